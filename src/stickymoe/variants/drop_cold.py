"""Skip light experts that are not resident; needs no training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import WEIGHT, Site, hyper, register
from stickymoe.variants.cached import Cached

if TYPE_CHECKING:
    from stickymoe.routing.rules import Skip


@register
@dataclass(frozen=True)
class DropColdVariant(Cached):
    """A chosen expert that is not resident is skipped if it weighs less than a fraction of an even split."""

    name: ClassVar[str] = "drop_cold"
    equation: ClassVar[str] = "w_e = 0 if e is not resident and w_e < share·Σw/k;  Σw is kept;  L = L_CE + μ·L_bal"

    share: float = hyper(0.5, "share", "fraction of an even split 1/k below which a miss is skipped", WEIGHT)

    def skip(self, site: Site) -> "Skip":
        from stickymoe.routing.rerouting import DropCold

        return DropCold(cache=self.cache(), share=self.share)
