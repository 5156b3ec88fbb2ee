"""A loss by other authors (BlES, from CoSMoEs): gate distance, weighted by the fraction of replaced experts."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import WEIGHT, Balanced, hyper, register


@register
@dataclass(frozen=True)
class BlES(Balanced):
    """The L1 distance between adjacent gates, times the fraction of experts that were replaced."""

    name: ClassVar[str] = "bles"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·mean r_t·‖g_t − g_t−1‖₁,  r_t = |S_t ∖ S_t−1| / k"

    lam: float = hyper(0.1, "λ", "weight λ of the loss", WEIGHT)

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import replacement_by_layer

        return (Term("bles", self.lam, lambda trace, context: replacement_by_layer(trace)),)
