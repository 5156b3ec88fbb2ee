"""What a variant hands to one layer of a model: a rule for its router, what ties its experts, a part beside them.

B sequences, T tokens, d width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from stickymoe.locality.rows import RowKey
from stickymoe.routing.deltas import Deltas
from stickymoe.routing.rules import RouterInput, RouterState, RoutingRule
from stickymoe.routing.ties import TiedExperts


class SidePart(nn.Module, ABC):
    """A module beside the experts of a layer; its output is added to the residual stream.

    Like a router, it works on a whole sequence or on its continuation, with the same result. `lr_scale` is the
    learning rate of its slow parameters, relative to that of the model.
    """

    lr_scale: float = 1.0

    @abstractmethod
    def forward(self, x: RouterInput, state: RouterState | None) -> tuple[Float[Tensor, "B T d"], RouterState]:
        """The output for the tokens of `x`, which continue those that `state` remembers, and the new state."""

    def initialise(self) -> None:
        """Initialise the parameters, after the model has initialised its own."""

    def slow_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that stay in slow memory; a token reads some of their rows, and gradients are sparse."""
        return iter(())

    def row_keys(self) -> tuple[RowKey, ...]:
        """How the rows that a token reads from slow memory are addressed."""
        return ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token reads from slow memory."""
        return 0


@dataclass(frozen=True)
class LayerParts:
    """The parts of one layer. No `rule` means a dense layer of the same active width.

    gate_only: also compute gates whose gradient reaches the gate's weights alone, for terms that need them
    """

    rule: RoutingRule | None = None
    ties: TiedExperts | None = None
    deltas: Deltas | None = None
    side: SidePart | None = None
    gate_only: bool = False
