"""Output of the commands: tables of results, tables with notes, skipped files, and JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.errors import StickyError

if TYPE_CHECKING:
    from stickymoe.reports.collection import Collection
    from stickymoe.reports.tables import Table
    from stickymoe.runs.record import RunRecord


def print_results(records: Sequence[RunRecord]) -> None:
    """Print one table for each group of comparable runs."""
    from stickymoe.reports.collection import Run, grouped
    from stickymoe.reports.tables import results, results_console, terminal

    console = results_console()
    for group in grouped(Run.of(record) for record in records):
        if len(records) > 1:
            console.print(group.title, highlight=False, markup=False)
        console.print(terminal(results(group.rows, group.baseline if len(group.rows) > 1 else None)))


def print_damaged(collection: Collection) -> None:
    for bad in collection.damaged:
        print(f"stickymoe: skipped {bad.path}: {bad.reason}", file=sys.stderr)


def print_lines(lines: Sequence[str | Table | None]) -> None:
    """Print tables and text; None is skipped."""
    from stickymoe.reports.tables import results_console, terminal

    console = results_console()
    for line in lines:
        if isinstance(line, str):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif line is not None:
            console.print(terminal(line), highlight=False, markup=False)


@contextlib.contextmanager
def progress(title: str, total: int, unit: str = "tok/s") -> Iterator[Callable[[int], None]]:
    """Progress on the error stream, with the speed and the time left; call what it gives with what is done."""
    from stickymoe.training.progress import Display

    done, started = 0, time.monotonic()

    def advance(n: int) -> None:
        nonlocal done
        done += n
        display.step(min(done, total), {}, done / max(time.monotonic() - started, 1e-9), unit)

    with Display(title, total, 0) as display:
        yield advance


def write_json(file: Path, value: Any) -> None:
    try:
        file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise StickyError(f"{file} cannot be written ({e.strerror}).") from e
