"""The paper's limiting case: a path through the experts that is fixed for a whole span, zero misses for free."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Gated, RouterSite, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class TrajectoryVariant(Gated):
    """Experts are fixed for a span, by a hash, the same in all layers; the gate only weighs them.

    Args:
        span: its tokens W; 0 for the whole document, or sequence where there are no documents
        sentence: end a span at the end of a sentence or paragraph too
    """

    name: ClassVar[str] = "trajectory"
    equation: ClassVar[str] = "S_t = hash(span),  g = softmax(ℓ);  L = L_CE"

    span: int = hyper(0, "span")
    sentence: bool = hyper(False, "per sentence", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(type(self.span) is int and self.span >= 0, "variant.span", self.span, "a whole number ≥ 0")

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.fixed import Trajectory

        return Trajectory(window=self.span, sentence=self.sentence)
