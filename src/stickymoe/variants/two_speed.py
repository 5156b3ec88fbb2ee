"""A router of two speeds: one gate reads the token, another the average of what came before it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_share

if TYPE_CHECKING:
    from stickymoe.routing.routers import Filter


@register
@dataclass(frozen=True)
class TwoSpeedVariant(Routed):
    """The logits of a gate on the token and of a gate on the average of its document so far, added.

    Args:
        mu: weight μ of the load-balancing loss
        slow: share d of the average that is kept from token to token
    """

    name: ClassVar[str] = "two_speed"
    equation: ClassVar[str] = "s_t = d·s_t−1 + (1−d)·h_t,  g = softmax(W_g·h_t + W_s·s_t);  L = L_CE + μ·L_bal"

    slow: float = hyper(0.9, "slow")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("slow", self.slow, below_one=True)

    def filter(self, site: RouterSite) -> "Filter":
        from stickymoe.routing.sequential import TwoSpeed

        return TwoSpeed(self.slow)
