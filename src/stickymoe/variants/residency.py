"""A router that owns its cache: only resident experts can be chosen, and at most one moves in per token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_share, require_weight, require_window

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class ResidencyVariant(Routed):
    """A token chooses among C resident experts; the best outsider replaces the worst resident if it wins by ρ.

    Args:
        mu: weight μ of the load-balancing loss
        capacity: resident experts C per layer and sequence, at least the k of a token
        rho: margin ρ by which an outsider must win
        average: decay of the running average of g that is the demand; 0 takes the logit instead
        free: share of training before ρ and the average's memory begin to grow
        rise: share of training over which they grow to full size
    """

    name: ClassVar[str] = "residency"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, |R_t| = C;  R loses argmin q and gains argmax q if q_in > q_out + ρ;  L = L_CE + μ·L_bal"
    )

    capacity: int = hyper(3, "C")
    rho: float = hyper(0.02, "ρ")
    average: float = hyper(0.9, "avg")
    free: float = hyper(0.0, "free", always=False)
    rise: float = hyper(0.0, "rise", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("capacity", self.capacity)
        require_weight("rho", self.rho)
        require_share("average", self.average, below_one=True)
        require_share("free", self.free)
        require_share("rise", self.rise)
        require(self.free + self.rise <= 1, "variant.rise", self.rise, f"at most {1 - self.free:g}, what free leaves")

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require(self.capacity >= top_k, "variant.capacity", self.capacity, f"at least the {top_k} experts of a token")

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Residency

        return Residency(capacity=self.capacity, margin=self.rho, average=self.average, free=self.free, rise=self.rise)
