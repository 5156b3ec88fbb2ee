"""Expert caches: one `request`, judged and served here; a policy only chooses the victim.

These objects are the plain reference of the compiled replay, and the ones a runtime holds its slots with.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Protocol, SupportsIndex, runtime_checkable

from stickymoe.errors import ConfigError, require, unknown


@runtime_checkable
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


class FIFO:
    """Evicts the expert that was loaded longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, expert: int) -> None:
        self._order.setdefault(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        victim = next(e for e in self._order if e not in pinned)
        del self._order[victim]
        return victim


class Sieve:
    """Evicts the first expert without a second use, from a hand that moves from the oldest load to the newest.

    Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. The hand takes the mark off what it passes.
    """

    def __init__(self) -> None:
        self._order: list[int] = []  # oldest load first
        self._marked: set[int] = set()
        self._hand = 0

    def used(self, expert: int) -> None:
        if expert in self._order:
            self._marked.add(expert)
        else:
            self._order.append(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        while (candidate := self._order[self._hand]) in pinned or candidate in self._marked:
            if candidate not in pinned:
                self._marked.remove(candidate)
            self._hand = (self._hand + 1) % len(self._order)
        del self._order[self._hand]
        if self._hand == len(self._order):
            self._hand = 0
        return candidate


class LFU:
    """Evicts the expert with the fewest uses since its load, where each eviction ages what stays behind.

    Dynamic ageing of Arlitt et al. (2000): a use sets an expert's value to its uses plus the value of the last
    victim, so that an old favourite cannot hold its slot for ever. Of equals, the one used longest ago goes.
    """

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self._value: OrderedDict[int, int] = OrderedDict()  # least recent first
        self._age = 0

    def used(self, expert: int) -> None:
        self._uses[expert] += 1
        self._value[expert] = self._uses[expert] + self._age
        self._value.move_to_end(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        victim = min((e for e in self._value if e not in pinned), key=self._value.__getitem__)
        self._age = self._value.pop(victim)
        del self._uses[victim]
        return victim


class Static:
    """Evicts the expert with the fewest uses in the whole trace: the most frequent stay once they are loaded.

    Of equals the highest index goes.
    """

    def __init__(self, requests: Iterable[Sequence[int]]) -> None:
        self._uses = Counter(e for request in requests for e in request)
        self._resident: set[int] = set()

    def used(self, expert: int) -> None:
        self._resident.add(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        victim = min(self._resident - pinned, key=lambda e: (self._uses[e], -e))
        self._resident.remove(victim)
        return victim


class Belady:
    """Evicts the expert whose next use lies farthest ahead: no demand policy misses less. Knows all `requests`."""

    def __init__(self, requests: Iterable[Sequence[int]]) -> None:
        self._ahead: dict[int, deque[int]] = {}
        for time, expert in enumerate(e for request in requests for e in request):
            self._ahead.setdefault(expert, deque()).append(time)
        self._resident: set[int] = set()

    def used(self, expert: int) -> None:
        self._ahead[expert].popleft()
        self._resident.add(expert)

    def victim(self, pinned: AbstractSet[int]) -> int:
        victim = max(self._resident - pinned, key=self._next_use)
        self._resident.remove(victim)
        return victim

    def _next_use(self, expert: int) -> float:
        ahead = self._ahead[expert]
        return float(ahead[0]) if ahead else inf


ONLINE: dict[str, type[Policy]] = {"lru": LRU, "lfu": LFU, "fifo": FIFO, "sieve": Sieve}
INFORMED: dict[str, type[Static] | type[Belady]] = {"static": Static, "belady": Belady}  # these know the trace
POLICIES = (*ONLINE, *INFORMED)


def require_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(unknown("policy", policy, POLICIES))


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

    `policy` is a name, or an object that chooses victims; `Static` and `Belady` are made with the requests to come.
    """

    def __init__(self, *, policy: str | Policy = "lru", capacity: SupportsIndex) -> None:
        if isinstance(policy, str):
            require_policy(policy)
            if policy in INFORMED:
                raise ConfigError(
                    f"policy: '{policy}' must know the requests, pass {INFORMED[policy].__name__}(requests)."
                )
            policy = ONLINE[policy]()
        self.capacity = require_slots(capacity)
        self._policy = policy
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

    def prefetch(self, experts: Sequence[int]) -> Outcome:
        """Load what is expected next, served as a request is; of more than fit, the first."""
        return self.request(experts[: self.capacity])

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
