"""A peer's objective (BlES, of CoSMoEs): gate distance, counted where experts were replaced."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight


@register
@dataclass(frozen=True)
class BlES(Routed):
    """The L1 distance of adjacent gates times the share of the experts that were replaced.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the loss
    """

    name: ClassVar[str] = "bles"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·mean r_t·‖g_t − g_t−1‖₁,  r_t = |S_t ∖ S_t−1| / k"

    lam: float = hyper(0.1, "λ")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import replacement_by_layer

        return (*super().terms(), Term("bles", self.lam, lambda trace, ctx: replacement_by_layer(trace)))
