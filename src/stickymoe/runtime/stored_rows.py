"""Rows that are read from the store while a model computes, and the hot ones that stay in memory.

    rows.begin(tokens, position, first, n)    # the addresses of n tokens are known: their rows are read
    rows.take(name)                           # the rows of a table, in the layer that adds them; waits if necessary

A token asks each cache once for its rows. A prompt asks for the union of its rows, which are read in the order in which
they lie. T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from stickymoe.errors import StoreError
from stickymoe.locality.cache import SparseCache
from stickymoe.locality.policies import find_policy
from stickymoe.locality.row_kernels import find_rows
from stickymoe.locality.rows import first_numbers, key_fields, size_classes
from stickymoe.runtime.memory import Region
from stickymoe.runtime.readers import THREADS, Readers, StoreFile, Ticket
from stickymoe.runtime.rows import BLOCK, GroupLayout, RowLayout
from stickymoe.runtime.slots import Waits
from stickymoe.runtime.store import ROWS, Store

ROW_COUNTS = ("rows", "row_hits", "row_bytes_read")
_SPAN = 16 * BLOCK  # bytes of neighbouring rows that are read together, at most
_SPANS = 16  # reads of one ticket, at most


class Wanted(NamedTuple):
    """A row that is read: where it lies, where it goes, and its key in the cache of its size."""

    at: int  # of its first block
    inner: int  # of the row in that block
    group: int
    row: int
    target: memoryview
    key: int


class Span(NamedTuple):
    """Neighbouring rows that are read together."""

    at: int
    nbytes: int
    rows: list[Wanted]


class RowTicket(Ticket):
    """A read of some spans, for one layer or a later one."""

    __slots__ = ("file", "layer", "layout", "spans", "store")

    def __init__(self, store: Store, file: StoreFile, layer: int, spans: Sequence[Span]) -> None:
        super().__init__()
        self.store, self.file, self.layer, self.spans = store, file, layer, spans
        self.layout = store.contents.row_layout

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def read(self, readers: Readers) -> None:
        may_end = readers.reserve(self.nbytes)
        for span in self.spans:
            data = readers.scratch(max(span.nbytes, _SPAN))[: span.nbytes]
            whole = self.file.read(data, span.at)
            for wanted in span.rows:
                self._keep(data, span.at, wanted, whole)
        readers.wait_until(may_end)

    def _keep(self, data: memoryview, at: int, wanted: Wanted, whole: bool) -> None:
        begin, n = wanted.at + wanted.inner - at, len(wanted.target)
        row, found = data[begin : begin + n], int.from_bytes(data[begin + n : begin + n + 8], "little")
        if not whole:
            raise self.store.damaged_row(wanted.group, wanted.row, "the file ends before it")
        if self.layout.checksum(wanted.group, wanted.row, row) != found:
            raise self.store.damaged_row(wanted.group, wanted.row, "its checksum differs")
        wanted.target[:] = row

    def failed(self, why: str) -> StoreError:
        first = self.spans[0].rows[0]
        return self.store.damaged_row(first.group, first.row, why)


class HotRows:
    """Slots for rows of one size."""

    def __init__(self, capacity: int, nbytes: int, policy: str) -> None:
        self._policy = policy
        self.cache = SparseCache(capacity=capacity, policy=policy)
        self.region = Region(capacity, nbytes)
        self._slot: dict[int, int] = {}

    def ask(self, keys: Sequence[int], *, union: bool) -> dict[int, memoryview]:
        """Ask for rows; those that are in memory, by key. The others must be `put` when they are read."""
        slots = [(key, self._slot[key]) for key in keys if key in self._slot]
        outcome = self.cache.request_union(keys) if union else self.cache.request(keys)
        for load in outcome.loads:
            assert load.slot is not None
            if load.evicted is not None:
                del self._slot[load.evicted]
            self._slot[load.expert] = load.slot
        return {key: self.region.view(slot) for key, slot in slots}

    def empty(self) -> None:
        self.cache = SparseCache(capacity=self.cache.capacity, policy=self._policy)
        self._slot.clear()

    def put(self, key: int, row: memoryview) -> None:
        """A row was read; it is kept if it has a slot."""
        slot = self._slot.get(key)
        if slot is not None:
            self.region.view(slot)[:] = row


class StoredRows:
    """The rows of one forward pass at a time. `memory` is the most that hot rows take.

    requested, hits: rows, and those that were in memory
    bytes_read: whole blocks
    """

    def __init__(self, store: Store, readers: Readers, waits: Waits, *, memory: float) -> None:
        self.layout: RowLayout = store.contents.row_layout
        self.requested = self.hits = self.bytes_read = 0
        self._store, self._readers, self._waits = store, readers, waits
        self._file = readers.open(ROWS)
        places = self.layout.places
        self._fields = key_fields([place.group.key for place in places])
        keys = [place.group.key for place in places]
        self._first = first_numbers(keys)
        self._sizes = size_classes(keys, int(memory // self.layout.row_bytes))
        self._hot: list[HotRows] = []
        self._of_one = [_empty(1, place) for place in places]  # at fixed addresses, which compiled loops know
        self._data, self._views = zip(*self._of_one, strict=True)
        self._which: list[Int[np.ndarray, " T"]] | None = None  # the place of each token's row in `_data`
        self._tables = {name: _parts(places, name) for name in self.layout.shapes}
        self._ids = np.empty((1, len(places)), np.int64)
        find_rows(np.zeros(1, np.int64), np.zeros(1, np.int64), 0, self._fields, self._ids)  # compiled before a text
        self._landing: list[RowTicket] = []

    def configure(self, policy: str) -> None:
        """Empty the hot rows; from now on `policy` decides which stay."""
        self._abandon()
        self._hot = []  # freed before the new ones are allocated
        online = policy if find_policy(policy).knows is None else "lru"
        self._hot = [HotRows(size.capacity, size.nbytes, online) for size in self._sizes if size.capacity]

    def empty(self) -> None:
        """Empty the hot rows."""
        self._abandon()
        for hot in self._hot:
            hot.empty()

    @property
    def nbytes(self) -> int:
        """Bytes in memory: hot rows, and those of one token."""
        return sum(hot.region.nbytes for hot in self._hot) + self.layout.row_bytes

    @property
    def counts(self) -> list[int]:
        """What was counted, in the order of ROW_COUNTS."""
        return [self.requested, self.hits, self.bytes_read]

    def begin(self, tokens: Int64[np.ndarray, " text"], position: Int64[np.ndarray, " places"], first: int) -> None:
        """A forward pass of the tokens from `first` on: find their rows, and read those that are not in memory."""
        self._abandon()
        n = len(tokens) - first
        ids = self._ids if n == 1 else np.empty((n, len(self._fields)), np.int64)
        find_rows(tokens, position, first, self._fields, ids)
        if n == 1:
            rows: list[Any] = [[row] for row in ids[0].tolist()]
            self._data, self._views = zip(*self._of_one, strict=True)
            self._which = None
        else:
            found = [np.unique(column, return_inverse=True) for column in ids.T]
            rows, self._which = [unique.tolist() for unique, _ in found], [which for _, which in found]
            filled = [_empty(len(r), place) for r, place in zip(rows, self.layout.places, strict=True)]
            self._data, self._views = zip(*filled, strict=True)
        self._landing = list(self._tickets(sorted(self._missing(rows, union=n > 1))))
        self._readers.submit(*self._landing)

    def wait(self, layer: int) -> None:
        """Wait until the rows of a layer are in memory."""
        awaited = [ticket for ticket in self._landing if ticket.layer <= layer]
        if not all(ticket.done for ticket in awaited):
            start = time.perf_counter()
            for ticket in awaited:
                self._readers.wait_any([ticket])
            self._waits.row_stall_s += time.perf_counter() - start
        for ticket in awaited:
            if ticket.error is not None:
                raise ticket.error
            self.bytes_read += ticket.nbytes
            if self._hot:
                self._put(ticket)
        self._landing = [ticket for ticket in self._landing if ticket.layer > layer]

    def take(self, name: str) -> Float[np.ndarray, "T parts width"]:
        """The rows of a table in this pass; those of its heads are the parts."""
        parts = self._tables[name]
        self.wait(max(self.layout.groups[i].layer for i, _ in parts))
        which = self._which
        rows = [self._data[i][:, c] if which is None else self._data[i][which[i], c] for i, c in parts]
        return np.stack(rows, axis=1)

    def addresses(self, name: str) -> list[int]:
        """Where the rows of one token lie in memory, one for each head of a table."""
        return [self._of_one[i][0].ctypes.data + 4 * c.start for i, c in self._tables[name]]

    def _missing(self, rows: list[list[int]], *, union: bool) -> Iterator[Wanted]:
        """The rows that must be read; those that are in memory are copied."""
        for number, size in enumerate(self._sizes):
            wanted = {
                self._first[i] + row: (i, row, view)
                for i in size.keys
                for row, view in zip(rows[i], self._views[i], strict=True)
            }
            self.requested += len(wanted)
            held = self._hot[number].ask(list(wanted), union=union) if self._hot else {}
            self.hits += len(held)
            for key, (i, row, view) in wanted.items():
                if key in held:
                    view[:] = held[key]
                else:
                    place = self.layout.places[i]
                    unit, inner = divmod(row, place.per_unit)
                    yield Wanted(place.offset + unit * place.unit, inner * place.stride, i, row, view, key)

    def _tickets(self, missing: list[Wanted]) -> Iterator[RowTicket]:
        """Reads of rows in the order in which they lie, for each layer that needs some."""
        groups = self.layout.groups
        for layer, wanted in groupby(missing, lambda row: groups[row.group].layer):
            spans = list(self._spans(wanted))
            n = min(-(-len(spans) // (2 * THREADS)) + 1, _SPANS)
            for first in range(0, len(spans), n):
                yield RowTicket(self._store, self._file, layer, spans[first : first + n])

    def _spans(self, wanted: Iterator[Wanted]) -> Iterator[Span]:
        """Rows of the same or of adjacent blocks, together."""
        at = end = 0
        rows: list[Wanted] = []
        for row in wanted:
            stop = row.at + self.layout.places[row.group].unit
            if rows and (row.at > end or stop - at > _SPAN):
                yield Span(at, end - at, rows)
                rows = []
            at = at if rows else row.at
            end = stop
            rows.append(row)
        if rows:
            yield Span(at, end - at, rows)

    def _put(self, ticket: RowTicket) -> None:
        """Keep what was read, where it has a slot."""
        for span in ticket.spans:
            for wanted in span.rows:
                self._hot[self._size_of(wanted.group)].put(wanted.key, wanted.target)

    def _size_of(self, group: int) -> int:
        return next(number for number, size in enumerate(self._sizes) if group in size.keys)

    def _abandon(self) -> None:
        """End the reads of a pass that was not completed. What the hot rows hold is not known then."""
        if self._landing:
            for ticket in self._landing:
                self._readers.cancel(ticket)
            self._landing = []
            for hot in self._hot:
                hot.empty()


class StoredTable(nn.Module):
    """Takes the place of a table in the model."""

    def __init__(self, rows: StoredRows, name: str) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.num_embeddings, self.embedding_dim = rows.layout.shapes[name]

    def forward(self, index: Int[Tensor, "1 T *heads"]) -> Float[Tensor, "1 T *parts"]:
        found = torch.from_numpy(self.rows.take(self.name))
        return found.reshape(*index.shape, -1)


def _empty(n: int, place: GroupLayout) -> tuple[Float[np.ndarray, "n width"], list[memoryview]]:
    """Memory for n rows, and the bytes of each."""
    data = np.zeros((n, place.group.width), np.float32)
    whole: memoryview = data.reshape(-1).view(np.uint8).data
    return data, [whole[i * place.nbytes : (i + 1) * place.nbytes] for i in range(n)]


def _parts(places: Sequence[GroupLayout], name: str) -> list[tuple[int, slice]]:
    """The groups that have rows of a table, and in which columns, in the order of its heads."""
    found = [
        (table.first, i, place.group.columns(table))
        for i, place in enumerate(places)
        for table in place.group.tables
        if table.name == name
    ]
    return [(i, columns) for _, i, columns in sorted(found, key=lambda part: part[0])]
