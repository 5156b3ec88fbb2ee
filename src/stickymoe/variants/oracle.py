"""The paper's simplified Oracle-MoE: the router reads what attention gathered instead of the hidden state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, RouterSite, register

if TYPE_CHECKING:
    from stickymoe.routing.routers import Source


@register
@dataclass(frozen=True)
class Oracle(Routed):
    """Routing on the attended values before the output projection, no locality loss.

    Args:
        mu: weight μ of the load-balancing loss
    """

    name: ClassVar[str] = "oracle"
    equation: ClassVar[str] = "g = softmax(W_g·a_t),  a_t the attended values;  L = L_CE + μ·L_bal"

    def source(self, site: RouterSite) -> "Source":
        from stickymoe.routing.routers import Attended

        return Attended()
