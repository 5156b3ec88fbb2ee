"""Grids: the runs of a table, from a dictionary or a YAML file.

preset: cpu-small            # for every row
data: {path: texts}          # any setting, for every row
rows:
  - variant: {name: soft, lam: 0.1}
  - variant: vanilla
    train: {steps: 2000}     # a row can override it
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stickymoe.errors import ConfigError, unknown
from stickymoe.runs.config import RENAMED, RunConfig
from stickymoe.runs.settings import config_from, read_yaml
from stickymoe.variants import hypers

Settings = dict[str, Any]


def load_grid(name: str, named: Mapping[str, Settings]) -> Settings:
    """A grid from `named` or from a YAML file."""
    if name in named:
        return copy.deepcopy(named[name])
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(unknown("grid", name, named) + " A YAML file is also accepted.")
    grid = read_yaml(Path(name))
    rows = grid.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"Grid {name}: expected 'rows:' with a list of settings such as '- variant: soft'.")
    return grid


def configs(grid: Settings, *, seeds: list[int], flags: list[str], source: str) -> list[RunConfig]:
    """Every run of a grid: all rows with the first seed, then the next seed; `flags` apply to all runs.

    Each seed also has a hash of its own, in rows that route by a hash and do not set its salt.
    """
    rows = grid["rows"]
    if any("seed" in settings for settings in (grid, *rows)):
        raise ConfigError(f"seed (in {source}): use --seeds in a sweep, for example --seeds 42,43.")
    common = {key: value for key, value in grid.items() if key != "rows"}
    return [
        config_from(_salted({**_merged(common, row), "seed": seed}), flags, source=f" (in row {i + 1} of {source})")
        for seed in seeds
        for i, row in enumerate(rows)
    ]


def _salted(settings: Settings) -> Settings:
    """Settings of a run; with a seed other than the default one, the seed is the salt of its hashes."""
    given = settings.get("variant", {})
    section = {"name": given} if isinstance(given, str) else given
    if settings["seed"] == RunConfig().seed or not isinstance(section, dict) or "salt" in section:
        return settings
    name = section.get("name", RunConfig().variant.name)
    known = hypers(name) if isinstance(name, str) else {}
    if "salt" not in known or ("hashed" in known and section.get("hashed") is not True):
        return settings
    return {**settings, "variant": {**section, "salt": settings["seed"]}}


def _merged(defaults: Settings, row: Settings) -> Settings:
    out = dict(defaults)
    for key, value in row.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and key != "variant"
        out[key] = _merged(out[key], value) if both else value
    return out


def _current_key(key: str) -> str:
    """The key of a row with the present names of settings that were renamed."""
    for earlier, present in RENAMED.items():
        key = re.sub(rf"-{earlier}(?=[0-9])", f"-{present}", key)
    return key


def chosen_rows(runs: list[RunConfig], names: str | None) -> list[RunConfig]:
    """The runs whose variant, label or key is in the comma-separated `names`; all runs if it is None."""
    if names is None:
        return runs
    wanted = [_current_key(name.strip()) for name in names.split(",")]
    known = {name for run in runs for name in (run.variant.name, run.variant.label, run.variant.key)}
    for name in wanted:
        if name not in known:
            names_only = ", ".join(dict.fromkeys(run.variant.name for run in runs))
            raise ConfigError(unknown("row", name, known, or_else=f"Known: {names_only}; --dry_run lists every row."))
    return [run for run in runs if {run.variant.name, run.variant.label, run.variant.key} & set(wanted)]
