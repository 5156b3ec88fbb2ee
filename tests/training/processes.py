"""Training in a process of its own that can be killed; forked, since importing torch takes longer than the run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accelerate.state import AcceleratorState

from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord

DEADLINE = 300.0  # seconds after which processes that wait for each other count as hung


class Ended(NamedTuple):
    """How a process ended: its exit code, or minus the signal that killed it; and what it wrote."""

    code: int
    stdout: str
    stderr: str


class Child:
    """`work` in a forked process; its answer, if a number, is the exit code."""

    def __init__(self, work: Callable[[], Any], outputs: Path) -> None:
        self._outputs = outputs
        outputs.mkdir(parents=True, exist_ok=True)
        self._pid = os.fork()
        if self._pid == 0:
            self._be(work)

    def _be(self, work: Callable[[], Any]) -> None:
        code = 70
        try:
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                stream = os.open(self._outputs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(stream, descriptor)
                setattr(sys, name, os.fdopen(os.dup(descriptor), "w", buffering=1))
            answer = work()
            code = answer if isinstance(answer, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self, deadline: float | None = None) -> Ended:
        """How it ended; killed if it still runs at the `deadline` of the monotonic clock."""
        while deadline is not None and not os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                self.kill()
                break
            time.sleep(0.02)
        _, status = os.waitpid(self._pid, 0)
        stdout, stderr = ((self._outputs / name).read_text() for name in ("stdout", "stderr"))
        return Ended(os.waitstatus_to_exitcode(status), stdout, stderr)


def in_two(work: Callable[[int], Any], outputs: Path, settings: Mapping[str, str] | None = None) -> list[Ended]:
    """How `work`, with the rank, ends in two processes that are launched as torchrun does, with these `settings`."""
    port = free_port()

    def launched(rank: int) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"})
        os.environ.update(settings or {})
        AcceleratorState._reset_state(reset_partial_state=True)
        return work(rank)

    children = [Child(lambda rank=rank: launched(rank), outputs / str(rank)) for rank in range(2)]
    deadline = time.monotonic() + DEADLINE
    return [child.wait(deadline) for child in children]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: Any, name: str, n: int, act: Callable[..., None], *, when: str = "before") -> None:
    """Make the n-th call of `owner.name` also do `act`, with the call's arguments."""
    original = getattr(owner, name)
    calls = 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n and when == "before":
            act(*args, **kwargs)
        answer = original(*args, **kwargs)
        if calls == n and when == "after":
            act(*args, **kwargs)
        return answer

    setattr(owner, name, replacement)


def same_results(run: Path, expected: Path) -> None:
    """Byte for byte: curves, record, routes, and the final model."""
    for name in ("metrics.jsonl", "record.json", "config.yaml", "tokenizer.json"):
        assert (run / name).read_text() == (expected / name).read_text(), name
    for file in sorted(expected.glob("routes/*")):
        assert (run / "routes" / file.name).read_bytes() == file.read_bytes(), file.name
    last = sorted(p.name for p in (expected / "checkpoints").iterdir())[-1]
    assert sorted(p.name for p in (run / "checkpoints").iterdir())[-1] == last
    for name in ("model.safetensors", "optimiser.safetensors"):
        ours, theirs = (folder / "checkpoints" / last / name for folder in (run, expected))
        assert ours.read_bytes() == theirs.read_bytes(), name


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def train_losses(run: Path) -> list[dict[str, float]]:
    return [line["train"] for line in RunFolder(run).read_metrics() if "train" in line]


def raise_at_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal while it works on the update with zero-based index `step`."""
    from stickymoe.data.batches import TrainBatches

    original = TrainBatches.batch

    def batch(self: Any, index: int, **kwargs: Any) -> Any:
        if index == step:
            signal.raise_signal(number)
        return original(self, index, **kwargs)

    monkeypatch.setattr(TrainBatches, "batch", batch)


def same_losses(run: Path, expected: Path) -> None:
    """Up to rounding: two finished runs of the same id."""
    for ours, theirs in zip(train_losses(run), train_losses(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    record, other = RunRecord.read(run / "record.json"), RunRecord.read(expected / "record.json")
    assert (record.status, record.run_id) == ("complete", other.run_id)
    assert record.metrics["ppl"] == pytest.approx(other.metrics["ppl"], rel=1e-4)
