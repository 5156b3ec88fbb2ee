"""The runs behind a report: found, read, and put together only where they may be compared.

Runs are compared when data, tokenizer, model and training protocol are the same: such runs are one `Group`. In a group,
the runs of one variant with different seeds are one `Row`. What cannot be read is kept too, by name and reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stickymoe.errors import RunError, StickyError
from stickymoe.experiments.grids import PAPER_ROWS
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.presets import PRESETS
from stickymoe.runs.record import RunRecord
from stickymoe.variants import Variant, variant_names

# What changes how often a run is looked at, but not what it is.
_HOW_OFTEN = ("log_every", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Run:
    """A run as it was recorded, and its folder if it is at hand."""

    record: RunRecord
    config: RunConfig
    folder: RunFolder | None = None

    @classmethod
    def of(cls, record: RunRecord, folder: RunFolder | None = None) -> Run:
        return cls(record, RunConfig.from_dict(record.config), folder)

    @property
    def complete(self) -> bool:
        return self.record.status == "complete"


@dataclass(frozen=True)
class Damaged:
    """A run record that could not be read, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Value:
    """A figure over seeds: the mean, the standard deviation if there are several, and of how many."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Value | None:
        if not values:
            return None
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class Row:
    """One variant with the same settings: its runs, one per seed."""

    variant: Variant
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Row:
        runs = tuple(sorted(runs, key=lambda run: (run.config.seed, run.record.run_id)))
        return cls(runs[0].config.variant, runs)

    @property
    def label(self) -> str:
        return self.variant.label

    @property
    def complete(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.complete)

    @property
    def status(self) -> str:
        """`complete` if any seed is; else what became of the last one."""
        return "complete" if self.complete else self.runs[-1].record.status

    @property
    def by_seed(self) -> dict[int, Run]:
        return {run.config.seed: run for run in self.complete}

    def metric(self, name: str) -> Value | None:
        return Value.of([float(v) for run in self.complete if (v := run.record.metrics.get(name)) is not None])

    def mean(self, name: str) -> float | None:
        value = self.metric(name)
        return None if value is None else value.mean

    def per_layer(self, name: str) -> list[float] | None:
        """Each layer's mean over seeds."""
        layers = [run.record.per_layer[name] for run in self.complete if name in run.record.per_layer]
        columns = [[v for v in column if v is not None] for column in zip(*layers, strict=True)]
        return [statistics.fmean(column) for column in columns] if columns and all(columns) else None

    def change(self, baseline: Row) -> Value | None:
        """Perplexity over the baseline's, in per cent: by pairs of one seed where both have it, else of the means."""
        return self._against(baseline, "ppl", lambda ppl, base: 100 * (ppl / base - 1))

    def fewer_misses(self, baseline: Row, hit_rate: str) -> Value | None:
        """How many times fewer misses than the baseline: (1 − hit rate there) / (1 − hit rate here)."""
        return self._against(baseline, hit_rate, lambda hit, base: (1 - base) / (1 - hit) if hit < 1 else math.inf)

    def _against(self, baseline: Row, metric: str, compare: Any) -> Value | None:
        ours, theirs = (
            {seed: float(v) for seed, run in row.by_seed.items() if (v := run.record.metrics.get(metric)) is not None}
            for row in (self, baseline)
        )
        if not ours or not theirs:
            return None
        common = ours.keys() & theirs.keys()
        if common:
            return Value.of([compare(ours[seed], theirs[seed]) for seed in sorted(common)])
        return Value.of([compare(statistics.fmean(ours.values()), statistics.fmean(theirs.values()))])


