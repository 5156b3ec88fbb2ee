"""The runs behind a report: found, read, and put together only where they may be compared.

Runs are compared when data, tokenizer, model and training protocol are the same: such runs are one `Group`. In a group,
the runs of one variant with different seeds are one `Row`. What cannot be read is kept too, by name and reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stickymoe.errors import RunError, StickyError
from stickymoe.experiments.grids import PAPER_ROWS
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder, run_id
from stickymoe.runs.presets import PRESETS
from stickymoe.runs.record import RunRecord
from stickymoe.variants import Variant, variant_names

# What changes how often a run is looked at, but not what it is.
_HOW_OFTEN = ("log_every", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Run:
    """A run as it was recorded, its logged lines, and its folder if it is at hand."""

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
        """How often the training text was seen."""
        seen = self.config.train.steps * self.config.train.batch_size * self.config.model.seq_len
        return float(seen / self.record.data["tokens"]["train"])

    def worth(self) -> tuple[bool, bool, bool, bool]:
        """Of two records of a row and seed the complete one counts, then today's, then the one with more beside it."""
        routes = self.folder is not None and self.folder.routes.exists()
        return self.complete, self.of_today, routes, bool(self.log)

    @property
    def of_today(self) -> bool:
        """Whether the same config and data still give these numbers, by the run id."""
        return run_id(self.config, self.record.data["fingerprint"]) == self.record.run_id


@dataclass(frozen=True)
class Damaged:
    """A file of a run that could not be read, and why."""

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
            if known is None or run.worth() > known.worth():
                by_seed[run.config.seed] = run
        ordered = tuple(by_seed[seed] for seed in sorted(by_seed))
        return cls(ordered[0].config.variant, ordered)

    @property
    def label(self) -> str:
        return self.variant.label

    @property
    def ablation(self) -> bool:
        """Whether a setting was changed that the paper's rows leave alone, or one that they have was switched off."""
        return any(value == 0 or not f.metadata.get("always") for f, value in self.variant.shown())

    @property
    def complete(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.complete)

    @property
    def status(self) -> str:
        """`complete` if any seed is; else what became of the last one."""
        return "complete" if self.complete else self.runs[-1].record.status

    def by_seed(self, metric: str) -> dict[int, float]:
        values = {run.config.seed: run.record.metrics.get(metric) for run in self.complete}
        return {seed: float(value) for seed, value in values.items() if value is not None}

    def metric(self, name: str, seeds: Iterable[int] | None = None) -> Value | None:
        """Over all seeds that have it, or those of them among `seeds`."""
        values = self.by_seed(name)
        return Value.of([value for seed, value in values.items() if seeds is None or seed in seeds])

    def mean(self, name: str) -> float | None:
        value = self.metric(name)
        return None if value is None else value.mean

    def per_layer(self, name: str) -> list[float] | None:
        """Each layer's mean over seeds; None unless every layer was measured."""
        layers = [run.record.per_layer[name] for run in self.complete if name in run.record.per_layer]
        columns = [[v for v in column if v is not None] for column in zip(*layers, strict=True)]
        return [statistics.fmean(column) for column in columns] if columns and all(columns) else None

    def per_layer_pairs(self, one: str, other: str) -> list[tuple[float, float]]:
        """Each layer's two values; none unless both were measured."""
        first, second = self.per_layer(one), self.per_layer(other)
        return list(zip(first, second, strict=True)) if first is not None and second is not None else []

    def change(self, baseline: Row) -> Value | None:
        """Perplexity over the baseline's, in per cent."""
        return self.against(baseline, "ppl", lambda ppl, base: 100 * (ppl / base - 1))

    def fewer_misses(self, baseline: Row, hit_rate: str, seeds: Iterable[int] | None = None) -> Value | None:
        """How many times fewer misses than the baseline: (1 − hit rate there) / (1 − hit rate here)."""

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
        """Both compared seed by seed, over the seeds both have, or those of them among `seeds`; None without any."""
        ours, theirs = self.by_seed(metric), other.by_seed(metric)
        common = ours.keys() & theirs.keys() if seeds is None else ours.keys() & theirs.keys() & set(seeds)
        return Value.of([compare(ours[seed], theirs[seed]) for seed in sorted(common)])


def common_seeds(*rows: Row) -> list[int]:
    """The seeds for which all of them have a perplexity."""
    return sorted(set.intersection(*(set(row.by_seed("ppl")) for row in rows)))


def kept_gain(row: Row, *, baseline: Row, dense: Row, seeds: Iterable[int] | None = None) -> Value | None:
    """The share of the mixture's gain over the dense control that a row keeps, over seeds that all three have.

    With `seeds`, over those of them alone.

    (PPL_dense − PPL_x) / (PPL_dense − PPL_vanilla), both as means over those seeds. The deviation is that of a ratio:
    of what each seed's gain is off that share of the mixture's gain with the same seed.
    """
    ours, base, without = (r.by_seed("ppl") for r in (row, baseline, dense))
    common = common_seeds(row, baseline, dense)
    seeds = common if seeds is None else [seed for seed in common if seed in set(seeds)]
    gain = statistics.fmean(without[seed] - base[seed] for seed in seeds) if seeds else 0.0
    if gain <= 0:
        return None
    kept = statistics.fmean(without[seed] - ours[seed] for seed in seeds) / gain
    off = [((without[seed] - ours[seed]) - kept * (without[seed] - base[seed])) / gain for seed in seeds]
    return Value(kept, statistics.stdev(off) if len(off) > 1 else None, len(off))


