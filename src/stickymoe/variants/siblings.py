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
    require_weight,
    require_window,
)

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class SiblingsVariant(Routed):
    """Expert i lives in slot i mod C, where it takes turns with its siblings; a token chooses among the C in place.

    Siblings are one expert at first and grow apart, so that what all must know is learned from all tokens.

    Args:
        mu: weight μ of the load-balancing loss, of families and among the siblings of each
        capacity: slots C per layer and sequence, at least the k of a token
        rho: margin ρ by which a sibling must win, in shares of its family
        average: decay of the running average that decides who is in place
        apart: share of training over which siblings grow from one expert to different ones; 0 for different at once
    """

    name: ClassVar[str] = "siblings"
    equation: ClassVar[str] = (
        "S_t = top-k of R_t, one of each {i ≡ c mod C};  R_c changes if q_in > q_out + ρ;  "
        "W̃ = τ·mean W + (1−τ)·W, τ → 0;  L = L_CE + μ·(L_bal of families + among siblings)"
    )
    acts_on_terms: ClassVar[bool] = True

    capacity: int = hyper(3, "C")
    rho: float = hyper(0.05, "ρ")
    average: float = hyper(0.9, "avg")
    apart: float = hyper(0.5, "apart")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("capacity", self.capacity)
        require_weight("rho", self.rho)
        require_share("average", self.average, below_one=True)
        require_share("apart", self.apart)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require(self.capacity >= top_k, "variant.capacity", self.capacity, f"at least the {top_k} experts of a token")

    @property
    def families(self) -> Families:
        return Families(self.capacity, self.apart)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Siblings

        return Siblings(self.capacity, self.rho, self.average)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import family_balance_by_layer

        balance = Term(
            "bal", self.mu, lambda trace, ctx: family_balance_by_layer(trace, slots=self.capacity, load=ctx.load)
        )
        return tuple(balance if term.symbol == "bal" else term for term in super().terms())
