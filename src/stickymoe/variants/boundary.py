"""A consistency loss that knows sentence ends: weaker between sentences, stronger inside them."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import WEIGHT, Balanced, hyper, register


@register
@dataclass(frozen=True)
class Boundary(Balanced):
    """The consistency loss, with less weight on pairs across the end of a sentence or paragraph."""

    name: ClassVar[str] = "boundary"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·Σ ω‖g_t − g_t−1‖² / Σ ω,  ω = across at ends, 1 inside"

    lam: float = hyper(0.1, "λ", "weight λ of the loss", WEIGHT)
    across: float = hyper(
        0.0,
        "across",
        "weight of a pair across an end (1 inside a sentence); the mean weight stays 1",
        WEIGHT,
        always=False,
    )

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import boundary_by_layer

        return (Term("bound", self.lam, lambda trace, context: boundary_by_layer(trace, across=self.across)),)
