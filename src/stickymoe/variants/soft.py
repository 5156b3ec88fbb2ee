"""The paper's method (`eq:total_loss`): adjacent tokens get similar gate distributions."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from stickymoe.routing.terms import Term
from stickymoe.variants.base import SWITCH, WEIGHT, Balanced, hyper, register

if TYPE_CHECKING:
    from torch import Tensor

    from stickymoe.routing.losses import LossContext
    from stickymoe.routing.trace import RoutingTrace


@register
@dataclass(frozen=True)
class Soft(Balanced):
    """Routing consistency loss: the squared distance between the gate distributions of adjacent tokens."""

    name: ClassVar[str] = "soft"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·L_cons,  L_cons = mean ‖g_t − g_t−1‖²"

    lam: float = hyper(0.1, "λ", "weight λ of the consistency loss", WEIGHT)
    gate_only: bool = hyper(
        False,
        "gate only",
        "train the gates alone with the consistency loss, not the hidden states they read (an ablation)",
        SWITCH,
        always=False,
    )

    def needs_gate_only(self) -> bool:
        return self.gate_only

    def own_terms(self) -> tuple[Term, ...]:
        return (Term("cons", self.lam, self._consistency),)

    def _consistency(self, trace: "RoutingTrace", context: "LossContext") -> "Tensor":
        from stickymoe.routing.losses import consistency_by_layer

        return consistency_by_layer(trace if trace.g_gate is None else replace(trace, g=trace.g_gate))
