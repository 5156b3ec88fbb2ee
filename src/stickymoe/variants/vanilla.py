"""The baseline: a standard top-k mixture of experts with load balancing only (`eq:base`)."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Balanced, register


@register
@dataclass(frozen=True)
class Vanilla(Balanced):
    """Standard top-k MoE, the control that every other variant is compared with."""

    name: ClassVar[str] = "vanilla"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal"
