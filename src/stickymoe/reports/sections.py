"""The sections of a report. A section is a function of a group of runs and the context that returns parts.

    def longest_run(group: Group, context: Context) -> list[Part]:
        longest = max(group.runs, key=lambda run: run.config.train.steps)
        item = Item(longest.config.variant.label, f"{longest.config.train.steps} steps")
        return [ListPart(name=f"longest-{context.name}", title="Longest run", items=[item])]

    report([Path("runs")], Path("report.html"), sections=[*DEFAULT_SECTIONS, longest_run])

An appendix is the same for all groups together: a function of the collection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stickymoe.errors import StickyError
from stickymoe.locality.devices import Device
from stickymoe.reports import figures, tables
from stickymoe.reports.charts import Chart
from stickymoe.reports.collection import Collection, Group, Row
from stickymoe.reports.device import on_device
from stickymoe.reports.parts import FigurePart, Item, ListPart, Part, RibbonPart, RunsPart, TablePart
from stickymoe.reports.ribbon import Ribbon, read_ribbon
from stickymoe.reports.tables import ALL_SLOTS, Table, capacities

RIBBON_LENGTH = 180
FRONT = "The dashed line is the Pareto front. Bars show one standard deviation over seeds."


@dataclass(frozen=True)
class Context:
    """What a section may use in addition to its group.

    name: unique name of the group, for the names of parts
    device, memory: device profile, and bytes for weights (None: half of the experts and all other weights)
    """

    name: str
    collection: Collection
    device: Device
    memory: float | None = None

    @property
    def others(self) -> list[Group]:
        """All groups but this one."""
        return [group for name, group in self.collection.names().items() if name != self.name]


Section = Callable[[Group, Context], Sequence[Part]]
Appendix = Callable[[Collection], Sequence[Part]]


def ribbon(group: Group, context: Context) -> list[Part]:
    """One text, coloured by the expert of each token, for every row that kept its routes."""
    capacity = min(capacities(group.rows), default=2)
    found = [(row, ribbon) for row in group.routed if (ribbon := _first_ribbon(row, capacity)) is not None]
    if not found:
        return []
    rates = [row.mean("switch_rate") or 0.0 for row, _ in found]
    return [
        RibbonPart(
            name=f"ribbon-{context.name}",
            title="The same text in two runs",
            ribbons=[ribbon for _, ribbon in found],
            sticky=min(range(1, len(found)), key=rates.__getitem__, default=0),
        )
    ]


def _first_ribbon(row: Row, capacity: int) -> Ribbon | None:
    for run in row.complete:
        if run.folder is not None and run.folder.routes.exists():
            with contextlib.suppress(StickyError):  # damaged routes, or routes without tokens: try the next seed
                return read_ribbon(run.folder.path, length=RIBBON_LENGTH, capacity=capacity)
    return None


def results(group: Group, context: Context) -> list[Part]:
    """The table of results."""
    name = f"results-{context.name}"
    table = tables.results(group.rows, group.baseline, name=name, caption=f"Results, {group.title}.")
    note = f"{tables.LEGEND}. ± is one standard deviation over seeds. Changes and factors use the common seeds."
    return [TablePart(name=name, title="Results", table=table, note=note)]


def pareto(group: Group, context: Context) -> list[Part]:
    """Perplexity against the hit rate, the switch rate, and the misses of every cache size."""
    top_1 = figures.pareto(group, "cache_hit_rate", "cache hit rate (higher is better)", better="higher")
    switches = figures.pareto(group, "switch_rate", "switch rate (lower is better)", better="lower")
    parts = [
        *_figure(
            f"pareto-chr-{context.name}",
            "Perplexity against hit rate",
            f"Hit rate of the top-1 expert in an LRU cache with 2 slots per layer. {FRONT}",
            top_1,
        ),
        *_figure(f"pareto-sr-{context.name}", "Perplexity against switch rate", FRONT, switches),
    ]
    for C in capacities(group.rows):
        axis = f"misses per access, all k experts, C={C} (log, lower is better)"
        chart = figures.pareto(group, f"{ALL_SLOTS}{C}", axis, better="lower", misses=True)
        title = f"Perplexity against misses, {C} slots per layer"
        note = f"Misses of all k experts of a token in an LRU cache. A device pays for these. {FRONT}"
        parts += _figure(f"pareto-misses-c{C}-{context.name}", title, note, chart)
    return parts


def switch_rate_by_layer(group: Group, context: Context) -> list[Part]:
    note = "Layer 0 is next to the input. A bright cell has a low switch rate."
    return _figure(f"layers-{context.name}", "Switch rate by layer", note, figures.layers(group))


def switches_and_misses(group: Group, context: Context) -> list[Part]:
    chart = figures.switches_and_misses(group)
    note = "One point for each layer of each row."
    return _figure(f"switches-misses-{context.name}", "Switches and misses", note, chart, wide=True)


def utilisation(group: Group, context: Context) -> list[Part]:
    note = "Share of all k slots. White is the uniform share, orange is more, purple is less."
    chart = figures.utilisation(group)
    return _figure(f"utilisation-{context.name}", "Use of experts by layer", note, chart, wide=True)


def training_curves(group: Group, context: Context) -> list[Part]:
    note = "Loss terms without their weights, mean over seeds. On the page, point at a line to highlight it."
    return _figure(f"curves-{context.name}", "Training and validation", note, figures.curves(group), wide=True)


def device(group: Group, context: Context) -> list[Part]:
    """What the routing of each row costs on the device: misses, tokens per second, distinct experts."""
    costs = on_device(group, context.device, context.memory)
    if costs is None:
        return []
    parts: list[Part] = [
        ListPart(
            name=f"device-{context.name}",
            title=f"On a device: {costs.device.name}",
            items=[Item(label, text) for label, text in costs.summaries],
        )
    ]
    for short, title, note, chart in costs.figures:
        parts += _figure(f"{short}-{context.name}", title, note, chart)
    return parts


def provenance(collection: Collection) -> list[Part]:
    """Where every number comes from: run, config, data, commit, versions and machine."""
    rows = []
    for name, group in collection.names().items():
        for run in group.runs:
            record, env = run.record, run.record.environment
            packages = env.get("packages", {})
            rows.append(
                (
                    record.run_id,
                    name,
                    run.config.variant.label,
                    str(run.config.seed),
                    record.status,
                    record.data["fingerprint"][:12],
                    (env.get("commit") or "unknown")[:12],
                    ", ".join(f"{package} {packages.get(package) or '?'}" for package in ("stickymoe", "torch")),
                    str(env.get("processor") or env.get("system") or "unknown"),
                )
            )
    heads = ("run", "comparison", "variant", "seed", "status", "data", "commit", "versions", "machine")
    table = Table("provenance", "The runs behind this report.", heads, tuple(rows))
    note = "Every number in this report is computed from these records."
    return [RunsPart(name="provenance", title="Provenance", note=note, runs=collection.runs, table=table)]


def _figure(name: str, title: str, note: str, chart: Chart | None, *, wide: bool = False) -> list[Part]:
    """A figure, or nothing if there is nothing to draw."""
    return [] if chart is None else [FigurePart(name=name, title=title, note=note, chart=chart, wide=wide)]


DEFAULT_SECTIONS: tuple[Section, ...] = (
    ribbon,
    results,
    device,
    pareto,
    switch_rate_by_layer,
    switches_and_misses,
    utilisation,
    training_curves,
)
DEFAULT_APPENDICES: tuple[Appendix, ...] = (provenance,)
