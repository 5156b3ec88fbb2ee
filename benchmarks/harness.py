"""Side-by-side timing: every contestant lives in a process of its own and they take turns.

A contestant is a function without arguments that prepares its work and returns a function to be timed. It runs in a
fresh interpreter, so that allocator and thread settings are its own; while one works the others wait for input. A
noisy machine then disturbs all alike, and ratios of medians over interleaved rounds mean something.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Work = Callable[[], object]


def serve(prepare: Callable[[], Work], warm_up: int) -> None:
    """The contestant's side: run once per line of input, answer with seconds and peak memory."""
    base = _peak_kb()
    work = prepare()
    for _ in range(warm_up):
        work()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "peak_mb": (_peak_kb() - base) / 1024}), flush=True)


def _peak_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise RuntimeError("VmHWM is not in /proc/self/status")


@dataclass(frozen=True)
class Timing:
    """Seconds over interleaved rounds."""

    name: str
    seconds: list[float]
    peak_mb: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "median_s": round(self.median, 6),
            "spread": round(self.spread, 4),
            "peak_mb": round(self.peak_mb, 1),
            "seconds": [round(s, 6) for s in self.seconds],
        }


def race(script: Path, names: list[str], *, threads: int, rounds: int, arguments: tuple[str, ...] = ()) -> list[Timing]:
    """Start `script --serve NAME …` for every name, then let them take turns."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    children = {}
    for name in names:
        command = [sys.executable, str(script), "--serve", name, *arguments]
        children[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        _answer(children[name])  # one prepares at a time
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peak: dict[str, float] = {}
    for _ in range(rounds):
        for name, child in children.items():
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            answer = _answer(child)
            seconds[name].append(answer["seconds"])
            peak[name] = answer["peak_mb"]
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    return [Timing(name, seconds[name], peak[name]) for name in names]


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{child.args!r} ended with code {child.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def write_record(path: Path, results: dict[str, Any]) -> None:
    """A JSON record with the machine and versions it was measured on."""
    from stickymoe.runs.environment import describe_environment

    record = {"environment": describe_environment() | {"cores": os.cpu_count()}, **results}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
