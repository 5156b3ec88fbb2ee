"""Side-by-side timing: every candidate runs in its own process, and the candidates take turns.

A candidate is a function without arguments that prepares its work and returns the function to time. It runs in a fresh
interpreter with its own allocator and thread settings. While one works, the others wait for input. So machine noise
affects all candidates equally, and ratios of medians over interleaved rounds are meaningful.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Work = Callable[[], object]


def serve(prepare: Callable[[], Work], warm_up: int) -> None:
    """The process of a candidate: run once per line of input; answer with seconds, peak memory and its result, if any.

    A result is a whole number, or a dict of numbers; `seconds` in a dict replaces the time of the whole work. Memory
    counts from here on, so import everything that the candidate needs before.
    """
    base = _peak_kb()
    start = time.perf_counter()
    work = prepare()
    for _ in range(warm_up):
        work()
    print(json.dumps({"warm_up_s": time.perf_counter() - start}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "peak_mb": (_peak_kb() - base) / 1024, "result": None, "numbers": {}}
        if isinstance(result, dict):
            answer |= {"seconds": result.pop("seconds", seconds), "numbers": result}
        elif isinstance(result, int):
            answer["result"] = result
        print(json.dumps(answer), flush=True)


def _peak_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise RuntimeError("VmHWM is not in /proc/self/status")


@dataclass(frozen=True)
class Timing:
    """Seconds over interleaved rounds; `result` is the number that the work returned last, if any, and `numbers` the
    dict of every round.
    """

    name: str
    seconds: list[float]
    peak_mb: float
    warm_up_s: float = 0.0
    result: int | None = None
    numbers: list[dict[str, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "median_s": round(self.median, 6),
            "spread": round(self.spread, 4),
            "peak_mb": round(self.peak_mb, 1),
            "warm_up_s": round(self.warm_up_s, 2),
            "seconds": [round(s, 6) for s in self.seconds],
        }


class Candidate:
    """A process that runs `script --serve NAME …` and does its work on request."""

    def __init__(self, script: Path, name: str, *, threads: int, arguments: tuple[str, ...] = ()) -> None:
        self.name = name
        self._seconds: list[float] = []
        self._peak_mb = 0.0
        self._result: int | None = None
        self._numbers: list[dict[str, float]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--serve", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.warm_up_s = 0.0

    def ready(self) -> None:
        """Wait until it has prepared its work."""
        self.warm_up_s = self._answer()["warm_up_s"]

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def wait(self) -> float:
        answer = self._answer()
        self._seconds.append(answer["seconds"])
        self._peak_mb = answer["peak_mb"]
        self._result = answer["result"]
        self._numbers.append(answer["numbers"])
        return self._seconds[-1]

    def end(self) -> Timing:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        return Timing(self.name, self._seconds, self._peak_mb, self.warm_up_s, self._result, self._numbers)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def race(
    script: Path,
    names: list[str],
    *,
    threads: int,
    rounds: int,
    arguments: tuple[str, ...] = (),
    together: bool = False,
) -> list[Timing]:
    """Start all candidates, one after another or `together`, then let them take turns."""
    candidates = []
    for name in names:
        candidates.append(Candidate(script, name, threads=threads, arguments=arguments))
        if not together:
            candidates[-1].ready()
    if together:
        for candidate in candidates:
            candidate.ready()
    for _ in range(rounds):
        for candidate in candidates:
            candidate.go()
            candidate.wait()
    return [candidate.end() for candidate in candidates]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, median and upper end: the 95 % interval of the median, by ranks."""
    ordered, n = sorted(values), len(values)
    first = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return ordered[first], statistics.median(ordered), ordered[n - 1 - first]


def write_record(path: Path, results: dict[str, Any]) -> None:
    """Write a JSON record with the machine and versions of the measurement."""
    from stickymoe.runs.environment import describe_environment

    record = {"environment": describe_environment() | {"cores": os.cpu_count()}, **results}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
