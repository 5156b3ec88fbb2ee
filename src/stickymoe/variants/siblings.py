"""Experts that take turns in a cache slot: which slots a token uses is decided at once, who is in them slowly."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.routing.families import Families
from stickymoe.variants.base import (
    Routed,
    RouterSite,
    Term,
    hyper,
    register,
    require_share,
    require_slots,
    require_weight,
    require_window,
)

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice, Filter


@register
@dataclass(frozen=True)
class SiblingsVariant(Routed):
    """Expert i lives in slot i mod C, where it takes turns with its siblings; a token chooses among the C in place.

    Siblings begin as one expert, and much of what one learns all do: what they share is learned from all tokens.

    Args:
        mu: weight μ of the load-balancing loss, of families (where a gate chooses them) and among the siblings of each
        capacity: slots C per layer and sequence, at least the k of a token
        fast: decay d of the average that the gate of the families reads; 0 for the token alone
        slow: decay s of the average that tells siblings apart
        rho: margin ρ by which a sibling must win, in shares of its family
        budget: loads B per token and layer, at most: from one to the next it is 1/B tokens
        kin: share of a sibling's gradient that goes to all of its family alike; 0 for strangers
        apart: share of training in which siblings stay one, and after which they begin to differ
        token: whether another gate of the families reads the token itself, beside the average
        hashed: whether the slots of a token come from a hash of it, by family size, and the gate only weighs them
    """

    name: ClassVar[str] = "siblings"
    equation: ClassVar[str] = (
        "ℓ_i = a_c(smooth_d h) [+ e_c(h)] + b_i(smooth_s h), c = i mod C;  S_t = top-k [or hash(token, layer)] of "
        "R_t, one of each c, who changes if q_in > q_out + ρ, q = g within c, at most B times a token;  "
        "∇W → κ·mean of the family's + (1−κ)·own, κ = 1 until apart;  L = L_CE + μ·L_bal of families and of siblings"
    )

    capacity: int = hyper(3, "C")
    fast: float = hyper(0.5, "d", minor=True)
    slow: float = hyper(0.9, "s", minor=True)
    rho: float = hyper(0.02, "ρ", minor=True)
    budget: float = hyper(0.03, "B")
    kin: float = hyper(0.9, "κ", minor=True)
    apart: float = hyper(0.0, "apart", always=False)
    token: bool = hyper(False, "token", always=False)
    hashed: bool = hyper(False, "hashed", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("capacity", self.capacity)
        require_weight("rho", self.rho)
        require_share("budget", self.budget)
        require_share("fast", self.fast, below_one=True)
        require_share("slow", self.slow, below_one=True)
        require_share("kin", self.kin)
        require_share("apart", self.apart, below_one=True)
        parting = not self.apart or 0 < self.kin < 1
        require(parting, "variant.apart", self.apart, "0 where variant.kin is 0 (never one) or 1 (always one)")

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require_slots("capacity", self.capacity, n_experts=n_experts, top_k=top_k)

    @property
    def families(self) -> Families | None:
        return Families(self.capacity, self.kin, self.apart) if self.kin else None

    def filter(self, site: RouterSite) -> "Filter":
        from stickymoe.routing.sequential import SiblingGates

        return SiblingGates(self.capacity, fast=self.fast, slow=self.slow, token=self.token)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Siblings

        return Siblings(self.capacity, self.rho, self.budget, hashed=site.layer if self.hashed else None)

    def balance(self) -> Term:
        from stickymoe.routing.losses import family_balance_by_layer

        return Term(
            "bal",
            self.mu,
            lambda trace, ctx: family_balance_by_layer(
                trace, capacity=self.capacity, load=ctx.load, within=self.hashed
            ),
        )
