"""A router with two speeds: one gate reads the token, another the average of its document so far."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import BELOW_ONE, Balanced, Site, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Filter


@register
@dataclass(frozen=True)
class TwoSpeedVariant(Balanced):
    """The sum of the logits of a gate on the token and of a gate on the average of its document so far."""

    name: ClassVar[str] = "two_speed"
    equation: ClassVar[str] = "s_t = d·s_t−1 + (1−d)·h_t,  g = softmax(W_g·h_t + W_s·s_t);  L = L_CE + μ·L_bal"

    slow: float = hyper(0.9, "slow", "decay d of the average", BELOW_ONE)

    def filter(self, site: Site) -> "Filter":
        from stickymoe.routing.sequential import TwoSpeed

        return TwoSpeed(self.slow)
