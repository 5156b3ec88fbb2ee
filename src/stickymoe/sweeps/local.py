"""Cells as processes of this machine, one thread each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stickymoe.sweeps.cells import Cell, Ended


class LocalEngine:
    """One process per cell."""

    def cpus(self) -> int:
        return os.cpu_count() or 1

    def start(self, cell: Cell) -> Process:
        return Process(cell.prepare())


class Process:
    """Python in a process group of its own, so that Ctrl-C in the terminal does not reach it.

    It stays in the session of the sweep. Linux shares the processor between sessions first, so in a session of its own
    the niceness of the sweep would not count.
    """

    def __init__(self, arguments: Sequence[str], *, folder: Path | None = None) -> None:
        self._ended: Ended | None = None
        with contextlib.ExitStack() as opened:
            self._stderr = opened.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
            opened.pop_all()

    def poll(self) -> Ended | None:
        if self._ended is None and (code := self._process.poll()) is not None:
            self._ended = Ended(code, self._last_line())
        return self._ended

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def _last_line(self) -> str:
        with self._stderr as f:
            f.seek(0)
            lines = f.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
