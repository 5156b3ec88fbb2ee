"""A router that weighs a load against what goes without it: rent until the rent is worth the price, then buy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import RouterSite, hyper, register, require_weight
from stickymoe.variants.resident import Resident

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class RentVariant(Resident):
    """A token chooses among C resident experts; an outsider moves in when the weight it missed adds up to θ.

    Args:
        mu: weight μ of the load-balancing loss
        capacity: resident experts C per layer and sequence, at least the k of a token
        free: share of training in which all experts can be chosen
        rise: share of training after it over which the residents' inertia grows to full size
        price: gate weight θ that an outsider must have missed, in sum, to be worth a load
    """

    name: ClassVar[str] = "rent"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, |R_t| = C;  R gains e if Σ max(0, g_e − min g_S) > θ, loses the least recently used;  "
        "L = L_CE + μ·L_bal"
    )

    price: float = hyper(1.0, "θ")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("price", self.price)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Rent

        return Rent(capacity=self.capacity, free=self.free, rise=self.rise, price=self.price)
