"""The paper's method (`eq:total_loss`): adjacent tokens are asked to have similar gate distributions."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, Term, hyper, register, require_weight

if TYPE_CHECKING:
    from torch import Tensor

    from stickymoe.routing.losses import LossContext
    from stickymoe.routing.trace import RoutingTrace


@register
@dataclass(frozen=True)
class Soft(Routed):
    """Routing consistency loss: the squared distance of adjacent tokens' gate distributions.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the consistency loss
        gate_only: train the gates alone with it, not the hidden states they read (an ablation)
    """

    name: ClassVar[str] = "soft"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·L_cons,  L_cons = mean ‖g_t − g_t−1‖²"

    lam: float = hyper(0.1, "λ")
    gate_only: bool = hyper(False, "gate only", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)

    def gates_alone(self) -> bool:
        return self.gate_only

    def terms(self) -> tuple[Term, ...]:
        return (*super().terms(), Term("cons", self.lam, self._consistency))

    def _consistency(self, trace: "RoutingTrace", context: "LossContext") -> "Tensor":
        from stickymoe.routing.losses import consistency_by_layer

        return consistency_by_layer(trace if trace.g_gate is None else replace(trace, g=trace.g_gate))
