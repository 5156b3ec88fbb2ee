"""Tables of results for the terminal, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from stickymoe.reports.collection import Row, Value

ALL_SLOTS = "cache_hit_rate_all_c"
LEGEND = (
    "bpb: bits per byte · SR: switch rate of the top-1 expert · CHR: hit rate of the top-1 expert in an LRU cache with "
    "2 slots per layer · all C: hit rate of all k experts with C slots per layer · UE: utilisation entropy in bits · "
    "gate H: mean entropy of the gates in bits · ×: how many times fewer misses than vanilla"
)
MISSING = "–"


@dataclass(frozen=True)
class Number:
    """A value and its number format."""

    value: Value
    form: str

    @property
    def mean(self) -> str:
        return "∞" if math.isinf(self.value.mean) else format(self.value.mean, self.form)

    @property
    def sd(self) -> str:
        sd = self.value.sd
        return "" if sd is None or not math.isfinite(sd) else format(sd, self.form.lstrip("+"))

    def __str__(self) -> str:
        return f"{self.mean} ± {self.sd}" if self.sd else self.mean


Cell = str | Number


@dataclass(frozen=True)
class Table:
    """Headings and cells; the first column is the label of the row. `name` is the file name."""

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Column:
    """A heading, and the function that computes a cell from a row and the baseline."""

    heading: str
    cell: Callable[[Row, Row | None], Value | None]
    form: str
    needs_baseline: bool = False


def _measured(heading: str, metric: str, form: str) -> Column:
    return Column(heading, lambda row, base: row.metric(metric), form)


def _fewer(heading: str, hit_rate: str) -> Column:
    def cell(row: Row, base: Row | None) -> Value | None:
        return None if base is None or row is base else row.fewer_misses(base, hit_rate)

    return Column(heading, cell, ".2f", needs_baseline=True)


def _change(row: Row, base: Row | None) -> Value | None:
    return None if base is None or row is base else row.change(base)


def capacities(rows: Sequence[Row]) -> list[int]:
    """The cache sizes for which the hit rate of all k experts was measured."""
    names = {name for row in rows for run in row.complete for name in run.record.metrics if name.startswith(ALL_SLOTS)}
    return sorted(int(name.removeprefix(ALL_SLOTS)) for name in names)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of the results table. Arrows show which direction is better."""
    all_slots = [
        column
        for C in capacities(rows)
        for column in (_measured(f"all C={C} ↑", f"{ALL_SLOTS}{C}", ".3f"), _fewer(f"× C={C}", f"{ALL_SLOTS}{C}"))
    ]
    return [
        _measured("PPL ↓", "ppl", ".2f"),
        Column("ΔPPL %", _change, "+.1f", needs_baseline=True),
        _measured("SR ↓", "switch_rate", ".3f"),
        _measured("CHR ↑", "cache_hit_rate", ".3f"),
        _fewer("× top-1", "cache_hit_rate"),
        _measured("UE ↑", "utilisation_entropy", ".3f"),
        _measured("bpb ↓", "bits_per_byte", ".3f"),
        *all_slots,
        _measured("gate H", "gate_entropy", ".3f"),
        _measured("neglected", "neglected_experts", ".3g"),
    ]


def results(rows: Sequence[Row], baseline: Row | None = None, *, name: str = "results", caption: str = "") -> Table:
    """The results table. With a `baseline`, perplexity and misses are also shown relative to it."""
    columns = [column for column in _columns(rows) if baseline is not None or not column.needs_baseline]
    seeds = any(len(row.runs) > 1 for row in rows)
    lines = []
    for row in rows:
        if row.complete:
            cells = [number(column.cell(row, baseline), column.form) for column in columns]
        else:
            cells = [row.status] * len(columns)
        lines.append((row.label, *([_seeds(row)] if seeds else []), *cells))
    headings = ("variant", *(["seeds"] if seeds else []), *(column.heading for column in columns))
    return Table(name, caption, headings, tuple(lines))


def number(value: Value | None, form: str) -> Cell:
    """The cell of a value; a dash if it was not measured."""
    return MISSING if value is None else Number(value, form)


def _seeds(row: Row) -> str:
    unfinished = len(row.runs) - len(row.complete)
    return f"{len(row.complete)}" + (f" ({unfinished} not complete)" if unfinished else "")


def markdown(table: Table) -> str:
    lines = [list(table.headings), ["---"] + ["---:"] * (len(table.headings) - 1)]
    lines += [[markdown_escaped(str(cell)) for cell in row] for row in table.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def markdown_escaped(text: str) -> str:
    """Escape text so that it cannot become markup or break a table row."""
    return " ".join(escape(text, quote=False).replace("|", "\\|").split())


def csv_text(table: Table) -> str:
    """CSV with all digits; a second column holds the deviation where there is one; unmeasured cells are empty."""
    columns = zip(*table.rows, strict=True)
    spread = [any(isinstance(cell, Number) and cell.sd for cell in column) for column in columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = zip(table.headings, spread, strict=True)
    writer.writerow([h for heading, two in heads for h in ([heading, f"{heading} ±"] if two else [heading])])
    for row in table.rows:
        cells: list[float | str | None] = []
        for cell, two in zip(row, spread, strict=True):
            plain = None if cell == MISSING else str(cell)
            mean, sd = (cell.value.mean, cell.value.sd) if isinstance(cell, Number) else (plain, None)
            cells += [mean, sd] if two else [mean]
        writer.writerow(cells)
    return out.getvalue()


_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "−": "$-$",
    "·": r"$\cdot$",
    "–": "--",
    "Δ": r"$\Delta$",
    "λ": r"$\lambda$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "μ": r"$\mu$",
    "ρ": r"$\rho$",
    "δ": r"$\delta$",
    "τ": r"$\tau$",
    "κ": r"$\kappa$",
    "η": r"$\eta$",
    "θ": r"$\theta$",
    "ξ": r"$\xi$",
    "★": r"$\star$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}


def latex_escaped(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def latex(table: Table) -> str:
    """A booktabs table."""
    lines = [
        r"\begin{table}[t]",
        r"\centering\small",
        rf"\caption{{{latex_escaped(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}",
        r"\toprule",
        " & ".join(latex_escaped(h) for h in table.headings) + r" \\",
        r"\midrule",
        *(" & ".join(latex_escaped(str(cell)) for cell in row) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in table.headings)
    body = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>{"".join(_html_cell(cell) for cell in row[1:])}</tr>'
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, Number) and cell.sd:
        return f'<td>{escape(cell.mean)} <span class="sd">± {escape(cell.sd)}</span></td>'
    return f"<td>{escape(str(cell))}</td>"


def terminal(table: Table) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(table.headings):
        shown.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(str(cell) for cell in row))
    return shown


def results_console() -> Console:
    """A console that is wide enough for every table."""
    console = Console()
    console.width = max(console.width, 400)
    return console
