"""`stickymoe monitor`: the curves of one or more runs on a web page, while they train or afterwards.

The server only reads the files of run folders. It writes nothing and takes no lock, so it cannot disturb a training.
It reads when a page asks, and a page gets only the points that are new to it.
"""

from __future__ import annotations

import itertools
import os
import secrets
import statistics
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from stickymoe.errors import ConfigError, RunError, StickyError
from stickymoe.reading import one_line, parse_json
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder, parse_metrics
from stickymoe.runs.record import RunRecord
from stickymoe.serving.middleware import KnownHosts, SecurityHeaders
from stickymoe.serving.pages import add_pages
from stickymoe.serving.server import bind, known_hosts, serve, url_of

# Where the records of runs are, relative to the folder that is shown.
PATTERNS = ("record.json", "*/record.json", "*/*/record.json")
ANCHOR = 256  # bytes before the offset that must still be there when a file is read on
RECENT = 100  # lines of timings.jsonl from which the time left is estimated
PAUSE = 600.0  # seconds between two lines after which a run was stopped and resumed

Point = tuple[int, dict[str, float]]  # a step, and values by name


class Tail:
    """The complete lines of a file that grows, each of them once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._anchor = b""  # the last bytes before the offset

    def read(self) -> tuple[bool, list[str]]:
        """Whether the file was cut or replaced since the last call, and the lines that are new."""
        try:
            with self.path.open("rb") as f:
                f.seek(self._offset - len(self._anchor))
                content = f.read()
                replaced = not content.startswith(self._anchor)
                if replaced:
                    self._offset, self._anchor = 0, b""
                    f.seek(0)
                    content = f.read()
        except OSError:  # not there yet, or deleted
            return False, []
        new = content[len(self._anchor) : content.rfind(b"\n") + 1]
        self._offset += len(new)
        self._anchor = (self._anchor + new)[-ANCHOR:]
        return replaced, new.decode(errors="replace").split("\n")[:-1]


class Log:
    """The points of one file, with the version of the monitor at which each was read."""

    def __init__(self, path: Path, parse: Callable[[str, str], Point]) -> None:
        self._tail, self._parse = Tail(path), parse
        self._versions: list[int] = []
        self.points: list[Point] = []
        self.unreadable = 0

    @property
    def name(self) -> str:
        return self._tail.path.name

    def refresh(self, version: int) -> bool:
        """Read what is new; returns whether earlier points are no longer valid."""
        replaced, lines = self._tail.read()
        if replaced:
            self._versions, self.points, self.unreadable = [], [], 0
        for line in lines:
            try:
                self.points.append(self._parse(line, str(self._tail.path)))
                self._versions.append(version)
            except RunError:
                self.unreadable += 1
        return replaced

    def since(self, version: int) -> list[Point]:
        return self.points[bisect_right(self._versions, version) :]


def _metrics(line: str, source: str) -> Point:
    values = parse_metrics(line, source)
    found = {f"{part}.{name}": value for part in ("train", "valid") for name, value in values.get(part, {}).items()}
    return values["step"], _numbers({"lr": values.get("lr"), **found})


def _timings(line: str, source: str) -> Point:
    values = parse_json(line, source, RunError)
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        raise RunError(f"{source} is damaged: expected an object with a step.")
    return values["step"], _numbers({name: values.get(name) for name in ("time", "tokens_per_s")})


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if type(value) in (int, float)}


class Run:
    """A run folder as the page shows it."""

    def __init__(self, folder: RunFolder, name: str, version: int) -> None:
        self.folder, self.name = folder, name
        self.metrics, self.timings = Log(folder.metrics, _metrics), Log(folder.timings, _timings)
        self.began = version  # the version since which all points are valid
        self._stat: tuple[int, ...] | None = None
        self._record: RunRecord | None = None
        self._config: RunConfig | None = None
        self._problem: str | None = None

    def refresh(self, version: int) -> None:
        self._read_record()
        replaced = [log.refresh(version) for log in (self.metrics, self.timings)]
        if any(replaced):
            self.began = version

    def _read_record(self) -> None:
        try:
            stat = self.folder.record.stat()
        except OSError:
            self._stat, self._problem = None, "The run folder was deleted."
            return
        if (stat.st_mtime_ns, stat.st_size, stat.st_ino) == self._stat:
            return
        try:
            self._record = RunRecord.read(self.folder.record)
            self._config = RunConfig.from_dict(self._record.config)
            self._problem = None
        except StickyError as e:
            self._problem = one_line(str(e))
        self._stat = (stat.st_mtime_ns, stat.st_size, stat.st_ino)

    @property
    def status(self) -> str:
        if self._stat is None:
            return "deleted"
        return "damaged" if self._problem or self._record is None else self._record.status

    @property
    def message(self) -> str | None:
        if self._problem:
            return self._problem
        if self._record is not None and self._record.failure:
            return one_line(self._record.failure)
        logs = [log for log in (self.metrics, self.timings) if log.unreadable]
        return ", ".join(f"{log.unreadable} unreadable lines in {log.name}" for log in logs) or None

    @property
    def step(self) -> int:
        return self.metrics.points[-1][0] if self.metrics.points else 0

    @property
    def tokens_per_s(self) -> float | None:
        return self.timings.points[-1][1].get("tokens_per_s") if self.timings.points else None

    def seconds_left(self) -> float | None:
        """Estimated from the recent lines of timings.jsonl: their wall-clock time, or else their speed."""
        if self.status != "running" or self._config is None:
            return None
        steps = self._config.total_steps - self.step
        durations = list(_seconds_per_step(self.timings.points[-RECENT:]))
        if durations:
            return steps * statistics.fmean(durations)
        tokens = self._config.train.batch_size * self._config.model.seq_len
        return steps * tokens / self.tokens_per_s if self.tokens_per_s else None

    def silent_for(self, now: float) -> float | None:
        """Seconds since a running run last wrote a line; a killed process leaves the status `running`."""
        if self.status != "running":
            return None
        written = [_modified(path) for path in (self.folder.metrics, self.folder.record)]
        return max(now - max(written), 0.0)

    def describe(self, since: int, now: float) -> dict[str, Any]:
        """What the page needs; `reset` says that the points replace all earlier ones."""
        reset = self.began > since
        points = [*self.metrics.since(0 if reset else since), *self.timings.since(0 if reset else since)]
        return {
            "name": self.name,
            "label": self._config.variant.label if self._config else self.name,
            "seed": self._config.seed if self._config else None,
            "status": self.status,
            "message": self.message,
            "step": self.step,
            "steps": self._config.total_steps if self._config else None,
            "seconds_left": self.seconds_left(),
            "tokens_per_s": self.tokens_per_s,
            "silent_for": self.silent_for(now),
            "reset": reset,
            "points": _series(points),
        }


def _seconds_per_step(points: list[Point]) -> Iterator[float]:
    """Between neighbouring lines of one session: a resumed run goes back, or pauses."""
    for (step, values), (later_step, later) in itertools.pairwise(points):
        seconds = later.get("time", 0.0) - values.get("time", 0.0)
        if later_step > step and 0 < seconds < PAUSE:
            yield seconds / (later_step - step)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _series(points: list[Point]) -> dict[str, list[tuple[int, float]]]:
    """Points by the name of their series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for step, values in points:
        for name, value in values.items():
            if name != "time":
                series.setdefault(name, []).append((step, value))
    return series


