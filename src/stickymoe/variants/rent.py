"""A router that weighs a load against what a token loses without it, as in ski rental: rent, then buy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import WEIGHT, Site, hyper, register
from stickymoe.variants.resident import Resident

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class RentVariant(Resident):
    """A token chooses among C residents; a non-resident is loaded when the weight it missed adds up to θ."""

    name: ClassVar[str] = "rent"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, |R_t| = C;  R gains e if Σ max(0, g_e − min g_S) > θ, loses the least recently used;  "
        "L = L_CE + μ·L_bal"
    )

    price: float = hyper(
        1.0, "θ", "gate weight θ that a non-resident must have missed in total to be worth a load", WEIGHT
    )

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.sequential import Rent

        return Rent(capacity=self.capacity, free=self.free, anneal=self.anneal, price=self.price)
