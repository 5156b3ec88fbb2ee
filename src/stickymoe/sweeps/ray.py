"""Cells as tasks of a Ray cluster (extra `ray`).

A task runs the same command as a local sweep, in a process of its node. Nodes exchange data only through the run
folders, so these must be on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RaySystemError, RayTaskError, TaskCancelledError

from stickymoe.data.tokens import load_tokens
from stickymoe.errors import StickyError
from stickymoe.runs.config import DataConfig
from stickymoe.sweeps.cells import Cell, Ended
from stickymoe.sweeps.local import Process
from stickymoe.training.stopping import stop_request

_LOST = {NodeDiedError: "its node died", OutOfMemoryError: "its node ran out of memory"}


@contextlib.contextmanager
def ray_engine(address: str | None = None) -> Iterator[RayEngine]:
    """The cluster at `address`; by default that of RAY_ADDRESS, or the one that runs on this machine.

    None is started here: Ray would leave a token in the home folder, which changes how later clusters start.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    shown = "The Ray cluster of this machine" if address == "auto" else f"The Ray cluster at {address}"
    _require_reachable(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with contextlib.redirect_stdout(io.StringIO()):  # where Ray prints the last words of a node, in the live table
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (RayError, OSError, RuntimeError, ValueError) as e:
            raise StickyError(f"{shown} cannot be used ({_first_line(e)}). See ray status.") from e
        try:
            engine = RayEngine()
            if engine.cpus() < 1:
                raise StickyError(f"{shown} has no CPUs, expected at least 1: add a node with ray start --num-cpus.")
            yield engine
        finally:
            ray.shutdown()


def _require_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise StickyError(f"--address: got {address!r}, expected HOST:PORT of the head node of a Ray cluster, or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as e:
        raise StickyError(f"No Ray cluster answers at {address} ({_first_line(e)}). Start it with ray start.") from e


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")


class RayEngine:
    """One task of one CPU per cell, on any node of the cluster that this process is connected to."""

    def cpus(self) -> int:
        return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]

    def start(self, cell: Cell) -> RayTask:
        job = Job(cell.prepare(), cell.folder.path.absolute(), Path.cwd(), cell.config.data, cell.data["fingerprint"])
        train = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(train_on_node)
        return RayTask(train.remote(job))


@dataclass(frozen=True)
class RayTask:
    """A cell on a node, or waiting for one."""

    result: Any

    def poll(self) -> Ended | None:
        ended, _ = ray.wait([self.result], timeout=0)
        return _outcome(self.result) if ended else None

    def stop(self) -> None:
        ray.cancel(self.result)  # interrupts the task, which saves and returns


def _outcome(result: Any) -> Ended:
    try:
        ended: Ended = ray.get(result)
    except TaskCancelledError:
        return Ended(130, "cancelled", lost=True)
    except (RayTaskError, RaySystemError) as e:  # an error of Python, such as a missing package
        return Ended(1, f"A node cannot train: {str(e).strip().splitlines()[-1]}")
    except RayError as e:
        return Ended(1, _LOST.get(type(e), f"its worker died ({type(e).__name__})"), lost=True)
    return ended


@dataclass(frozen=True)
class Job:
    """What a node needs to train a cell: the command, and what it must find."""

    command: list[str]
    folder: Path
    current: Path  # the current folder of the sweep, for relative paths
    data: DataConfig
    fingerprint: str


def train_on_node(job: Job) -> Ended:
    """Train a cell in a process of this node. An interrupt saves a checkpoint first; the process dies with this one."""
    node = f"(on node {platform.node()})"
    with stop_request() as stop:
        try:
            current = _require_visible(job)
        except StickyError as e:
            return Ended(2, f"{e} {node}")
        process = Process(["-m", "stickymoe.sweeps.tied", str(os.getpid()), *job.command], folder=current)
        stopped = False
        while (ended := process.poll()) is None:
            if stop.is_set() and not stopped:
                process.stop()
                stopped = True
            time.sleep(0.1)
    message = f"{ended.message} {node}" if ended.message else ""
    return Ended(ended.code, message, lost=stopped)


def _require_visible(job: Job) -> Path:
    """Check that this node sees the run folder and the same data; returns the folder to run in."""
    if not (job.folder / ".cell.yaml").exists():
        raise StickyError(f"{job.folder} is not there: --out must be on a file system that all nodes share.")
    current = job.current if job.current.is_dir() else job.folder
    with contextlib.chdir(current):
        found = load_tokens(job.data).fingerprint
    if found != job.fingerprint:
        raise StickyError(
            f"The data has fingerprint {found}, expected {job.fingerprint}: all nodes must read the same files."
        )
    return current
