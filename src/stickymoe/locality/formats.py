"""Route tables on disk: a folder of `.npy` arrays and a JSON header, so that a table larger than memory maps.

    header.json   {"format": "stickymoe-routes", "version": 1, "n_experts": 4, "arrays": {"S": [4, 945, 256, 2], …}}
    S.npy         uint8 or uint16 [L, B, T, k], heaviest expert first
    mask.npy      bool [B, T]
    doc.npy, weights.npy, phase.npy, tokens.npy   where known

The header may also say `expert_bytes`. It is written last: a folder without one is incomplete.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from stickymoe.errors import DataError
from stickymoe.locality.table import RouteTable, index_dtype

FORMAT = "stickymoe-routes"
VERSION = 1
_ARRAYS = ("S", "mask", "doc", "weights", "phase", "tokens")


def save_table(table: RouteTable, folder: Path) -> None:
    arrays = {name: getattr(table, name) for name in _ARRAYS if getattr(table, name) is not None}
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    with _writing(folder):
        for name, array in arrays.items():
            fresh = folder / f".{name}.npy"  # the table may be mapped from the very file it replaces
            np.save(fresh, array)
            fresh.replace(folder / f"{name}.npy")
        _write_header(folder, shapes, n_experts=table.n_experts, expert_bytes=table.expert_bytes)


@contextlib.contextmanager
def create_table(
    folder: Path, shape: tuple[int, int, int, int], *, n_experts: int
) -> Iterator[tuple[Shaped[np.ndarray, "L B T k"], Shaped[np.ndarray, "B T"]]]:
    """A new table's `S` and `mask`, mapped to be written; complete once the block is left."""
    with _writing(folder):
        S = np.lib.format.open_memmap(folder / "S.npy", mode="w+", dtype=index_dtype(n_experts), shape=shape)
        mask = np.lib.format.open_memmap(folder / "mask.npy", mode="w+", dtype=np.bool_, shape=shape[1:3])
        yield S, mask
        S.flush()
        mask.flush()
        _write_header(folder, {"S": list(shape), "mask": list(shape[1:3])}, n_experts=n_experts, expert_bytes=None)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A folder to write into: incomplete until it has a header again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "header.json").unlink(missing_ok=True)
        yield
    except OSError as e:
        raise DataError(f"{folder} cannot be written ({e.strerror or e}).") from e


def _write_header(folder: Path, shapes: dict[str, list[int]], *, n_experts: int, expert_bytes: int | None) -> None:
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, "n_experts": n_experts, "arrays": shapes}
    if expert_bytes is not None:
        fields["expert_bytes"] = expert_bytes
    (folder / "header.json").write_text(json.dumps(fields, indent=1) + "\n")


def open_trace(path: Path) -> RouteTable:
    """The table of a run folder, of its `routes`, of a trace folder, or of another tool's file."""
    if path.is_file():
        from stickymoe.locality.foreign import read_foreign

        return read_foreign(path)
    routes = path / "routes"
    return load_table(routes if routes.is_dir() else path)


def load_table(folder: Path) -> RouteTable:
    """Map a saved table; its arrays are read as they are used."""
    header = _read_header(folder)
    arrays = {name: _map(folder / f"{name}.npy", shape) for name, shape in header["arrays"].items()}
    return RouteTable(n_experts=header["n_experts"], expert_bytes=header.get("expert_bytes"), **arrays)


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / "header.json").read_text())
    except OSError as e:
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder: expected a run's, or one with a route table.") from e
        raise DataError(f"{folder} holds no route table: header.json cannot be read ({e.strerror}).") from e
    except ValueError as e:
        raise DataError(f"{folder / 'header.json'} is damaged: {e}.") from e
    path = folder / "header.json"
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        raise DataError(f"{path}: expected format '{FORMAT}' version {VERSION}.")
    fields: dict[str, Any] = header
    arrays, n_experts = fields.get("arrays"), fields.get("n_experts")
    if not isinstance(arrays, dict) or not {"S", "mask"} <= set(arrays) <= set(_ARRAYS):
        raise DataError(f"{path}: got arrays {arrays}, expected S, mask and perhaps {', '.join(_ARRAYS[2:])}.")
    if type(n_experts) is not int or n_experts < 1:
        raise DataError(f"{path}: got n_experts {n_experts!r}, expected a whole number ≥ 1.")
    size = fields.get("expert_bytes", 1)
    if type(size) is not int or size < 1:
        raise DataError(f"{path}: got expert_bytes {size!r}, expected a whole number ≥ 1.")
    return fields


def _map(path: Path, shape: list[int]) -> Shaped[np.ndarray, ...]:
    try:
        array: Shaped[np.ndarray, ...] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise DataError(f"{path} is missing or damaged: {e}.") from e
    if list(array.shape) != shape:
        raise DataError(f"{path}: got shape {list(array.shape)}, but the header says {shape}.")
    return array
