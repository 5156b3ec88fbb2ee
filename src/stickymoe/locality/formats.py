"""Route tables on disk: a folder of `.npy` arrays and a JSON header. Arrays are mapped, so they may exceed memory.

    header.json   {"format": "stickymoe-routes", "version": 1, "n_experts": 4, "arrays": {"S": [4, 945, 256, 2], …}}
    S.npy         uint8 or uint16 [L, B, T, k], experts in order of descending weight
    mask.npy      bool [B, T]
    doc.npy, weights.npy, phase.npy, tokens.npy, predicted.npy, residents.npy   where known

The header may contain `expert_bytes` (one number per layer), `other_bytes`, `share_block` and `skips`, see
`RouteTable`. It is written last: a folder without a header is incomplete. A zip archive of a folder is read, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from stickymoe import files
from stickymoe.errors import DataError, shown
from stickymoe.locality.rows import RowKey
from stickymoe.locality.table import BLOCK, RouteTable, blocks, extremes, release
from stickymoe.npy import map_npy
from stickymoe.reading import read_json, reason

FORMAT = "stickymoe-routes"
VERSION = 1
_KINDS = {
    "S": "iu",
    "mask": "b",
    "doc": "iu",
    "weights": "f",
    "phase": "iu",
    "tokens": "iu",
    "predicted": "iu",
    "residents": "iu",
}
_KIND_NAMES = {"iu": "integers", "b": "bool", "f": "floating-point numbers"}
_ARRAYS = tuple(_KINDS)


def save_table(table: RouteTable, folder: Path) -> None:
    """Write a table; the folder may be the one that the table is mapped from."""
    arrays = {name: getattr(table, name) for name in _ARRAYS if getattr(table, name) is not None}
    shapes = {name: array.shape for name, array in arrays.items()}
    with _writing(folder):
        for name, array in arrays.items():
            with files.replacing(folder / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        _write_header(folder, shapes, table.n_experts, _sizes_of(table))


@contextlib.contextmanager
def create_table(
    folder: Path, arrays: Mapping[str, tuple[tuple[int, ...], Any]], *, n_experts: int, **sizes: Any
) -> Iterator[dict[str, Shaped[np.ndarray, ...]]]:
    """Map the arrays of a new table for writing, by name: shape and type. The table is complete when the block ends."""
    with _writing(folder):
        mapped: dict[str, Shaped[np.ndarray, ...]] = {
            name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
            for name, (shape, dtype) in arrays.items()
        }
        yield mapped
        for array in mapped.values():
            array.flush()  # type: ignore[attr-defined]
        _write_header(folder, {name: shape for name, (shape, _) in arrays.items()}, n_experts, sizes)


def _sizes_of(table: RouteTable) -> dict[str, Any]:
    names = ("expert_bytes", "other_bytes", "share_block", "row_bytes", "row_keys", "skips")
    return {name: getattr(table, name) for name in names}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Write into a folder without a header, so that it counts as incomplete until the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "header.json").unlink(missing_ok=True)
        yield
    except OSError as e:
        raise DataError(f"{folder} cannot be written ({e.strerror or e}).") from e


def _write_header(folder: Path, shapes: Mapping[str, Sequence[int]], n_experts: int, sizes: Mapping[str, Any]) -> None:
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, "n_experts": n_experts, "arrays": shapes}
    absent: dict[str, Any] = {"row_bytes": 0, "row_keys": [], "skips": False}
    keys = [[key.n, key.salt, key.rows, key.nbytes] for key in sizes.get("row_keys", ())]
    known = {**sizes, "row_keys": keys}
    fields |= {name: value for name, value in known.items() if value is not None and absent.get(name) != value}
    files.write_text(folder / "header.json", json.dumps(fields, indent=1) + "\n")


def open_trace(path: Path) -> RouteTable:
    """The table of a run folder, of its `routes`, of a trace folder or its zip archive, or of another tool's file."""
    if path.suffix == ".zip" and path.is_file():
        return _load_zipped(path)
    if path.is_file():
        from stickymoe.locality.foreign import read_foreign

        return read_foreign(path)
    routes = path / "routes"
    return load_table(routes if routes.is_dir() else path)


def load_table(folder: Path) -> RouteTable:
    """Map a saved table, after checking every value once."""
    header = _read_header(folder)
    arrays = {name: _map(folder / f"{name}.npy", shape) for name, shape in header["arrays"].items()}
    if arrays["S"].ndim != 4:
        raise DataError(f"{folder / 'S.npy'}: got shape {arrays['S'].shape}, expected [layers, sequences, tokens, k].")
    for name, array in arrays.items():
        expected = arrays["S"].shape if name in ("S", "weights") else arrays["S"].shape[1:3]
        if name in ("predicted", "residents"):  # any number of experts per token
            expected = (*arrays["S"].shape[:3], *(array.shape[3:4] or (1,)))
        if array.shape != expected:
            raise DataError(f"{folder / name}.npy: got shape {array.shape}, expected {expected} as in S.npy.")
        _require_values(folder / f"{name}.npy", name, array)
    sizes = header.get("expert_bytes")
    if sizes is not None:  # one number for all layers is the form of version 0.1
        sizes = tuple(sizes) if isinstance(sizes, list) else (sizes,) * arrays["S"].shape[0]
    return table_from(
        folder,
        n_experts=header["n_experts"],
        expert_bytes=sizes,
        other_bytes=header.get("other_bytes"),
        share_block=header.get("share_block", 1),
        row_bytes=header.get("row_bytes", 0),
        row_keys=tuple(RowKey(*key) for key in header.get("row_keys", ())),
        skips=header.get("skips", False),
        **arrays,
    )


