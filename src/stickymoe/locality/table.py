"""`RouteTable`: which experts every token chose, without gradient; what metrics, replay and files speak.

L layers, B sequences, T steps, N experts, k experts per token.
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

BLOCK = 1 << 22  # elements looked at at a time, so that a table larger than memory never sits in it
MOST_EXPERTS = 1 << 16


def index_dtype(n_experts: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned type that holds every expert index."""
    if not 1 <= n_experts <= MOST_EXPERTS:
        raise DataError(f"n_experts: got {n_experts}, expected 1 … {MOST_EXPERTS}.")
    return np.uint8 if n_experts <= 256 else np.uint16


def release(array: Shaped[np.ndarray, ...]) -> None:
    """Let go of what was read of a mapped array: its pages count as memory of this process otherwise."""
    mapping = getattr(array, "_mmap", None)
    private = getattr(array, "mode", None) == "c"  # what was written to such a mapping lives nowhere else
    if mapping is not None and not private and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 … `length`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def extremes(array: Integer[np.ndarray, ...]) -> tuple[int, int]:
    """Least and greatest of a non-empty array, read in blocks."""
    flat = array.reshape(-1)
    found = []
    for block in blocks(len(flat), BLOCK):
        found += [int(flat[block].min()), int(flat[block].max())]
        release(array)
    return min(found), max(found)


def _wrong(name: str, array: Shaped[np.ndarray, ...], expected: str) -> DataError:
    return DataError(f"The route table's {name}: got {array.dtype} {array.shape}, expected {expected}.")


@dataclass(frozen=True)
class RouteTable:
    """`S` holds the chosen experts, heaviest first; arrays may be memory-mapped.

    `mask` marks real tokens and `doc` numbers documents; `weights` are the combine weights of `S`; `phase` tells
    prefill (0) from decode (1) in the trace of a generation; `tokens` are the token ids; `expert_bytes` is the size
    of one expert. What is unknown is None.
    """

    S: Integer[np.ndarray, "L B T k"]
    n_experts: int
    mask: Bool[np.ndarray, "B T"]
    doc: Integer[np.ndarray, "B T"] | None = None
    weights: Float[np.ndarray, "L B T k"] | None = None
    phase: Integer[np.ndarray, "B T"] | None = None
    tokens: Integer[np.ndarray, "B T"] | None = None
    expert_bytes: int | None = None

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
        if self.expert_bytes is not None and self.expert_bytes < 1:
            raise DataError(f"The route table's expert_bytes: got {self.expert_bytes}, expected a whole number ≥ 1.")
        if self.S.size:
            for extreme in extremes(self.S):
                if not 0 <= extreme < self.n_experts:
                    raise DataError(
                        f"The route table names expert {extreme}, but there are {self.n_experts} experts "
                        f"(0 … {self.n_experts - 1})."
                    )

    @property
    def n_layers(self) -> int:
        return int(self.S.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.S.shape[3])

    @cached_property
    def pairs(self) -> Bool[np.ndarray, "B steps"]:
        """Adjacent tokens that count: both real and in the same document."""
        both: Bool[np.ndarray, "B steps"] = self.mask[:, 1:] & self.mask[:, :-1]
        if self.doc is not None:
            both &= self.doc[:, 1:] == self.doc[:, :-1]
        return both
