"""The paper's appendix (`eq:full_loss`): adjacent layers use the same expert, for decoding in layer order."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import SWITCH, WEIGHT, hyper, register
from stickymoe.variants.soft import Soft


@register
@dataclass(frozen=True)
class CrossLayer(Soft):
    """Consistency of adjacent tokens and of adjacent layers; the latter saves loads only where layers share weights."""

    name: ClassVar[str] = "cross_layer"
    equation: ClassVar[str] = "L = L_CE + λ·L_cons + μ·L_bal + γ·L_cross,  L_cross = mean_t Σ_ℓ ‖g^(ℓ) − g^(ℓ+1)‖²"

    gamma: float = hyper(0.1, "γ", "weight γ of the cross-layer loss", WEIGHT)
    within_block: bool = hyper(
        False,
        "within block",
        "count only pairs of layers that share their experts (model.share_block)",
        SWITCH,
        always=False,
    )

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import cross_layer_loss

        cross = Term(
            "cross",
            self.gamma,
            lambda trace, context: cross_layer_loss(
                trace, share_block=context.share_block if self.within_block else None
            ),
        )
        return (*super().own_terms(), cross)
