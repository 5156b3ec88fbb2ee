"""The paper's simulated ReMoE: the consistency loss applied after training, to the gates alone."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Phase, Routed, Term, hyper, register, require_weight
from stickymoe.variants.vanilla import Vanilla


@register
@dataclass(frozen=True)
class ReMoE(Routed):
    """Vanilla training, then a tenth of its steps on the gates only with the consistency loss.

    Args:
        mu: weight μ of the load-balancing loss, kept in both phases
        lam: weight λ of the consistency loss in the second phase
        tune_share: length of the second phase as a fraction of train.steps
        tune_lr: constant learning rate of the second phase
    """

    name: ClassVar[str] = "remoe"
    equation: ClassVar[str] = "1: L = L_CE + μ·L_bal, all weights;  2: L + λ·L_cons, gates only"

    lam: float = hyper(0.1, "λ")
    tune_share: float = 0.1
    tune_lr: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)
        for key in ("tune_share", "tune_lr"):
            value = getattr(self, key)
            require(isinstance(value, int | float) and 0 < value <= 1, f"variant.{key}", value, "a number in (0, 1]")

    @property
    def first_phase_is(self) -> Vanilla:
        return Vanilla(mu=self.mu)

    def phases(self) -> tuple[Phase, ...]:
        from stickymoe.routing.losses import consistency_by_layer

        cons = Term("cons", self.lam, lambda trace, ctx: consistency_by_layer(trace))
        return (
            Phase("train", self.terms()),
            Phase("tune", (*self.terms(), cons), share=self.tune_share, trains="gates", lr=self.tune_lr),
        )
