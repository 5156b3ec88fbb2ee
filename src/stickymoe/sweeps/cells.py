"""The cells of a sweep, one per run, and what an engine does with them.

A cell and its sweep communicate only through the run folder. So a sweep can be killed and started again, and several
sweeps can share a folder: each run is locked by the process that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stickymoe.data.tokens import load_tokens
from stickymoe.errors import RunError
from stickymoe.runs.config import DataConfig, RunConfig
from stickymoe.runs.environment import describe_environment
from stickymoe.runs.folder import RunFolder, run_id
from stickymoe.runs.record import RunRecord


@dataclass(frozen=True)
class Ended:
    """How the process of a cell ended: its exit code and its last line on stderr.

    A lost process was stopped from outside, as when its machine died; it did not fail.
    """

    code: int
    message: str = ""
    lost: bool = False


@runtime_checkable
class Running(Protocol):
    """A cell that an engine has started."""

    def poll(self) -> Ended | None:
        """How it ended; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save a checkpoint and end."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Where cells run."""

    def cpus(self) -> int:
        """The number of cells that can run at a time."""
        ...

    def start(self, cell: Cell) -> Running: ...


@dataclass
class Cell:
    """One run of a sweep and its progress."""

    config: RunConfig
    run_id: str
    folder: RunFolder
    data: dict[str, Any]  # the description of the data for the record
    after: Cell | None = None  # the run whose result replaces the first phase of this run
    running: Running | None = None
    status: str = "waiting"
    failure: str = ""  # why it failed, or why it waits again
    started: float = 0.0
    started_step: int = 0
    not_before: float = 0.0
    losses: int = 0  # how often it was lost since its last progress

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

    @property
    def is_complete(self) -> bool:
        """Whether the run is complete, by its record."""
        record = self.record
        return record is not None and record.status == "complete"

    def progress(self) -> tuple[int, float | None, float | None]:
        """The last step, and the latest switch rate and validation perplexity."""
        step, switch_rate, ppl = 0, None, None
        for line in self.folder.recent_metrics():
            step = line.get("step", step)
            switch_rate = line.get("train", line.get("valid", {})).get("switch_rate", switch_rate)
            ppl = line.get("valid", {}).get("ppl", ppl)
        return step, switch_rate, ppl

    def prepare(self) -> list[str]:
        """Write the config of the run; returns the command that starts or resumes it."""
        folder = self.folder.path.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / ".cell.yaml"
        self.folder.write_config(self.config, config)
        command = ["-m", "stickymoe.cli", "train", "--quiet", "--resume", "--config", str(config), "--out", str(folder)]
        first = self.after
        if first is not None and first.status == "complete" and first.folder.has_end(first.steps):
            command += ["--first_phase", str(first.folder.path.absolute())]
        return command

    def record_failure(self) -> None:
        """Record the failure of a process that was killed or could not start.

        A record that cannot be read is not overwritten: it may belong to a finished run.
        """
        record = self.record
        if record is None and self.folder.record.exists():
            return
        record = record or RunRecord(self.run_id, "failed", self.config.as_dict(), self.data, describe_environment())
        if record.status != "complete":
            replace(record, status="failed", failure=record.failure or self.failure).write(self.folder.record)


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
