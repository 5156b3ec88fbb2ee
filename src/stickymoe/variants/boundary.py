"""Consistency that knows where a thought ends: released between sentences, raised inside them."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight


@register
@dataclass(frozen=True)
class Boundary(Routed):
    """The consistency loss, with less weight on pairs that a sentence or paragraph end parts.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the loss
        across: weight of a pair across an end, against 1 inside; the weights' mean stays 1
    """

    name: ClassVar[str] = "boundary"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·Σ ω‖g_t − g_t−1‖² / Σ ω,  ω = across at ends, 1 inside"

    lam: float = hyper(0.1, "λ")
    across: float = hyper(0.0, "across", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)
        require_weight("across", self.across)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import boundary_by_layer

        bound = Term("bound", self.lam, lambda trace, ctx: boundary_by_layer(trace, across=self.across))
        return (*super().terms(), bound)
