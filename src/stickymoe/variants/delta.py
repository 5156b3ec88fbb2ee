"""Experts that are a resident base and a small difference: a load reads only the difference."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.deltas import Deltas
from stickymoe.variants.base import COUNT, hyper, register
from stickymoe.variants.slots import Slots


@register
@dataclass(frozen=True)
class DeltaVariant(Slots):
    """Expert i is the base i mod C, which stays in fast memory, plus a difference of rank r, which is loaded.

    The experts of a base start with the same weights.
    """

    name: ClassVar[str] = "delta"
    equation: ClassVar[str] = "W_i = base_c + B_i·A_i for both matrices, c = i mod C, rank r;  L = L_CE + μ·L_bal"

    rank: int = hyper(8, "r", "rank r of the difference of each matrix from its base", COUNT)

    def deltas(self) -> Deltas:
        return Deltas(self.capacity, self.rank)
