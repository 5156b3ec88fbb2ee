"""A router that decides once per W tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT, Balanced, Site, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class SegmentVariant(Balanced):
    """One decision per W tokens, from the mean logits of the W tokens before them."""

    name: ClassVar[str] = "segment"
    equation: ClassVar[str] = "S = top-k(mean of ℓ over the preceding W tokens),  g = softmax(ℓ);  L = L_CE + μ·L_bal"

    span: int = hyper(
        8, "span", "segment length W; the first segment of a document is decided by its first token", COUNT
    )

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.sequential import Segment

        return Segment(window=self.span)
