"""Results as tables, for the terminal and as Markdown. Reads run records; never torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stickymoe.runs.config import RunConfig
from stickymoe.runs.record import RunRecord

# Heading, key in the metrics, format. Arrows say which way is better.
Column = tuple[str, str, str]
_BEFORE: list[Column] = [
    ("PPL ↓", "ppl", ".2f"),
    ("bpb ↓", "bits_per_byte", ".3f"),
    ("SR ↓", "switch_rate", ".3f"),
    ("CHR ↑", "cache_hit_rate", ".3f"),
]
_AFTER: list[Column] = [
    ("UE ↑", "utilisation_entropy", ".3f"),
    ("gate H", "gate_entropy", ".3f"),
    ("neglected", "neglected_experts", "d"),
]
_ALL_SLOTS = "cache_hit_rate_all_c"
LEGEND = (
    "bpb bits per byte · SR switch rate of the top-1 expert · CHR its hit rate in an LRU cache of 2 slots a layer · "
    "all C: the same over all k experts · UE utilisation entropy, bits · gate H mean entropy of the gates, bits"
)


@dataclass(frozen=True)
class Row:
    """One line of the results table."""

    label: str
    status: str
    metrics: dict[str, Any]

    @classmethod
    def from_record(cls, record: RunRecord) -> Row:
        label = RunConfig.from_dict(record.config).variant.label
        return cls(label, record.status, record.metrics)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """The columns for `rows`: all-slots hit rates for every capacity that was measured."""
    sizes = {int(key.removeprefix(_ALL_SLOTS)) for row in rows for key in row.metrics if key.startswith(_ALL_SLOTS)}
    return [*_BEFORE, *((f"all C={C} ↑", f"{_ALL_SLOTS}{C}", ".3f") for C in sorted(sizes)), *_AFTER]


def _cells(rows: Sequence[Row], baseline: Row | None) -> list[list[str]]:
    out = []
    columns = _columns(rows)
    for row in rows:
        if row.status != "complete":
            out.append([row.label, *[row.status] * (len(columns) + (baseline is not None))])
            continue
        cells = [row.label]
        for heading, key, form in columns:
            value = row.metrics.get(key)
            cells.append("–" if value is None else format(value, form))
            if heading.startswith("PPL") and baseline is not None:
                cells.append(_change(row, baseline))
        out.append(cells)
    return out


def _change(row: Row, baseline: Row) -> str:
    ppl, base = row.metrics.get("ppl"), baseline.metrics.get("ppl")
    if ppl is None or base is None or row is baseline:
        return "–"
    return f"{100 * (ppl / base - 1):+.1f}"


def _headings(rows: Sequence[Row], baseline: Row | None) -> list[str]:
    names = [heading for heading, _, _ in _columns(rows)]
    return ["variant", names[0], *(["ΔPPL %"] if baseline is not None else []), *names[1:]]


def results_table(rows: Sequence[Row], baseline: Row | None = None) -> Table:
    """The results for a terminal; perplexity also relative to `baseline` if there is one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(_headings(rows, baseline)):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for cells in _cells(rows, baseline):
        table.add_row(*cells)
    return table


def results_markdown(rows: Sequence[Row], baseline: Row | None = None) -> str:
    headings = _headings(rows, baseline)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *_cells(rows, baseline)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def results_console() -> Console:
    """A console that never squeezes the table, whatever the width it reports."""
    console = Console()
    console.width = max(console.width, 120)
    return console
