"""Losses by other authors (BlockFFN): adjacent tokens predict each other's experts, and a chunk uses few experts."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import COUNT, WEIGHT, Balanced, hyper, register


@register
@dataclass(frozen=True)
class BlockFFN(Balanced):
    """Binary cross-entropy of adjacent gates, and the fraction of experts that a chunk of tokens uses."""

    name: ClassVar[str] = "blockffn"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·BCE(g_t, g_t−1) + ξ·mean (1 − Π_t (1 − g_t)^k) over chunks of W"

    lam: float = hyper(0.1, "λ", "weight λ of the adjacent cross-entropy", WEIGHT)
    xi: float = hyper(0.1, "ξ", "weight ξ of the chunk loss", WEIGHT)
    chunk: int = hyper(8, "chunk", "chunk length W", COUNT)

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import adjacent_entropy_by_layer, chunk_by_layer

        return (
            Term("bce", self.lam, lambda trace, context: adjacent_entropy_by_layer(trace)),
            Term("chunk", self.xi, lambda trace, context: chunk_by_layer(trace, window=self.chunk)),
        )
