"""Prefer resident experts by a bonus on their logits; needs no training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT_OR_NONE, WEIGHT, Site, hyper, register
from stickymoe.variants.cached import Cached

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class CachePriorVariant(Cached):
    """A bonus on the logits of resident experts, in units of their mean range; the first J are always kept."""

    name: ClassVar[str] = "cache_prior"
    equation: ClassVar[str] = (
        "S_t = top-J of z_t and top-(k−J) of z_t + λ·Δ̄·[resident];  Δ̄ = mean of max z − min z;  L = L_CE + μ·L_bal"
    )

    strength: float = hyper(0.5, "λ", "bonus λ of resident experts, in mean ranges of the logits", WEIGHT)
    keep: int = hyper(1, "J", "experts J with the highest logits that are always chosen", COUNT_OR_NONE, always=False)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.rerouting import CachePrior

        return CachePrior(cache=self.cache(), kept=self.keep, lam=self.strength)
