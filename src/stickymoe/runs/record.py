"""`RunRecord`: what a run was and what came out of it, as JSON that every table leads back to."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stickymoe import files
from stickymoe.errors import RunError
from stickymoe.runs.folder import ADDED, NOT_IN_ID, RunFolder

SCHEMA = 1

Status = Literal["running", "interrupted", "failed", "complete"]


@dataclass(frozen=True)
class RunRecord:
    """`metrics` are of the final model on the whole validation split; `per_layer` holds their layers.

    `sizes` are bytes of the parameters, measured: `expert_bytes` of one expert for each layer, `other_bytes` of
    everything else that is resident, `table_bytes` of rows in slow memory and `row_bytes` that a token reads of them.
    Records of version 0.1 have none.
    """

    run_id: str
    status: Status
    config: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    per_layer: dict[str, list[float | None]] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
        files.write_text(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise RunError(f"{path.parent} is no run folder: {path.name} cannot be read ({e.strerror}).") from e
        except ValueError as e:
            raise RunError(f"{path} is damaged: {e}. Start the run again in a new folder.") from e
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.get("schema") != SCHEMA or not set(values) <= known:
            raise RunError(f"{path} is damaged or of another version: expected a run record with schema {SCHEMA}.")
        try:
            record = cls(**values)
        except TypeError as e:
            raise RunError(f"{path} is damaged: {e}.") from e
        record.require_whole(path)
        return record

    def require_whole(self, path: Path) -> None:
        """Refuse values that a run would not have written."""
        for name in ("config", "data", "environment", "metrics", "per_layer", "sizes"):
            if not isinstance(getattr(self, name), dict):
                raise RunError(f"{path} is damaged: {name} is {getattr(self, name)!r}, expected a mapping.")
        for name in ("fingerprint", "vocab_size", "tokens"):
            if name not in self.data:
                raise RunError(f"{path} is damaged: data has no {name}.")
        layers = [value for values in self.per_layer.values() for value in values]
        for value in [*self.metrics.values(), *layers]:
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise RunError(f"{path} is damaged: got {value!r} among the metrics, expected numbers.")
        ppl = self.metrics.get("ppl")
        if self.status == "complete" and (ppl is None or ppl <= 0):
            raise RunError(f"{path} is damaged: a complete run with perplexity {ppl}, expected a number > 0.")


def earlier_run(folder: RunFolder, record: RunRecord, *, resume: bool) -> RunRecord | None:
    """What the folder holds already; refused if it is not this run or needs `resume`."""
    if not folder.record.exists():
        foreign = [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]
        if foreign:
            raise RunError(
                f"{folder.path} is not empty and holds no run (found {foreign[0]}). Choose another folder with --out."
            )
        return None
    earlier = RunRecord.read(folder.record)
    if earlier.run_id != record.run_id:
        raise RunError(
            f"{folder.path} holds a different run ({_difference(earlier, record)}). Choose another folder with --out."
        )
    if earlier.status != "complete" and not resume:
        raise RunError(f"{folder.path} holds this run unfinished ({earlier.status}). Add --resume to go on with it.")
    return earlier


def _difference(earlier: RunRecord, record: RunRecord) -> str:
    for section, values in record.config.items():
        old = earlier.config.get(section)
        if not isinstance(values, dict) or not isinstance(old, dict):
            if old != values:
                return f"{section}: {old} there, {values} here"
            continue
        for key in {**old, **values}:
            there = old.get(key, ADDED.get((section, key)))
            if there != values.get(key) and (section, key) not in NOT_IN_ID:
                return f"{section}.{key}: {there} there, {values.get(key)} here"
    return "its data or numerics version differ"
