"""What variants that are made for a device have in common: the number of its slots."""

from dataclasses import dataclass

from stickymoe.variants.base import COUNT, Balanced, hyper, require_slots


@dataclass(frozen=True)
class Slots(Balanced):
    """A device with C slots per layer."""

    capacity: int = hyper(3, "C", "slots C per layer and sequence, at least the k experts of a token", COUNT)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        require_slots("capacity", self.capacity, n_experts=n_experts, top_k=top_k)
