"""Synthetic traces for planning and benchmarks, of any size, stickiness and skew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stickymoe.errors import require
from stickymoe.locality.formats import create_table
from stickymoe.locality.table import BLOCK, blocks, index_dtype, release


@dataclass(frozen=True)
class Synthetic:
    """The properties of a synthetic trace.

    stickiness: the probability that an expert is kept from one token to the next. A new draw may give the same expert,
        so experts stay a little more often
    skew: popularity falls with rank as rank^−skew; 0 is uniform. Each layer has its own ranks
    """

    n_experts: int = 64
    top_k: int = 8
    n_layers: int = 16
    sequences: int = 16
    length: int = 1024
    stickiness: float = 0.5
    skew: float = 0.5
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("n_experts", "top_k", "n_layers", "sequences", "length"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number ≥ 1")
        require(self.n_experts <= 1 << 16, "n_experts", self.n_experts, "at most 65536")
        require(self.top_k <= self.n_experts, "top_k", self.top_k, f"at most n_experts={self.n_experts}")
        require(0 <= self.stickiness <= 1, "stickiness", self.stickiness, "a probability in [0, 1]")
        require(0 <= self.skew < 100, "skew", self.skew, "a number in [0, 100)")
        require(0 <= self.seed < 2**32, "seed", self.seed, "a whole number in [0, 2³²)")


def make_trace(folder: Path, kind: Synthetic) -> None:
    """Write a synthetic trace folder, a block at a time."""
    from stickymoe.locality.kernels import draw_sets, seed  # numba is slow to import

    rng = np.random.default_rng(kind.seed)
    popularity = np.arange(1, kind.n_experts + 1, dtype=np.float64) ** -kind.skew
    chances = np.cumsum(popularity / popularity.sum())
    shape = (kind.n_layers, kind.sequences, kind.length, kind.top_k)
    arrays = {"S": (shape, index_dtype(kind.n_experts)), "mask": (shape[1:3], np.bool_)}
    with create_table(folder, arrays, n_experts=kind.n_experts) as written:
        S, mask = written["S"], written["mask"]
        seed(kind.seed)
        for layer in range(kind.n_layers):
            ranked = rng.permutation(kind.n_experts)
            for b in range(kind.sequences):
                state = np.full(kind.top_k, -1)
                for span in blocks(kind.length, max(BLOCK // kind.top_k, 1)):
                    part = np.empty((span.stop - span.start, kind.top_k), S.dtype)
                    draw_sets(part, state, ranked, popularity, chances, kind.stickiness)
                    S[layer, b, span] = part
                    release(S)
        for b in range(kind.sequences):
            for span in blocks(kind.length, BLOCK):
                mask[b, span] = True
                release(mask)
