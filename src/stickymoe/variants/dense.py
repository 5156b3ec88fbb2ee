"""The dense control: one feed-forward layer of width k·d_ff, no routing."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.variants.base import Variant, register


@register
@dataclass(frozen=True)
class Dense(Variant):
    """A dense model of equal active compute, which shows what the mixture gains."""

    name: ClassVar[str] = "dense"
    equation: ClassVar[str] = "y = FFN(h) of width k·d_ff,  L = L_CE"
    routes: ClassVar[bool] = False
