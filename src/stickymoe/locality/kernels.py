"""Compiled loops over traces: requests, miss curves, figures of locality, synthetic traces.

`kind` says what a row of `steps` [n, width] is: skipped, a request of its first k entries, or a prefetch of its first
p. Where `cold`, the cache is emptied first. The caller owns the state arrays, so a trace can be processed in blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from stickymoe.locality.policies import NEVER
from stickymoe.locality.serving import ASK, PREFETCH, SKIP, UNION


@njit(cache=True)
def write_requests(
    S: Any,
    predicted: Any,
    offset: Any,
    n_experts: int,
    tokens: Any,
    first: Any,
    opens: Any,
    decodes: Any,
    begin: int,
    end: int,
    layer_by_layer: bool,
    warm: bool,
    prefetches: bool,
    entries: Any,
    bounds: Any,
    kind: Any,
    cold: Any,
    set_of: Any,
) -> int:
    """Write the requests of forward passes `begin` … `end`; returns their number, −1 if one repeats an expert.

    Passes go through the layers one by one, or text by text through one layer after another (`layer_by_layer`).
    `set_of` [n, 2], if not empty, gets the layer and the last token of each request, −1 for a prefetch.
    """
    n_layers = len(S)
    seen = np.zeros(n_experts + 1, np.bool_)
    n = 0
    text = begin
    while text < end:
        next_text = end
        if layer_by_layer:
            next_text = text + 1
            while next_text < end and not opens[next_text]:
                next_text += 1
        outer, inner = (n_layers, next_text - text) if layer_by_layer else (next_text - text, n_layers)
        for a in range(outer):
            for b in range(inner):
                layer, p = (a, text + b) if layer_by_layer else (b, text + a)
                cold[n] = opens[p] and layer == 0 and not warm
                asked = tokens[first[p] : first[p + 1]]
                follows = not opens[p] and tokens[first[p] - 1] == asked[0] - 1
                if prefetches and decodes[p] and (len(predicted) or follows):
                    if len(predicted):
                        bounds[n + 1] = _write_set(
                            predicted[layer, asked[0]], n_experts, offset[layer], entries, bounds[n]
                        )
                    else:
                        bounds[n + 1] = _write_set(S[layer, asked[0] - 1], n_experts, offset[layer], entries, bounds[n])
                    kind[n] = PREFETCH
                    if len(set_of):
                        set_of[n] = -1
                    n += 1
                    cold[n] = False
                if len(asked) == 1:
                    bounds[n + 1] = _write_set(S[layer, asked[0]], n_experts, offset[layer], entries, bounds[n])
                    kind[n] = ASK
                else:
                    bounds[n + 1] = _write_union(S[layer], asked, offset[layer], seen, entries, bounds[n])
                    kind[n] = UNION
                if len(set_of):
                    set_of[n, 0], set_of[n, 1] = layer, asked[-1]
                n += 1
                if bounds[n] < 0 or bounds[n - 1] < 0:
                    return -1
        text = next_text
    return n


@njit(cache=True)
def _write_set(experts: Any, n_experts: int, offset: int, entries: Any, at: int) -> int:
    """Write the experts of one token in their order; returns the end, −1 if one is there twice."""
    for j in range(len(experts)):
        if experts[j] == n_experts:  # a slot that uses no expert, or a place that prefetches none
            continue
        entries[at] = experts[j] + offset
        at += 1
        for other in range(j):
            if experts[j] == experts[other]:
                return -1
    return at


@njit(cache=True)
def _write_union(S: Any, tokens: Any, offset: int, seen: Any, entries: Any, at: int) -> int:
    """Write every expert that any of the tokens chose, in ascending order; returns the end."""
    seen[:] = False
    for token in tokens:
        for j in range(S.shape[1]):
            seen[S[token, j]] = True
    for e in range(len(seen) - 1):  # the last stands for slots that use no expert
        if seen[e]:
            entries[at] = e + offset
            at += 1
    return at


@njit(cache=True)
def next_uses_of_requests(entries: Any, bounds: Any, kind: Any, n_entries: int) -> Any:
    """For every access of requests of any size, the position of the entry's next one, or `NEVER`."""
    future = np.full(len(entries), NEVER)
    ahead = np.full(n_entries, NEVER)
    for i in range(len(kind) - 1, -1, -1):
        if kind[i] != PREFETCH:
            for j in range(bounds[i + 1] - 1, bounds[i] - 1, -1):
                future[j] = ahead[entries[j]]
                ahead[entries[j]] = j
    return future


@njit(cache=True)
def next_uses(steps: Any, kind: Any, k: int, n_entries: int) -> Any:
    """For every access of rows, the position of the entry's next one, or `NEVER`."""
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
    """Add to `depths[d]` the accesses that an LRU cache of d or more slots (and at least k) would hit.

    The depth of an entry is the number of entries used since its last use, including itself. Counting over all entries
    is a loop without branches, which the compiler vectorises. Returns the clock.
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

    The first C entries of the stack are what a cache of C ≥ k slots holds. A request puts its members on top. Of the
    others, a cache of C slots keeps the C − k with the highest value, so each place below gets the best of what was
    there and what the places above gave up. Without `rank`, the value is the negative next use. Returns the size.
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
    """Add to `out[u]` the experts with u uses in each segment of `window` adjacent tokens of S [B, T, k].

    `out[window + 1]` counts the segments. A segment is inside one document and has no padding.
    """
    uses = np.zeros(n_experts + 1, np.int64)  # the last counts slots that use no expert
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
    resident = np.zeros(n_experts + 1, np.bool_)  # the last column stands for slots that use no expert
    pinned = np.zeros(n_experts + 1, np.bool_)
    last = np.zeros(n_experts + 1, np.int64)
    ahead = np.zeros(n_experts + 1, np.int64)  # uses after this token, before `far`
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
                if resident[e] or e == n_experts:
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
    """Seed the random numbers of `draw_sets`."""
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
    """An expert outside `state`, by popularity: the same distribution as drawing until one is outside, in one pass."""
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
