"""A router that holds on to what it chose: a bonus for the experts of the previous token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_weight

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class HysteresisVariant(Routed):
    """Experts chosen at the previous token stay unless others beat their logits by the bonus.

    Args:
        mu: weight μ of the load-balancing loss
        bonus: bonus m on the logits of the experts chosen at the previous token; the weights are without it
    """

    name: ClassVar[str] = "hysteresis"
    equation: ClassVar[str] = "S_t = top-k(ℓ + m·1[e ∈ S_t−1]),  g = softmax(ℓ);  L = L_CE + μ·L_bal"

    bonus: float = hyper(0.5, "m")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("bonus", self.bonus)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Hysteresis

        return Hysteresis(bonus=self.bonus)
