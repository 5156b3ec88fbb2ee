"""How a cache serves requests: the loops that every policy is compiled into.

A request is what one forward pass asks of one cache. Its experts, heaviest first, are served together: hits are judged
against the cache before the request, resident members are pinned, each miss evicts an entry outside the request, then
the policy sees every member from the lightest to the heaviest. A request that is larger than the cache is served one
expert after another, heaviest first. A union (the experts of several tokens) that is larger than the cache is served
in groups that fit: first its hits, then the others.

With bypass, a miss need not enter the cache. If the cache is full and the victim was requested more often lately than
the missing entry, the victim stays, and the entry is used from a scratch slot (admission as in TinyLFU, Einziger et
al., 2017). Members of a request are counted when it comes, once per request; before a request, if at least `FADE`
members per slot were counted since the last time, all counts are halved. Prefetches are not counted, and are always
admitted: whoever prefetches has a better guess than a count.

Where routers keep resident sets, and the policy knows them, a union that is larger than the cache is served with the
experts of these sets last, so that they are in the cache when the prompt ends.

The functions below are templates: `used`, `victim` and `forget` are those of one policy; `BYPASS` and `ROUTED` are
constants.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from stickymoe.locality.policies import (
    ASKED,
    BYPASSED,
    CAPACITY,
    COUNTED,
    EVICTED,
    EVICTIONS,
    HELD,
    HINT,
    HITS,
    INTO,
    LOADED,
    LOADS,
    NEVER,
    PINNED,
    PREFETCHED,
    SCORE,
    SIZE,
    SLOT,
    UNUSED,
    USEFUL,
    VAR,
    clear,
)

if TYPE_CHECKING:
    from stickymoe.locality.policies import Policy

    used: Callable[..., None]
    victim: Callable[..., int]
    forget: Callable[..., None]

SKIP, ASK, PREFETCH, UNION = 0, 1, 2, 3  # kinds of request
FADE = 8  # requested entries per slot until counts are halved: more saves more where popularity lasts, and costs more
BYPASS = ROUTED = False


def _load(s: Any, e: int, asked: bool) -> None:
    """Give a missing entry a slot, or bypass the cache."""
    n = s[VAR, LOADS]
    s[VAR, LOADS] = n + 1
    if s[VAR, SIZE] == s[VAR, CAPACITY]:
        out = victim(s)
        if BYPASS and asked and s[ASKED, e] < s[ASKED, out]:
            s[LOADED, n], s[INTO, n], s[EVICTED, n] = e, -1, -1
            s[VAR, BYPASSED] += 1
            return
        slot = s[SLOT, out]
        forget(s, out)
        s[SLOT, out] = -1
        s[UNUSED, out] = 0
        s[VAR, EVICTIONS] += 1
    else:
        out = -1
        slot = s[VAR, SIZE]
        while s[HELD, slot] >= 0:  # a slot below was freed
            slot = slot + 1 if slot + 1 < s[VAR, CAPACITY] else 0
        s[VAR, SIZE] += 1
    s[HELD, slot] = e
    s[SLOT, e] = slot
    s[SCORE, slot] = NEVER
    s[PINNED, e] = 2
    s[LOADED, n], s[INTO, n], s[EVICTED, n] = e, slot, out


@njit(inline="always")
def _hit(s: Any, e: int) -> None:
    s[VAR, HITS] += 1
    s[VAR, USEFUL] += s[UNUSED, e]
    s[UNUSED, e] = 0


def _serve(s: Any, entries: Any, first: int, last: int, asked: bool) -> None:
    """Serve entries[first:last] together; they fit into the cache."""
    missing = 0
    for j in range(first, last):
        e = entries[j]
        slot = s[SLOT, e]
        if slot < 0:
            missing += 1
            continue
        s[PINNED, e] = 1
        s[SCORE, slot] = NEVER
        if asked:
            _hit(s, e)
    if missing:
        for j in range(first, last):
            e = entries[j]
            if s[SLOT, e] < 0:
                _load(s, e, asked)
                if not asked:
                    s[UNUSED, e] = 1
                    s[VAR, PREFETCHED] += 1
    for j in range(last - 1, first - 1, -1):
        e = entries[j]
        if BYPASS and s[SLOT, e] < 0:
            continue
        new = s[PINNED, e] == 2
        s[PINNED, e] = 0
        used(s, e, new)


def _request(s: Any, kind: int, entries: Any, first: int, last: int) -> None:
    """Serve entries[first:last] as a request of some kind; a large union is put into the order it is served in."""
    C = s[VAR, CAPACITY]
    s[VAR, LOADS] = 0
    if BYPASS and kind != PREFETCH:
        _count(s, entries, first, last)
    if kind == PREFETCH:
        _serve(s, entries, first, min(last, first + C), False)
    elif last - first <= C:
        _serve(s, entries, first, last, True)
    elif kind == ASK:
        for j in range(first, last):
            _serve(s, entries, j, j + 1, True)
    else:
        border = _hits_first(s, entries, first, last)
        if ROUTED:
            _kept_last(s, entries, border, last)
        _serve(s, entries, first, border, True)
        for j in range(border, last, C):
            _serve(s, entries, j, min(j + C, last), True)


@njit(cache=True)
def _count(s: Any, entries: Any, first: int, last: int) -> None:
    """Count the members of a request, for bypass."""
    if s[VAR, COUNTED] >= FADE * s[VAR, CAPACITY]:
        s[ASKED] //= 2
        s[VAR, COUNTED] = 0
    for j in range(first, last):
        s[ASKED, entries[j]] += 1
    s[VAR, COUNTED] += last - first


@njit(cache=True)
def _hits_first(s: Any, entries: Any, first: int, last: int) -> int:
    """Put the resident entries of a union first, both parts in their order; returns where the others begin."""
    border = first
    for j in range(first, last):
        e = entries[j]
        if s[SLOT, e] >= 0:
            for i in range(j, border, -1):
                entries[i] = entries[i - 1]
            entries[border] = e
            border += 1
    return border


@njit(cache=True)
def _kept_last(s: Any, entries: Any, first: int, last: int) -> None:
    """Put the entries that a router keeps last, both parts in their order."""
    border = first
    for j in range(first, last):
        e = entries[j]
        if not s[HINT, e]:
            for i in range(j, border, -1):
                entries[i] = entries[i - 1]
            entries[border] = e
            border += 1


def _replay_rows(s: Any, steps: Any, kind: Any, cold: Any, k: int, p: int, future: Any) -> None:
    """Serve the rows of `steps` [n, width] in order: k entries of a request, p of a prefetch; `cold` empties first.

    `future` [n, width] are hints about the entries, or empty.
    """
    width = steps.shape[1]
    entries = steps.reshape(-1)
    for i in range(len(kind)):
        if cold[i]:
            clear(s)
        if kind[i] != SKIP:
            n = k if kind[i] == ASK else p
            for j in range(n if len(future) else 0):
                s[HINT, steps[i, j]] = future[i, j]
            if not BYPASS and n == 1 and kind[i] == ASK and s[SLOT, steps[i, 0]] >= 0:  # nothing to pin or load
                _hit(s, steps[i, 0])
                used(s, steps[i, 0], False)
            else:
                _request(s, kind[i], entries, i * width, i * width + n)


def _replay_requests(s: Any, entries: Any, bounds: Any, kind: Any, cold: Any, future: Any) -> None:
    """Serve requests of any size in order: request i is entries[bounds[i]:bounds[i + 1]]."""
    for i in range(len(kind)):
        if cold[i]:
            clear(s)
        if kind[i] != SKIP:
            for j in range(bounds[i], bounds[i + 1] if len(future) else bounds[i]):
                s[HINT, entries[j]] = future[j]
            _request(s, kind[i], entries, bounds[i], bounds[i + 1])


def _replay_routed(
    s: Any, entries: Any, bounds: Any, kind: Any, cold: Any, set_of: Any, sets: Any, offset: Any, empty: int, kept: Any
) -> None:
    """The same for a policy that knows the resident sets of routers.

    Before request i, the router of layer l has the residents `sets[l, t]`, with (l, t) = `set_of[i]`; −1 if the router
    has not run since the request before. `empty` marks a place without a resident. `kept` [layers, C] are the residents
    that are marked, and is updated.
    """
    for i in range(len(kind)):
        if cold[i]:
            clear(s)
            s[HINT] = 0
            kept[:] = empty
        layer, token = set_of[i, 0], set_of[i, 1]
        if layer >= 0:
            for j in range(kept.shape[1]):
                before, now = kept[layer, j], np.int64(sets[layer, token, j])
                if before != now:
                    if before != empty:
                        s[HINT, before + offset[layer]] -= 1
                    if now != empty:
                        s[HINT, now + offset[layer]] += 1
                    kept[layer, j] = now
        _request(s, kind[i], entries, bounds[i], bounds[i + 1])


class Loops(NamedTuple):
    """The loops of this module, compiled for one policy."""

    request: Callable[..., None]
    replay_rows: Callable[..., None]
    replay_requests: Callable[..., None]
    replay_routed: Callable[..., None]


def compile_for(policy: Policy, *, bypass: bool) -> Loops:
    """The loops with the functions of a policy in them. Numba keeps them on disk under the policy's own name."""
    own = {"used": policy.used, "victim": policy.victim, "forget": policy.forget}
    scope: dict[str, Any] = {**globals(), **own, "BYPASS": bypass, "ROUTED": policy.routed}
    for template in (_load, _serve, _request, _replay_rows, _replay_requests, _replay_routed):
        name = template.__name__
        function = FunctionType(template.__code__, scope, name)
        function.__qualname__ = f"{name}_{policy.name}_{policy.source}{'_bypass' * bypass}"
        function.__module__ = template.__module__
        if name == "_serve":  # inlined, so that a replayed request costs no call
            scope[name] = njit(function, inline="always")
        else:
            scope[name] = njit(function, cache=bool(policy.source))
    return Loops(*(scope[f"_{name}"] for name in Loops._fields))
