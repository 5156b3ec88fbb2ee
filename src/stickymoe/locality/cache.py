"""`Cache`: the slots of one expert cache, which a runtime asks for experts and a simulator replays.

The policies and the way requests are served are compiled once (`policies`, `serving`) and used here request by request,
so a runtime and the replay of its trace count the same misses. `SparseCache` is the same for objects that are too many
for a state of each, such as the rows of a table.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np

from stickymoe.errors import ConfigError, require
from stickymoe.locality import policies as p
from stickymoe.locality.serving import ASK, PREFETCH, UNION


def require_slots(capacity: SupportsIndex) -> int:
    expected = "a whole number of slots ≥ 1"
    require(hasattr(capacity, "__index__"), "capacity", capacity, expected)
    slots = operator.index(capacity)
    require(slots >= 1, "capacity", slots, expected)
    return slots


class Load(NamedTuple):
    """An expert that must be loaded into a slot; `evicted` was there before, None if the slot was free.

    A slot of None means bypass: the expert is loaded into scratch memory, used by this request and not kept.
    """

    expert: int
    slot: int | None
    evicted: int | None


class Outcome(NamedTuple):
    """What one request did to the cache.

    Attributes:
        hits: experts that were resident
        loads: experts that were not, in the order in which they are loaded. A caller that uses the hits first and then
            each expert directly after its load needs room for one bypassed expert at a time
        late: hits whose prefetch is still in flight; the caller waits for them
        interrupted: experts that were evicted while their prefetch was in flight; the caller waits for their loads to
            end before it loads into the same slots
    """

    hits: tuple[int, ...]
    loads: tuple[Load, ...]
    late: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()

    @property
    def evictions(self) -> tuple[int, ...]:
        """Experts that a load evicts."""
        return tuple(load.evicted for load in self.loads if load.evicted is not None)

    @property
    def bypassed(self) -> tuple[int, ...]:
        """Experts that are loaded into scratch memory, not into a slot."""
        return tuple(load.expert for load in self.loads if load.slot is None)


@dataclass(frozen=True)
class CacheStats:
    """What one cache of `capacity` slots counted.

    Attributes:
        policy: name of the policy
        capacity: slots of the cache
        hits: accesses to resident experts
        misses: accesses to experts that had to be loaded
        prefetched: experts that were loaded before they were requested
        wasted: experts that were prefetched and not used
        evictions: residents that made room for a load or a prefetch; None where only misses are known (a miss curve)
        bypassed: misses that were not admitted to the cache; they are loads, not evictions
    """

    policy: str
    capacity: int
    hits: int
    misses: int
    prefetched: int = 0
    wasted: int = 0
    evictions: int | None = None
    bypassed: int = 0

    @property
    def accesses(self) -> int:
        """Hits and misses."""
        return self.hits + self.misses

    @property
    def loads(self) -> int:
        """Misses and prefetches."""
        return self.misses + self.prefetched

    @property
    def hit_rate(self) -> float:
        """Hits / accesses."""
        return self.hits / self.accesses if self.accesses else float("nan")

    @property
    def miss_rate(self) -> float:
        """Misses / accesses."""
        return self.misses / self.accesses if self.accesses else float("nan")

    @classmethod
    def of(cls, state: p.State, *, policy: str, capacity: int, misses: int) -> CacheStats:
        """The counts in the state of a cache, which knows no misses."""
        hits, prefetched, useful, evictions, bypassed = (
            int(state[p.VAR, i]) for i in (p.HITS, p.PREFETCHED, p.USEFUL, p.EVICTIONS, p.BYPASSED)
        )
        return cls(policy, capacity, hits, misses, prefetched, prefetched - useful, evictions, bypassed)


class Cache:
    """`capacity` slots for experts; `serving` defines how a request is served.

    An offline policy (static, belady) must be given the `requests` to come. The policy `router` must be given what the
    router keeps resident before each request (`set_residents`). With `on_miss` "bypass", a missing expert is not
    admitted if the victim was requested more often lately.
    """

    def __init__(
        self,
        *,
        capacity: SupportsIndex,
        policy: str = "lru",
        on_miss: p.OnMiss = "load",
        requests: Iterable[Sequence[int]] | None = None,
    ) -> None:
        p.require_on_miss(on_miss)
        self.policy = p.find_policy(policy)
        self.capacity = require_slots(capacity)
        self.on_miss = on_miss
        self._request = self.policy.loops_for(on_miss).request
        self._state = p.new_state(self.capacity, self.capacity)
        self._misses = 0
        self._in_flight: set[int] = set()
        self._ahead: dict[int, deque[int]] = {}
        self._kept: dict[int, list[int]] = {}
        if not self.policy.online:
            if requests is None:
                raise ConfigError(f"policy: '{policy}' must know the trace: pass requests=…, or choose another policy.")
            self._look_ahead([list(request) for request in requests])

    @property
    def resident(self) -> frozenset[int]:
        """The experts that have a slot, including those in flight."""
        held = self._state[p.HELD, : self.capacity]
        return frozenset(held[held >= 0].tolist())

    @property
    def in_flight(self) -> frozenset[int]:
        """Prefetched experts whose load is neither committed nor cancelled."""
        return frozenset(self._in_flight)

    @property
    def stats(self) -> CacheStats:
        """What was counted so far. A prefetch that is not used yet, or was cancelled, counts as wasted."""
        return CacheStats.of(self._state, policy=self.policy.name, capacity=self.capacity, misses=self._misses)

    def slot_of(self, expert: int) -> int | None:
        """The slot of an expert, None if it is not resident."""
        slot = int(self._state[p.SLOT, expert]) if 0 <= expert < self._state.shape[1] - 1 else -1
        return None if slot < 0 else slot

    def set_residents(self, experts: Sequence[int], *, layer: int = 0) -> None:
        """What the router of a layer keeps resident from now on. They are loaded when they are requested, not before.

        If several layers share the cache, an expert is kept as long as one of their routers keeps it. Only the policy
        `router` reads this.
        """
        if not self.policy.routed:
            return
        before = self._kept.get(layer, [])
        now = list(experts)
        if now == before:
            return
        if now and min(now) < 0:
            raise ConfigError(f"residents: got experts {now}, expected indices ≥ 0.")
        self._grow(max(now, default=0) + 1)
        for marked, change in ((before, -1), (now, 1)):
            for e in marked:
                self._state[p.HINT, e] += change
        self._kept[layer] = now

    def request(self, experts: Sequence[int]) -> Outcome:
        """Ask for the experts of one token, heaviest first."""
        return self._serve(ASK, experts)

    def request_union(self, experts: Iterable[int]) -> Outcome:
        """Ask for the experts that any token of one forward pass needs: of a prompt, or of a batch."""
        return self.request_group(sorted(set(experts)))

    def request_group(self, experts: Sequence[int]) -> Outcome:
        """The same, with the experts in the order in which they are served."""
        return self._serve(UNION, experts)

    def prefetch(self, experts: Sequence[int]) -> Outcome:
        """Reserve slots for the next experts, as many as fit. Their loads are in flight until `commit`.

        Experts in flight count as resident. One that is evicted before `commit` is no longer in flight.
        """
        if self.policy.knows == "next_use":
            raise ConfigError(
                f"{self.policy.name} bounds policies that load on demand: choose another policy, or omit prefetch."
            )
        outcome = self._serve(PREFETCH, experts)
        self._in_flight.update(load.expert for load in outcome.loads)
        return outcome

    def commit(self, expert: int) -> None:
        """The load of a prefetched expert is complete."""
        self._require_in_flight(expert)
        self._in_flight.remove(expert)

    def cancel(self, expert: int) -> None:
        """The load of a prefetched expert failed: free its slot."""
        self._require_in_flight(expert)
        self._in_flight.remove(expert)
        s = self._state
        self.policy.forget(s, expert)
        s[p.HELD, s[p.SLOT, expert]] = -1
        s[p.SLOT, expert] = -1
        s[p.UNUSED, expert] = 0
        s[p.VAR, p.SIZE] -= 1

    def _require_in_flight(self, expert: int) -> None:
        if expert not in self._in_flight:
            raise ConfigError(f"Expert {expert} is not in flight: expected one of {sorted(self._in_flight)}.")

    def _serve(self, kind: int, experts: Sequence[int]) -> Outcome:
        entries = np.array(experts, np.int64)
        asked: list[int] = entries.tolist()
        distinct = set(asked)
        if len(distinct) < len(asked) or (asked and min(distinct) < 0):
            raise ConfigError(f"request: got experts {asked}, expected different indices ≥ 0.")
        if asked and max(distinct) >= self._state.shape[1] - 1:
            self._grow(max(distinct) + 1)
        s = self._state
        if self.policy.knows == "next_use":
            for e in asked:
                s[p.HINT, e] = self._next_use(e)
        self._request(s, kind, entries, 0, len(asked))
        if not s.item(p.VAR, p.LOADS) and not self._in_flight:  # a short cut: nothing to load or to wait for
            return Outcome(tuple(asked if kind != PREFETCH else asked[: self.capacity]), ())
        expert, slot, evicted = s[p.LOADED : p.EVICTED + 1, : s.item(p.VAR, p.LOADS)].tolist()
        loads = tuple(
            [
                Load(e, None if i < 0 else i, None if out < 0 else out)
                for e, i, out in zip(expert, slot, evicted, strict=True)
            ]
        )
        if kind != PREFETCH:
            self._misses += len(loads)
        served = asked[: self.capacity] if kind == PREFETCH else asked
        hits = tuple([e for e in served if e not in expert])
        if not self._in_flight:
            return Outcome(hits, loads)
        late = tuple(e for e in hits if e in self._in_flight)
        interrupted = tuple(e for e in evicted if e in self._in_flight)
        self._in_flight.difference_update(evicted)
        return Outcome(hits, loads, late, interrupted)

    def _look_ahead(self, requests: list[list[int]]) -> None:
        """Give the policy what it knows of the requests to come."""
        self._grow(max((e for request in requests for e in request), default=0) + 1)
        if self.policy.knows == "rank":
            uses = Counter(e for request in requests for e in request)
            for rank, expert in enumerate(sorted(uses, key=lambda e: (uses[e], -e))):
                self._state[p.HINT, expert] = rank
            return
        for position, expert in enumerate(e for request in requests for e in request):
            self._ahead.setdefault(expert, deque()).append(position)

    def _next_use(self, expert: int) -> int:
        """The position of the use after this one."""
        ahead = self._ahead.get(expert, deque())
        if ahead:
            ahead.popleft()
        return ahead[0] if ahead else p.NEVER

    def _grow(self, n_experts: int) -> None:
        """Make room for experts with higher indices."""
        old, end = self._state, self._state.shape[1] - 1
        if n_experts <= end:
            return
        new = p.new_state(max(n_experts, 2 * end), self.capacity)
        last = new.shape[1] - 1
        new[:, :end] = old[:, :end]
        new[:, last] = old[:, end]
        for row in (p.NEWER, p.OLDER):
            new[row][new[row] == end] = last
        if new[p.VAR, p.HAND] == end:
            new[p.VAR, p.HAND] = last
        self._state = new


class SparseCache:
    """A cache of `capacity` slots for keys of any size. Only keys that have a slot take memory.

    It decides as a `Cache` of all keys does. A policy that a device can run keeps nothing of a key without a slot, so
    the number that stands for a key can stand for another one later.
    """

    def __init__(self, *, capacity: SupportsIndex, policy: str = "lru") -> None:
        found = p.find_policy(policy)
        require(found.knows is None, "policy", policy, f"one of {', '.join(p.policy_names(online=True))}")
        self._cache = Cache(capacity=capacity, policy=policy)
        self._entry: dict[int, int] = {}
        self._key: list[int] = []
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def stats(self) -> CacheStats:
        return self._cache.stats

    @property
    def resident(self) -> frozenset[int]:
        """The keys that have a slot."""
        return frozenset(self._entry)

    def request(self, keys: Sequence[int]) -> Outcome:
        """Ask for the keys of one token."""
        return self._of_keys(self._cache.request([self._entry_of(key) for key in keys]))

    def request_union(self, keys: Iterable[int]) -> Outcome:
        """Ask for the keys of several tokens of one forward pass."""
        return self._of_keys(self._cache.request_group([self._entry_of(key) for key in sorted(set(keys))]))

    def _entry_of(self, key: int) -> int:
        """The number that stands for a key in the cache, a new one if it has none."""
        entry = self._entry.get(key)
        if entry is None:
            if self._free:
                entry = self._free.pop()
                self._key[entry] = key
            else:
                entry = len(self._key)
                self._key.append(key)
            self._entry[key] = entry
        return entry

    def _of_keys(self, outcome: Outcome) -> Outcome:
        """An outcome for keys. Keys that have no slot any more are forgotten."""
        if not outcome.loads:
            return Outcome(tuple([self._key[e] for e in outcome.hits]), ())
        key = self._key
        hits = tuple([key[e] for e in outcome.hits])
        loads = [Load(key[e], slot, None if out is None else key[out]) for e, slot, out in outcome.loads]
        for out in dict.fromkeys(outcome.evictions):
            if self._cache.slot_of(out) is None:
                del self._entry[key[out]]
                self._free.append(out)
        return Outcome(hits, tuple(loads))
