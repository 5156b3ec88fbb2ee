"""`Term`: one weighted summand of the training loss, as data; `losses.objective` sums them. No torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from stickymoe.routing.losses import LossContext
    from stickymoe.routing.trace import RoutingTrace


@dataclass(frozen=True)
class Term:
    """The summand `weight · fn(trace, context)`.

    `fn` returns a scalar, or one value per layer, which are averaged. `layers` are factors on the values of the
    layers. The weight grows linearly from 0 to its full size over the fraction `warmup` of the phase.
    """

    symbol: str
    weight: float
    fn: Callable[[RoutingTrace, LossContext], Tensor]
    layers: tuple[float, ...] = ()
    warmup: float = 0.0

    def weighted(self, value: Tensor, progress: float = 1.0) -> Tensor:
        """The summand for `value` = fn(…) after the fraction `progress` of the phase."""
        if self.layers and value.ndim:
            value = value * value.new_tensor(self.layers)
        ramp = min(progress / self.warmup, 1.0) if self.warmup else 1.0
        return (ramp * self.weight * value).mean()
