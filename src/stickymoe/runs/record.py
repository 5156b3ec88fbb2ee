"""`RunRecord`: the settings, data, environment and results of a run, as JSON. Every table is made from records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from stickymoe import files
from stickymoe.errors import ConfigError, RunError, require
from stickymoe.reading import read_json, reason
from stickymoe.runs.config import RunConfig, current_names
from stickymoe.runs.folder import ADDED, NOT_IN_ID, RunFolder

SCHEMA = 1

Status = Literal["running", "interrupted", "failed", "complete"]


@dataclass(frozen=True)
class RunRecord:
    """`metrics` describe the final model on the whole validation split; `per_layer` has the values of each layer.

    `sizes` are bytes of the parameters, measured: `expert_bytes` of one expert for each layer, `other_bytes` of
    everything else that is resident, `table_bytes` of rows in slow memory and `row_bytes` that a token reads of them.
    Records of version 0.1 have none.

    `evaluations` are later measurements of the final model, by name: "test" for the test split, "valid int8" for the
    validation split with experts rounded to int8, "shuffled valid" for the validation split with every resident
    replaced by another expert of its slot. Each has ppl, bits_per_byte, targets and expert_bytes, the bytes of
    one expert for each layer in that precision.
    """

    run_id: str
    status: Status
    config: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    per_layer: dict[str, list[float | None]] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str | None = None
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
        files.write_text(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read and check a record."""
        if not path.is_file():
            raise RunError(f"{path.parent} is not a run folder: it has no readable {path.name}.")
        values = read_json(path, RunError)
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.get("schema") != SCHEMA or not set(values) <= known:
            raise RunError(f"{path} is damaged or of another version: expected a run record with schema {SCHEMA}.")
        try:
            record = cls(**values)
            record._require_valid()
        except (TypeError, ConfigError) as e:
            raise RunError(f"{path} is damaged: {reason(e)}.") from e
        return record

    def _require_valid(self) -> None:
        """Refuse values that no run writes."""
        require(type(self.run_id) is str, "run_id", self.run_id, "text")
        require(self.status in get_args(Status), "status", self.status, f"one of {', '.join(get_args(Status))}")
        require(isinstance(self.failure, str | None), "failure", self.failure, "text or null")
        for name in ("config", "data", "environment", "metrics", "per_layer", "sizes", "evaluations"):
            require(isinstance(getattr(self, name), dict), name, getattr(self, name), "a mapping")
        config = RunConfig.from_dict(self.config)
        self._require_data()
        n_layers = config.model.n_layers
        for name, layers in self.per_layer.items():
            ok = isinstance(layers, list) and len(layers) == n_layers and all(map(_is_number_or_none, layers))
            require(ok, f"per_layer.{name}", layers, f"{n_layers} numbers")
        for name, value in self.metrics.items():
            require(_is_number_or_none(value), f"metrics.{name}", value, "a number")
        for name, size in self.sizes.items():
            sizes = size if isinstance(size, list) else [size]
            require(all(type(n) is int and n >= 0 for n in sizes), f"sizes.{name}", size, "bytes")
        for name, found in self.evaluations.items():
            ok = isinstance(found, dict) and all(
                _is_number_or_none(found.get(key)) for key in ("ppl", "bits_per_byte", "targets")
            )
            require(ok, f"evaluations.{name}", found, "a mapping with numbers")
        ppl = self.metrics.get("ppl")
        ok = self.status != "complete" or (ppl is not None and ppl > 0)
        require(ok, "metrics.ppl", ppl, "a number > 0 in a complete run")

    def _require_data(self) -> None:
        fingerprint, vocab_size, tokens = (self.data.get(k) for k in ("fingerprint", "vocab_size", "tokens"))
        require(type(fingerprint) is str, "data.fingerprint", fingerprint, "text")
        require(type(vocab_size) is int and vocab_size >= 1, "data.vocab_size", vocab_size, "an integer ≥ 1")
        require(isinstance(tokens, dict), "data.tokens", tokens, "a mapping")
        for split, least in (("train", 1), ("valid", 0), ("test", 0)):
            count = tokens.get(split) if isinstance(tokens, dict) else None
            require(type(count) is int and count >= least, f"data.tokens.{split}", count, f"an integer ≥ {least}")


def _is_number_or_none(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def earlier_run(folder: RunFolder, record: RunRecord, *, resume: bool) -> RunRecord | None:
    """The record that the folder already contains; refused if it is another run, or unfinished without `resume`."""
    if not folder.record.exists():
        foreign = [p.name for p in folder.path.iterdir() if not p.name.startswith(".")]
        if foreign:
            raise RunError(
                f"{folder.path} is not empty and has no run (found {foreign[0]}). Choose another folder with --out."
            )
        return None
    earlier = RunRecord.read(folder.record)
    if earlier.run_id != record.run_id:
        raise RunError(
            f"{folder.path} has a different run ({_difference(earlier, record)}). Choose another folder with --out."
        )
    if earlier.status != "complete" and not resume:
        raise RunError(f"{folder.path} has this run, but unfinished ({earlier.status}). Add --resume to resume it.")
    return earlier


def _difference(earlier: RunRecord, record: RunRecord) -> str:
    for section, values in record.config.items():
        old = earlier.config.get(section)
        if not isinstance(values, dict) or not isinstance(old, dict):
            if old != values:
                return f"{section}: {old} there, {values} here"
            continue
        old = current_names(old) if section == "variant" else old
        for key in {**old, **values}:
            there = old.get(key, ADDED.get((section, key)))
            if there != values.get(key) and (section, key) not in NOT_IN_ID:
                return f"{section}.{key}: {there} there, {values.get(key)} here"
    return "the data or the numerics version differs"
