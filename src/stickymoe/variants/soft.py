"""The paper's method (`eq:total_loss`): adjacent tokens are asked to have similar gate distributions."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight


@register
@dataclass(frozen=True)
class Soft(Routed):
    """Routing consistency loss: the squared distance of adjacent tokens' gate distributions.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the consistency loss
    """

    name: ClassVar[str] = "soft"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·L_cons,  L_cons = mean ‖g_t − g_t−1‖²"

    lam: float = hyper(0.1, "λ")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import consistency_by_layer

        return (*super().terms(), Term("cons", self.lam, lambda trace, ctx: consistency_by_layer(trace)))
