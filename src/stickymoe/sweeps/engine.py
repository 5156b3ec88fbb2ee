"""Run the cells of a grid in parallel. Complete runs are skipped, interrupted runs resume."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from rich.console import Console

from stickymoe.errors import InterruptedRunError, RunError
from stickymoe.runs.folder import HELD
from stickymoe.sweeps.cells import Cell, Ended, Engine
from stickymoe.sweeps.display import display
from stickymoe.sweeps.local import LocalEngine

MAX_LOSSES = 3  # of a cell, without progress


def sweep(
    cells: list[Cell], *, jobs: int | None = None, engine: Engine | None = None, console: Console | None = None
) -> list[Cell]:
    """Run every cell and return the cells with their final status.

    At most `jobs` run at a time: by default, as many as `engine` has CPUs, which is this machine by default.
    """
    engine = engine or LocalEngine()
    for cell in cells:
        if cell.is_complete:
            cell.status = "complete"
    with _stop_signals():
        try:
            with display(cells, console or Console(stderr=True)) as show:
                while True:
                    _collect(cells)
                    _launch(cells, engine, jobs or engine.cpus())
                    show()
                    if all(cell.status in ("complete", "failed") for cell in cells):
                        return cells
                    time.sleep(0.5)
        except KeyboardInterrupt:
            _stop(cells)
            raise InterruptedRunError("Sweep stopped; its runs are saved. The same command resumes it.") from None
        except BaseException as e:
            _stop(cells)
            if isinstance(e, OSError):
                where = f"{e.filename}: " if e.filename else ""
                raise RunError(f"Sweep stopped; its runs are saved ({where}{e.strerror or e}).") from e
            raise


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """A terminated sweep must stop its runs; a sweep in the background must react to Ctrl-C."""
    stop_signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        stop_signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, signal.default_int_handler) for s in stop_signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _stop(cells: list[Cell]) -> None:
    """Stop the running cells; each saves a checkpoint first."""
    running = [cell.running for cell in cells if cell.running is not None]
    for one in running:
        one.stop()
    while any(one.poll() is None for one in running):
        time.sleep(0.05)


def _launch(cells: list[Cell], engine: Engine, jobs: int) -> None:
    busy = sum(cell.status == "running" for cell in cells)
    for cell in cells:
        if busy >= jobs:
            return
        first = cell.after
        ready = first is None or first.status in ("complete", "failed")
        ready = ready and time.monotonic() >= cell.not_before
        if cell.status != "waiting" or not ready:
            continue
        cell.running = engine.start(cell)
        cell.status, cell.failure, cell.started = "running", "", time.monotonic()
        cell.started_step = cell.progress()[0]
        busy += 1


def _collect(cells: list[Cell]) -> None:
    """Update the status of cells whose process has ended."""
    for cell in cells:
        if cell.running is None or (ended := cell.running.poll()) is None:
            continue
        cell.running = None
        if cell.is_complete:  # by this process or another sweep's
            cell.status = "complete"
        elif ended.lost and _may_start_again(cell):
            _wait(cell, ended.message)
        elif not ended.lost and (HELD in ended.message or cell.folder.is_locked()):  # another sweep runs it
            _wait(cell)
        else:
            _fail(cell, ended)


def _may_start_again(cell: Cell) -> bool:
    cell.losses = 1 if cell.progress()[0] > cell.started_step else cell.losses + 1
    return cell.losses < MAX_LOSSES


def _wait(cell: Cell, reason: str = "") -> None:
    cell.status, cell.failure, cell.not_before = "waiting", reason, time.monotonic() + 2


def _fail(cell: Cell, ended: Ended) -> None:
    message = ended.message.removeprefix("stickymoe: ") or f"ended with code {ended.code}"
    cell.status = "failed"
    cell.failure = f"{message}, {cell.losses} times without progress" if ended.lost else message
    cell.record_failure()
