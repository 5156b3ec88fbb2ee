"""A peer's objective (cacheable-by-design): adjacent gates are asked to overlap."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight


@register
@dataclass(frozen=True)
class Dot(Routed):
    """One minus the inner product of adjacent gates, which also asks them to be sure of themselves.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the loss
    """

    name: ClassVar[str] = "dot"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·mean (1 − ⟨g_t, g_t−1⟩)"

    lam: float = hyper(0.1, "λ")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import dot_by_layer

        return (*super().terms(), Term("dot", self.lam, lambda trace, ctx: dot_by_layer(trace)))
