"""Every equation of the paper has an owner: a function, class or module whose docstring names its LaTeX label."""

import ast
import re
from pathlib import Path

import pytest

import stickymoe

# Not in the list: `eq:cons_loss_intro` and `eq:total_loss_intro`, with which the introduction only announces
# `eq:cons_loss` and `eq:total_loss`.
LABELS = [
    "eq:gate",
    "eq:topk",
    "eq:moe_output",
    "eq:bal_loss",
    "eq:switch_rate",
    "eq:cons_loss",
    "eq:cons_loss_full",
    "eq:total_loss",
    "eq:hard_loss",
    "eq:total_loss_softhard",
    "eq:base",
    "eq:sr_metric",
    "eq:cross_loss",
    "eq:full_loss",
]
INTRODUCTION = {"eq:cons_loss_intro", "eq:total_loss_intro"}


def mentioned(source: str) -> set[str]:
    """Labels in the docstrings of a module, not in its comments or other strings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    return {label for node in nodes for label in re.findall(r"eq:\w+", ast.get_docstring(node) or "")}


@pytest.fixture(scope="module")
def owned() -> set[str]:
    files = sorted(Path(stickymoe.__file__).parent.rglob("*.py"))
    return {label for file in files for label in mentioned(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("label", LABELS)
def test_equation_has_an_owner(label: str, owned: set[str]) -> None:
    assert label in owned, f"No docstring in src/stickymoe begins with or names {label}."


def test_no_docstring_names_an_equation_that_the_paper_has_not(owned: set[str]) -> None:
    assert owned <= {*LABELS, *INTRODUCTION}


def test_only_docstrings_count_and_only_whole_labels() -> None:
    source = '# eq:a\nx = "eq:b"\ndef f():\n    """eq:cons_loss_full. Mean."""\n    y = "eq:c"\n'
    assert mentioned(source) == {"eq:cons_loss_full"}
