"""A router that decides once per W tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Routed, RouterSite, hyper, register, require_window

if TYPE_CHECKING:
    from stickymoe.routing.routers import Choice


@register
@dataclass(frozen=True)
class SegmentVariant(Routed):
    """One decision per W tokens, from the mean logits of the W tokens before them.

    Args:
        mu: weight μ of the load-balancing loss
        span: segment length W; the first segment of a document is decided by its first token
    """

    name: ClassVar[str] = "segment"
    equation: ClassVar[str] = "S = top-k(mean of ℓ over the preceding W tokens),  g = softmax(ℓ);  L = L_CE + μ·L_bal"

    span: int = hyper(8, "span")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window("span", self.span)

    def choice(self, site: RouterSite) -> "Choice":
        from stickymoe.routing.sequential import Segment

        return Segment(window=self.span)
