"""The paper's simulated ReMoE: the consistency loss applied after training, to the gates alone."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import ABOVE_ZERO, WEIGHT, Balanced, Phase, hyper, register
from stickymoe.variants.vanilla import Vanilla


@register
@dataclass(frozen=True)
class ReMoE(Balanced):
    """Vanilla training, then a tenth of its steps on the gates only with the consistency loss."""

    name: ClassVar[str] = "remoe"
    equation: ClassVar[str] = "1: L = L_CE + μ·L_bal, all weights;  2: L + λ·L_cons, gates only"

    lam: float = hyper(0.1, "λ", "weight λ of the consistency loss in the second phase", WEIGHT)
    tune_share: float = hyper(
        0.1, "tune_share", "length of the second phase as a fraction of train.steps", ABOVE_ZERO, always=False
    )
    tune_lr: float = hyper(1e-4, "tune_lr", "constant learning rate of the second phase", ABOVE_ZERO, always=False)

    @property
    def first_phase_is(self) -> Vanilla:
        return Vanilla(mu=self.mu)

    def phases(self) -> tuple[Phase, ...]:
        from stickymoe.routing.losses import consistency_by_layer

        cons = Term("cons", self.lam, lambda trace, context: consistency_by_layer(trace))
        return (
            Phase("train", self.terms()),
            Phase("tune", (*self.terms(), cons), share=self.tune_share, trains="gates", lr=self.tune_lr),
        )
