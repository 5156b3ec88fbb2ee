"""A loss that counts what a device pays: the expected misses of a soft cache."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_slots, require_weight, require_window


@register
@dataclass(frozen=True)
class CacheLoss(Routed):
    """The misses of a cache that holds a share of every expert, as a differentiable loss.

    Args:
        mu: weight μ of the load-balancing loss
        eta: weight η of the expected misses
        slots: slots C of the soft cache, at least the k experts of a token
    """

    name: ClassVar[str] = "cache_loss"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + η·Σ a,  a = u·(1−m),  u = min(1, k·g),  m ← m + a − e,  Σm ≤ C"

    eta: float = hyper(0.1, "η")
    slots: int = hyper(3, "slots")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("eta", self.eta)
        require_window("slots", self.slots)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require_slots("slots", self.slots, n_experts=n_experts, top_k=top_k)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import expected_misses_by_layer

        misses = Term("miss", self.eta, lambda trace, ctx: expected_misses_by_layer(trace, capacity=self.slots))
        return (*super().terms(), misses)
