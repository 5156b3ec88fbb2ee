"""`Recorder`: collects the routes of many forward passes into one table, in bounded memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from stickymoe.errors import DataError
from stickymoe.locality.formats import create_table, load_table, save_table
from stickymoe.locality.table import RouteTable, release

_PADDING = {"mask": False, "doc": -1}  # what stands behind the end of a shorter sequence; 0 in the other arrays


class Recorder:
    """Adds sequences to a table. With a folder, routes go to disk as they come; otherwise they stay in memory.

        recorder = Recorder(folder)
        for batch in batches:
            recorder.add(model(batch).trace.table())
        table = recorder.finish()

    Sequences may differ in length; shorter ones are padded.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._parts: list[RouteTable] = []

    def add(self, table: RouteTable) -> None:
        """Add the sequences of a table, which must fit those before."""
        if self._parts:
            _require_fit(self._parts[0], table)
        if self.folder is not None:
            part = self._scratch / f"{len(self._parts):08d}"
            save_table(table, part)
            table = load_table(part)
        self._parts.append(table)

    def finish(
        self, *, expert_bytes: tuple[int, ...] | None = None, other_bytes: int | None = None, share_block: int = 1
    ) -> RouteTable:
        """The whole table, with what is known of the model's sizes; refused if nothing was added."""
        if not self._parts:
            raise DataError("Nothing was recorded: add at least one table before finish.")
        sizes = {"expert_bytes": expert_bytes, "other_bytes": other_bytes, "share_block": share_block}
        n_experts = self._parts[0].n_experts
        layout = {name: self._shape(name) for name in _arrays_of(self._parts[0])}
        if self.folder is None:
            arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in layout.items()}
            self._fill(arrays)
            return RouteTable(n_experts=n_experts, **arrays, **sizes)  # type: ignore[arg-type]
        with create_table(self.folder, layout, n_experts=n_experts, **sizes) as arrays:
            self._fill(arrays)
        shutil.rmtree(self._scratch)
        return load_table(self.folder)

    @property
    def _scratch(self) -> Path:
        assert self.folder is not None
        return self.folder / ".parts"

    def _shape(self, name: str) -> tuple[tuple[int, ...], Any]:
        """Shape and type of an array of the whole table."""
        n_rows = sum(len(part.mask) for part in self._parts)
        length = max(part.mask.shape[1] for part in self._parts)
        array = getattr(self._parts[0], name)
        layers, width = (array.shape[:1], array.shape[3:]) if array.ndim == 4 else ((), ())
        return (*layers, n_rows, length, *width), array.dtype

    def _fill(self, arrays: dict[str, Shaped[np.ndarray, ...]]) -> None:
        """Copy all parts, one after another."""
        row = 0
        for part in self._parts:
            n, length = part.mask.shape
            for name, array in arrays.items():
                rows = array[:, row : row + n] if array.ndim == 4 else array[row : row + n]
                _pad_and_copy(rows, getattr(part, name), length, _PADDING.get(name, 0))
                release(array)
            row += n


def _pad_and_copy(rows: Shaped[np.ndarray, ...], part: Shaped[np.ndarray, ...], length: int, padding: int) -> None:
    at: tuple[Any, ...] = (slice(None), slice(None)) if rows.ndim == 4 else (slice(None),)
    rows[(*at, slice(None, length))] = part
    rows[(*at, slice(length, None))] = padding


def _arrays_of(table: RouteTable) -> list[str]:
    names = ("S", "mask", "doc", "weights", "phase", "tokens")
    return [name for name in names if getattr(table, name) is not None]


def _require_fit(first: RouteTable, table: RouteTable) -> None:
    for what, a, b in (
        ("layers", first.n_layers, table.n_layers),
        ("experts", first.n_experts, table.n_experts),
        ("experts per token", first.top_k, table.top_k),
        ("arrays", ", ".join(_arrays_of(first)), ", ".join(_arrays_of(table))),
    ):
        if a != b:
            raise DataError(f"The table to add does not fit: got {what} {b}, expected {a} as in the tables before.")
