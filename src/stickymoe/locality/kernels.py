"""Compiled loops of the replay. Each does what `cache.Cache` does request by request; tests hold them equal.

A block of `steps` [n, width] is served in order: `kind` says whether a row is skipped, asked for (its first k
entries) or fetched ahead (its first p); where `cold` the cache is emptied first. The state of a cache lives in
arrays that the caller keeps, so that a trace of any length goes through in blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SKIP, ASK, FETCH = 0, 1, 2
LRU, FIFO, SIEVE = 0, 1, 2
LFU, STATIC, BELADY = 0, 1, 2
SIZE, HITS, FETCHED, USEFUL, HAND, AGE, CLOCK = range(7)  # what `counts` holds

NEVER = np.iinfo(np.int64).max  # a next use that does not come, and the score of a slot that must stay


@njit(cache=True)
def queue_replay(
    policy: int,
    steps: Any,
    kind: Any,
    cold: Any,
    k: int,
    p: int,
    capacity: int,
    newer: Any,
    older: Any,
    resident: Any,
    marked: Any,
    ahead: Any,
    pinned: Any,
    counts: Any,
) -> None:
    """LRU, FIFO and SIEVE: residents form a circular list from the newest to the oldest, closed by a sentinel.

    A hit costs a few writes whatever the capacity. An entry that is linked to itself was loaded in this step.
    """
    end = len(resident)
    size, hits, fetched, useful, hand = counts[SIZE], counts[HITS], counts[FETCHED], counts[USEFUL], counts[HAND]
    for i in range(len(steps)):
        if cold[i]:
            resident[:] = False
            ahead[:] = False
            size = 0
            newer[end] = older[end] = hand = end
        if kind[i] == SKIP:
            continue
        asked = kind[i] == ASK
        if policy == LRU and k == 1 and asked and older[end] == steps[i, 0]:  # asked for again: no order changes
            hits += 1
            useful += ahead[steps[i, 0]]
            ahead[steps[i, 0]] = False
            continue
        width = k if asked else min(p, capacity)
        group = width if width <= capacity else 1
        for first in range(0, width, group):
            for j in range(first, first + group):
                e = steps[i, j]
                pinned[e] = True
                if asked and resident[e]:
                    hits += 1
                    useful += ahead[e]
                    ahead[e] = False
            for j in range(first, first + group):
                e = steps[i, j]
                if resident[e]:
                    continue
                if size == capacity:
                    if policy == SIEVE:
                        victim = hand if hand != end else newer[end]
                        while pinned[victim] or marked[victim]:
                            if not pinned[victim]:
                                marked[victim] = False
                            victim = newer[victim]
                            if victim == end:
                                victim = newer[end]
                        hand = newer[victim]
                    else:
                        victim = newer[end]
                        while pinned[victim]:
                            victim = newer[victim]
                    newer[older[victim]] = newer[victim]
                    older[newer[victim]] = older[victim]
                    resident[victim] = False
                    ahead[victim] = False
                    size -= 1
                resident[e] = True
                marked[e] = False
                newer[e] = older[e] = e
                size += 1
                if not asked:
                    ahead[e] = True
                    fetched += 1
            for j in range(first + group - 1, first - 1, -1):
                e = steps[i, j]
                pinned[e] = False
                if policy == LRU or newer[e] == e:
                    newer[older[e]] = newer[e]
                    older[newer[e]] = older[e]
                    newest = older[end]
                    older[e] = newest
                    newer[e] = end
                    newer[newest] = e
                    older[end] = e
                else:
                    marked[e] = True
    counts[SIZE], counts[HITS], counts[FETCHED], counts[USEFUL], counts[HAND] = size, hits, fetched, useful, hand


@njit(cache=True)
def scored_replay(
    policy: int,
    steps: Any,
    kind: Any,
    cold: Any,
    k: int,
    p: int,
    capacity: int,
    future: Any,
    rank: Any,
    holds: Any,
    score: Any,
    stamp: Any,
    slot_of: Any,
    uses: Any,
    ahead: Any,
    counts: Any,
) -> None:
    """LFU, static and Belady: every slot has a score, and the lowest goes; of equals the one used longest ago.

    `future` [n, k] holds the next use of each access (Belady), `rank` the standing of each entry (static).
    """
    size, hits, fetched, useful, age, clock = (
        counts[SIZE],
        counts[HITS],
        counts[FETCHED],
        counts[USEFUL],
        counts[AGE],
        counts[CLOCK],
    )
    for i in range(len(steps)):
        if cold[i]:
            slot_of[:] = -1
            uses[:] = 0
            ahead[:] = False
            size = age = clock = 0
        if kind[i] == SKIP:
            continue
        asked = kind[i] == ASK
        width = k if asked else min(p, capacity)
        group = width if width <= capacity else 1
        for first in range(0, width, group):
            for j in range(first, first + group):
                e = steps[i, j]
                slot = slot_of[e]
                if slot >= 0:
                    score[slot] = NEVER
                    if asked:
                        hits += 1
                        useful += ahead[e]
                        ahead[e] = False
            for j in range(first, first + group):
                e = steps[i, j]
                if slot_of[e] >= 0:
                    continue
                if size < capacity:
                    slot = size
                    size += 1
                else:
                    slot = _lowest(score, stamp, size, policy == LFU)
                    victim = holds[slot]
                    slot_of[victim] = -1
                    ahead[victim] = False
                    if policy == LFU:
                        age = score[slot]
                        uses[victim] = 0
                holds[slot] = e
                slot_of[e] = slot
                score[slot] = NEVER
                if not asked:
                    ahead[e] = True
                    fetched += 1
            for j in range(first + group - 1, first - 1, -1):
                e = steps[i, j]
                slot = slot_of[e]
                if policy == BELADY:
                    score[slot] = -future[i, j]
                elif policy == STATIC:
                    score[slot] = rank[e]
                else:
                    uses[e] += 1
                    clock += 1
                    score[slot] = uses[e] + age
                    stamp[slot] = clock
    counts[SIZE], counts[HITS], counts[FETCHED], counts[USEFUL] = size, hits, fetched, useful
    counts[AGE], counts[CLOCK] = age, clock


@njit(cache=True)
def _lowest(score: Any, stamp: Any, size: int, stamped: bool) -> int:
    """The slot with the lowest score; of equals the one with the lowest stamp, if there are stamps."""
    low = NEVER
    for slot in range(size):
        low = min(low, score[slot])
    best = 0
    while score[best] != low:
        best += 1
    if stamped:
        for slot in range(best + 1, size):
            if score[slot] == low and stamp[slot] < stamp[best]:
                best = slot
    return best


@njit(cache=True)
def next_uses(steps: Any, kind: Any, k: int, n_entries: int) -> Any:
    """For every access the position of the entry's next one, or `NEVER`."""
    future = np.full((len(steps), k), NEVER)
    ahead = np.full(n_entries, NEVER)
    for i in range(len(steps) - 1, -1, -1):
        if kind[i] == ASK:
            for j in range(k - 1, -1, -1):
                e = steps[i, j]
                future[i, j] = ahead[e]
                ahead[e] = i * k + j
    return future


