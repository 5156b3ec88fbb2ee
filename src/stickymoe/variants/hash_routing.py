"""Hash routing (Roller et al.): the token id chooses the experts, a bound without a learned choice."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.variants.base import COUNT_OR_NONE, Site, Variant, hyper, register

if TYPE_CHECKING:
    from stickymoe.routing.rules import Choice

SALT = "number that selects the hash; in a sweep, each seed except the default one is its own salt"


@register
@dataclass(frozen=True)
class HashRouting(Variant):
    """Experts are fixed before training by a hash of the token and the layer; the gate only sets their weights."""

    name: ClassVar[str] = "hash"
    equation: ClassVar[str] = "S_t = hash(token, layer, salt),  g = softmax(ℓ);  L = L_CE"

    salt: int = hyper(0, "salt", SALT, COUNT_OR_NONE, always=False, seeded=True)

    def choice(self, site: Site) -> "Choice":
        from stickymoe.routing.fixed import Hashed, hash_key

        return Hashed(hash_key(site.layer, self.salt))
