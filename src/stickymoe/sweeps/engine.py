"""Run a grid in parallel: one process per core, one thread each. Complete runs are skipped, interrupted runs resume.

The engine and its runs communicate only through run folders. So a sweep can be killed and started again, and several
sweeps can share a folder: each run is locked by the process that runs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from stickymoe.data.tokens import load_tokens
from stickymoe.errors import InterruptedRunError, RunError
from stickymoe.runs.config import DataConfig, RunConfig
from stickymoe.runs.environment import describe_environment
from stickymoe.runs.folder import HELD, RunFolder, run_id
from stickymoe.runs.record import RunRecord


@dataclass
class Cell:
    """One run of a sweep and its progress."""

    config: RunConfig
    run_id: str
    folder: RunFolder
    data: dict[str, Any]  # the description of the data for the record
    after: Cell | None = None  # the run whose result replaces the first phase of this run
    process: subprocess.Popen[bytes] | None = None
    status: str = "waiting"
    failure: str = ""
    started: float = 0.0
    started_step: int = 0
    not_before: float = 0.0

    @property
    def steps(self) -> int:
        return self.config.total_steps

    @property
    def record(self) -> RunRecord | None:
        """The record of the run, if there is one that can be read."""
        try:
            return RunRecord.read(self.folder.record)
        except RunError:
            return None


def plan(configs: Sequence[RunConfig], out: Path) -> list[Cell]:
    """The cells of a sweep. Tokens are prepared here, once for all runs."""
    described: dict[DataConfig, dict[str, Any]] = {}
    cells: dict[str, Cell] = {}
    for config in configs:
        if config.data not in described:
            described[config.data] = load_tokens(config.data).describe()
        data = described[config.data]
        identity = run_id(config, data["fingerprint"])
        cells.setdefault(identity, Cell(config, identity, RunFolder(_folder(config, identity, out)), data))
    for cell in cells.values():
        same = cell.config.variant.first_phase_is
        if same is not None:
            first = replace(cell.config, variant=same)
            cell.after = cells.get(run_id(first, cell.data["fingerprint"]))
    return list(cells.values())


def _folder(config: RunConfig, identity: str, out: Path) -> Path:
    """The folder of a run: an earlier version may have named it after settings that were renamed since."""
    ending = f"-s{config.seed}-{identity[:8]}"
    return next(out.glob(f"{config.variant.name}-*{ending}"), out / f"{config.variant.key}{ending}")


def sweep(cells: list[Cell], *, jobs: int, console: Console | None = None) -> list[Cell]:
    """Run every cell, `jobs` at a time, and return the cells with their final status."""
    console = console or Console(stderr=True)
    for cell in cells:
        if (record := cell.record) is not None and record.status == "complete":
            cell.status = "complete"
    live = Live(_table(cells), console=console, refresh_per_second=1, transient=False)
    # A terminated sweep must stop its runs; a sweep in the background must react to Ctrl-C.
    stop_signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        stop_signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, signal.default_int_handler) for s in stop_signals}
    try:
        with live if console.is_terminal else _Lines(cells, console) as shown:
            while True:
                _collect(cells)
                _launch(cells, jobs)
                shown.update(_table(cells))
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
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _stop(cells: list[Cell]) -> None:
    """Stop the running processes; each saves a checkpoint first."""
    running = [cell.process for cell in cells if cell.process is not None]
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        process.wait()


def _launch(cells: list[Cell], jobs: int) -> None:
    busy = sum(cell.status == "running" for cell in cells)
    for cell in cells:
        if busy >= jobs:
            return
        first = cell.after
        ready = first is None or first.status in ("complete", "failed")
        ready = ready and time.monotonic() >= cell.not_before
        if cell.status != "waiting" or not ready:
            continue
        cell.process = _start(cell)
        cell.status, cell.started = "running", time.monotonic()
        cell.started_step = _progress(cell)[0]
        busy += 1


def _start(cell: Cell) -> subprocess.Popen[bytes]:
    cell.folder.path.mkdir(parents=True, exist_ok=True)
    config = cell.folder.path / ".cell.yaml"
    cell.folder.write_config(cell.config, config)
    command = [sys.executable, "-m", "stickymoe.cli", "train", "--quiet", "--resume", "--config", str(config)]
    command += ["--out", str(cell.folder.path)]
    if cell.after is not None and cell.after.status == "complete" and cell.after.folder.has_end(cell.after.steps):
        command += ["--first_phase", str(cell.after.folder.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with _stderr(cell).open("w") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment, start_new_session=True)


def _stderr(cell: Cell) -> Path:
    """The error output of the run; each sweep uses its own file."""
    return cell.folder.path / f".stderr-{os.getpid()}"


def _collect(cells: list[Cell]) -> None:
    """Update the status of cells whose process has ended."""
    for cell in cells:
        if cell.process is None or cell.process.poll() is None:
            continue
        messages = _stderr(cell).read_text(errors="replace").strip().splitlines()
        _stderr(cell).unlink()
        code, cell.process = cell.process.returncode, None
        if (record := cell.record) is not None and record.status == "complete":  # by this process or another sweep's
            cell.status = "complete"
            continue
        if cell.folder.is_locked() or (messages and messages[-1].endswith(HELD)):  # another sweep runs it
            cell.status, cell.not_before = "waiting", time.monotonic() + 2
            continue
        cell.status = "failed"
        cell.failure = messages[-1].removeprefix("stickymoe: ") if messages else f"ended with code {code}"
        _record_failure(cell)


def _record_failure(cell: Cell) -> None:
    """Record the failure of a process that was killed or could not start.

    A record that cannot be read is not overwritten: it may belong to a finished run.
    """
    record = cell.record
    if record is None and cell.folder.record.exists():
        return
    record = record or RunRecord(cell.run_id, "failed", cell.config.as_dict(), cell.data, describe_environment())
    if record.status != "complete":
        replace(record, status="failed", failure=record.failure or cell.failure).write(cell.folder.record)


def _progress(cell: Cell) -> tuple[int, float | None, float | None]:
    """The last step, and the latest switch rate and validation perplexity."""
    step, switch_rate, ppl = 0, None, None
    for line in cell.folder.recent_metrics():
        step = line.get("step", step)
        switch_rate = line.get("train", line.get("valid", {})).get("switch_rate", switch_rate)
        ppl = line.get("valid", {}).get("ppl", ppl)
    return step, switch_rate, ppl


def _row(cell: Cell) -> tuple[str, ...]:
    step, switch_rate, ppl = _progress(cell)
    left = ""
    if cell.status == "running" and step > cell.started_step:
        seconds = (time.monotonic() - cell.started) / (step - cell.started_step) * (cell.steps - step)
        left = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    return (
        f"{cell.config.variant.label}  seed {cell.config.seed}",
        cell.status if cell.status != "failed" else f"failed: {cell.failure}",
        f"{step}/{cell.steps}",
        left,
        "–" if switch_rate is None else f"{switch_rate:.3f}",
        "–" if ppl is None else f"{ppl:.2f}",
    )


def _table(cells: list[Cell]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "status", "steps", "left", "SR", "PPL"):
        table.add_column(heading, justify="left" if heading in ("run", "status") else "right")
    for cell in cells:
        table.add_row(*_row(cell))
    return table


class _Lines:
    """Without a terminal: print one line when a run starts or ends."""

    def __init__(self, cells: list[Cell], console: Console) -> None:
        self._cells, self._console = cells, console
        self._printed: dict[str, str] = {}

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, table: Table) -> None:
        for cell in self._cells:
            if cell.status != "waiting" and self._printed.get(cell.run_id) != cell.status:
                self._printed[cell.run_id] = cell.status
                done = sum(c.status in ("complete", "failed") for c in self._cells)
                text = "  ".join(part for part in _row(cell) if part)
                self._console.print(
                    f"[{done}/{len(self._cells)}] {text}", markup=False, highlight=False, soft_wrap=True
                )
