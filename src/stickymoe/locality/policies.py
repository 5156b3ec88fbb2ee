"""Cache policies: which resident entry is evicted. One definition serves `Cache` and the compiled replay.

A policy is a class with up to three static functions, which numba compiles:

    used(s, e, new)   entry e was requested and is resident; `new` if this request loaded it
    victim(s)         the entry to evict, never one that the request being served needs; with bypass it may stay
    forget(s, e)      entry e leaves the cache (optional)

`s` is the `State` of one cache. A policy keeps either an order (`append`, `unlink`, `oldest`) or a score per slot
(`lowest`). The class docstring says what is evicted. `knows` names what a policy reads from `s[HINT, e]`: "rank", the
rank of each entry by its uses in the whole trace, or "next_use", the position of its next use, which only an offline
policy knows; or "residents", how many routers of the cache's layers keep the entry resident, which a device knows too.

    @register_policy("mru")
    class MRU:
        \"\"\"Evicts the entry that was used last.\"\"\"

        @staticmethod
        def used(s, e, new):
            if not new:
                unlink(s, e)
            append(s, e)

        @staticmethod
        def victim(s): ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numba import njit

from stickymoe.errors import ConfigError, require, unknown

if TYPE_CHECKING:
    from stickymoe.locality.serving import Loops

NEVER = np.iinfo(np.int64).max  # a next use that never comes, and the score of a slot that must stay
Knowledge = Literal["rank", "next_use", "residents"]
OnMiss = Literal["load", "bypass"]


# The state of a cache is one array of whole numbers [rows, entries + 1]. Passing one array to compiled code is free;
# passing a dozen costs as much as a replayed request. These are its rows.
SLOT = 0  # the slot of each entry, −1 if it is not resident
PINNED = 1  # whether the request being served needs a resident entry: 0, 1 (it was resident) or 2 (it was loaded)
UNUSED = 2  # whether an entry was prefetched and not yet requested
NEWER, OLDER = 3, 4  # neighbours in a circular list from the newest to the oldest entry, closed by the last column
MARK = 5  # one bit per entry
USES = 6  # uses since the entry was loaded
HINT = 7  # what a policy knows of each entry beside its uses so far
HELD = 8  # the entry in each slot, −1 if it is free
SCORE, STAMP = 9, 10  # of each slot; a pinned slot has the score NEVER
LOADED, INTO, EVICTED = 11, 12, 13  # the loads of the last request: entry, slot (−1: bypassed), replaced entry or −1
ASKED = 14  # recent requests of each entry, counted for bypass only
VAR = 15  # these variables of the cache:
CAPACITY, SIZE, HITS, LOADS, PREFETCHED, USEFUL, EVICTIONS, BYPASSED, COUNTED, HAND, AGE, CLOCK = range(12)

State = np.ndarray[Any, np.dtype[np.int64]]


def new_state(n_entries: int, capacity: int) -> State:
    """An empty cache of `capacity` slots."""
    state = np.zeros((VAR + 1, max(n_entries, capacity, CLOCK + 1) + 1), np.int64)
    state[VAR, CAPACITY] = capacity
    clear(state)
    return state


@njit(cache=True)
def clear(s: Any) -> None:
    """Empty the cache; the counts of hits, prefetches and evictions are kept: emptying is no eviction."""
    end = s.shape[1] - 1
    s[SLOT] = s[HELD] = -1
    s[UNUSED] = s[ASKED] = 0
    s[NEWER, end] = s[OLDER, end] = end
    s[VAR, HAND] = end
    s[VAR, SIZE] = s[VAR, AGE] = s[VAR, CLOCK] = s[VAR, COUNTED] = 0


@njit(cache=True)
def append(s: Any, e: int) -> None:
    """Put an entry at the newest end of the order."""
    end = s.shape[1] - 1
    newest = s[OLDER, end]
    s[OLDER, e] = newest
    s[NEWER, e] = end
    s[NEWER, newest] = e
    s[OLDER, end] = e


@njit(cache=True)
def unlink(s: Any, e: int) -> None:
    """Remove an entry from the order."""
    s[NEWER, s[OLDER, e]] = s[NEWER, e]
    s[OLDER, s[NEWER, e]] = s[OLDER, e]


@njit(cache=True)
def oldest(s: Any) -> int:
    """The oldest entry of the order that is not pinned."""
    e = s[NEWER, s.shape[1] - 1]
    while s[PINNED, e]:
        e = s[NEWER, e]
    return e  # type: ignore[no-any-return]


@njit(cache=True)
def lowest(s: Any, by_stamp: bool) -> int:
    """The entry whose slot has the lowest score; among equal scores the lowest stamp, or the first slot."""
    low = NEVER
    for slot in range(s[VAR, CAPACITY]):
        low = min(low, s[SCORE, slot])
    best = 0
    while s[SCORE, best] != low:
        best += 1
    if by_stamp:
        for slot in range(best + 1, s[VAR, CAPACITY]):
            if s[SCORE, slot] == low and s[STAMP, slot] < s[STAMP, best]:
                best = slot
    return s[HELD, best]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Policy:
    """A registered policy, its functions compiled. `source` identifies the code; empty if it is in no file."""

    name: str
    description: str
    knows: Knowledge | None
    used: Callable[..., None]
    victim: Callable[..., int]
    forget: Callable[..., None]
    source: str

    @property
    def online(self) -> bool:
        """Whether a device can run it: an offline policy knows the trace, and is a bound."""
        return self.knows in (None, "residents")

    @property
    def routed(self) -> bool:
        """Whether it needs the resident sets of the model's routers."""
        return self.knows == "residents"

    @cached_property
    def loops(self) -> Loops:
        """How this policy serves requests, compiled on first use."""
        from stickymoe.locality.serving import compile_for

        return compile_for(self, bypass=False)

    @cached_property
    def bypass_loops(self) -> Loops:
        """The same with bypass. Refused for an offline policy: a bound for it would have to know what to bypass.

        Refused if routers choose the residents: what they keep is admitted.
        """
        if self.knows is not None:
            raise ConfigError(f"{self.name} admits every load: choose another policy, or on_miss load.")
        from stickymoe.locality.serving import compile_for

        return compile_for(self, bypass=True)

    def loops_for(self, on_miss: OnMiss) -> Loops:
        return self.bypass_loops if on_miss == "bypass" else self.loops


