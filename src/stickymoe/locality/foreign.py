"""Other tools' routing traces, read into route tables. Formats were taken from the tools' public files, named below."""

from __future__ import annotations

import csv
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stickymoe.errors import ConfigError, DataError, unknown
from stickymoe.locality.table import RouteTable, index_dtype

_BIGMOE_MARK = "# route_trace v1"
_BIGMOE_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


def read_bigmoeonedge(path: Path) -> RouteTable:
    """BigMoeOnEdge's `--route-trace` CSV, version 1 (Helldez/BigMoeOnEdge: docs/telemetry.md).

    A `#` preamble (n_expert, n_expert_used, expert_bytes of each layer), then a row per chosen expert, columns by
    name. A turn becomes a sequence. A prompt token that the last layer did not route (llama.cpp routes only the last
    one there) is masked out: the trace does not say what the layer would have chosen.
    """
    facts, sizes, rows = _bigmoe_parts(path)
    n_experts, k = _whole(facts, "n_expert", path), _whole(facts, "n_expert_used", path)
    if k > n_experts:
        raise DataError(f"{path}: got n_expert_used {k} in the preamble, expected at most n_expert={n_experts}.")
    cells: dict[tuple[int, int], dict[int, list[tuple[int, int, float]]]] = {}
    phases: dict[tuple[int, int], int] = {}
    for turn, phase, step, layer, slot, expert, weight in rows:
        if not 0 <= expert < n_experts or step < 0:
            raise DataError(
                f"{path}: got expert {expert} at step {step}, expected experts 0 … {n_experts - 1} and steps ≥ 0."
            )
        if phase not in (0, 1):
            raise DataError(f"{path}: got phase {phase} at step {step}, expected 0 (prefill) or 1 (decode).")
        cells.setdefault((turn, step), {}).setdefault(layer, []).append((slot, expert, weight))
        phases[turn, step] = phase
    layers = sorted({layer for token in cells.values() for layer in token})
    turns = sorted({turn for turn, _ in cells})
    steps = {turn: sorted(s for t, s in cells if t == turn) for turn in turns}
    shape = (len(layers), len(turns), max(len(s) for s in steps.values()), k)
    S, weights = np.zeros(shape, index_dtype(n_experts)), np.zeros(shape, np.float32)
    mask, phase_of = np.zeros(shape[1:3], np.bool_), np.zeros(shape[1:3], np.uint8)
    for b, turn in enumerate(turns):
        for t, step in enumerate(steps[turn]):
            token = cells[turn, step]
            phase_of[b, t] = phases[turn, step]
            mask[b, t] = len(token) == len(layers)
            for layer, cell in token.items():
                if sorted(slot for slot, _, _ in cell) != list(range(k)):
                    raise DataError(
                        f"{path}: got {len(cell)} experts for turn {turn}, step {step}, layer {layer}, expected {k}."
                    )
                for slot, expert, weight in cell:
                    S[layers.index(layer), b, t, slot] = expert
                    weights[layers.index(layer), b, t, slot] = weight
    return RouteTable(
        S=S,
        n_experts=n_experts,
        mask=mask,
        phase=phase_of,
        weights=None if np.isnan(weights).any() else weights,
        expert_bytes=sizes.pop() if len(sizes) == 1 else None,
    )


def _bigmoe_parts(path: Path) -> tuple[dict[str, str], set[int], Iterator[tuple[int, int, int, int, int, int, float]]]:
    """Facts of the preamble, sizes of an expert, rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    preamble = [line for line in lines if line.startswith("#")]
    pairs = [dict(part.split("=", 1) for part in line[1:].split() if "=" in part) for line in preamble]
    facts = next((p for p in pairs if "n_expert" in p), {})
    try:
        sizes = {int(p["expert_bytes"]) for p in pairs if "expert_bytes" in p} - {0}
    except ValueError as e:
        raise DataError(f"{path}: the preamble's expert_bytes is no number: {e}.") from e
    if min(sizes, default=1) < 1:
        raise DataError(f"{path}: got expert_bytes {min(sizes)} in the preamble, expected a whole number ≥ 0.")
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    missing = [c for c in _BIGMOE_COLUMNS if c not in (table.fieldnames or ())]
    if missing:
        raise DataError(f"{path}: column {missing[0]} is missing, expected {', '.join(_BIGMOE_COLUMNS)}.")
    return facts, sizes, _bigmoe_rows(table, path)


def _bigmoe_rows(table: Any, path: Path) -> Iterator[tuple[int, int, int, int, int, int, float]]:
    number = 0
    for number, row in enumerate(table, start=1):
        try:
            turn, phase, step, layer, slot, expert = (int(row[c]) for c in _BIGMOE_COLUMNS[:-1])
            yield turn, phase, step, layer, slot, expert, float(row["weight"])
        except (TypeError, ValueError) as e:
            raise DataError(f"{path}: row {number} is cut off or damaged ({e}).") from e
    if number == 0:
        raise DataError(f"{path} holds no routing, only a preamble.")


def _whole(facts: dict[str, str], key: str, path: Path) -> int:
    value = facts.get(key, "")
    if not value.isdecimal() or len(value) > 9 or int(value) < 1:
        raise DataError(f"{path}: got {key} '{value}' in the preamble, expected a whole number ≥ 1.")
    return int(value)


def read_cacheable(path: Path) -> RouteTable:
    """cacheable-by-design's npz (Shriniwas410/cacheable-by-design: routing-lab/01_log_routing.py).

    `experts` int16 [layers, tokens, k], heaviest first, and `meta`, a JSON text with `num_experts`. One domain is one
    sequence: the file does not say where the tool's forward passes ended.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            experts, meta = arrays["experts"], json.loads(str(arrays["meta"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise DataError(f"{path} is damaged or no routing-lab trace: {' '.join(str(e).split())}.") from e
    n_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if type(n_experts) is not int or n_experts < 1:
        raise DataError(f"{path}: got num_experts {n_experts!r} in meta, expected a whole number ≥ 1.")
    if experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer):
        raise DataError(
            f"{path}: got experts {experts.dtype} {experts.shape}, expected whole numbers [layers, tokens, k]."
        )
    table = RouteTable(S=experts[:, None], n_experts=n_experts, mask=np.ones((1, experts.shape[1]), np.bool_))
    return RouteTable(S=table.S.astype(index_dtype(n_experts)), n_experts=n_experts, mask=table.mask)


READERS: dict[str, Callable[[Path], RouteTable]] = {
    "bigmoeonedge": read_bigmoeonedge,
    "cacheable-by-design": read_cacheable,
}


def read_foreign(path: Path, format: str | None = None) -> RouteTable:
    """Another tool's trace; its format is recognised unless it is named."""
    if format is not None and format not in READERS:
        raise ConfigError(unknown("trace format", format, READERS))
    found = format or _recognise(path)
    try:
        return READERS[found](path)
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror}).") from e
    except csv.Error as e:
        raise DataError(f"{path} is damaged: {e}.") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is no text, so no {found} trace.") from e


def _recognise(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror}).") from e
    if head.startswith(_BIGMOE_MARK.encode()):
        return "bigmoeonedge"
    if head.startswith(b"PK"):
        return "cacheable-by-design"
    raise DataError(f"{path} is of no known trace format. Known: a stickymoe-routes folder, {', '.join(READERS)}.")
