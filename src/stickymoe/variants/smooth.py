"""A router that reads an average: its input changes slowly, so its choice does too."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import BELOW_ONE, SWITCH, Balanced, Site, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Filter


@register
@dataclass(frozen=True)
class SmoothVariant(Balanced):
    """The gate reads a causal exponential average of the hidden states of its document."""

    name: ClassVar[str] = "smooth"
    equation: ClassVar[str] = "s_t = d·s_t−1 + (1−d)·h_t,  g = softmax(W_g·s_t);  L = L_CE + μ·L_bal"

    decay: float = hyper(0.5, "d", "decay d of the average; 0 is vanilla", BELOW_ONE)
    learned: bool = hyper(False, "learned", "learn the decay of each layer, starting at d", SWITCH, always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.decay > 0 or not self.learned,
            "variant.decay",
            self.decay,
            "a number in (0, 1) if variant.learned is true",
        )

    def filter(self, site: Site) -> "Filter":
        from stickymoe.routing.sequential import LearnedSmooth, Smooth

        return LearnedSmooth(self.decay) if self.learned else Smooth(self.decay)
