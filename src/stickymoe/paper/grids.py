"""The grids of the paper, and those beyond it: ablations, the frontier, shared experts, the demo."""

from __future__ import annotations

from typing import Any

from stickymoe.runs.presets import RECOMMENDED
from stickymoe.sweeps.grid import Settings

_SOFT = [{"name": "soft", "lam": lam} for lam in (0.01, 0.05, 0.1, 0.2, 0.5)]
_HARD = [{"name": "hard_window", "window": window} for window in (2, 4, 8)]
_SOFT_HARD = [{"name": "soft_hard", "lam": 0.1, "alpha": alpha, "window": 4} for alpha in (0.05, 0.1, 0.5, 1.0)]

# The fifteen rows of the paper in its order, and the dense control, which the paper does not have.
PAPER_ROWS: list[Settings] = [
    {"variant": v}
    for v in (
        {"name": "vanilla"},
        *_SOFT,
        *_HARD,
        *_SOFT_HARD,
        {"name": "remoe"},
        {"name": "oracle"},
        {"name": "dense"},
    )
]

PAPER_ORDER: list[str] = list(dict.fromkeys(settings["variant"]["name"] for settings in PAPER_ROWS))

_SOFT_05 = {"name": "soft", "lam": 0.5}
# A quarter of the corpus for more than fifteen epochs: does the loss help if the model overfits?
_OVERFIT = {"data": {"fraction": 0.25}, "train": {"steps": 3000, "eval_every": 250}}

ABLATION_ROWS: list[Settings] = [
    {"variant": {**_SOFT_05, "gate_only": True}},
    {"variant": {**_SOFT_05, "mu": 0.0}},
    {"variant": {"name": "soft_hard", "lam": 0.0, "alpha": 1.0}},
    {"variant": "vanilla", **_OVERFIT},
    {"variant": {"name": "soft", "lam": 0.1}, **_OVERFIT},
]


def _each(name: str, setting: str, *strengths: int | float, **fixed: Any) -> list[Settings]:
    """One variant at several strengths."""
    return [{"variant": {"name": name, setting: strength, **fixed}} for strength in strengths]


# Beyond the paper: every method at three strengths and the controls, for a short screening.
FRONTIER_ROWS: list[Settings] = [
    {"variant": "vanilla"},
    {"variant": "dense"},
    {"variant": "hash"},
    *_each("trajectory", "span", 0, 16),
    {"variant": {"name": "trajectory", "sentence": True}},
    *_each("soft", "lam", 0.1, 0.5, 2.0),
    *_each("smooth", "decay", 0.5, 0.7, 0.8),
    {"variant": {"name": "smooth", "decay": 0.5, "learned": True}},
    *_each("hysteresis", "bonus", 0.1, 0.3, 1.0),
    *_each("residency", "rho", 0.0, 0.02, 0.05),
    *_each("segment", "span", 4, 8, 16),
    *_each("cache_loss", "eta", 0.05, 0.2, 0.8),
    *_each("bles", "lam", 0.1, 0.5, 2.0),
    *_each("blockffn", "lam", 0.1, 0.5, 2.0),
    *_each("dot", "lam", 0.1, 0.5, 2.0),
    *_each("boundary", "lam", 0.1, 0.5, 2.0),
    *_each("grouped", "lam", 0.1, 0.5, 2.0),
    *_each("cross_layer", "gamma", 0.01, 0.1, 1.0),
    *_each("graded+soft", "warmup", 0.25, 0.5, 0.75, lam=0.5),
    *_each("graded+soft", "lam", 0.1, 0.5, 2.0, warmup=0.0, layers=[0.0, 1.0, 1.0, 1.0]),
    *_each("two_speed", "slow", 0.5, 0.8, 0.95),
    *_each("siblings", "budget", 0.1, 0.03, 0.01),
    *_each("rent", "price", 0.3, 1.0, 3.0, rise=0.7),
]

# The appendix: layers that share experts, with and without a loss for choosing the same experts in adjacent layers.
# The universal pool has as many weights as separate experts.
_POOLS: list[Settings] = [{}, {"share_block": 2}, {"share_block": 4}, {"universal": True}]
SHARING_ROWS: list[Settings] = [
    {"variant": variant, "model": pool}
    for pool in _POOLS
    for variant in ("vanilla", {"name": "cross_layer", "gamma": 0.1})
]
_SCREEN = {"steps": 300, "warmup": 30, "eval_every": 300}

# A short run needs a larger λ than the 10,000 steps of the paper. The recommended router is not of the paper.
DEMO_ROWS: list[Settings] = [
    {"variant": "vanilla"},
    {"variant": {"name": "soft", "lam": 0.5}},
    {"variant": {"name": "soft_hard", "lam": 0.5, "alpha": 1.0}},
    {"variant": "hard_window"},
    {"variant": {"name": "remoe", "lam": 0.5}},
    {"variant": "oracle"},
    {"variant": RECOMMENDED},
    {"variant": "dense"},
]

GRIDS: dict[str, Settings] = {
    "paper-small": {"preset": "paper-small", "rows": PAPER_ROWS},
    "paper-medium": {"preset": "paper-medium", "rows": PAPER_ROWS},
    "cpu-small": {"preset": "cpu-small", "rows": PAPER_ROWS},
    "cpu-medium": {"preset": "cpu-medium", "rows": PAPER_ROWS},
    "ablations": {"preset": "cpu-small", "rows": ABLATION_ROWS},
    "frontier": {
        "preset": "cpu-small",
        "train": _SCREEN,
        "rows": FRONTIER_ROWS,
    },
    "sharing": {"preset": "cpu-small", "train": _SCREEN, "rows": SHARING_ROWS},
    "demo": {"preset": "demo", "rows": DEMO_ROWS},
}
