"""A router that owns its cache: only resident experts can be chosen, and at most one moves in per token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import RouterSite, hyper, register, require_share, require_weight
from stickymoe.variants.resident import Resident

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class ResidencyVariant(Resident):
    """A token chooses among C resident experts; the best outsider replaces the worst resident if it wins by ρ.

    Args:
        mu: weight μ of the load-balancing loss
        capacity: resident experts C per layer and sequence, at least the k of a token
        free: share of training in which all experts can be chosen
        rise: share of training after it over which the residents' inertia grows to full size
        rho: margin ρ by which an outsider must win
        average: decay of the running average of g that is the demand; 0 takes the logit instead
        pinned: experts among the C that never leave
    """

    name: ClassVar[str] = "residency"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, |R_t| = C;  R loses argmin q and gains argmax q if q_in > q_out + ρ;  L = L_CE + μ·L_bal"
    )

    rho: float = hyper(0.02, "ρ")
    average: float = hyper(0.9, "avg")
    pinned: int = hyper(0, "pinned", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("rho", self.rho)
        require_share("average", self.average, below_one=True)
        ok = type(self.pinned) is int and 0 <= self.pinned < self.capacity
        require(ok, "variant.pinned", self.pinned, f"a whole number from 0 to {self.capacity - 1}")

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Residency

        return Residency(
            capacity=self.capacity,
            free=self.free,
            rise=self.rise,
            margin=self.rho,
            average=self.average,
            pinned=self.pinned,
        )
