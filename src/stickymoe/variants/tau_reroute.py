"""Replace an expert that is not resident by a resident that is nearly as good; needs no training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT_OR_NONE, FRACTION, Site, hyper, register
from stickymoe.variants.cached import Cached

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class TauRerouteVariant(Cached):
    """A missing expert e gives its slot to the best resident with g ≥ (1−τ)·g_e; the first J are always kept."""

    name: ClassVar[str] = "tau_reroute"
    equation: ClassVar[str] = (
        "e ∈ top-k of z_t not resident → argmax g of {residents: g ≥ (1−τ)·g_e};  L = L_CE + μ·L_bal"
    )

    tau: float = hyper(0.5, "τ", "fraction τ of its score that a slot may lose", FRACTION)
    keep: int = hyper(0, "J", "experts J with the highest logits that are always chosen", COUNT_OR_NONE, always=False)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.rerouting import TauReroute

        return TauReroute(cache=self.cache(), kept=self.keep, tau=self.tau)