_POLICIES: dict[str, Policy] = {}


def register_policy(name: str, *, knows: Knowledge | None = None) -> Callable[[type], type]:
    """Register a policy under `name`. A name can be registered once."""

    def register(cls: type) -> type:
        if name in _POLICIES:
            raise ConfigError(f"Policy '{name}' is registered twice; choose another name.")
        functions: dict[str, Any] = {role: getattr(cls, role, None) for role in ("used", "victim", "forget")}
        for required in ("used", "victim"):
            if functions[required] is None:
                raise ConfigError(f"Policy '{name}': {cls.__name__} has no function '{required}'.")
        _POLICIES[name] = Policy(
            name=name,
            description=" ".join((cls.__doc__ or "").split()),
            knows=knows,
            used=njit(functions["used"]),
            victim=njit(functions["victim"]),
            forget=njit(functions["forget"] or _forget_nothing),
            source=_digest([f for f in functions.values() if f is not None]),
        )
        return cls

    return register


def _forget_nothing(s: Any, e: int) -> None:
    pass


def _digest(functions: Sequence[FunctionType]) -> str:
    """Identifies the code of a policy and of the functions above: compiled loops on disk must not outlive either."""
    files = sorted({Path(__file__), *(Path(function.__code__.co_filename) for function in functions)})
    if not all(file.is_file() for file in files):  # defined in an interactive session
        return ""
    return hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()[:10]


def find_policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise ConfigError(unknown("policy", name, _POLICIES))
    return _POLICIES[name]


def require_on_miss(on_miss: str) -> None:
    require(on_miss in ("load", "bypass"), "on_miss", on_miss, "load or bypass")


def policy_names(*, online: bool | None = None, routed: bool = False) -> tuple[str, ...]:
    """All policies, or those that a device can run, or the others.

    Policies that need the resident sets of routers are left out unless `routed`: most models have none.
    """
    return tuple(
        name
        for name, policy in _POLICIES.items()
        if (online is None or policy.online == online) and (routed or not policy.routed)
    )


