"""A loss by other authors (cacheable-by-design): adjacent gates overlap."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import WEIGHT, Balanced, hyper, register


@register
@dataclass(frozen=True)
class Dot(Balanced):
    """One minus the inner product of adjacent gates, which also rewards confident gates."""

    name: ClassVar[str] = "dot"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·mean (1 − ⟨g_t, g_t−1⟩)"

    lam: float = hyper(0.1, "λ", "weight λ of the loss", WEIGHT)

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import dot_by_layer

        return (Term("dot", self.lam, lambda trace, context: dot_by_layer(trace)),)
