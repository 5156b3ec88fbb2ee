"""`Recorder`: collects the routes of many forward passes into one table, in bounded memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from stickymoe.errors import DataError
from stickymoe.locality.formats import create_table, load_table, save_table
from stickymoe.locality.rows import RowKey
from stickymoe.locality.table import RouteTable, release

_PADDING = {"mask": False, "doc": -1}  # fills the end of shorter sequences; 0 in other arrays, no expert in sets
_SETS = ("predicted", "residents")  # n_experts marks an empty place
_BY_LAYER = ("S", "weights", *_SETS)


class _Layout(NamedTuple):
    """What is the same in all tables of a recorder."""

    n_layers: int
    n_experts: int
    top_k: int
    n_predicted: int
    n_residents: int
    arrays: tuple[str, ...]

    @classmethod
    def of(cls, table: RouteTable) -> _Layout:
        names = ("S", "mask", "doc", "weights", "phase", "tokens", *_SETS)
        known = tuple(name for name in names if getattr(table, name) is not None)
        predicted, residents = (
            0 if sets is None else int(sets.shape[3]) for sets in (table.predicted, table.residents)
        )
        return cls(table.n_layers, table.n_experts, table.top_k, predicted, residents, known)

    def require(self, other: _Layout) -> None:
        """Refuse a table of another layout."""
        for what, a, b in (
            ("layers", self.n_layers, other.n_layers),
            ("experts", self.n_experts, other.n_experts),
            ("experts per token", self.top_k, other.top_k),
            ("prefetched experts per token", self.n_predicted, other.n_predicted),
            ("residents of a router", self.n_residents, other.n_residents),
            ("arrays", ", ".join(self.arrays), ", ".join(other.arrays)),
        ):
            if a != b:
                raise DataError(f"The table to add does not fit: got {what} {b}, expected {a} as in the tables before.")


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
        self._layout: _Layout | None = None
        self._shapes: list[tuple[int, int]] = []  # sequences and tokens of each part
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._kept: list[RouteTable] = []
        self._skips = False

    def add(self, table: RouteTable) -> None:
        """Add the sequences of a table, which must fit those before."""
        layout = _Layout.of(table)
        if self._layout is None:
            self._layout = layout
            self._discard_earlier()
        self._layout.require(layout)
        if self.folder is None:
            self._kept.append(table)
        else:
            save_table(table, self._part_folder(len(self._shapes)))
        self._shapes.append(table.mask.shape)
        self._skips |= table.skips
        for name in layout.arrays:
            dtype = getattr(table, name).dtype
            if name == "doc":  # padding is −1
                dtype = np.promote_types(dtype, np.int8)
            if name in _SETS:  # padding is n_experts
                dtype = np.promote_types(dtype, np.min_scalar_type(table.n_experts))
            self._dtypes[name] = np.promote_types(self._dtypes.get(name, dtype), dtype)

    def finish(
        self,
        *,
        expert_bytes: tuple[int, ...] | None = None,
        other_bytes: int | None = None,
        share_block: int = 1,
        row_bytes: int = 0,
        row_keys: tuple[RowKey, ...] = (),
    ) -> RouteTable:
        """The whole table, with what is known of the model's sizes; refused if nothing was added."""
        if self._layout is None:
            raise DataError("Nothing was recorded: add at least one table before finish.")
        sizes = {
            "expert_bytes": expert_bytes,
            "other_bytes": other_bytes,
            "share_block": share_block,
            "row_bytes": row_bytes,
            "row_keys": row_keys,
            "skips": self._skips,
        }
        shapes = {name: (self._shape(name, self._layout), dtype) for name, dtype in self._dtypes.items()}
        if self.folder is None:
            arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
            self._fill(arrays, self._layout)
            return RouteTable(n_experts=self._layout.n_experts, **arrays, **sizes)  # type: ignore[arg-type]
        with create_table(self.folder, shapes, n_experts=self._layout.n_experts, **sizes) as mapped:
            self._fill(mapped, self._layout)
        shutil.rmtree(self._scratch)
        return load_table(self.folder)

    @property
    def _scratch(self) -> Path:
        assert self.folder is not None
        return self.folder / ".parts"

    def _part_folder(self, i: int) -> Path:
        return self._scratch / f"{i:08d}"

    def _discard_earlier(self) -> None:
        """Discard what the folder has: after an interruption, an earlier table must not be mistaken for the new one."""
        if self.folder is not None:
            (self.folder / "header.json").unlink(missing_ok=True)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _shape(self, name: str, layout: _Layout) -> tuple[int, ...]:
        """The shape of an array of the whole table."""
        at = sum(n for n, _ in self._shapes), max(length for _, length in self._shapes)
        width = {"predicted": layout.n_predicted, "residents": layout.n_residents}.get(name, layout.top_k)
        return (layout.n_layers, *at, width) if name in _BY_LAYER else at

    def _fill(self, arrays: dict[str, Shaped[np.ndarray, ...]], layout: _Layout) -> None:
        """Copy all parts, one after another."""
        paddings = _PADDING | dict.fromkeys(_SETS, layout.n_experts)
        row = 0
        for i, (n, length) in enumerate(self._shapes):
            part = self._kept[i] if self.folder is None else load_table(self._part_folder(i))
            for name, array in arrays.items():
                rows = array[:, row : row + n] if name in _BY_LAYER else array[row : row + n]
                _pad_and_copy(rows, getattr(part, name), length, paddings.get(name, 0))
                release(array)
            row += n


def _pad_and_copy(rows: Shaped[np.ndarray, ...], part: Shaped[np.ndarray, ...], length: int, padding: int) -> None:
    at: tuple[Any, ...] = (slice(None), slice(None)) if rows.ndim == 4 else (slice(None),)
    rows[(*at, slice(None, length))] = part
    rows[(*at, slice(length, None))] = padding
