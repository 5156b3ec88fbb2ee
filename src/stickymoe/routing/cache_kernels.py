"""Compiled loops of the rules in `rerouting`. `request` serves a request by one cache policy, see `serving`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from stickymoe.locality import policies as p
from stickymoe.locality.serving import ASK

PRIOR, RANK, TAU = 0, 1, 2  # methods of `choose`


@njit
def choose(
    request: Any,
    method: int,
    strength: float,
    kept: int,
    rank: Any,
    g: Any,
    position: Any,
    caches: Any,
    ranges: Any,
    S: Any,
) -> None:
    n_rows, n_tokens, N = rank.shape
    k = S.shape[2]
    entries = np.empty(k, np.int64)
    taken = np.empty(N, np.bool_)
    value = np.empty(N, np.float64)
    for b in range(n_rows):
        s = caches[b]
        for t in range(n_tokens):
            if position[b, t] == 0:
                p.clear(s)
                ranges[b] = 0.0
            taken[:] = False
            low, high = np.inf, -np.inf
            for e in range(N):
                if rank[b, t, e] > -np.inf:
                    low, high = min(low, rank[b, t, e]), max(high, rank[b, t, e])
            ranges[b, 0] += high - low
            ranges[b, 1] += 1
            for j in range(k):
                for e in range(N):
                    value[e] = rank[b, t, e]
                best = _best(value, taken)
                if j >= kept:
                    if method == PRIOR:
                        for e in range(N):
                            if s[p.SLOT, e] >= 0:
                                value[e] += strength * ranges[b, 0] / ranges[b, 1]
                        best = _best(value, taken)
                    elif s[p.SLOT, best] < 0:
                        for e in range(N):
                            allowed = s[p.SLOT, e] >= 0
                            if method == TAU:
                                allowed = allowed and g[b, t, e] >= (1 - strength) * g[b, t, best]
                            elif allowed:
                                allowed = _place(rank[b, t], e) < strength
                            if not allowed:
                                value[e] = -np.inf
                        other = _best(value, taken)
                        if value[other] > -np.inf and not taken[other]:
                            best = other
                taken[best] = True
                S[b, t, j] = best
            for i in range(1, k):  # heaviest first
                e, j = S[b, t, i], i
                while j > 0 and g[b, t, S[b, t, j - 1]] < g[b, t, e]:
                    S[b, t, j] = S[b, t, j - 1]
                    j -= 1
                S[b, t, j] = e
            for j in range(k):
                entries[j] = S[b, t, j]
            request(s, ASK, entries, 0, k)


@njit
def _best(value: Any, taken: Any) -> int:
    """The highest value that is not taken; ties go to the lowest index."""
    best = -1
    for e in range(len(value)):
        if not taken[e] and (best < 0 or value[e] > value[best]):
            best = e
    return best


@njit
def _place(rank: Any, expert: int) -> int:
    """How many experts have a higher rank."""
    place = 0
    for e in range(len(rank)):
        if rank[e] > rank[expert] or (rank[e] == rank[expert] and e < expert):
            place += 1
    return place


@njit
def drop(request: Any, share: float, S: Any, w: Any, position: Any, caches: Any, used: Any) -> None:
    n_rows, n_tokens, k = S.shape
    entries = np.empty(k, np.int64)
    for b in range(n_rows):
        s = caches[b]
        for t in range(n_tokens):
            if position[b, t] == 0:
                p.clear(s)
            even = w[b, t].sum() / k
            n = 0
            for j in range(k):
                e = S[b, t, j]
                used[b, t, j] = j == 0 or s[p.SLOT, e] >= 0 or w[b, t, j] >= share * even
                if used[b, t, j]:
                    entries[n] = e
                    n += 1
            request(s, ASK, entries, 0, n)
