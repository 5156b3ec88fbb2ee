"""How rows of tables lie in a store: the parts of a row next to each other, whatever tables they belong to.

A token reads one row for each way to address it (`RowKey`): the rows of all layers that are keyed by the token alone
are one row of the store, and each hash of its last tokens has rows of its own. A row is followed by its checksum, so
that a single row can be read and compared. Rows lie in blocks of 4,096 bytes, the unit of direct reads, and none
crosses a border that it could avoid: a row of up to 4,088 bytes costs one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Float32, UInt8

from stickymoe.locality.rows import RowKey

BLOCK = 4096  # bytes that a direct read takes at least
_CHECKSUM = 8
_PIECE = 1 << 24  # bytes that are packed at a time

TableReader = Callable[[str, int, int], Float32[np.ndarray, "rows width"]]  # name, first, stop → rows of a table


@dataclass(frozen=True)
class TableRows:
    """The part of a table that a group of rows has.

    name: of the table in the state of the model
    layer: that reads the table
    first: the row of the table that is row 0 of the group
    width: numbers of a row of the table
    """

    name: str
    layer: int
    first: int
    width: int


@dataclass(frozen=True)
class RowGroup:
    """The rows of all tables that are addressed alike. See `RowKey` for n, salt and rows."""

    n: int
    salt: int
    rows: int
    tables: tuple[TableRows, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowGroup:
        return cls(**{**values, "tables": tuple(TableRows(**table) for table in values["tables"])})

    @cached_property
    def width(self) -> int:
        """Numbers of a row."""
        return sum(table.width for table in self.tables)

    @property
    def key(self) -> RowKey:
        return RowKey(self.n, self.salt, self.rows, 4 * self.width)

    @cached_property
    def layer(self) -> int:
        """The first layer that reads the rows."""
        return min(table.layer for table in self.tables)

    def columns(self, table: TableRows) -> slice:
        """Where the numbers of a table lie in a row."""
        begin = sum(other.width for other in self.tables[: self.tables.index(table)])
        return slice(begin, begin + table.width)

    def named(self, row: int) -> str:
        """A row in a message."""
        if self.n == 1:
            return f"the row of token {row}"
        return f"row {row} of the {self.n}-grams of layer {self.layer}"


@dataclass(frozen=True)
class Piece:
    """Rows of a group that are packed at a time."""

    group: int
    first: int
    stop: int


@dataclass(frozen=True)
class GroupLayout:
    """Where the rows of a group lie, from `offset` on.

    unit: bytes that are read for a row, whole blocks
    per_unit: rows in a unit
    """

    group: RowGroup
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row, without its checksum."""
        return 4 * self.group.width

    @cached_property
    def stride(self) -> int:
        return self.nbytes + _CHECKSUM

    @cached_property
    def unit(self) -> int:
        return -(-self.stride // BLOCK) * BLOCK

    @cached_property
    def per_unit(self) -> int:
        return max(BLOCK // self.stride, 1)

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return self.unit * -(-self.group.key.n_rows // self.per_unit)

    def span(self, piece: Piece) -> tuple[int, int]:
        """Offset and bytes of a piece."""
        units = -(-(piece.stop - piece.first) // self.per_unit)
        return self.offset + piece.first // self.per_unit * self.unit, units * self.unit


@dataclass(frozen=True)
class RowLayout:
    """Where every row of a store lies. `fingerprint` is that of the weights: checksums depend on it and on the place,
    so that a row of another model or place is noticed.
    """

    groups: tuple[RowGroup, ...]
    fingerprint: str

    @cached_property
    def places(self) -> tuple[GroupLayout, ...]:
        found: list[GroupLayout] = []
        for group in self.groups:
            found.append(GroupLayout(group, found[-1].offset + found[-1].total if found else 0))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in the store."""
        return sum(place.total for place in self.places)

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows that a token reads."""
        return sum(place.nbytes for place in self.places)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables in memory."""
        return 4 * sum(rows * width for rows, width in self.shapes.values())

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of every table. The row for short texts is its last one."""
        found: dict[str, tuple[int, int]] = {}
        for group in self.groups:
            for table in group.tables:
                rows = max(table.first + group.key.n_rows, found.get(table.name, (0, 0))[0])
                found[table.name] = rows, table.width
        return found

    def pieces(self) -> Iterator[Piece]:
        """All rows, in the order in which they lie."""
        for number, place in enumerate(self.places):
            n, step = place.group.key.n_rows, max(_PIECE // place.unit, 1) * place.per_unit
            for first in range(0, n, step):
                yield Piece(number, first, min(first + step, n))

    @cached_property
    def _seed(self) -> int:
        return xxhash.xxh3_64_intdigest(self.fingerprint.encode())

    def checksum(self, group: int, row: int, data: Any) -> int:
        """The checksum of a row, which depends on where it lies."""
        return xxhash.xxh3_64_intdigest(data, self._seed ^ (group << 40) ^ row)

    def encode(self, piece: Piece, read: TableReader) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of a piece."""
        place = self.places[piece.group]
        n = piece.stop - piece.first
        rows = np.zeros((-(-n // place.per_unit) * place.per_unit, place.stride), np.uint8)
        rows[:n, : place.nbytes] = self._parts(piece, read).view(np.uint8)
        sums = [
            self.checksum(piece.group, row, data[: place.nbytes].data) for row, data in enumerate(rows[:n], piece.first)
        ]
        rows[:n, place.nbytes :] = np.array(sums, "<u8").view(np.uint8).reshape(n, _CHECKSUM)
        units = np.zeros((len(rows) // place.per_unit, place.unit), np.uint8)
        units[:, : place.per_unit * place.stride] = rows.reshape(len(units), -1)
        return units.reshape(-1)

    def decode(self, piece: Piece, data: UInt8[np.ndarray, " bytes"]) -> Float32[np.ndarray, "rows width"]:
        """The rows of a piece, without a look at their checksums."""
        place = self.places[piece.group]
        units = data.reshape(-1, place.unit)[:, : place.per_unit * place.stride]
        rows = units.reshape(-1, place.stride)[: piece.stop - piece.first, : place.nbytes]
        return np.ascontiguousarray(rows).view(np.float32)

    def tables(self, pieces: Iterator[tuple[Piece, Float32[np.ndarray, "rows width"]]]) -> dict[str, Any]:
        """All tables from all pieces."""
        found = {name: np.empty(shape, np.float32) for name, shape in self.shapes.items()}
        for piece, rows in pieces:
            group = self.groups[piece.group]
            for table in group.tables:
                part, columns = found[table.name], rows[:, group.columns(table)]
                for first, stop, at in _in_table(group, table, piece, len(part)):
                    part[at : at + stop - first] = columns[first - piece.first : stop - piece.first]
        return found

    def _parts(self, piece: Piece, read: TableReader) -> Float32[np.ndarray, "rows width"]:
        """The rows of a piece, from their tables."""
        group, shapes = self.groups[piece.group], self.shapes
        rows = np.empty((piece.stop - piece.first, group.width), np.float32)
        for table in group.tables:
            columns = rows[:, group.columns(table)]
            for first, stop, at in _in_table(group, table, piece, shapes[table.name][0]):
                columns[first - piece.first : stop - piece.first] = read(table.name, at, at + stop - first)
        return rows


def _in_table(group: RowGroup, table: TableRows, piece: Piece, table_rows: int) -> Iterator[tuple[int, int, int]]:
    """First and last row of a piece, and where they are in a table; the row for short texts is its last one."""
    stop = min(piece.stop, group.rows)
    if piece.first < stop:
        yield piece.first, stop, table.first + piece.first
    if group.n > 1 and piece.stop > group.rows:
        yield group.rows, group.rows + 1, table_rows - 1


def grouped(tables: Sequence[tuple[int, int, int, TableRows]]) -> tuple[RowGroup, ...]:
    """Groups of the tables that are addressed alike; each table comes with n, salt and rows."""
    found: dict[tuple[int, int, int], list[TableRows]] = {}
    for n, salt, rows, table in tables:
        found.setdefault((n, salt, rows), []).append(table)
    return tuple(RowGroup(*key, tuple(parts)) for key, parts in found.items())