@dataclass(frozen=True)
class Group:
    """Runs that may be compared, by variant, in the paper's order; `note` tells it from groups of the same title."""

    rows: tuple[Row, ...]
    note: str = ""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def config(self) -> RunConfig:
        """Of its first run that routes: the dense control may come from a mixture of other experts."""
        return _one_of(self.runs).config

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
            model = self.config.model
            if model.layers_per_pool == 1 and all(getattr(model, key) == value for key, value in sizes.items()):
                return size
        return None

    @property
    def corpus(self) -> tuple[str, int]:
        """The name of its text, and of how many tokens the vocabulary is."""
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
        """A short name for files, not unique."""
        return (
            f"{self.size or f'd{self.config.model.d_model}-n{self.config.model.n_experts}'}-{self.config.train.steps}"
        )


@dataclass(frozen=True)
class Collection:
    """Everything found: groups, largest first, and what was damaged."""

    groups: tuple[Group, ...]
    damaged: tuple[Damaged, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple({run.record.run_id: run for group in self.groups for run in group.runs}.values())

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
    damaged: list[Damaged] = []
    for path in sorted({p for folder in folders for p in _records(folder)}):
        try:
            run = _read(RunFolder(path.parent), damaged)
        except (StickyError, KeyError, TypeError, AttributeError) as e:
            damaged.append(Damaged(path, str(e)))
            continue
        known = runs.get(run.record.run_id)
        if known is None or run.worth() > known.worth():
            runs[run.record.run_id] = run
    _require_a_result(folders, list(runs.values()), damaged)
    return Collection(grouped(runs.values()), tuple(damaged))


def _records(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: expected one with runs in it.")
    return sorted(folder.rglob("record.json"))


def _read(folder: RunFolder, damaged: list[Damaged]) -> Run:
    """A run from its folder; a log that cannot be read goes to `damaged`, and the run counts without it."""
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
        raise RunError(f"There is no run in {where} (no record.json). Make some with stickymoe sweep GRID --out DIR.")
    counts = {
        status: sum(run.record.status == status for run in runs) for status in ("failed", "interrupted", "running")
    }
    found = [f"{n} {status}" for status, n in {**counts, "damaged": len(damaged)}.items() if n]
    first = next((run.record.failure for run in runs if run.record.failure), damaged[0].reason if damaged else None)
    raise RunError(f"No run in {where} is complete ({', '.join(found)})" + (f": {first}" if first else "."))


def grouped(runs: Iterable[Run]) -> tuple[Group, ...]:
    """Runs by what may be compared, largest group first.

    A dense run has no experts to count or share, so it stands in every group that differs from its own only in those.
    """
    groups: dict[str, list[Run]] = {}
    dense: list[Run] = []
    for run in runs:
        groups.setdefault(repr(_setting(run)), []).append(run)
        if run.config.variant.name == "dense":
            dense.append(run)
    for members in groups.values():
        first = _setting(members[0], of_experts=False)
        members += [run for run in dense if run not in members and _setting(run, of_experts=False) == first]
    together = [Group(_rows(members)) for members in groups.values()]
    titles = [group.title for group in together]
    together = [
        Group(group.rows, _difference(group, [g for g, t in zip(together, titles, strict=True) if t == title]))
        for group, title in zip(together, titles, strict=True)
    ]
    return tuple(sorted(together, key=lambda group: (-len(group.rows), group.title)))


# What the dense control does not have.
_OF_EXPERTS = ("n_experts", "share_block", "universal")


def _setting(run: Run, *, of_experts: bool = True) -> dict[str, Any]:
    """What must be equal for two runs to stand in one table; without `of_experts`, as far as the dense control goes."""
    config = run.config.as_dict()
    train = {f"train.{key}": value for key, value in config["train"].items() if key not in _HOW_OFTEN}
    sizes = config["model"].items()
    model = {f"model.{key}": value for key, value in sizes if of_experts or key not in _OF_EXPERTS}
    data = {"data": run.record.data["fingerprint"][:12], "data.documents": config["data"]["documents"]}
    return {**data, **model, **train}


def _difference(group: Group, alike: list[Group]) -> str:
    """The settings in which groups of one title differ, as this one has them."""
    settings = [_setting(_one_of(other.runs)) for other in alike]
    differs = [key for key in settings[0] if len({repr(setting[key]) for setting in settings}) > 1]
    return ", ".join(f"{key} {_setting(_one_of(group.runs))[key]}" for key in differs)


def _one_of(runs: Sequence[Run]) -> Run:
    return next((run for run in runs if run.config.variant.name != "dense"), runs[0])


def _rows(runs: list[Run]) -> tuple[Row, ...]:
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.config.variant.key, []).append(run)
    return tuple(sorted((Row.of(members) for members in rows.values()), key=_paper_order))


def _paper_order(row: Row) -> tuple[int, bool, list[float], str]:
    """By name, the paper's own rows before ablations, then by strength."""
    names = list(dict.fromkeys([settings["variant"]["name"] for settings in PAPER_ROWS] + list(variant_names())))
    place = names.index(row.variant.name) if row.variant.name in names else len(names)  # combinations come last
    strengths = [
        float(value) for f, value in row.variant.shown() if f.metadata.get("always") and isinstance(value, int | float)
    ]
    return place, row.ablation, strengths, row.variant.key
