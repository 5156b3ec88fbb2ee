"""The runs behind a report: find them, read them, and group those that can be compared.

Runs with the same data, tokenizer, model and training protocol form one `Group`. Within a group, the runs of one
variant with different seeds form one `Row`. A file that cannot be read is kept as `Damaged`, with the reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stickymoe.errors import RunError, StickyError
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder, run_id
from stickymoe.runs.presets import PRESETS
from stickymoe.runs.record import RunRecord
from stickymoe.variants import Variant, variant_names

# How often a run logs, evaluates and saves does not change its result.
_INTERVALS = ("log_every", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Run:
    """A recorded run, its log, and its folder if there is one."""

    record: RunRecord
    config: RunConfig
    folder: RunFolder | None = None
    log: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: RunRecord) -> Run:
        return cls(record, RunConfig.from_dict(record.config))

    @property
    def complete(self) -> bool:
        return self.record.status == "complete"

    @property
    def epochs(self) -> float:
        """Number of passes over the training text."""
        seen = self.config.train.steps * self.config.train.batch_size * self.config.model.seq_len
        return float(seen / self.record.data["tokens"]["train"])

    def preference(self) -> tuple[bool, bool, bool, bool]:
        """Which of two records of one seed to use: prefer complete, then current, then with routes, then with a log."""
        routes = self.folder is not None and self.folder.routes.exists()
        return self.complete, self.current, routes, bool(self.log)

    @property
    def current(self) -> bool:
        """Whether the run id is the one that this version computes for the same config and data."""
        return run_id(self.config, self.record.data["fingerprint"]) == self.record.run_id


@dataclass(frozen=True)
class Damaged:
    """A file of a run that could not be read, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Value:
    """A number over seeds: mean, standard deviation (None for one seed) and number of seeds."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Value | None:
        if not values:
            return None
        spread = len(values) > 1 and all(math.isfinite(v) for v in values)
        return cls(statistics.fmean(values), statistics.stdev(values) if spread else None, len(values))


@dataclass(frozen=True)
class Row:
    """One variant with the same settings: its runs, one per seed."""

    variant: Variant
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Row:
        by_seed: dict[int, Run] = {}
        for run in runs:
            known = by_seed.get(run.config.seed)
            if known is None or run.preference() > known.preference():
                by_seed[run.config.seed] = run
        ordered = tuple(by_seed[seed] for seed in sorted(by_seed))
        return cls(ordered[0].config.variant, ordered)

    @property
    def label(self) -> str:
        return self.variant.label

    @property
    def ablation(self) -> bool:
        """Whether it changes a setting that usually keeps its default, or sets a strength to 0."""
        return any(value == 0 or not hyper.always for hyper, value in self.variant.shown())

    @property
    def complete(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.complete)

    @property
    def status(self) -> str:
        """`complete` if any seed is complete; otherwise the status of the last seed."""
        return "complete" if self.complete else self.runs[-1].record.status

    def by_seed(self, metric: str) -> dict[int, float]:
        values = {run.config.seed: run.record.metrics.get(metric) for run in self.complete}
        return {seed: float(value) for seed, value in values.items() if value is not None}

    def metric(self, name: str, seeds: Iterable[int] | None = None) -> Value | None:
        """A metric over all seeds that have it, or over those among `seeds`."""
        values = self.by_seed(name)
        return Value.of([value for seed, value in values.items() if seeds is None or seed in seeds])

    def mean(self, name: str) -> float | None:
        value = self.metric(name)
        return None if value is None else value.mean

    def per_layer(self, name: str) -> list[float] | None:
        """The mean over seeds for each layer; None unless every layer was measured."""
        layers = [run.record.per_layer[name] for run in self.complete if name in run.record.per_layer]
        columns = [[v for v in column if v is not None] for column in zip(*layers, strict=True)]
        return [statistics.fmean(column) for column in columns] if columns and all(columns) else None

    def per_layer_pairs(self, one: str, other: str) -> list[tuple[float, float]]:
        """Two metrics for each layer; empty unless both were measured."""
        first, second = self.per_layer(one), self.per_layer(other)
        return list(zip(first, second, strict=True)) if first is not None and second is not None else []

    def change(self, baseline: Row) -> Value | None:
        """Change of perplexity relative to the baseline, in per cent."""
        return self.against(baseline, "ppl", lambda ppl, base: 100 * (ppl / base - 1))

    def fewer_misses(self, baseline: Row, hit_rate: str, seeds: Iterable[int] | None = None) -> Value | None:
        """Misses of the baseline divided by misses of this row: (1 − its hit rate) / (1 − our hit rate)."""

        def times(hit: float, base: float) -> float:
            return (1 - base) / (1 - hit) if hit < 1 else math.inf

        return self.against(baseline, hit_rate, times, seeds)

    def against(
        self,
        other: Row,
        metric: str,
        compare: Callable[[float, float], float],
        seeds: Iterable[int] | None = None,
    ) -> Value | None:
        """Compare two rows over their common seeds, or those of them among `seeds`; None if there are none."""
        ours, theirs = self.by_seed(metric), other.by_seed(metric)
        common = ours.keys() & theirs.keys() if seeds is None else ours.keys() & theirs.keys() & set(seeds)
        return Value.of([compare(ours[seed], theirs[seed]) for seed in sorted(common)])


def common_seeds(*rows: Row) -> list[int]:
    """The seeds for which all rows have a perplexity."""
    return sorted(set.intersection(*(set(row.by_seed("ppl")) for row in rows)))


@dataclass(frozen=True)
class Group:
    """Runs that can be compared, one row per variant; `note` distinguishes groups with the same title."""

    rows: tuple[Row, ...]
    note: str = ""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def config(self) -> RunConfig:
        """The config of the first run with experts: the dense control may come from a sweep with other experts."""
        return _first_routed(self.runs).config

    @property
    def complete(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.complete)

    @property
    def routed(self) -> tuple[Row, ...]:
        """Complete rows with a router; the dense control has none."""
        return tuple(row for row in self.complete if row.mean("switch_rate") is not None)

    @property
    def baseline(self) -> Row | None:
        return self.find("vanilla")

    def find(self, key: str) -> Row | None:
        """The complete row whose variant has this key, such as `soft-lam0.5`."""
        return next((row for row in self.complete if row.variant.key == key), None)

    @property
    def size(self) -> str | None:
        """`small` or `medium` if the model has the size of that preset."""
        for size in ("small", "medium"):
            sizes = PRESETS[f"paper-{size}"]["model"]
            model = self.config.model
            if model.layers_per_pool == 1 and all(getattr(model, key) == value for key, value in sizes.items()):
                return size
        return None

    @property
    def corpus(self) -> tuple[str, int]:
        """Name of the corpus and size of the vocabulary."""
        data = self.config.data
        return Path(data.path).name if data.path else data.corpus, int(self.runs[0].record.data["vocab_size"])

    @property
    def title(self) -> str:
        data, model, train = self.config.data, self.config.model, self.config.train
        part = f", {data.fraction:.0%} of it" if data.fraction < 1 else ""
        size = f"{self.size} model" if self.size else f"d={model.d_model}, L={model.n_layers}"
        return (
            f"{size}, N={model.n_experts}, k={model.top_k} · {self.corpus[0]}{part}, "
            f"vocabulary {self.corpus[1]:,} · {train.steps:,} steps"
            f"{f' · {self.note}' if self.note else ''}"
        )

    @property
    def name(self) -> str:
        """A short name for files; not unique."""
        return (
            f"{self.size or f'd{self.config.model.d_model}-n{self.config.model.n_experts}'}-{self.config.train.steps}"
        )


@dataclass(frozen=True)
class Collection:
    """All groups, largest first, and all damaged files."""

    groups: tuple[Group, ...]
    damaged: tuple[Damaged, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple({run.record.run_id: run for group in self.groups for run in group.runs}.values())

    def names(self) -> dict[str, Group]:
        """Groups by unique names for files and links."""
        out: dict[str, Group] = {}
        for group in self.groups:
            name, i = group.name, 2
            while name in out:
                name, i = f"{group.name}-{i}", i + 1
            out[name] = group
        return out


def collect(folders: Sequence[Path], *, order: Sequence[str] = ()) -> Collection:
    """Every run in or under `folders`; copies of a run count once. For `order` see `grouped`."""
    runs: dict[str, Run] = {}
    damaged: list[Damaged] = []
    for path in sorted({p for folder in folders for p in _records(folder)}):
        try:
            run = _read(RunFolder(path.parent), damaged)
        except (StickyError, KeyError, TypeError, AttributeError) as e:
            damaged.append(Damaged(path, str(e)))
            continue
        known = runs.get(run.record.run_id)
        if known is None or run.preference() > known.preference():
            runs[run.record.run_id] = run
    _require_a_result(folders, list(runs.values()), damaged)
    return Collection(grouped(runs.values(), order=order), tuple(damaged))


def _records(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: expected a folder that contains runs.")
    return sorted(folder.rglob("record.json"))


def _read(folder: RunFolder, damaged: list[Damaged]) -> Run:
    """A run from its folder; if its log cannot be read, the log is reported as damaged and the run is used."""
    record = RunRecord.read(folder.record)
    log: list[dict[str, Any]] = []
    if folder.metrics.exists():
        try:
            log = folder.read_metrics()
        except RunError as e:
            damaged.append(Damaged(folder.metrics, str(e)))
    return Run(record, RunConfig.from_dict(record.config), folder, log)


def _require_a_result(folders: Sequence[Path], runs: list[Run], damaged: list[Damaged]) -> None:
    if any(run.complete for run in runs):
        return
    where = ", ".join(str(folder) for folder in folders)
    if not runs and not damaged:
        raise RunError(f"There is no run in {where} (no record.json). Create runs with stickymoe sweep GRID --out DIR.")
    counts = {
        status: sum(run.record.status == status for run in runs) for status in ("failed", "interrupted", "running")
    }
    found = [f"{n} {status}" for status, n in {**counts, "damaged": len(damaged)}.items() if n]
    first = next((run.record.failure for run in runs if run.record.failure), damaged[0].reason if damaged else None)
    raise RunError(f"No run in {where} is complete ({', '.join(found)})" + (f": {first}" if first else "."))


def grouped(runs: Iterable[Run], *, order: Sequence[str] = ()) -> tuple[Group, ...]:
    """Group the runs that can be compared, largest group first.

    The variants named in `order` come first, in that order; then vanilla, the other variants by name, combinations.
    A dense run has no experts, so it joins every group that differs from its own only in the experts.
    """
    groups: dict[str, list[Run]] = {}
    dense: list[Run] = []
    for run in runs:
        groups.setdefault(repr(_setting(run)), []).append(run)
        if run.config.variant.name == "dense":
            dense.append(run)
    for members in groups.values():
        first = _setting(members[0], with_experts=False)
        members += [run for run in dense if run not in members and _setting(run, with_experts=False) == first]
    together = [Group(_rows(members, order)) for members in groups.values()]
    titles = [group.title for group in together]
    together = [
        Group(group.rows, _difference(group, [g for g, t in zip(together, titles, strict=True) if t == title]))
        for group, title in zip(together, titles, strict=True)
    ]
    return tuple(sorted(together, key=lambda group: (-len(group.rows), group.title)))


# Settings that do not apply to the dense control.
_EXPERT_SETTINGS = ("n_experts", "share_block", "universal")


def _setting(run: Run, *, with_experts: bool = True) -> dict[str, Any]:
    """The settings that must be equal in a group; without `with_experts`, those that apply to the dense control."""
    config = run.config.as_dict()
    train = {f"train.{key}": value for key, value in config["train"].items() if key not in _INTERVALS}
    sizes = config["model"].items()
    model = {f"model.{key}": value for key, value in sizes if with_experts or key not in _EXPERT_SETTINGS}
    data = {"data": run.record.data["fingerprint"][:12], "data.documents": config["data"]["documents"]}
    return {**data, **model, **train}


def _difference(group: Group, same_title: list[Group]) -> str:
    """The settings of this group that differ between groups with the same title."""
    settings = [_setting(_first_routed(other.runs)) for other in same_title]
    differs = [key for key in settings[0] if len({repr(setting[key]) for setting in settings}) > 1]
    return ", ".join(f"{key} {_setting(_first_routed(group.runs))[key]}" for key in differs)


def _first_routed(runs: Sequence[Run]) -> Run:
    return next((run for run in runs if run.config.variant.name != "dense"), runs[0])


def _rows(runs: list[Run], order: Sequence[str]) -> tuple[Row, ...]:
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.config.variant.key, []).append(run)
    names = list(dict.fromkeys([*order, *variant_names()]))
    return tuple(sorted((Row.of(members) for members in rows.values()), key=lambda row: _position(row, names)))


def _position(row: Row, names: Sequence[str]) -> tuple[int, bool, list[float], str]:
    """By the variant's place in `names`, ablations after the other rows of their variant, then by strength."""
    place = names.index(row.variant.name) if row.variant.name in names else len(names)  # combinations come last
    strengths = [
        float(value) for hyper, value in row.variant.shown() if hyper.always and isinstance(value, int | float)
    ]
    return place, row.ablation, strengths, row.variant.key