@dataclass(frozen=True)
class Group:
    """Runs that may be compared, by variant, in the paper's order."""

    rows: tuple[Row, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @property
    def complete(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.complete)

    @property
    def routed(self) -> tuple[Row, ...]:
        """Complete rows that route, which the dense control does not."""
        return tuple(row for row in self.complete if row.mean("switch_rate") is not None)

    @property
    def baseline(self) -> Row | None:
        return self.find("vanilla")

    def find(self, key: str) -> Row | None:
        """The complete row whose variant has this key, such as `soft-lam0.5`."""
        return next((row for row in self.complete if row.variant.key == key), None)

    @property
    def size(self) -> str | None:
        """`small` or `medium` if the model is the paper's."""
        for size in ("small", "medium"):
            sizes = PRESETS[f"paper-{size}"]["model"]
            if all(getattr(self.config.model, key) == value for key, value in sizes.items()):
                return size
        return None

    @property
    def title(self) -> str:
        data, model, train = self.config.data, self.config.model, self.config.train
        corpus = Path(data.path).name if data.path else data.corpus
        part = f", {data.fraction:.0%} of it" if data.fraction < 1 else ""
        size = f"{self.size} model" if self.size else f"d={model.d_model}, L={model.n_layers}"
        return (
            f"{size}, N={model.n_experts}, k={model.top_k} · {corpus}{part}, "
            f"{self.runs[0].record.data['vocab_size']:,} tokens · {train.steps:,} steps"
        )

    @property
    def name(self) -> str:
        """A short name for files, not unique."""
        return (
            f"{self.size or f'd{self.config.model.d_model}-n{self.config.model.n_experts}'}-{self.config.train.steps}"
        )


@dataclass(frozen=True)
class Collection:
    """Everything found: groups, largest first, and what was damaged."""

    groups: tuple[Group, ...]
    damaged: tuple[Damaged, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    def names(self) -> dict[str, Group]:
        """Groups by a name each, for files and links."""
        out: dict[str, Group] = {}
        for group in self.groups:
            name, i = group.name, 2
            while name in out:
                name, i = f"{group.name}-{i}", i + 1
            out[name] = group
        return out


def collect(folders: Sequence[Path]) -> Collection:
    """Every run in or under `folders`; a run that is there twice counts once."""
    runs: dict[str, Run] = {}
    damaged = []
    for path in sorted({p for folder in folders for p in _records(folder)}):
        try:
            run = Run.of(RunRecord.read(path), RunFolder(path.parent))
        except (StickyError, KeyError, TypeError) as e:
            damaged.append(Damaged(path, str(e)))
            continue
        known = runs.get(run.record.run_id)
        if known is None or (run.complete, _n_files(run)) > (known.complete, _n_files(known)):
            runs[run.record.run_id] = run
    _require_a_result(folders, list(runs.values()), damaged)
    return Collection(grouped(runs.values()), tuple(damaged))


def grouped(runs: Iterable[Run]) -> tuple[Group, ...]:
    """Runs by what may be compared, largest group first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_setting(run), []).append(run)
    together = [Group(_rows(members)) for members in groups.values()]
    return tuple(sorted(together, key=lambda group: (-len(group.rows), group.title)))


def _records(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: expected one with runs in it.")
    return sorted(folder.rglob("record.json"))


def _n_files(run: Run) -> int:
    assert run.folder is not None
    return sum(p.exists() for p in (run.folder.metrics, run.folder.routes))


def _require_a_result(folders: Sequence[Path], runs: list[Run], damaged: list[Damaged]) -> None:
    if any(run.complete for run in runs):
        return
    where = ", ".join(str(folder) for folder in folders)
    if not runs and not damaged:
        raise RunError(f"There is no run in {where} (no record.json). Make some with stickymoe sweep GRID --out DIR.")
    found = [f"{n} {status}" for status in ("failed", "interrupted", "running") if (n := _count(runs, status))]
    found += [f"{len(damaged)} damaged"] if damaged else []
    first = next((run.record.failure for run in runs if run.record.failure), damaged[0].reason if damaged else None)
    raise RunError(f"No run in {where} is complete ({', '.join(found)})" + (f": {first}" if first else "."))


def _count(runs: list[Run], status: str) -> int:
    return sum(run.record.status == status for run in runs)


def _setting(run: Run) -> str:
    """What must be equal for two runs to stand in one table."""
    config = run.config.as_dict()
    train = {key: value for key, value in config["train"].items() if key not in _HOW_OFTEN}
    data = run.record.data["fingerprint"], config["data"]["documents"]
    return repr((data, config["model"], train))


_ORDER = tuple(dict.fromkeys([row["variant"]["name"] for row in PAPER_ROWS] + list(variant_names())))


def _rows(runs: list[Run]) -> tuple[Row, ...]:
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.config.variant.key, []).append(run)
    return tuple(sorted((Row.of(members) for members in rows.values()), key=lambda row: _paper_order(row.variant)))


def _paper_order(variant: Variant) -> tuple[int, int, list[float], str]:
    """By name, plain settings before ablations of them, then by strength."""
    shown = variant.shown()
    strengths = [float(value) for f, value in shown if f.metadata.get("always")]
    return _ORDER.index(variant.name), len(shown) - len(strengths), strengths, variant.key
