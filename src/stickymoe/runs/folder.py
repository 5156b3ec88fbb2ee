"""A run on disk: its id, its files, and who may write them.

    config.yaml      what was asked for
    metrics.jsonl    one line per logged step or evaluation; a function of the config and the data alone
    timings.jsonl    speed and wall-clock, which are not
    record.json      status and results
    routes/          the route table of the validation split
    tokenizer.json   the tokenizer the tokens came from
    checkpoints/     step-000100/, …

Sweeps and reports talk only through these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from stickymoe import files
from stickymoe.errors import RunError
from stickymoe.runs.config import RunConfig, earlier_names

NUMERICS_VERSION = 1  # raised when the same config and data come to give other numbers

# Settings that move or time a run without touching its numbers.
NOT_IN_ID = {("data", "path"), ("data", "cache_dir"), ("data", "corpus"), ("train", "checkpoint_every")}

HELD = "is being written by another process."  # how a refused lock ends its line

# Settings that were added later, with the value that earlier runs had: part of an id only where they differ.
ADDED: dict[tuple[str, str], Any] = {
    ("model", "share_block"): 1,
    ("model", "universal"): False,
    ("variant", "token"): False,
    ("variant", "hashed"): False,
    ("variant", "apart"): 0.0,
}


def run_id(config: RunConfig, data_fingerprint: str) -> str:
    """Names a run by what decides its numbers: settings without paths, data, numerics version."""
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
    """The version of a run's numbers: the common one, raised for settings whose numbers changed alone."""
    variant, N = config.as_dict()["variant"], config.model.pool_size
    parts = variant["name"].split("+")
    # Hashed slots follow the number of their experts; `rent` evicts the lightest of the experts last used together.
    by_size = "siblings" in parts and variant["hashed"] and N % variant["capacity"]
    by_weight = "rent" in parts and variant["capacity"] - config.model.top_k >= 2
    return NUMERICS_VERSION + 1 if by_size or by_weight else NUMERICS_VERSION


def _names_a_run(key: tuple[str, str], value: Any) -> bool:
    return key not in NOT_IN_ID and not (key in ADDED and value == ADDED[key])


def _floats(value: Any) -> Any:
    """Numbers written alike however they were given: λ=1 is λ=1.0."""
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
        """Hold the folder against other writers; released by the system when the process dies."""
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
        """Whether the checkpoint of its last step is still there."""
        return (self.checkpoints / checkpoint_name(step)).is_dir()

    def write_config(self, config: RunConfig, path: Path | None = None) -> None:
        files.write_text(path or self.config, yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True))

    def append(self, path: Path, line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as f:
            f.write(_line(line))

    def rewind(self, step: int) -> None:
        """Forget metrics after `step`, and a line that was cut off in mid-write."""
        if self.metrics.exists():
            self.write_metrics([line for line in self.read_metrics() if line["step"] <= step])

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        files.write_text(self.metrics, "".join(_line(line) for line in lines))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line; one that was cut off in mid-write is left out."""
        try:
            text = self.metrics.read_text(encoding="utf-8")
            return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except ValueError as e:
            raise RunError(f"{self.metrics} is damaged: {e}.") from e


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
