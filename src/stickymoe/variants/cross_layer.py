"""The paper's appendix (`eq:full_loss`): adjacent layers are asked for the same expert, for decoding in layer order."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Term, hyper, register, require_weight
from stickymoe.variants.soft import Soft


@register
@dataclass(frozen=True)
class CrossLayer(Soft):
    """Consistency of adjacent tokens and of adjacent layers; the latter saves loads only where layers share weights.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the consistency loss
        gate_only: train the gates alone with the consistency loss (an ablation)
        gamma: weight γ of the cross-layer loss
        within_block: count only pairs of layers that share their experts (model.share_block)
    """

    name: ClassVar[str] = "cross_layer"
    equation: ClassVar[str] = "L = L_CE + λ·L_cons + μ·L_bal + γ·L_cross,  L_cross = mean_t Σ_ℓ ‖g^(ℓ) − g^(ℓ+1)‖²"

    gamma: float = hyper(0.1, "γ")
    within_block: bool = hyper(False, "within block", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("gamma", self.gamma)

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import cross_layer_loss

        cross = Term(
            "cross",
            self.gamma,
            lambda trace, ctx: cross_layer_loss(trace, share_block=ctx.share_block if self.within_block else None),
        )
        return (*super().terms(), cross)
