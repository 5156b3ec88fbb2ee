"""`RouteTable`: which experts every token chose, without gradient. Metrics, replay and files work on it.

L layers, B sequences, T steps, N experts, k experts per token, p prefetched experts per token, C residents of a router.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer, Shaped

from stickymoe.errors import DataError
from stickymoe.locality.rows import RowKey

BLOCK = 1 << 22  # elements read at a time, so that a table larger than memory can be measured
MOST_EXPERTS = 1 << 16


def index_dtype(n_experts: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned type that holds every expert index."""
    if not 1 <= n_experts <= MOST_EXPERTS:
        raise DataError(f"n_experts: got {n_experts}, expected 1 … {MOST_EXPERTS}.")
    return np.uint8 if n_experts <= 256 else np.uint16


def release(array: Shaped[np.ndarray, ...]) -> None:
    """Drop the pages of a mapped array that were read: otherwise they count as memory of this process."""
    mapping = getattr(array, "_mmap", None)
    private = getattr(array, "mode", None) == "c"  # data written to such a mapping exists nowhere else
    if mapping is not None and not private and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 … `length`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def extremes(array: Integer[np.ndarray, ...]) -> tuple[int, int]:
    """Minimum and maximum of a non-empty array, read in blocks."""
    flat = array.reshape(-1)
    found = []
    for block in blocks(len(flat), BLOCK):
        found += [int(flat[block].min()), int(flat[block].max())]
        release(array)
    return min(found), max(found)


def starts_in(doc: Integer[np.ndarray, " tokens"] | None, length: int, span: slice) -> Bool[np.ndarray, " n"]:
    """Which tokens of a span begin a sequence or document, in a flat stream of sequences of `length` tokens."""
    starts = np.zeros(span.stop - span.start, np.bool_)
    starts[-span.start % length :: length] = True
    if doc is not None:
        before = max(span.start - 1, 0)
        starts[span.start == 0 :] |= np.diff(doc[before : span.stop]) != 0
    return starts


def _wrong(name: str, array: Shaped[np.ndarray, ...], expected: str) -> DataError:
    return DataError(f"The route table's {name}: got {array.dtype} {array.shape}, expected {expected}.")


