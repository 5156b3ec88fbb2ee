"""Open the trace of a run, of its `routes` folder, of a trace folder, or of another tool's file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from stickymoe.errors import ConfigError, DataError, RunError
from stickymoe.locality.formats import open_trace
from stickymoe.locality.table import RouteTable
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.record import RunRecord


@dataclass(frozen=True)
class Trace:
    """A route table with a label; `ppl` is the perplexity of its run, and `is_run` whether there is one."""

    path: Path
    label: str
    table: RouteTable
    ppl: float | None = None
    is_run: bool = False

    @property
    def description(self) -> str:
        L, B, T, k = self.table.S.shape
        return f"{self.label}: {L} layers, {self.table.n_experts} experts, top-{k}, {B} × {T} tokens"


def open_traces(paths: Sequence[Path]) -> list[Trace]:
    """Traces to compare: of the same text and of models of the same shape."""
    traces = [_open(path) for path in paths]
    for other in traces[1:]:
        _require_comparable(traces[0], other)
    times = Counter(trace.label for trace in traces)
    return [_with_folder_name(trace) if times[trace.label] > 1 else trace for trace in traces]


def _open(path: Path) -> Trace:
    folder = _run_folder(path)
    if not (folder / "record.json").is_file():
        return Trace(path, path.name, open_trace(path))
    record = RunRecord.read(folder / "record.json")
    if record.status != "complete":
        resume = f"stickymoe train --resume --out {folder} resumes it"
        raise RunError(f"{path}: the run is {record.status}, expected a complete one; {resume}.")
    config = RunConfig.from_dict(record.config)
    if not config.variant.routes:
        raise RunError(f"{path}: a dense model has no experts, so it has no routes; expected a run of another variant.")
    table = replace(open_trace(path), share_block=config.model.layers_per_pool)
    if table.expert_bytes is None:  # routes of version 0.1
        table = replace(table, expert_bytes=(expert_bytes(config.model),) * table.n_layers)
    return Trace(path, config.variant.label, table, ppl=record.metrics.get("ppl"), is_run=True)


def expert_bytes(model: ModelConfig) -> int:
    """Bytes of one expert of a run whose record has no measured sizes: two matrices with biases, in fp32."""
    d, f = model.d_model, model.d_ff
    return 4 * (2 * d * f + f + d)


def _run_folder(path: Path) -> Path:
    """Where a run's record would be."""
    return path.parent if path.name == "routes" else path


def _with_folder_name(trace: Trace) -> Trace:
    name = _run_folder(trace.path).name
    return replace(trace, label=f"{trace.label} ({trace.path if name == trace.label else name})")


def _require_comparable(a: Trace, b: Trace) -> None:
    for what, x, y in (
        ("layers", a.table.n_layers, b.table.n_layers),
        ("experts", a.table.n_experts, b.table.n_experts),
        ("experts per token", a.table.top_k, b.table.top_k),
        ("sequences and tokens", a.table.mask.shape, b.table.mask.shape),
        ("bytes of an expert", a.table.expert_bytes, b.table.expert_bytes),
    ):
        if x != y and None not in (x, y):
            raise DataError(f"{a.path} and {b.path} cannot be compared: {what} are {x} in the first, {y} in the other.")
    for what, ours, theirs in (
        ("they are traces of different texts", a.table.tokens, b.table.tokens),
        ("their padding differs", a.table.mask, b.table.mask),
        ("their documents differ", a.table.doc, b.table.doc),
    ):
        if ours is not None and theirs is not None and not np.array_equal(ours, theirs):
            raise DataError(f"{a.path} and {b.path} cannot be compared: {what}.")
    if (a.table.doc is None) != (b.table.doc is None):
        raise DataError(f"{a.path} and {b.path} cannot be compared: only one of them has documents.")


def parse_sharing(text: str | None, traces: Sequence[Trace]) -> int | Literal["full"] | None:
    """The option --share_block: a number of layers, or full; None for the value of each trace."""
    if text is None:
        return None
    full = text in ("full", "universal")
    if not full and not text.isdecimal():
        raise ConfigError(f"--share_block: got '{text}', expected a whole number of layers, full or universal.")
    for trace in traces:
        asked = trace.table.n_layers if full else int(text)
        if trace.is_run and trace.table.share_block != asked:
            raise ConfigError(
                f"--share_block: got {text}, but {trace.path} is a run with share_block={trace.table.share_block}; "
                "omit --share_block."
            )
    return "full" if full else int(text)
