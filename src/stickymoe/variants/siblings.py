"""Experts that share a cache slot: every token chooses its slots, the resident of each slot changes slowly."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.routing.terms import Term
from stickymoe.routing.ties import TiedExperts
from stickymoe.variants.base import (
    BELOW_ONE,
    COUNT_OR_NONE,
    FRACTION,
    SWITCH,
    WEIGHT,
    Site,
    hyper,
    register,
)
from stickymoe.variants.hash_routing import SALT
from stickymoe.variants.slots import Slots

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice, Filter


@register
@dataclass(frozen=True)
class SiblingsVariant(Slots):
    """Expert i uses slot i mod C, where one expert is resident at a time; a token chooses among the C residents.

    The experts of a slot start with the same weights and share a fraction of their gradients.
    """

    name: ClassVar[str] = "siblings"
    equation: ClassVar[str] = (
        "ℓ_i = a_c(smooth_d h) [+ e_c(h)] + b_i(smooth_s h), c = i mod C;  S_t = top-k [or hash(token, layer, salt)] "
        "of R_t, one of each c, replaced if q_in > q_out + ρ, q = g within c, at most B times a token;  "
        "∇W → κ·mean over the slot + (1−κ)·own, κ = 1 until untied;  L = L_CE + μ·L_bal of slots and within slots"
    )

    fast: float = hyper(
        0.5,
        "d",
        "decay d of the average that the gate of the slots reads; 0 for the token alone",
        BELOW_ONE,
        minor=True,
    )
    slow: float = hyper(0.9, "s", "decay s of the average that the gate within slots reads", BELOW_ONE, minor=True)
    rho: float = hyper(
        0.02, "ρ", "margin ρ by which an expert must win, in fractions of its slot's gate weight", WEIGHT, minor=True
    )
    budget: float = hyper(
        0.03, "B", "maximum loads B per token and layer: loads are at least 1/B tokens apart", FRACTION
    )
    shared_gradient: float = hyper(
        0.9,
        "κ",
        "fraction κ of an expert's gradient that is shared over its slot; 0 for independent experts",
        FRACTION,
        minor=True,
    )
    untie_after: float = hyper(
        0.0, "untie", "fraction of training in which the experts of a slot stay equal", BELOW_ONE, always=False
    )
    token: bool = hyper(
        False, "token", "add a gate of the slots that reads the token itself, beside the average", SWITCH, always=False
    )
    hashed: bool = hyper(
        False, "hashed", "a hash of the token chooses its slots; the gate only sets their weights", SWITCH, always=False
    )
    salt: int = hyper(0, "salt", SALT, COUNT_OR_NONE, always=False, seeded=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        unties = not self.untie_after or 0 < self.shared_gradient < 1
        expected = "0 if variant.shared_gradient is 0 (never tied) or 1 (always tied)"
        require(unties, "variant.untie_after", self.untie_after, expected)

    def ties(self) -> TiedExperts | None:
        return TiedExperts(self.capacity, self.shared_gradient, self.untie_after) if self.shared_gradient else None

    def filter(self, site: Site) -> "Filter":
        from stickymoe.routing.sequential import SlotGates

        return SlotGates(self.capacity, fast=self.fast, slow=self.slow, token=self.token)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.fixed import hash_key
        from stickymoe.routing.sequential import SlotChoice

        key = hash_key(site.layer, self.salt) if self.hashed else None
        return SlotChoice(self.capacity, self.rho, self.budget, hashed=key)

    def balance(self) -> Term | None:
        from stickymoe.routing.losses import slot_balance_by_layer

        return Term(
            "bal",
            self.mu,
            lambda trace, context: slot_balance_by_layer(
                trace, capacity=self.capacity, load=context.load, within=self.hashed
            ),
        )
