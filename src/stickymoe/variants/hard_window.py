"""The paper's ablation baseline: a hard bias on recently used experts instead of a differentiable loss."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT, WEIGHT, Balanced, Site, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class HardWindowVariant(Balanced):
    """Bias β on the logits of every expert in the unbiased top-k of the preceding W tokens."""

    name: ClassVar[str] = "hard_window"
    equation: ClassVar[str] = "g = softmax(ℓ + β·1[e ∈ H(t, W)]),  L = L_CE + μ·L_bal"

    window: int = hyper(4, "W", "window length W", COUNT)
    beta: float = hyper(10.0, "β", "strength β of the bias", WEIGHT)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.rules import HardWindow

        return HardWindow(window=self.window, beta=self.beta)
