"""A router that reads an average: what the gate sees changes slowly, so its choice does too."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_share

if TYPE_CHECKING:
    from stickymoe.routing.routers import Filter


@register
@dataclass(frozen=True)
class SmoothVariant(Routed):
    """The gate reads a causal exponential average of the hidden states of its document.

    Args:
        mu: weight μ of the load-balancing loss
        decay: share d of the average that is kept from token to token; 0 is vanilla
        learned: let each layer learn its decay, from d on
    """

    name: ClassVar[str] = "smooth"
    equation: ClassVar[str] = "s_t = d·s_t−1 + (1−d)·h_t,  g = softmax(W_g·s_t);  L = L_CE + μ·L_bal"

    decay: float = hyper(0.5, "d")
    learned: bool = hyper(False, "learned", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("decay", self.decay, below_one=True)
        require(self.decay > 0 or not self.learned, "variant.decay", self.decay, "a number in (0, 1) to learn from")

    def filter(self, site: RouterSite) -> "Filter":
        from stickymoe.routing.sequential import LearnedSmooth, Smooth

        return LearnedSmooth(self.decay) if self.learned else Smooth(self.decay)