@njit(cache=True)
def recency_depths(steps: Any, kind: Any, cold: Any, k: int, last: Any, depths: Any, clock: int) -> int:
    """Adds to `depths[d]` the accesses that an LRU cache of d or more slots (and at least k) would hit.

    The depth of an entry is the number of entries used since, itself included: counting them over all entries is a
    loop without branches, which the compiler turns into a few wide instructions. Returns the clock.
    """
    for i in range(len(steps)):
        if cold[i]:
            last[:] = 0
            clock = 0
        if kind[i] == SKIP:
            continue
        if clock > 2_000_000_000:
            clock = _renumber(last)
        for j in range(k):
            since = last[steps[i, j]]
            if since > 0:
                depth = np.int32(1)
                for x in range(len(last)):
                    depth += np.int32(last[x] > since)
                depths[depth] += 1
        for j in range(k - 1, -1, -1):
            clock += 1
            last[steps[i, j]] = clock
    return clock


@njit(cache=True)
def _renumber(last: Any) -> int:
    """Keep the order of `last` in small numbers."""
    clock = 0
    for e in np.argsort(last):
        if last[e] > 0:
            clock += 1
            last[e] = clock
    return clock


@njit(cache=True)
def stack_depths(
    steps: Any,
    kind: Any,
    cold: Any,
    k: int,
    future: Any,
    rank: Any,
    value: Any,
    stack: Any,
    place: Any,
    depths: Any,
    size: int,
) -> int:
    """Like `recency_depths` for a policy that evicts the lowest `value`: the stack of Mattson et al. (1970).

    The first C of the stack are what a cache of C ≥ k slots holds. A request puts its members on top; a cache of C
    slots keeps of the others the C − k with the highest value, so each place below takes the best of what the places
    above gave up and what stood there. Without `rank` the value is the next use, farthest lowest. Returns the size.
    """
    carried = np.empty(k + 1, np.int64)
    member = np.zeros(len(place), np.bool_)
    for i in range(len(steps)):
        if cold[i]:
            place[:] = -1
            size = 0
        if kind[i] == SKIP:
            continue
        missing = 0
        deepest = k - 1
        for j in range(k):
            e = steps[i, j]
            member[e] = True
            if place[e] >= 0:
                depths[place[e] + 1] += 1
                deepest = max(deepest, place[e])
            else:
                missing += 1
        n_carried = 0
        for c in range(min(k, size)):
            if not member[stack[c]]:
                carried[n_carried] = stack[c]
                n_carried += 1
        last = size + missing - 1 if missing else deepest
        for c in range(k, last + 1):
            if c < size and not member[stack[c]]:
                carried[n_carried] = stack[c]
                n_carried += 1
            best = 0
            for x in range(1, n_carried):
                if value[carried[x]] > value[carried[best]]:
                    best = x
            stack[c] = carried[best]
            place[stack[c]] = c
            n_carried -= 1
            carried[best] = carried[n_carried]
        size += missing
        for j in range(k):
            e = steps[i, j]
            member[e] = False
            stack[j] = e
            place[e] = j
            value[e] = rank[e] if len(rank) else -future[i, j]
    return size


