"""Read routing traces of other tools into route tables. The formats follow the tools' public files, named below."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from stickymoe.errors import ConfigError, DataError, shown, unknown
from stickymoe.locality.formats import table_from
from stickymoe.locality.table import RouteTable, index_dtype
from stickymoe.npy import read_npz
from stickymoe.reading import parse_json, read_text, reason

_BIGMOE_MARK = "# route_trace v1"
_BIGMOE_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
_MAX_INTEGER = 2**62
_MAX_WEIGHT = float(np.finfo(np.float32).max)
# A table is dense. Turns of different lengths leave holes in it, but not more than this for each row of the file.
_MAX_CELLS_PER_ROW = 256
_MIN_MAX_CELLS = 1 << 24


@dataclass(frozen=True)
class _Rows:
    """The columns of a BigMoeOnEdge trace, one entry for each chosen expert."""

    turn: Int64[np.ndarray, " n"]
    phase: Int64[np.ndarray, " n"]
    step: Int64[np.ndarray, " n"]
    layer: Int64[np.ndarray, " n"]
    slot: Int64[np.ndarray, " n"]
    expert: Int64[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"]


def read_bigmoeonedge(path: Path) -> RouteTable:
    """BigMoeOnEdge's `--route-trace` CSV, version 1 (Helldez/BigMoeOnEdge: docs/telemetry.md).

    A `#` preamble (n_expert, n_expert_used, expert_bytes and dense_bytes of each layer) precedes one row per chosen
    expert, with columns identified by name. A turn becomes a sequence. llama.cpp routes only the last token of a prompt
    in the last layer. The other tokens of the prompt are masked, because the trace does not contain their choice.
    """
    lines = read_text(path, DataError).splitlines()
    preamble = [_fields(line) for line in lines if line.startswith("#")]
    facts = next((fields for fields in preamble if "n_expert" in fields), {})
    n_experts, k = _positive(facts, "n_expert", path), _positive(facts, "n_expert_used", path)
    if k > n_experts:
        raise DataError(f"{path}: got n_expert_used {k} in the preamble, expected at most n_expert={n_experts}.")
    rows = _bigmoe_rows([line for line in lines if not line.startswith("#")], path)
    _require_bigmoe_values(rows, n_experts, k, path)
    return _bigmoe_table(rows, n_experts, k, _bigmoe_sizes(preamble, path), path)


def _fields(line: str) -> dict[str, str]:
    """The key=value pairs of a line of the preamble."""
    return dict(part.split("=", 1) for part in line[1:].split() if "=" in part)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one expert by layer, and of all weights that are always resident; None if the preamble has none."""

    experts: dict[int, int]
    other: int | None

    def of_layers(self, layers: list[int]) -> tuple[int, ...] | None:
        """Bytes of one expert in each of these layers, None if a size is unknown."""
        sizes = tuple(self.experts.get(layer, 0) for layer in layers)
        return sizes if all(sizes) else None


def _bigmoe_sizes(preamble: list[dict[str, str]], path: Path) -> _Sizes:
    experts, dense = {}, []
    for fields in preamble:
        for key in ("layer", "expert_bytes", "dense_bytes"):
            text = fields.get(key, "0")
            if not text.isdecimal() or len(text) > 18:
                raise DataError(f"{path}: got {key} {shown(text)} in the preamble, expected an integer ≥ 0.")
        if "layer" in fields:
            experts[int(fields["layer"])] = int(fields.get("expert_bytes", "0"))
        if "dense_bytes" in fields:
            dense.append(int(fields["dense_bytes"]))
    return _Sizes(experts, sum(dense) if dense else None)


def _positive(facts: dict[str, str], key: str, path: Path) -> int:
    value = facts.get(key, "")
    if not value.isdecimal() or len(value) > 9 or int(value) < 1:
        raise DataError(f"{path}: got {key} {shown(value)} in the preamble, expected an integer ≥ 1.")
    return int(value)


