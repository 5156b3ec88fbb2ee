"""Expert caches: one `request`, judged and served here; a policy only chooses the victim.

These objects are the plain reference of the compiled replay, and the ones a runtime holds its slots with.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

from stickymoe.errors import ConfigError, require, unknown


class Policy(Protocol):
    """Keeps whatever order it needs to choose a victim."""

    def used(self, expert: int) -> None:
        """`expert` is resident and was just asked for."""

    def victim(self, pinned: AbstractSet[int]) -> int:
        """Choose a resident expert outside `pinned`, and forget it."""


class LRU:
    """Evicts the expert that was used longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        victim = next(e for e in self._order if e not in pinned)
        del self._order[victim]
        return victim


POLICIES: dict[str, type[Policy]] = {"lru": LRU}


def require_policy(policy: str, known: Iterable[str] = POLICIES) -> None:
    if policy not in known:
        raise ConfigError(unknown("policy", policy, known))


def require_slots(capacity: SupportsIndex) -> int:
    expected = "a whole number of slots ≥ 1"
    require(hasattr(capacity, "__index__"), "capacity", capacity, expected)
    slots = operator.index(capacity)
    require(slots >= 1, "capacity", slots, expected)
    return slots


@dataclass(frozen=True)
class Outcome:
    """What one request did to the cache."""

    hits: tuple[int, ...]
    loads: tuple[int, ...]
    evictions: tuple[int, ...]


class Cache:
    """`capacity` slots for experts.

    The experts of a request, heaviest first, are served together: hits are judged against the cache before it, its
    members are pinned, each miss evicts a victim outside them, then recency is updated from the lightest to the
    heaviest. A request larger than the cache is served one expert after another, heaviest first.
    """

    def __init__(self, *, policy: str = "lru", capacity: SupportsIndex) -> None:
        require_policy(policy)
        self.capacity = require_slots(capacity)
        self._policy = POLICIES[policy]()
        self._resident: set[int] = set()

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._resident)

    def request(self, experts: Sequence[int]) -> Outcome:
        if len(set(experts)) < len(experts):
            raise ConfigError(f"A request names each expert once, got {list(experts)}.")
        if len(experts) <= self.capacity:
            return self._serve(experts)
        served = [self._serve([e]) for e in experts]
        return Outcome(
            hits=tuple(e for o in served for e in o.hits),
            loads=tuple(e for o in served for e in o.loads),
            evictions=tuple(e for o in served for e in o.evictions),
        )

    def _serve(self, experts: Sequence[int]) -> Outcome:
        hits = tuple(e for e in experts if e in self._resident)
        loads = tuple(e for e in experts if e not in self._resident)
        pinned = frozenset(experts)
        evictions = []
        for expert in loads:
            if len(self._resident) == self.capacity:
                victim = self._policy.victim(pinned)
                self._resident.remove(victim)
                evictions.append(victim)
            self._resident.add(expert)
        for expert in reversed(experts):
            self._policy.used(expert)
        return Outcome(hits, loads, tuple(evictions))
