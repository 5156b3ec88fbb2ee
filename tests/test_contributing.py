"""CONTRIBUTING.md is true: its loss, rule and policy work, and the commands that it names find them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stickymoe.cli import main
from stickymoe.locality import policies
from stickymoe.variants import base

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
VARIANTS = {"contributed_peak": "Add a loss", "contributed_prefer": "Add a router rule"}
POLICY_IMPORTS = """
from typing import Any
from stickymoe.locality.policies import NEWER, OLDER, PINNED, append, register_policy, unlink
"""


def code(section: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)
    return block


def commands(program: str) -> list[list[str]]:
    """The arguments of a program in the commands of the first example."""
    lines = re.findall(rf"^    {program} (.*)$", SECTIONS["Add a loss"], re.MULTILINE)
    assert lines
    return [shlex.split(line) for line in lines]


def load(file: Path, source: str) -> None:
    """Run the code of the page as a module, which registers what it declares."""
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in which the examples of the page are registered, for one test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))
    for name, section in VARIANTS.items():
        load(tmp_path / f"{name}.py", code(section))
    load(tmp_path / "contributed_policy.py", POLICY_IMPORTS + code("Add a cache policy"))
    yield tmp_path
    for name in (*VARIANTS, "contributed_policy"):
        del sys.modules[name]


def test_a_new_file_is_found(tmp_path):
    """In a copy of the package."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name, section in VARIANTS.items():
        (tmp_path / "src" / "stickymoe" / "variants" / f"{name}.py").write_text(code(section))
    variables = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-m", "stickymoe.cli", "variants"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"peak", "prefer"} <= set(done.stdout.split())


def test_the_commands_work_as_written(place, capsys):
    for command in commands("stickymoe"):
        assert main(command) == 0, (command, capsys.readouterr().err)
    assert "peak+smooth" in (place / "report.md").read_text()
    assert main(["train", "--preset", "tiny", "--variant", "prefer", "--train.steps", "2", "--out", "runs/prefer"]) == 0


def test_the_policy_is_found(place, capsys):
    sizes = ["--n_layers", "2", "--n_experts", "4", "--top_k", "2", "--sequences", "1", "--length", "16"]
    assert main(["trace", "make", "trace", *sizes]) == 0
    assert main(["simulate", "trace", "--policy", "mru,lru", "--capacity", "2,3"]) == 0
    assert "mru" in capsys.readouterr().out


def test_the_contract_tests_find_the_loss(place):
    (arguments,) = [command for command in commands("python") if "contract" in " ".join(command)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(place)])}
    command = [sys.executable, *arguments, "-p", "contributed_peak", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