def _bigmoe_rows(lines: list[str], path: Path) -> _Rows:
    table = csv.DictReader(lines)
    parsed: list[list[float]] = []
    try:
        missing = [c for c in _BIGMOE_COLUMNS if c not in (table.fieldnames or ())]
        if missing:
            raise DataError(f"{path}: column {missing[0]} is missing, expected {', '.join(_BIGMOE_COLUMNS)}.")
        for row in table:
            parsed.append([*(_integer(row[c]) for c in _BIGMOE_COLUMNS[:-1]), _weight(row["weight"])])
    except csv.Error as e:
        raise DataError(f"{path} is damaged: {reason(e)}.") from e
    except (TypeError, ValueError) as e:
        raise DataError(f"{path}: row {len(parsed) + 1} is cut off or damaged ({reason(e)}).") from e
    if not parsed:
        raise DataError(f"{path} contains no routing, only a preamble.")
    *integers, weights = zip(*parsed, strict=True)
    columns = [*(np.array(column, np.int64) for column in integers), np.array(weights, np.float64)]
    return _Rows(*columns)


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) > _MAX_INTEGER:
        raise ValueError(f"got {shown(text)}, expected an integer of at most 62 bits")
    return value


def _weight(text: str) -> float:
    """NaN where the weight is unknown."""
    value = float(text)
    if abs(value) > _MAX_WEIGHT:
        raise ValueError(f"got the weight {shown(text)}, expected a 32-bit number")
    return value


def _require_bigmoe_values(rows: _Rows, n_experts: int, k: int, path: Path) -> None:
    """Refuse the first row with a value that is out of range."""
    limits = (
        ("phase", 0, 1, "0 (prefill) or 1 (decode)"),
        ("step", 0, _MAX_INTEGER, "steps ≥ 0"),
        ("slot", 0, k - 1, f"slots 0 … {k - 1}"),
        ("expert", 0, n_experts - 1, f"experts 0 … {n_experts - 1}"),
    )
    for name, lowest, highest, expected in limits:
        column = getattr(rows, name)
        wrong = np.flatnonzero((column < lowest) | (column > highest))
        if len(wrong):
            given = f"{name} {column[wrong[0]]} in row {wrong[0] + 1}"
            raise DataError(f"{path}: got {given}, expected {expected}.")


def _bigmoe_table(rows: _Rows, n_experts: int, k: int, sizes: _Sizes, path: Path) -> RouteTable:
    """Place the rows: layers, turns and steps are numbered in ascending order, whatever numbers the tool gave them."""
    layers, layer = np.unique(rows.layer, return_inverse=True)
    turns, turn = np.unique(rows.turn, return_inverse=True)
    steps, step = np.unique(rows.step, return_inverse=True)
    tokens, first, token = np.unique(turn * len(steps) + step, return_index=True, return_inverse=True)
    _require_slots(rows, token * len(layers) + layer, k, path)
    phase = rows.phase[first]
    if (phase[token] != rows.phase).any():
        raise DataError(f"{path} is damaged: one token has rows of both phases.")
    b = tokens // len(steps)
    t = np.arange(len(tokens)) - np.searchsorted(b, b)
    shape = (len(layers), len(turns), int(t.max()) + 1, k)
    _require_dense(shape, len(token), path)
    S, weights = np.zeros(shape, index_dtype(n_experts)), np.zeros(shape, np.float32)
    at = (layer, b[token], t[token], rows.slot)
    S[at], weights[at] = rows.expert, rows.weight
    mask, phases = np.zeros(shape[1:3], np.bool_), np.zeros(shape[1:3], np.uint8)
    mask[b, t], phases[b, t] = np.bincount(token) == len(layers) * k, phase
    if not mask.any():
        raise DataError(f"{path}: no token was routed in all {len(layers)} layers, expected at least one.")
    return table_from(
        path,
        S=S,
        n_experts=n_experts,
        mask=mask,
        phase=phases,
        weights=None if np.isnan(weights).any() else weights,
        expert_bytes=sizes.of_layers(layers.tolist()),
        other_bytes=sizes.other,
    )


