"""A peer's objective (BlockFFN): adjacent tokens predict each other's experts, and a chunk calls few."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight, require_window


@register
@dataclass(frozen=True)
class BlockFFN(Routed):
    """Binary cross-entropy of adjacent gates, and the share of experts that a chunk of tokens calls.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the adjacent cross-entropy
        xi: weight ξ of the chunk loss
        chunk: chunk length W
    """

    name: ClassVar[str] = "blockffn"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·BCE(g_t, g_t−1) + ξ·mean (1 − Π_t (1 − g_t)^k) over chunks of W"

    lam: float = hyper(0.1, "λ")
    xi: float = hyper(0.1, "ξ")
    chunk: int = hyper(8, "chunk")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)
        require_weight("xi", self.xi)
        require_window("chunk", self.chunk)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import adjacent_entropy_by_layer, chunk_by_layer

        return (
            *super().terms(),
            Term("bce", self.lam, lambda trace, ctx: adjacent_entropy_by_layer(trace)),
            Term("chunk", self.xi, lambda trace, ctx: chunk_by_layer(trace, window=self.chunk)),
        )
