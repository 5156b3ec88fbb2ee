"""The paper's simplified Oracle-MoE: the router reads the attended values instead of the hidden state."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stickymoe.variants.base import Balanced, register


@register
@dataclass(frozen=True)
class Oracle(Balanced):
    """Routing on the attended values before the output projection, no locality loss."""

    name: ClassVar[str] = "oracle"
    equation: ClassVar[str] = "g = softmax(W_g·a_t),  a_t the attended values;  L = L_CE + μ·L_bal"
    source: ClassVar[Literal["h", "attended"]] = "attended"
