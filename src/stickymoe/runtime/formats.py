"""How one expert lies in a store: its tensors in the layout that the kernels read, in one of four precisions.

An expert is a feed-forward network. Its matrices are [out, in], row by row; biases and other vectors are always fp32.
Every piece begins at a multiple of 64 bytes, and an expert at a multiple of 4,096 bytes, so that one direct read
brings it into a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int4")
PAGE = 4096  # an expert begins at a multiple of it: direct I/O needs 512, huge pages like 4,096
ALIGNMENT = 64  # a piece of an expert begins at a multiple of it
GROUP = 64  # columns that share a scale in int4


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of one expert: a matrix [out, in], or a vector."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertSpec:
    """The tensors of one expert, and what it computes.

    tensors: in the order in which they are stored. `up` [m, d] and `down` [d, f] are always there; `up_bias` [m] and
        `down_bias` [d] may be. With a gate, m = 2·f: first the rows of the gate, then the others
    activation: what compiled kernels apply: "gelu" (exact), "gelu_tanh", "silu" or "relu2"; None if only the model's
        own code knows it
    gated: out = down·(activation(gate) ⊙ up); otherwise out = down·activation(up)
    """

    tensors: tuple[TensorSpec, ...]
    activation: str | None
    gated: bool
