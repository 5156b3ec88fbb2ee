"""`RouteTable`: which experts every token chose, without gradient; what metrics, replay and files speak.

L layers, B sequences, T steps, N experts, k experts per token.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer, Shaped

from stickymoe.errors import DataError, require

BLOCK = 1 << 22  # elements looked at at a time, so that a table larger than memory never sits in it


def index_dtype(n_experts: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned type that holds every expert index."""
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
        if not np.issubdtype(self.S.dtype, np.integer):
            raise DataError(f"The route table's experts are {self.S.dtype}, expected whole numbers.")
        for name in ("mask", "doc", "phase", "tokens"):
            array = getattr(self, name)
            if array is not None and array.shape != self.S.shape[1:3]:
                raise DataError(f"The route table's {name} is {array.shape}, expected {self.S.shape[1:3]} as in S.")
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

    def by_tensor(self, share_block: int) -> RouteTable:
        """The same routes, each expert named by its weights: expert e of layer ℓ is ⌊ℓ/K⌋·N + e.

        Blocks of K = `share_block` layers share their experts, so a shared tensor is one name, and one cache entry
        when a cache serves several layers, as in decode order.
        """
        require(self.n_layers % share_block == 0, "share_block", share_block, f"a divisor of {self.n_layers} layers")
        pool = np.arange(self.n_layers) // share_block
        n_experts = (self.n_layers // share_block) * self.n_experts
        S = self.S + (pool * self.n_experts)[:, None, None, None]
        return replace(self, S=S.astype(index_dtype(n_experts)), n_experts=n_experts)

    @cached_property
    def pairs(self) -> Bool[np.ndarray, "B steps"]:
        """Adjacent tokens that count: both real and in the same document."""
        both: Bool[np.ndarray, "B steps"] = self.mask[:, 1:] & self.mask[:, :-1]
        if self.doc is not None:
            both &= self.doc[:, 1:] == self.doc[:, :-1]
        return both
