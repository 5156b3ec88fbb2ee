"""A run on disk: its id, its files, and the lock that allows one process to write them.

    config.yaml      the settings
    metrics.jsonl    one line per logged step or evaluation; a function of the config and the data alone
    timings.jsonl    speed and wall-clock time, which differ between repetitions
    record.json      status and results
    routes/          the route table of the validation split
    tokenizer.json   the tokenizer that made the tokens
    checkpoints/     step-000100/, …

Sweeps and reports exchange data only through these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from stickymoe import files
from stickymoe.errors import RunError, shown
from stickymoe.reading import parse_json, read_text
from stickymoe.runs.config import RunConfig, earlier_names

NUMERICS_VERSION = 1  # raised when the same config and data give other numbers than before

# Settings that do not change the numbers of a run.
NOT_IN_ID = {("data", "path"), ("data", "cache_dir"), ("data", "corpus"), ("train", "checkpoint_every")}

HELD = "is being written by another process."  # the end of the message when the lock is taken

# Settings added later, with the value of all earlier runs. They are part of an id only if they have another value.
ADDED: dict[tuple[str, str], Any] = {
    ("data", "limit"): 0,
    ("model", "share_block"): 1,
    ("model", "universal"): False,
    ("variant", "token"): False,
    ("variant", "hashed"): False,
    ("variant", "apart"): 0.0,
    ("variant", "salt"): 0,
    ("variant", "table_drop"): 0.0,
}


def run_id(config: RunConfig, data_fingerprint: str) -> str:
    """A hash of what determines the numbers of a run: settings without paths, data, numerics version."""
    sections = config.as_dict()
    sections["variant"] = earlier_names(sections["variant"])
    settings = {
        section: {k: v for k, v in values.items() if _names_a_run((section, k), v)}
        if isinstance(values, dict)
        else values
        for section, values in sections.items()
    }
    decides = {"config": _floats(settings), "data": data_fingerprint, "numerics": _numerics(config)}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _numerics(config: RunConfig) -> int:
    """The numerics version of a run: the common one, or a higher one for settings whose numbers changed later."""
    variant, N = config.as_dict()["variant"], config.model.pool_size
    parts = variant["name"].split("+")
    # Hashed slots follow the number of their experts; `rent` evicts the lightest of the experts last used together.
    by_size = "siblings" in parts and variant["hashed"] and N % variant["capacity"]
    by_weight = "rent" in parts and variant["capacity"] - config.model.top_k >= 2
    return NUMERICS_VERSION + 1 if by_size or by_weight else NUMERICS_VERSION


def _names_a_run(key: tuple[str, str], value: Any) -> bool:
    return key not in NOT_IN_ID and not (key in ADDED and value == ADDED[key])


def _floats(value: Any) -> Any:
    """Integers as floats, so that λ=1 and λ=1.0 give the same id."""
    if isinstance(value, dict):
        return {k: _floats(v) for k, v in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.record = path / "record.json"
        self.routes = path / "routes"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoints = path / "checkpoints"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other writers out; the system releases the lock when the process dies."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=0)
            lock.acquire()
        except Timeout as e:
            raise RunError(f"{self.path} {HELD}") from e
        except OSError as e:
            raise RunError(f"{self.path} cannot be written ({e.strerror}). Choose another folder with --out.") from e
        try:
            yield
        finally:
            lock.release()

    def is_locked(self) -> bool:
        """Whether another process is writing the run now."""
        try:
            with self.lock():
                return False
        except RunError as e:
            return isinstance(e.__cause__, Timeout)

    def has_end(self, step: int) -> bool:
        """Whether the checkpoint of the last step still exists."""
        return (self.checkpoints / checkpoint_name(step)).is_dir()

    def write_config(self, config: RunConfig, path: Path | None = None) -> None:
        files.write_text(path or self.config, yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True))

    def append(self, path: Path, line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as f:
            f.write(_line(line))

    def rewind(self, step: int) -> None:
        """Remove metrics after `step`, and a last line that was cut off while it was written."""
        if self.metrics.exists():
            self.write_metrics([line for line in self.read_metrics() if line["step"] <= step])

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        files.write_text(self.metrics, "".join(_line(line) for line in lines))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line; a last line that was cut off while it was written is ignored."""
        text = read_text(self.metrics, RunError)
        lines = text[: text.rfind("\n") + 1].split("\n")[:-1]
        return [parse_metrics(line, f"{self.metrics}, line {i},") for i, line in enumerate(lines, start=1)]

    def recent_metrics(self, size: int = 1 << 14) -> list[dict[str, Any]]:
        """The readable lines among the last `size` bytes, also while another process writes the file."""
        try:
            with self.metrics.open("rb") as f:
                f.seek(max(f.seek(0, io.SEEK_END) - size, 0))
                lines = f.read().decode(errors="replace").split("\n")
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(RunError):  # the first line may be cut, the last may be incomplete
                found.append(parse_metrics(line, str(self.metrics)))
        return found


def parse_metrics(line: str, source: str) -> dict[str, Any]:
    """A line of metrics: a step, and numbers by name for `train` and `valid`."""
    values = parse_json(line, source, RunError)
    if not isinstance(values, dict) or type(values.get("step")) is not int or values["step"] < 0:
        raise RunError(f"{source} is damaged: got {shown(values)}, expected an object with a step.")
    for key in ("train", "valid"):
        part = values.get(key, {})
        if not isinstance(part, dict) or not all(type(x) in (int, float, type(None)) for x in part.values()):
            raise RunError(f"{source} is damaged: got {key} {shown(part)}, expected numbers.")
    return values


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