def _require_slots(rows: _Rows, cell: Int64[np.ndarray, " n"], k: int, path: Path) -> None:
    """Every token has each of its k slots once in a layer; `cell` numbers the pairs of token and layer."""
    order = np.lexsort((rows.slot, cell))
    starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    wrong = starts[counts != k]
    if not len(wrong):
        wrong = np.flatnonzero(rows.slot[order] != np.arange(len(order)) % k)
    if len(wrong):
        row = order[wrong[0]]
        slots = rows.slot[cell == cell[row]].tolist()
        where = f"turn {rows.turn[row]}, step {rows.step[row]}, layer {rows.layer[row]}"
        raise DataError(f"{path}: got slots {shown(slots)} for {where}, expected {k} (0 … {k - 1}).")


def _require_dense(shape: tuple[int, int, int, int], n_rows: int, path: Path) -> None:
    L, B, T, k = shape
    if L * B * T * k > max(_MIN_MAX_CELLS, _MAX_CELLS_PER_ROW * n_rows):
        given = f"{n_rows:,} rows for {L:,} layers, {B:,} turns and {T:,} steps"
        raise DataError(f"{path}: got {given}, too few to fill a table; its numbers may be damaged.")


def read_cacheable(path: Path) -> RouteTable:
    """cacheable-by-design's npz (Shriniwas410/cacheable-by-design: routing-lab/01_log_routing.py).

    `experts` is int16 [layers, tokens, k] in order of descending weight, and `meta` is a JSON text with `num_experts`.
    A domain becomes one sequence, because the file does not record where a forward pass of the tool ended.
    """
    arrays = read_npz(path, ("experts", "meta"), DataError)
    experts, n_experts = arrays["experts"], _cacheable_experts(arrays["meta"], path)
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise DataError(f"{path}: got experts {experts.dtype} {experts.shape}, expected integers [layers, tokens, k].")
    mask = np.ones((1, experts.shape[1]), np.bool_)
    table = table_from(path, S=experts[:, None], n_experts=n_experts, mask=mask)
    return RouteTable(S=table.S.astype(index_dtype(n_experts)), n_experts=n_experts, mask=mask)


def _cacheable_experts(meta: Any, path: Path) -> int:
    """The number of experts that `meta` contains."""
    try:
        text = str(meta[()]) if meta.dtype.kind == "U" and meta.ndim == 0 else ""
    except ValueError as e:  # not characters
        raise DataError(f"{path} is damaged: meta is not text.") from e
    fields = parse_json(text, f"{path} (meta)", DataError)
    n_experts = fields.get("num_experts") if isinstance(fields, dict) else None
    if type(n_experts) is not int or n_experts < 1:
        raise DataError(f"{path}: got num_experts {shown(n_experts)} in meta, expected an integer ≥ 1.")
    return n_experts


READERS: dict[str, Callable[[Path], RouteTable]] = {
    "bigmoeonedge": read_bigmoeonedge,
    "cacheable-by-design": read_cacheable,
}


def read_foreign(path: Path, format: str | None = None) -> RouteTable:
    """The trace of another tool; the format is detected unless it is given."""
    if format is not None and format not in READERS:
        raise ConfigError(unknown("trace format", format, READERS))
    return READERS[format or _detect(path)](path)


def _detect(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as e:
        raise DataError(f"{path} cannot be read ({reason(e)}).") from e
    if head.startswith(_BIGMOE_MARK.encode()):
        return "bigmoeonedge"
    if head.startswith(b"PK"):
        return "cacheable-by-design"
    raise DataError(f"{path} has no known trace format. Known: a stickymoe-routes folder, {', '.join(READERS)}.")
