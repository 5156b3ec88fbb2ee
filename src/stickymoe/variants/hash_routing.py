"""Hash routing (Roller et al.): the token id chooses the experts, a bound without a learned choice."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import Site, Variant, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice


@register
@dataclass(frozen=True)
class HashRouting(Variant):
    """Experts are fixed before training by a hash of the token and the layer; the gate only sets their weights."""

    name: ClassVar[str] = "hash"
    equation: ClassVar[str] = "S_t = hash(token, layer),  g = softmax(ℓ);  L = L_CE"

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.fixed import Hashed

        return Hashed(layer=site.layer)
