"""Compiled loops of the replay. Each does what `cache.Cache` does request by request; tests hold them equal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def lru_hits(requests: Any, valid: Any, cold: Any, capacity: int, n_experts: int) -> int:
    """Hits of an LRU cache over `requests` [sequences, steps, k], emptied where `cold`, skipping what is not `valid`.

    Residents form a circular list from the most to the least recent, closed by the sentinel `n_experts`, so that a
    hit costs four writes whatever the capacity.
    """
    end = n_experts
    newer = np.empty(n_experts + 1, np.int32)
    older = np.empty(n_experts + 1, np.int32)
    resident = np.zeros(n_experts, np.bool_)
    pinned = np.zeros(n_experts, np.bool_)
    n_sequences, n_steps, k = requests.shape
    group = k if k <= capacity else 1
    hits = 0
    size = 0
    newer[end] = older[end] = end
    for b in range(n_sequences):
        for t in range(n_steps):
            if cold[b, t]:
                resident[:] = False
                size = 0
                newer[end] = older[end] = end
            if not valid[b, t]:
                continue
            for first in range(0, k, group):
                for j in range(first, first + group):
                    e = requests[b, t, j]
                    pinned[e] = True
                    hits += resident[e]
                for j in range(first, first + group):
                    e = requests[b, t, j]
                    if resident[e]:
                        continue
                    if size == capacity:
                        victim = newer[end]
                        while pinned[victim]:
                            victim = newer[victim]
                        newer[older[victim]] = newer[victim]
                        older[newer[victim]] = older[victim]
                        resident[victim] = False
                        size -= 1
                    resident[e] = True
                    newer[e] = older[e] = e
                    size += 1
                for j in range(first + group - 1, first - 1, -1):
                    e = requests[b, t, j]
                    pinned[e] = False
                    newer[older[e]] = newer[e]
                    older[newer[e]] = older[e]
                    most_recent = older[end]
                    older[e] = most_recent
                    newer[e] = end
                    newer[most_recent] = e
                    older[end] = e
    return hits
