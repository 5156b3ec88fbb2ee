"""Which runs make a table: the paper's rows, the ablations it lacks, what goes past it, the demo, or your own YAML.

preset: cpu-small            # under every row
data: {path: texts}          # any setting, under every row
rows:
  - variant: {name: soft, lam: 0.1}
  - variant: vanilla
    train: {steps: 2000}     # a row may say otherwise
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from stickymoe.errors import ConfigError, unknown
from stickymoe.runs.config import RunConfig
from stickymoe.runs.settings import config_from, read_yaml

Settings = dict[str, Any]

_SOFT = [{"name": "soft", "lam": lam} for lam in (0.01, 0.05, 0.1, 0.2, 0.5)]
_HARD = [{"name": "hard_window", "window": window} for window in (2, 4, 8)]
_SOFT_HARD = [{"name": "soft_hard", "lam": 0.1, "alpha": alpha, "window": 4} for alpha in (0.05, 0.1, 0.5, 1.0)]

# The paper's fifteen rows in its order, and the control it lacks.
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

_SOFT_05 = {"name": "soft", "lam": 0.5}
# A quarter of the corpus, seen more than fifteen times: does the loss help where the model overfits?
_OVERFIT = {"data": {"fraction": 0.25}, "train": {"steps": 3000, "eval_every": 250}}

ABLATION_ROWS: list[Settings] = [
    {"variant": {**_SOFT_05, "gate_only": True}},
    {"variant": {**_SOFT_05, "mu": 0.0}},
    {"variant": {"name": "soft_hard", "lam": 0.0, "alpha": 1.0}},
    {"variant": "vanilla", **_OVERFIT},
    {"variant": {"name": "soft", "lam": 0.1}, **_OVERFIT},
]


def _each(name: str, setting: str, *strengths: int | float, **fixed: Any) -> list[Settings]:
    """A variant at several strengths, from weak to strong."""
    return [{"variant": {"name": name, setting: strength, **fixed}} for strength in strengths]


# Past the paper: every method at three strengths beside the controls, to be screened in few steps.
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

# The appendix: experts that layers share, with and without a loss for using the same ones in adjacent layers. The
# universal pool has as many weights as no sharing.
_POOLS: list[Settings] = [{}, {"share_block": 2}, {"share_block": 4}, {"universal": True}]
SHARING_ROWS: list[Settings] = [
    {"variant": variant, "model": pool}
    for pool in _POOLS
    for variant in ("vanilla", {"name": "cross_layer", "gamma": 0.1})
]
_SCREEN = {"steps": 300, "warmup": 30, "eval_every": 300}

# A run this short needs more of λ than the paper's 10,000 steps.
DEMO_ROWS: list[Settings] = [
    {"variant": "vanilla"},
    {"variant": {"name": "soft", "lam": 0.5}},
    {"variant": {"name": "soft_hard", "lam": 0.5, "alpha": 1.0}},
    {"variant": "hard_window"},
    {"variant": {"name": "remoe", "lam": 0.5}},
    {"variant": "oracle"},
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


def load_grid(name: str) -> Settings:
    """A grid by its name, or from a YAML file."""
    if name in GRIDS:
        return copy.deepcopy(GRIDS[name])
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(unknown("grid", name, GRIDS) + " Or pass a YAML file.")
    grid = read_yaml(Path(name))
    rows = grid.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"Grid {name}: expected 'rows:' with a list of settings such as '- variant: soft'.")
    return grid


def configs(grid: Settings, *, seeds: list[int], flags: list[str], source: str) -> list[RunConfig]:
    """Every run of a grid: each row with each seed, seeds outermost; `flags` are over all of them."""
    rows = grid["rows"]
    if any("seed" in settings for settings in (grid, *rows)):
        raise ConfigError(f"seed (in {source}): a sweep takes --seeds, as in --seeds 42,43.")
    common = {key: value for key, value in grid.items() if key != "rows"}
    return [
        config_from({**_merged(common, row), "seed": seed}, flags, source=f" (in row {i + 1} of {source})")
        for seed in seeds
        for i, row in enumerate(rows)
    ]


def _merged(under: Settings, over: Settings) -> Settings:
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and key != "variant"
        out[key] = _merged(out[key], value) if both else value
    return out


def chosen_rows(runs: list[RunConfig], names: str | None) -> list[RunConfig]:
    """The runs whose variant or label is among the comma-separated `names`; all of them without."""
    if names is None:
        return runs
    wanted = [name.strip() for name in names.split(",")]
    known = {name for run in runs for name in (run.variant.name, run.variant.label, run.variant.key)}
    for name in wanted:
        if name not in known:
            names_only = ", ".join(dict.fromkeys(run.variant.name for run in runs))
            raise ConfigError(unknown("row", name, known, or_else=f"Known: {names_only}; --dry_run lists every row."))
    return [run for run in runs if {run.variant.name, run.variant.label, run.variant.key} & set(wanted)]
