"""Fill slots from resident experts of high rank; needs no training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT, COUNT_OR_NONE, Site, hyper, register
from stickymoe.variants.cached import Cached

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class MaxRankVariant(Cached):
    """The first J experts are always kept; the other slots go to residents among the first M, then to the rest."""

    name: ClassVar[str] = "max_rank"
    equation: ClassVar[str] = (
        "S_t = top-J of z_t and k−J residents inside top-M of z_t, then the rest in order;  L = L_CE + μ·L_bal"
    )

    depth: int = hyper(4, "M", "experts M with the highest logits among which residents are preferred", COUNT)
    keep: int = hyper(1, "J", "experts J with the highest logits that are always chosen", COUNT_OR_NONE, always=False)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.rerouting import MaxRank

        return MaxRank(cache=self.cache(), kept=self.keep, rank=self.depth)