@dataclass(frozen=True)
class RouteTable:
    """The experts that every token chose in every layer. What is unknown is None. Arrays may be memory-mapped.

    Attributes:
        S: the chosen experts, heaviest first
        mask: real tokens; the others are padding
        doc: document numbers; a text ends where the number changes
        weights: the combine weights of S
        phase: prefill (0) or decode (1), in the trace of a generation
        tokens: token ids
        predicted: the experts that a runtime prefetched before it asked for those of the token; an index of n_experts
            marks an empty place
        residents: the experts that the router itself keeps resident when the token is routed; an index of n_experts
            marks an empty place. The tokens of a prompt are routed together: the set of its last token is what counts
        expert_bytes: bytes of one expert, for each layer
        other_bytes: bytes of all weights outside the experts, which are always resident
        share_block: adjacent layers that use the same expert weights
        row_bytes: bytes of table rows that a token reads from slow memory, over all layers
        row_keys: how these rows are addressed: with `tokens`, they say which rows every token reads
        skips: some tokens use fewer than k experts; an index of n_experts in S marks a slot that uses none
    """

    S: Integer[np.ndarray, "L B T k"]
    n_experts: int
    mask: Bool[np.ndarray, "B T"]
    doc: Integer[np.ndarray, "B T"] | None = None
    weights: Float[np.ndarray, "L B T k"] | None = None
    phase: Integer[np.ndarray, "B T"] | None = None
    tokens: Integer[np.ndarray, "B T"] | None = None
    predicted: Integer[np.ndarray, "L B T p"] | None = None
    residents: Integer[np.ndarray, "L B T C"] | None = None
    expert_bytes: tuple[int, ...] | None = None
    other_bytes: int | None = None
    share_block: int = 1
    row_bytes: int = 0
    row_keys: tuple[RowKey, ...] = ()
    skips: bool = False

    def __post_init__(self) -> None:
        if self.S.ndim != 4 or not np.issubdtype(self.S.dtype, np.integer):
            raise _wrong("experts", self.S, "whole numbers [layers, sequences, tokens, k]")
        if not 1 <= self.top_k <= self.n_experts <= MOST_EXPERTS:
            raise DataError(
                f"The route table chooses {self.top_k} of {self.n_experts} experts, "
                f"expected 1 ≤ k ≤ experts ≤ {MOST_EXPERTS}."
            )
        at = self.S.shape[1:3]
        if self.mask.shape != at or self.mask.dtype != np.bool_:
            raise _wrong("mask", self.mask, f"bool {at}")
        for name in ("doc", "phase", "tokens"):
            array = getattr(self, name)
            if array is not None and (array.shape != at or not np.issubdtype(array.dtype, np.integer)):
                raise _wrong(name, array, f"whole numbers {at}")
        if self.weights is not None and self.weights.shape != self.S.shape:
            raise _wrong("weights", self.weights, f"{self.S.shape} as in S")
        for name in ("predicted", "residents"):
            sets = getattr(self, name)
            if sets is not None and (sets.shape[:-1] != self.S.shape[:3] or not np.issubdtype(sets.dtype, np.integer)):
                raise _wrong(name, sets, f"whole numbers [{', '.join(map(str, self.S.shape[:3]))}, …]")
        self._require_sizes()
        self._require_experts("names", self.S, empty=self.skips)
        if self.predicted is not None:
            self._require_experts("prefetches", self.predicted, empty=True)
        if self.residents is not None:
            self._require_experts("keeps resident", self.residents, empty=True)

    def _require_experts(self, does: str, experts: Integer[np.ndarray, ...], *, empty: bool) -> None:
        """Check that indices are those of experts; n_experts is allowed if places may be `empty`."""
        for extreme in extremes(experts) if experts.size else ():
            if not 0 <= extreme < self.n_experts + empty:
                raise DataError(
                    f"The route table {does} expert {extreme}, but there are {self.n_experts} experts "
                    f"(0 … {self.n_experts - 1})."
                )

    def _require_sizes(self) -> None:
        sizes = self.expert_bytes
        if sizes is not None and (len(sizes) != self.n_layers or any(size < 1 for size in sizes)):
            expected = f"{self.n_layers} whole numbers ≥ 1, one for each layer"
            raise DataError(f"The route table's expert_bytes: got {sizes}, expected {expected}.")
        if self.other_bytes is not None and self.other_bytes < 0:
            raise DataError(f"The route table's other_bytes: got {self.other_bytes}, expected a whole number ≥ 0.")
        if not 1 <= self.share_block <= max(self.n_layers, 1):
            expected = f"a whole number of layers from 1 to {self.n_layers}"
            raise DataError(f"The route table's share_block: got {self.share_block}, expected {expected}.")

    @property
    def n_layers(self) -> int:
        return int(self.S.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.S.shape[3])

    @property
    def used_slots(self) -> int:
        """Slots of real tokens, over all layers, that use an expert."""
        real = int(self.mask.sum()) * self.top_k * self.n_layers
        return real - sum(int((S[self.mask] == self.n_experts).sum()) for S in self.S) if self.skips else real

    @cached_property
    def starts(self) -> Bool[np.ndarray, "B T"]:
        """The first tokens of sequences and documents."""
        B, T = self.mask.shape
        doc = None if self.doc is None else self.doc.reshape(-1)
        return starts_in(doc, max(T, 1), slice(0, B * T)).reshape(B, T)

    @cached_property
    def pairs(self) -> Bool[np.ndarray, "B steps"]:
        """Adjacent tokens that count: both real and in the same document."""
        return np.asarray(self.mask[:, 1:] & self.mask[:, :-1] & ~self.starts[:, 1:])
