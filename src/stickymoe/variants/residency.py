"""A router with a resident set: only resident experts can be chosen, and at most one is loaded per token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import BELOW_ONE, COUNT_OR_NONE, WEIGHT, Site, hyper, register
from stickymoe.variants.resident import Resident

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class ResidencyVariant(Resident):
    """A token chooses among C residents; the best non-resident replaces the worst resident if it wins by ρ."""

    name: ClassVar[str] = "residency"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, |R_t| = C;  R loses argmin q and gains argmax q if q_in > q_out + ρ;  L = L_CE + μ·L_bal"
    )

    rho: float = hyper(0.02, "ρ", "margin ρ by which a non-resident must win", WEIGHT)
    average: float = hyper(
        0.9, "avg", "decay of the running average of g that ranks the experts; 0 ranks by the logit", BELOW_ONE
    )
    pinned: int = hyper(0, "pinned", "experts among the C that are never evicted", COUNT_OR_NONE, always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"a whole number from 0 to {self.capacity - 1}"
        require(self.pinned < self.capacity, "variant.pinned", self.pinned, expected)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.sequential import Residency

        return Residency(
            capacity=self.capacity,
            free=self.free,
            anneal=self.anneal,
            margin=self.rho,
            average=self.average,
            pinned=self.pinned,
        )
