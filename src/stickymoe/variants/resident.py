"""What routers that own their cache have in common: residents, and inertia that grows during training."""

from dataclasses import dataclass

from stickymoe.errors import require
from stickymoe.variants.base import Routed, hyper, require_share, require_slots, require_window


@dataclass(frozen=True)
class Resident(Routed):
    """Only C experts a layer can be chosen, and at most one of them changes per token.

    Args:
        mu: weight μ of the load-balancing loss
        capacity: resident experts C per layer and sequence, at least the k of a token
        free: share of training in which all experts can be chosen
        rise: share of training after it over which the residents' inertia grows to full size
    """

    capacity: int = hyper(3, "C")
    free: float = hyper(0.0, "free", always=False)
    rise: float = hyper(0.0, "rise", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("capacity", self.capacity)
        require_share("free", self.free)
        require_share("rise", self.rise)
        require(self.free + self.rise <= 1, "variant.rise", self.rise, f"at most {1 - self.free:g}, what free leaves")

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require_slots("capacity", self.capacity, n_experts=n_experts, top_k=top_k)
