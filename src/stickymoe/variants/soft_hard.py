"""The paper's combined method (`eq:total_loss_softhard`): small steps, and an anchor per window against drift."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Term, hyper, register, require_weight, require_window
from stickymoe.variants.soft import Soft


@register
@dataclass(frozen=True)
class SoftHard(Soft):
    """Consistency loss and anchor loss: every token stays near the first token of its window.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the consistency loss
        gate_only: train the gates alone with the consistency loss (an ablation)
        alpha: weight α of the anchor loss
        window: window length W
        anchor_gradient: let gradient reach the anchor, which the paper calls fixed
    """

    name: ClassVar[str] = "soft_hard"
    equation: ClassVar[str] = (
        "L = L_CE + μ·L_bal + λ·L_cons + α·L_hard,  L_hard = mean (t−s)/W · ‖g_t − g_s‖²,  s = W⌊t/W⌋"
    )

    alpha: float = hyper(1.0, "α")
    window: int = hyper(4, "W")
    anchor_gradient: bool = hyper(False, "anchor gradient", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("alpha", self.alpha)
        require_window("window", self.window)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import anchor_by_layer

        anchor = Term(
            "hard",
            self.alpha,
            lambda trace, ctx: anchor_by_layer(trace, window=self.window, anchor_gradient=self.anchor_gradient),
        )
        return (*super().terms(), anchor)
