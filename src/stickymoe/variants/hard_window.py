"""The paper's ablation baseline: a hard bias on recently used experts instead of a differentiable loss."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_weight, require_window

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class HardWindowVariant(Routed):
    """Bias β on the logits of every expert in the unbiased top-k of the preceding W tokens.

    Args:
        mu: weight μ of the load-balancing loss
        window: window length W
        beta: strength β of the bias
    """

    name: ClassVar[str] = "hard_window"
    equation: ClassVar[str] = "g = softmax(ℓ + β·1[e ∈ H(t, W)]),  L = L_CE + μ·L_bal"

    window: int = hyper(4, "W")
    beta: float = hyper(10.0, "β")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("window", self.window)
        require_weight("beta", self.beta)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.routers import HardWindow

        return HardWindow(window=self.window, beta=self.beta)