def zipped(table: RouteTable, name: str) -> bytes:
    """A zip archive of the folder `name` with a table, which `open_trace` reads."""
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        save_table(table, Path(folder))
        for path in sorted(Path(folder).iterdir()):
            file.write(path, f"{name}/{path.name}")
    return archive.getvalue()


def _load_zipped(path: Path) -> RouteTable:
    """Arrays are mapped from unpacked files, which are deleted already."""
    known = {"header.json", *(f"{name}.npy" for name in _ARRAYS)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    name = Path(member.filename).name
                    if name in known:
                        (Path(folder) / name).write_bytes(archive.read(member))
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, ValueError) as e:
            raise DataError(f"{path} is damaged ({reason(e)}): expected a zip archive of a trace folder.") from e
        try:
            return load_table(Path(folder))
        except DataError as e:
            raise DataError(str(e).replace(folder, str(path))) from e


def table_from(source: Path, **fields: Any) -> RouteTable:
    """A table of these fields; an error names the file or folder that they come from."""
    try:
        return RouteTable(**fields)
    except DataError as e:
        raise DataError(f"{source}: {e}") from e


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / "header.json"
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: expected a run folder or a folder with a route table.")
    if not path.exists():
        raise DataError(f"{folder} has no route table (header.json): pass a run folder, its routes, or a trace folder.")
    header = read_json(path, DataError)
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        raise DataError(f"{path}: expected format '{FORMAT}' version {VERSION}.")
    arrays = header.get("arrays")
    if not isinstance(arrays, dict) or not {"S", "mask"} <= set(arrays) <= set(_ARRAYS):
        raise DataError(
            f"{path}: got arrays {shown(arrays)}, expected S, mask and optionally {', '.join(_ARRAYS[2:])}."
        )
    sizes = header.get("expert_bytes", 1)
    numbers = [("n_experts", header.get("n_experts"), 1), ("share_block", header.get("share_block", 1), 1)]
    numbers += [("expert_bytes", size, 1) for size in (sizes if isinstance(sizes, list) else [sizes])]
    for key, value, least in [*numbers, *((key, header.get(key, 0), 0) for key in ("other_bytes", "row_bytes"))]:
        if type(value) is not int or value < least:
            raise DataError(f"{path}: got {key} {shown(value)}, expected an integer ≥ {least}.")
    keys = header.get("row_keys", [])
    if not isinstance(keys, list) or not all(map(_is_row_key, keys)):
        raise DataError(f"{path}: got row_keys {shown(keys)}, expected lists of n, salt, rows and bytes ≥ 1.")
    if not isinstance(header.get("skips", False), bool):
        raise DataError(f"{path}: got skips {shown(header['skips'])}, expected true or false.")
    return header


_MOST = 1 << 40  # so that rows can be numbered


def _is_row_key(key: Any) -> bool:
    """Whether it has the four numbers of a `RowKey`."""
    whole = isinstance(key, list) and len(key) == 4 and all(type(number) is int for number in key)
    return whole and min(key[0], key[2], key[3]) >= 1 and max(key[0], key[2], key[3]) <= _MOST


def _map(path: Path, shape: Any) -> Shaped[np.ndarray, ...]:
    array = map_npy(path, DataError)
    if list(array.shape) != shape:
        raise DataError(f"{path}: got shape {list(array.shape)}, but header.json says {shown(shape)}.")
    return array


def _require_values(path: Path, name: str, array: Shaped[np.ndarray, ...]) -> None:
    """Check the type, and what a `RouteTable` takes for granted: a bool or phase is 0 or 1, and weights are finite."""
    if array.dtype.kind not in _KINDS[name]:
        raise DataError(f"{path}: got {array.dtype}, expected {_KIND_NAMES[_KINDS[name]]}.")
    if name == "weights" and not _all_finite(array):
        raise DataError(f"{path}: got infinite or NaN weights, expected finite numbers.")
    if name in ("mask", "phase") and array.size:
        lowest, highest = extremes(array.view(np.uint8) if name == "mask" else array)
        if lowest < 0 or highest > 1:
            raise DataError(f"{path}: got values {lowest} … {highest}, expected 0 and 1.")


def _all_finite(array: Shaped[np.ndarray, ...]) -> bool:
    flat, ok = array.reshape(-1), True
    for block in blocks(len(flat), BLOCK):
        ok = ok and bool(np.isfinite(flat[block]).all())
        release(array)
    return ok