class Monitor:
    """The runs in a folder, which may be a run folder itself. Runs may appear, start again and disappear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[Path, Run] = {}
        self._version = 0
        self._session = secrets.token_hex(4)  # a cursor of an earlier server means nothing to this one
        self._lock = threading.Lock()

    def data(self, cursor: str = "", now: float | None = None) -> dict[str, Any]:
        """The state of every run, and the points since `cursor`; any other text than a cursor asks for all of them."""
        with self._lock:
            since = self._since(cursor)
            self._refresh()
            now = time.time() if now is None else now
            return {
                "cursor": f"{self._session}-{self._version}",
                "folder": _text(self.folder),
                "message": self._message(),
                "runs": [run.describe(since, now) for run in self._runs.values()],
            }

    def _since(self, cursor: str) -> int:
        session, _, version = cursor.partition("-")
        return int(version) if session == self._session and version.isdecimal() else 0

    def _refresh(self) -> None:
        self._version += 1
        for path in _run_folders(self.folder):
            if path not in self._runs:
                name = _text(path.relative_to(self.folder)) if path != self.folder else _text(path.resolve().name)
                self._runs[path] = Run(RunFolder(path), name, self._version)
        for run in self._runs.values():
            run.refresh(self._version)

    def _message(self) -> str | None:
        if not self.folder.is_dir():
            return f"{_text(self.folder)} was deleted. Waiting for it to come back."
        if not self._runs:
            return f"Waiting for runs: {_text(self.folder)} has none yet."
        return None


def _run_folders(folder: Path) -> list[Path]:
    """The run folders at or under a folder; empty where a folder disappears during the search."""
    try:
        return sorted(record.parent for pattern in PATTERNS for record in folder.glob(pattern))
    except OSError:
        return []


def _text(path: Path | str) -> str:
    """A path as text; bytes of a name that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")


def make_app(folder: Path, *, hosts: Sequence[str] | None) -> FastAPI:
    """The page and its data. `hosts`: names under which clients may reach it; None: any."""
    monitor = Monitor(folder)
    app = FastAPI(title="stickymoe monitor", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/data")
    def data(since: str = "") -> JSONResponse:
        return JSONResponse(monitor.data(since), headers={"Cache-Control": "no-store"})

    add_pages(app, {"": "monitor.html"})
    if hosts is not None:
        app.add_middleware(KnownHosts, hosts=hosts)
    app.add_middleware(SecurityHeaders)
    return app


def monitor_runs(folder: Path, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Show the runs of a folder until SIGTERM or Ctrl-C. `on_ready` is called with the address."""
    if not folder.is_dir():
        given = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {given}: expected a run folder, or a folder in which runs are or will be.")
    with bind(host, port) as listener:
        serve(make_app(folder, hosts=known_hosts(host)), listener, on_ready=lambda: on_ready(url_of(listener)))
