"""Base of the variants whose rule looks at a cache of experts. They need no training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stickymoe.variants.base import COUNT, Balanced, Check, hyper

if TYPE_CHECKING:
    from stickymoe.routing.rerouting import ExpertCache


def _is_online_policy(name: object) -> bool:
    from stickymoe.locality.policies import find_policy, policy_names

    return name in policy_names() and find_policy(str(name)).online


POLICY = Check(_is_online_policy, "a cache policy that a device can run, such as lru", examples=("lru", "lfu"))


@dataclass(frozen=True)
class Cached(Balanced):
    """A rule that knows which experts a cache of C slots per layer and sequence holds."""

    capacity: int = hyper(3, "C", "slots C of the cache, per layer and sequence", COUNT)
    policy: str = hyper("lru", "policy", "cache policy", POLICY, always=False)

    def cache(self) -> "ExpertCache":
        from stickymoe.routing.rerouting import ExpertCache

        return ExpertCache(capacity=self.capacity, policy=self.policy)
