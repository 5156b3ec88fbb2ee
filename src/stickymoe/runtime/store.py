"""A packed store: the experts of a model in one file, each contiguous and aligned, so that a miss is one read.

store.json          sizes, the place and checksum of every expert; written last, so a store is complete or absent
experts.bin         the experts, each in the layout that its kernel reads
rows.bin            tables of rows, if the model has such tables; see `rows`
dense.safetensors   everything else
…                   the config and tokenizer of the model
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Float32

from stickymoe import files
from stickymoe.errors import StoreError, shown
from stickymoe.reading import read_json, reason
from stickymoe.runtime.formats import PRECISIONS, ExpertLayout, ExpertSpec, Precision, TensorSpec
from stickymoe.runtime.rows import Piece, RowGroup, RowLayout

SCHEMA, SCHEMA_WITH_ROWS = 1, 2  # stores of the first schema have tables of rows in their dense part
INDEX, EXPERTS, ROWS, DENSE = "store.json", "experts.bin", "rows.bin", "dense.safetensors"
_PACK_AGAIN = "Pack the model again"
_BLOCK = 1 << 24


def checksum(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as f:
        while block := f.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """Where an expert lies in experts.bin, or a piece of the tables in rows.bin, and the checksum of its bytes."""

    precision: Precision
    offset: int
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Contents:
    """What a store holds, apart from the bytes.

    kind: "run" for a model of ours, "transformers" for others
    fingerprint: identifies the weights that were packed
    n_pools: sets of experts; one per layer, or one for several layers that share their experts
    n_experts: experts of a pool
    top_k: experts of a token
    layers_per_pool: adjacent layers that use the same pool
    rows: groups of rows in slow memory; none if the model has no tables, or they are in the dense part
    """

    kind: str
    name: str
    fingerprint: str
    spec: ExpertSpec
    n_pools: int
    n_experts: int
    top_k: int
    layers_per_pool: int = 1
    rows: tuple[RowGroup, ...] = ()

    @property
    def n_layers(self) -> int:
        return self.n_pools * self.layers_per_pool

    @property
    def schema(self) -> int:
        """The first version of the index that can hold this."""
        return SCHEMA_WITH_ROWS if self.rows else SCHEMA

    @cached_property
    def row_layout(self) -> RowLayout:
        return RowLayout(self.rows, self.fingerprint)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        values = asdict(self)
        if not self.rows:
            del values["rows"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Contents:
        spec = values["spec"]
        tensors = tuple(TensorSpec(t["name"], tuple(t["shape"])) for t in spec["tensors"])
        rows = tuple(RowGroup.from_dict(group) for group in values.get("rows", ()))
        return cls(**{**values, "spec": ExpertSpec(tensors, spec["activation"], spec["gated"]), "rows": rows})


@dataclass(frozen=True)
class Store:
    """An opened store. `entries[pool][expert]` says where each expert lies, `row_entries` each piece of the tables."""

    folder: Path
    contents: Contents
    entries: tuple[tuple[Entry, ...], ...]
    dense_bytes: int
    dense_checksum: str
    row_entries: tuple[Entry, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Read the index of a store and check that its files have the size that it says."""
        index = folder / INDEX
        if not index.is_file():
            raise StoreError(f"{folder} is not a packed store: it has no {INDEX}. Pack a model with stickymoe pack.")
        values = read_json(index, StoreError)
        schema = values.get("schema") if isinstance(values, dict) else None
        if schema not in (SCHEMA, SCHEMA_WITH_ROWS):
            expected = f"expected {SCHEMA} or {SCHEMA_WITH_ROWS}"
            raise StoreError(f"{index}: got schema {shown(schema)}, {expected}. {_PACK_AGAIN}.")
        if values.get("checksum") != _index_checksum(values):
            raise StoreError(f"{index} is damaged: its checksum differs. {_PACK_AGAIN}.")
        entries = tuple(tuple(Entry(*entry) for entry in pool) for pool in values["experts"])
        contents = Contents.from_dict(values["contents"])
        dense, rows = values["dense"], tuple(Entry(*entry) for entry in values.get("rows", ()))
        store = cls(folder, contents, entries, dense["nbytes"], dense["checksum"], rows)
        store._require_sizes()
        return store

    def _require_sizes(self) -> None:
        expected_bytes = {EXPERTS: self.nbytes, DENSE: self.dense_bytes}
        if self.contents.rows:
            expected_bytes[ROWS] = self.contents.row_layout.nbytes
        for name, expected in expected_bytes.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except OSError as e:
                raise StoreError(f"{path} cannot be read ({reason(e)}). {_PACK_AGAIN}.") from e
            if size != expected:
                raise StoreError(f"{path} is damaged: got {size:,} bytes, expected {expected:,}. {_PACK_AGAIN}.")

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(entry.nbytes for pool in self.entries for entry in pool)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of the largest expert."""
        return max(entry.nbytes for pool in self.entries for entry in pool)

    @cached_property
    def layouts(self) -> dict[Precision, ExpertLayout]:
        return {precision: ExpertLayout(self.contents.spec, precision) for precision in PRECISIONS}

    @property
    def precision(self) -> str:
        """The precision of all experts, or "mixed"."""
        found = {entry.precision for pool in self.entries for entry in pool}
        return found.pop() if len(found) == 1 else "mixed"

    def read(self, pool: int, expert: int) -> list[Float32[np.ndarray, ...]]:
        """The tensors of one expert, through the page cache."""
        entry = self.entries[pool][expert]
        with (self.folder / EXPERTS).open("rb") as f:
            f.seek(entry.offset)
            data = f.read(entry.nbytes)
        if checksum(data) != entry.checksum:
            raise self.damaged(pool, expert, "its checksum differs")
        return self.layouts[entry.precision].decode(np.frombuffer(data, np.uint8).copy())

    def damaged(self, pool: int, expert: int, why: str) -> StoreError:
        """The error for an expert that cannot be used."""
        where = f"expert {expert} of layer {pool * self.contents.layers_per_pool}"
        return StoreError(f"{self.folder / EXPERTS}: {where} cannot be used: {why}. {_PACK_AGAIN}.")

    def tables(self) -> dict[str, Float32[np.ndarray, "rows width"]]:
        """All tables of rows, by their names in the state of the model."""
        return self.contents.row_layout.tables(self._row_pieces()) if self.contents.rows else {}

    def _row_pieces(self) -> Iterator[tuple[Piece, Float32[np.ndarray, "rows width"]]]:
        layout, path = self.contents.row_layout, self.folder / ROWS
        with path.open("rb") as f:
            for piece, entry in zip(layout.pieces(), self.row_entries, strict=True):
                data = f.read(entry.nbytes)
                if checksum(data) != entry.checksum:
                    raise StoreError(f"{path} is damaged: its checksum differs. {_PACK_AGAIN}.")
                yield piece, layout.decode(piece, np.frombuffer(data, np.uint8))

    def damaged_row(self, group: int, row: int, why: str) -> StoreError:
        """The error for a row that cannot be used."""
        where = self.contents.rows[group].named(row)
        return StoreError(f"{self.folder / ROWS}: {where} cannot be used: {why}. {_PACK_AGAIN}.")

    def require_dense(self) -> Path:
        """The file of the dense part, after its checksum was compared."""
        path = self.folder / DENSE
        if file_checksum(path) != self.dense_checksum:
            raise StoreError(f"{path} is damaged: its checksum differs. {_PACK_AGAIN}.")
        return path


def write_index(folder: Path, contents: Contents, entries: list[list[Entry]], rows: list[Entry]) -> None:
    """Write the index of a store whose other files are complete."""
    dense = folder / DENSE
    values: dict[str, Any] = {
        "schema": contents.schema,
        "contents": contents.as_dict(),
        "dense": {"nbytes": dense.stat().st_size, "checksum": file_checksum(dense)},
        "experts": [[list(asdict(entry).values()) for entry in pool] for pool in entries],
    }
    if rows:
        values["rows"] = [list(asdict(entry).values()) for entry in rows]
    values["checksum"] = _index_checksum(values)
    files.write_text(folder / INDEX, json.dumps(values) + "\n")


def _index_checksum(values: dict[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True).encode())
