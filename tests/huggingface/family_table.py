"""The table of families in docs/huggingface.md, made by running a tiny model of every family.

python tests/huggingface/family_table.py    # writes it
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from tiny import FAMILIES, SPECIAL, batch, tiny

import stickymoe
from stickymoe.errors import StickyError
from stickymoe.huggingface.families import REFUSED
from stickymoe.huggingface.gates import find_gates
from stickymoe.huggingface.rules import _scoring, routes_by_token

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BORDERS = "<!-- families: begin -->", "<!-- families: end -->"


def row(family: str) -> str:
    """What a forward pass of a tiny model shows: scores, selection, and whether a rule reaches the experts."""
    model = tiny(family)
    inputs = {name: value for name, value in batch(model).items() if name != "labels"}
    gate = find_gates(model)[-1]
    with torch.no_grad():
        with stickymoe.attach(model) as attached:
            model(**inputs)
            trace = attached.trace
        rules = "yes"
        try:
            with stickymoe.attach(model, "hysteresis"):
                model(**inputs)
        except StickyError as e:
            rules = re.search(r"does not allow: (.*?)\. Expected", str(e)).group(1)
    scoring = _scoring(gate)
    extras = []
    if scoring.bias is not None:
        extras.append(f"bias on {gate.spec.bias_on}")
    if scoring.groups > 1:
        extras.append(f"groups by {'two best' if scoring.group_score == 'top2' else 'best'}")
    if trace.n_null:
        extras.append("null classes" if trace.n_null > 1 else "a skip class")
    if any(routes_by_token(g) for g in find_gates(model)):
        extras.append("layers by hash")
    return f"| `{family}` | {gate.score.replace('_', '-')} | {', '.join(extras) or '–'} | {rules} |"


def table() -> str:
    heading = ["| family | score | selection | rules |", "|---|---|---|---|"]
    refused = [f"| `{family}` | – | – | not supported: {REFUSED[family]} |" for family in SPECIAL]
    return "\n".join([*heading, *(row(family) for family in sorted(FAMILIES)), *refused])


def page_with(text: str, new: str) -> str:
    begin, end = BORDERS
    return text[: text.index(begin) + len(begin)] + f"\n{new}\n" + text[text.index(end) :]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    PAGE.write_text(page_with(PAGE.read_text(), table()))
