"""The paper's combined method (`eq:total_loss_softhard`): small steps, and an anchor per window that limits drift."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import COUNT, SWITCH, WEIGHT, hyper, register
from stickymoe.variants.soft import Soft


@register
@dataclass(frozen=True)
class SoftHard(Soft):
    """Consistency loss and anchor loss: every token stays near the first token of its window."""

    name: ClassVar[str] = "soft_hard"
    equation: ClassVar[str] = (
        "L = L_CE + μ·L_bal + λ·L_cons + α·L_hard,  L_hard = mean (t−s)/W · ‖g_t − g_s‖²,  s = W⌊t/W⌋"
    )

    alpha: float = hyper(1.0, "α", "weight α of the anchor loss", WEIGHT)
    window: int = hyper(4, "W", "window length W", COUNT)
    anchor_gradient: bool = hyper(
        False, "anchor gradient", "let gradients reach the anchor; in the paper it is fixed", SWITCH, always=False
    )

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import anchor_by_layer

        anchor = Term(
            "hard",
            self.alpha,
            lambda trace, context: anchor_by_layer(trace, window=self.window, anchor_gradient=self.anchor_gradient),
        )
        return (*super().own_terms(), anchor)
