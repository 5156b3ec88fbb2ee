"""The progress of a sweep: a live table in a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from stickymoe.sweeps.cells import Cell


@contextlib.contextmanager
def display(cells: list[Cell], console: Console) -> Iterator[Callable[[], None]]:
    """A function that shows the present state of the cells."""
    if not console.is_terminal:
        yield _Lines(cells, console).update
        return
    with Live(_table(cells), console=console, refresh_per_second=1, redirect_stdout=False) as live:
        yield lambda: live.update(_table(cells))


def _table(cells: list[Cell]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "status", "steps", "left", "SR", "PPL"):
        table.add_column(heading, justify="left" if heading in ("run", "status") else "right")
    for cell in cells:
        table.add_row(*_row(cell))
    return table


def _row(cell: Cell) -> tuple[str, ...]:
    step, switch_rate, ppl = cell.progress()
    left = ""
    if cell.status == "running" and step > cell.started_step:
        seconds = (time.monotonic() - cell.started) / (step - cell.started_step) * (cell.steps - step)
        left = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    return (
        f"{cell.config.variant.label}  seed {cell.config.seed}",
        f"{cell.status}: {cell.failure}" if cell.failure else cell.status,
        f"{step}/{cell.steps}",
        left,
        "–" if switch_rate is None else f"{switch_rate:.3f}",
        "–" if ppl is None else f"{ppl:.2f}",
    )


class _Lines:
    """Without a terminal: print one line when a run starts, ends or is lost."""

    def __init__(self, cells: list[Cell], console: Console) -> None:
        self._cells, self._console = cells, console
        self._printed: dict[str, tuple[str, str]] = {}

    def update(self) -> None:
        for cell in self._cells:
            state = cell.status, cell.failure
            if state != ("waiting", "") and self._printed.get(cell.run_id) != state:
                self._printed[cell.run_id] = state
                done = sum(c.status in ("complete", "failed") for c in self._cells)
                text = "  ".join(part for part in _row(cell) if part)
                self._console.print(
                    f"[{done}/{len(self._cells)}] {text}", markup=False, highlight=False, soft_wrap=True
                )
