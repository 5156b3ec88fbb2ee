"""Compiled loops over tokens, where each token's outcome needs the one before. Tests hold them to plain loops.

Arrays are [B, T, N] or [B, N] of one dtype; `start` [B, T] marks the first token of a document. What a sequence carries
on is kept in the arrays' own precision, so that its pieces give the same bits as the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def average(x: Any, start: Any, before: Any, decay: float, out: Any) -> None:
    """s_t = d·s_t−1 + (1−d)·x_t, and s_t = x_t at a start."""
    B, T, N = x.shape
    for b in range(B):
        for t in range(T):
            for i in range(N):
                if start[b, t]:
                    out[b, t, i] = x[b, t, i]
                else:
                    last = before[b, i] if t == 0 else out[b, t - 1, i]
                    out[b, t, i] = decay * last + (1.0 - decay) * x[b, t, i]


@njit(cache=True)
def average_backward(grad: Any, x: Any, start: Any, before: Any, decay: float, out: Any, dx: Any) -> float:
    """Gradient of `average` by x, written to `dx`; answers the one by the decay."""
    B, T, N = x.shape
    by_decay = 0.0
    for b in range(B):
        for i in range(N):
            ahead = 0.0  # by s_t, from all later tokens
            for t in range(T - 1, -1, -1):
                ahead += grad[b, t, i]
                if start[b, t]:
                    dx[b, t, i] = ahead
                    ahead = 0.0
                else:
                    last = before[b, i] if t == 0 else out[b, t - 1, i]
                    dx[b, t, i] = (1.0 - decay) * ahead
                    by_decay += ahead * (last - x[b, t, i])
                    ahead *= decay
    return by_decay


@njit(cache=True)
def _choose(scores: Any, k: int, chosen: Any) -> None:
    """Mark the k best; of equal ones the lowest index."""
    chosen[:] = False
    for _ in range(k):
        best = -1
        for i in range(len(scores)):
            if not chosen[i] and (best < 0 or scores[i] > scores[best]):
                best = i
        chosen[best] = True


@njit(cache=True)
def hysteresis(logits: Any, start: Any, before: Any, bonus: float, k: int, chosen: Any) -> None:
    """The k best of ℓ_t + m·1[chosen at t−1]."""
    B, T, N = logits.shape
    scores = np.empty(N, logits.dtype)
    for b in range(B):
        for t in range(T):
            for i in range(N):
                last = before[b, i] if t == 0 else chosen[b, t - 1, i]
                scores[i] = logits[b, t, i] + bonus if last and not start[b, t] else logits[b, t, i]
            _choose(scores, k, chosen[b, t])


@njit(cache=True)
def residency(
    signal: Any, start: Any, demand: Any, before: Any, capacity: int, margin: float, decay: float, resident: Any
) -> None:
    """Who is resident at each token; `demand` [B, N], the running average of `signal`, is brought up to date."""
    B, T, N = signal.shape
    for b in range(B):
        for t in range(T):
            now = resident[b, t]
            if start[b, t]:
                demand[b] = signal[b, t]
                _choose(demand[b], capacity, now)
                continue
            entering, leaving = -1, -1
            for i in range(N):
                demand[b, i] = decay * demand[b, i] + (1.0 - decay) * signal[b, t, i]
                now[i] = before[b, i] if t == 0 else resident[b, t - 1, i]
                if now[i]:
                    if leaving < 0 or demand[b, i] <= demand[b, leaving]:
                        leaving = i
                elif entering < 0 or demand[b, i] > demand[b, entering]:
                    entering = i
            if entering >= 0 and demand[b, entering] > demand[b, leaving] + margin:
                now[entering], now[leaving] = True, False


@njit(cache=True)
def segment(logits: Any, position: Any, total: Any, before: Any, window: int, k: int, chosen: Any) -> None:
    """One choice per W tokens; `total` [B, N] sums the logits of the segment so far, brought up to date in place."""
    B, T, _ = logits.shape
    for b in range(B):
        for t in range(T):
            if position[b, t] == 0:
                _choose(logits[b, t], k, chosen[b, t])
                total[b] = 0.0
            elif position[b, t] % window == 0:
                _choose(total[b], k, chosen[b, t])
                total[b] = 0.0
            else:
                chosen[b, t] = before[b] if t == 0 else chosen[b, t - 1]
            total[b] += logits[b, t]


@njit(cache=True)
def soft_cache(use: Any, valid: Any, start: Any, capacity: float, held: Any, misses: Any) -> None:
    """a = u·(1−m) to `misses`, m before each token to `held`; tokens that are not `valid` leave the cache alone.

    Then m ← m + a − e, where e makes room for what exceeds C, taken in proportion to m·(1−u).
    """
    B, T, N = use.shape
    m = np.empty(N, use.dtype)
    for b in range(B):
        m[:] = 0.0
        for t in range(T):
            if start[b, t]:
                m[:] = 0.0
            held[b, t] = m
            misses[b, t] = 0.0
            if not valid[b, t]:
                continue
            excess, free = -capacity, 0.0
            for i in range(N):
                misses[b, t, i] = use[b, t, i] * (1.0 - m[i])
                excess += m[i] + misses[b, t, i]
                free += m[i] * (1.0 - use[b, t, i])
            share = excess / free if excess > 0.0 and free > 0.0 else 0.0
            for i in range(N):
                m[i] += misses[b, t, i] - share * m[i] * (1.0 - use[b, t, i])


@njit(cache=True)
def soft_cache_backward(grad: Any, use: Any, valid: Any, start: Any, capacity: float, held: Any, du: Any) -> None:
    """Gradient of `soft_cache` by u, where `grad` [B, T, N] is the one by the misses a."""
    B, T, N = use.shape
    ahead = np.empty(N, use.dtype)  # by m after the token
    for b in range(B):
        ahead[:] = 0.0
        for t in range(T - 1, -1, -1):
            du[b, t] = 0.0
            if valid[b, t]:
                excess, free, along = -capacity, 0.0, 0.0
                for i in range(N):
                    m, u = held[b, t, i], use[b, t, i]
                    excess += m + u * (1.0 - m)
                    free += m * (1.0 - u)
                    along += ahead[i] * m * (1.0 - u)
                evicts = excess > 0.0 and free > 0.0
                by_excess = -along / free if evicts else 0.0
                for i in range(N):
                    m, u = held[b, t, i], use[b, t, i]
                    by_a = grad[b, t, i] + ahead[i] + by_excess
                    by_v = -(excess / free) * (ahead[i] + by_excess) if evicts else 0.0
                    du[b, t, i] = by_a * (1.0 - m) - by_v * m
                    ahead[i] += by_excess - by_a * u + by_v * (1.0 - u)
            if start[b, t]:
                ahead[:] = 0.0
