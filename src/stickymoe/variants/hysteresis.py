"""A router that keeps its choice: a bonus for the experts of the previous token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import WEIGHT, Balanced, Site, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class HysteresisVariant(Balanced):
    """Experts of the previous token stay chosen unless others beat their logits by the bonus."""

    name: ClassVar[str] = "hysteresis"
    equation: ClassVar[str] = "S_t = top-k(ℓ + m·1[e ∈ S_t−1]),  g = softmax(ℓ);  L = L_CE + μ·L_bal"

    bonus: float = hyper(
        0.5, "m", "bonus m on the logits of the previous token's experts; combine weights ignore it", WEIGHT
    )

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.sequential import Hysteresis

        return Hysteresis(bonus=self.bonus)