# The policies


@register_policy("lru")
class LRU:
    """Evicts the entry that was used longest ago."""

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        if not new:
            if s[OLDER, s.shape[1] - 1] == e:
                return
            unlink(s, e)
        append(s, e)

    @staticmethod
    def victim(s: Any) -> int:
        return oldest(s)

    @staticmethod
    def forget(s: Any, e: int) -> None:
        unlink(s, e)


@register_policy("lfu")
class LFU:
    """Evicts the entry with the fewest uses since it was loaded, plus the age of the cache when it was last used.

    Dynamic ageing (Arlitt et al., 2000): the age is the value of the last victim, so an entry that was popular long
    ago does not stay for ever. Among equal values, it evicts the entry that was used longest ago.
    """

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        s[USES, e] = 1 if new else s[USES, e] + 1
        s[VAR, CLOCK] += 1
        s[SCORE, s[SLOT, e]] = s[USES, e] + s[VAR, AGE]
        s[STAMP, s[SLOT, e]] = s[VAR, CLOCK]

    @staticmethod
    def victim(s: Any) -> int:
        e = lowest(s, True)
        s[VAR, AGE] = s[SCORE, s[SLOT, e]]
        return e


@register_policy("fifo")
class FIFO(LRU):
    """Evicts the entry that was loaded longest ago."""

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        if new:
            append(s, e)


@register_policy("sieve")
class Sieve:
    """Evicts the first entry that was not used again, from a hand that moves from the oldest load to the newest.

    Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. The hand clears the mark of the entries it passes.
    """

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        s[MARK, e] = not new
        if new:
            append(s, e)

    @staticmethod
    def victim(s: Any) -> int:
        end = s.shape[1] - 1
        e = s[VAR, HAND] if s[VAR, HAND] != end else s[NEWER, end]
        while s[PINNED, e] or s[MARK, e]:
            if not s[PINNED, e]:
                s[MARK, e] = False
            e = s[NEWER, e] if s[NEWER, e] != end else s[NEWER, end]
        s[VAR, HAND] = e
        return e  # type: ignore[no-any-return]

    @staticmethod
    def forget(s: Any, e: int) -> None:
        if s[VAR, HAND] == e:
            s[VAR, HAND] = s[NEWER, e]
        unlink(s, e)


@register_policy("router", knows="residents")
class Routed(LRU):
    """Evicts the entry that was used longest ago among those that no router keeps resident; if all are kept, of all."""

    # With a slot for each resident R_t of the router, requests inside R_t and no prefetch, a cache loads at most
    # |R_1| + Σ |R_t minus R_t−1| experts: the first fill and the router's own swaps. Proof: the missing expert is in
    # R_t, so a full cache holds an entry outside R_t. The request is inside R_t, so that entry is not pinned, and the
    # victim is outside R_t. So a loaded expert stays as long as the router keeps it: it is loaded at most once each
    # time that the router makes it resident.

    @staticmethod
    def victim(s: Any) -> int:
        end = s.shape[1] - 1
        e = s[NEWER, end]
        while e != end and (s[PINNED, e] or s[HINT, e]):
            e = s[NEWER, e]
        return e if e != end else oldest(s)


@register_policy("static", knows="rank")
class Static:
    """Evicts the entry with the fewest uses in the whole trace; among equals the one with the highest index."""

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        s[SCORE, s[SLOT, e]] = s[HINT, e]

    @staticmethod
    def victim(s: Any) -> int:
        return lowest(s, False)


@register_policy("belady", knows="next_use")
class Belady:
    """Evicts the entry whose next use is farthest in the future: no policy that loads on demand misses less.

    A union larger than the cache is an exception: how it is split depends on what is resident, so
    another policy can in rare cases miss slightly less.
    """

    @staticmethod
    def used(s: Any, e: int, new: bool) -> None:
        s[SCORE, s[SLOT, e]] = -s[HINT, e]

    @staticmethod
    def victim(s: Any) -> int:
        return lowest(s, False)
