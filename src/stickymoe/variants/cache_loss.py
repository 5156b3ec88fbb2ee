"""A loss that counts what a device pays: the expected misses of a soft cache."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import COUNT, WEIGHT, Balanced, hyper, register, require_slots


@register
@dataclass(frozen=True)
class CacheLoss(Balanced):
    """The misses of a cache that holds a fraction of every expert, as a differentiable loss."""

    name: ClassVar[str] = "cache_loss"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + η·Σ a,  a = u·(1−m),  u = min(1, k·g),  m ← m + a − e,  Σm ≤ C"

    eta: float = hyper(0.1, "η", "weight η of the expected misses", WEIGHT)
    slots: int = hyper(3, "slots", "slots C of the soft cache, at least the k experts of a token", COUNT)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        require_slots("slots", self.slots, n_experts=n_experts, top_k=top_k)

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import expected_misses_by_layer

        return (Term("miss", self.eta, lambda trace, context: expected_misses_by_layer(trace, capacity=self.slots)),)
