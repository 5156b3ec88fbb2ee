"""The report sections of the paper: its observations, the MoE gain that each row keeps, its numbers next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stickymoe.paper import figures
from stickymoe.paper.findings import findings, scope, summary
from stickymoe.paper.frontier import EXPLAINED, kept_table
from stickymoe.paper.grids import PAPER_ORDER
from stickymoe.paper.published import SOURCE, beside_the_paper, layers_beside_the_paper
from stickymoe.reports.collection import Collection, Group
from stickymoe.reports.parts import FigurePart, Item, ListPart, Part, TablePart
from stickymoe.reports.report import report
from stickymoe.reports.sections import DEFAULT_APPENDICES, DEFAULT_SECTIONS, Appendix, Context, Section
from stickymoe.reports.tables import capacities


def observations(group: Group, context: Context) -> list[Part]:
    """The paper's observations and open questions, decided by the runs."""
    if len(group.complete) < 2:
        return []
    found = findings(group, context.others)
    return [
        ListPart(
            name=f"findings-{context.name}",
            title="Findings",
            note=scope(group),
            summary=summary(found),
            items=[Item(finding.claim, finding.text, badge=finding.verdict) for finding in found],
        )
    ]


def gain(group: Group, context: Context) -> list[Part]:
    """The share of the MoE gain that each row keeps, as a table and as a figure for each cache size."""
    name = f"kept-{context.name}"
    table = kept_table(group, name=name, caption=f"{EXPLAINED} {group.title}.")
    parts: list[Part] = [] if table is None else [TablePart(name=name, title="MoE gain kept", table=table)]
    for C in capacities(group.rows):
        chart = figures.kept_gain(group, C)
        if chart is not None:
            note = (
                "The dashed line is the Pareto front. In the shaded region a row keeps at least 80 % of the gain with "
                "at least ten times fewer misses than vanilla."
            )
            title = f"MoE gain kept, {C} slots per layer"
            parts.append(FigurePart(name=f"kept-c{C}-{context.name}", title=title, note=note, chart=chart))
    return parts


def published(group: Group, context: Context) -> list[Part]:
    """The numbers of the paper next to ours."""
    name, layers = f"paper-{context.name}", f"paper-layers-{context.name}"
    note = f"Source: {SOURCE}."
    found = (
        (name, "The paper and our runs", beside_the_paper(group, name=name)),
        (layers, "Switch rate by layer in the paper and in our runs", layers_beside_the_paper(group, name=layers)),
    )
    return [TablePart(name=n, title=title, table=table, note=note) for n, title, table in found if table is not None]


def access_orders(collection: Collection) -> list[Part]:
    """The figure of the paper's appendix."""
    note = (
        "The numbers show the order in which the experts of a layer are requested. In prefill, a layer processes all "
        "tokens before the next layer starts, so the next request of a layer comes from the next token. In decoding, "
        "the requests of all other layers come in between."
    )
    title = "Two orders of access"
    return [FigurePart(name="access-patterns", title=title, note=note, chart=figures.access_patterns())]


PAPER_SECTIONS: tuple[Section, ...] = (observations, gain, published)
PAPER_APPENDICES: tuple[Appendix, ...] = (access_orders,)


def paper_report(
    folders: Sequence[Path], out: Path, *, device: str = "raspberry-pi-5", memory: float | None = None
) -> Collection:
    """The report with the sections of the paper after the results, and its rows in the order of the paper."""
    ribbon, results, *others = DEFAULT_SECTIONS
    return report(
        folders,
        out,
        sections=(ribbon, results, *PAPER_SECTIONS, *others),
        appendices=(*PAPER_APPENDICES, *DEFAULT_APPENDICES),
        order=PAPER_ORDER,
        device=device,
        memory=memory,
    )
