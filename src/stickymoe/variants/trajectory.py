"""The paper's limiting case: experts that are fixed for a whole span, so no loads inside it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT_OR_NONE, SWITCH, Site, Variant, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class TrajectoryVariant(Variant):
    """Experts are fixed for a span by a hash, the same in all layers; the gate only sets their weights."""

    name: ClassVar[str] = "trajectory"
    equation: ClassVar[str] = "S_t = hash(span),  g = softmax(ℓ);  L = L_CE"

    span: int = hyper(
        0,
        "span",
        "tokens W per span; 0 for the whole document, or the whole sequence if there are no documents",
        COUNT_OR_NONE,
    )
    sentence: bool = hyper(
        False, "per sentence", "also end a span at the end of a sentence or paragraph", SWITCH, always=False
    )

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.fixed import Trajectory

        return Trajectory(window=self.span, sentence=self.sentence)