@njit(cache=True)
def repeated(steps: Any, kind: Any, k: int, p: int) -> bool:
    """Whether a request or a prefetch names an entry twice."""
    for i in range(len(steps)):
        if kind[i] != SKIP:
            for j in range(1, k if kind[i] == ASK else p):
                for other in range(j):
                    if steps[i, j] == steps[i, other]:
                        return True
    return False


@njit(cache=True)
def segment_uses(S: Any, mask: Any, unit: Any, n_experts: int, window: int, out: Any) -> None:
    """Adds to `out[u]` the experts with u uses in each segment of `window` adjacent tokens of S [B, T, k].

    `out[window + 1]` counts the segments. A segment lies inside one document and has no hole.
    """
    uses = np.zeros(n_experts, np.int64)
    n_sequences, n_steps, k = S.shape
    for b in range(n_sequences):
        uses[:] = 0
        begin = 0  # of the tokens counted in `uses`
        for t in range(n_steps):
            if not mask[b, t] or (t > 0 and unit[b, t] != unit[b, t - 1]):
                uses[:] = 0
                begin = t
            if not mask[b, t]:
                begin = t + 1
                continue
            for j in range(k):
                uses[S[b, t, j]] += 1
            if t - begin == window:
                for j in range(k):
                    uses[S[b, begin, j]] -= 1
                begin += 1
            if t - begin == window - 1:
                out[window + 1] += 1
                for e in range(n_experts):
                    out[uses[e]] += 1


@njit(cache=True)
def segment_cache_hits(S: Any, mask: Any, unit: Any, n_experts: int, window: int, capacity: int) -> int:
    """Hits of a cache that evicts the expert with the fewest uses in the next `window` − 1 tokens of its document."""
    resident = np.zeros(n_experts, np.bool_)
    pinned = np.zeros(n_experts, np.bool_)
    last = np.zeros(n_experts, np.int64)
    ahead = np.zeros(n_experts, np.int64)  # uses after this token, before `far`
    n_sequences, n_steps, k = S.shape
    hits = size = clock = far = 0
    for b in range(n_sequences):
        for t in range(n_steps):
            if t == 0 or unit[b, t] != unit[b, t - 1]:
                resident[:] = False
                ahead[:] = 0
                size = 0
                far = t
            while far < min(t + window, n_steps) and unit[b, far] == unit[b, t]:
                if mask[b, far]:
                    for j in range(k):
                        ahead[S[b, far, j]] += 1
                far += 1
            if not mask[b, t]:
                continue
            for j in range(k):
                e = S[b, t, j]
                pinned[e] = True
                ahead[e] -= 1
                hits += resident[e]
            for j in range(k):
                e = S[b, t, j]
                if resident[e]:
                    continue
                if size == capacity:
                    victim = -1
                    for x in range(n_experts):
                        if not resident[x] or pinned[x]:
                            continue
                        if victim < 0 or (ahead[x], last[x]) < (ahead[victim], last[victim]):
                            victim = x
                    resident[victim] = False
                    size -= 1
                resident[e] = True
                size += 1
            for j in range(k - 1, -1, -1):
                clock += 1
                last[S[b, t, j]] = clock
                pinned[S[b, t, j]] = False
    return hits


@njit(cache=True)
def seed(number: int) -> None:
    """Begin the random numbers of `draw_sets`."""
    np.random.seed(number)


@njit(cache=True)
def draw_sets(out: Any, state: Any, ranked: Any, popularity: Any, chances: Any, stickiness: float) -> None:
    """Fill `out` [n, k] with sets of a synthetic trace; `state` holds the last one, −1 before the first."""
    k = out.shape[1]
    for t in range(len(out)):
        for j in range(k):
            if state[j] >= 0 and np.random.random() >= stickiness:
                state[j] = -1
        for j in range(k):
            tries = 0
            while state[j] < 0 and tries < 16:
                rank = min(np.searchsorted(chances, np.random.random()), len(ranked) - 1)
                if not _holds(state, ranked[rank]):
                    state[j] = ranked[rank]
                tries += 1
            if state[j] < 0:
                state[j] = _draw_free(state, ranked, popularity)
        for j in range(k):
            out[t, j] = state[j]


@njit(cache=True)
def _holds(state: Any, expert: int) -> bool:
    for held in state:  # noqa: SIM110  numba compiles no generator here
        if held == expert:
            return True
    return False


@njit(cache=True)
def _draw_free(state: Any, ranked: Any, popularity: Any) -> int:
    """An expert outside `state` by its popularity: the same chances as drawing until one is, in bounded time."""
    total = 0.0
    for rank in range(len(ranked)):
        if not _holds(state, ranked[rank]):
            total += popularity[rank]
    left = np.random.random() * total
    found = -1
    for rank in range(len(ranked)):
        if (found < 0 or left > 0) and not _holds(state, ranked[rank]):
            found = ranked[rank]
            left -= popularity[rank]
    return found
