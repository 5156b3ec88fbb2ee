"""Compiled loops over tokens, where each token's outcome depends on the one before. Tests compare them to plain loops.

Arrays are [B, T, N] or [B, N] of one dtype; position 0 is the start of a document. State arrays [B, …] are updated in
place and keep the precision of the input, so that a sequence in pieces gives the same bits as the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def average(x: Any, position: Any, last: Any, decay: Any, out: Any) -> None:
    """s_t = d·s_t−1 + (1−d)·x_t, and s_t = x_t at a start; `last` [B, N] is updated.

    `decay` has one number for each equal part of the N columns.
    """
    B, T, N = x.shape
    width = N // len(decay)
    for b in range(B):
        for t in range(T):
            for i in range(N):
                d, new = decay[i // width], x[b, t, i]
                last[b, i] = new if position[b, t] == 0 else d * last[b, i] + (1.0 - d) * new
                out[b, t, i] = last[b, i]


@njit(cache=True)
def average_backward(grad: Any, x: Any, position: Any, before: Any, decay: Any, out: Any, dx: Any) -> float:
    """Gradient of `average` for x, written to `dx`; returns the gradient for the decay, if that is one number."""
    B, T, N = x.shape
    width = N // len(decay)
    by_decay = 0.0
    for b in range(B):
        for i in range(N):
            d = decay[i // width]
            ahead = 0.0  # with respect to s_t, from all later tokens
            for t in range(T - 1, -1, -1):
                ahead += grad[b, t, i]
                if position[b, t] == 0:
                    dx[b, t, i] = ahead
                    ahead = 0.0
                else:
                    last = before[b, i] if t == 0 else out[b, t - 1, i]
                    dx[b, t, i] = (1.0 - d) * ahead
                    by_decay += ahead * (last - x[b, t, i])
                    ahead *= d
    return by_decay


@njit(cache=True)
def _choose(scores: Any, k: int, chosen: Any) -> None:
    """Mark the k best; ties go to the lowest index."""
    chosen[:] = False
    for _ in range(k):
        best = -1
        for i in range(len(scores)):
            if not chosen[i] and (best < 0 or scores[i] > scores[best]):
                best = i
        chosen[best] = True


@njit(cache=True)
def _heaviest(g: Any, among: Any, left: Any, S: Any) -> None:
    """Write the experts of `among` with the highest g to S, heaviest first; `left` is scratch."""
    left[:] = among
    for slot in range(len(S)):
        best = -1
        for i in range(len(g)):
            if left[i] and (best < 0 or g[i] > g[best]):
                best = i
        S[slot] = best
        left[best] = False


@njit(cache=True)
def _draw(key: int, salt: int, lots: int, best: Any, k: int, chosen: Any) -> None:
    """Mark k entries by a hash of `key` and `salt`; `best` is scratch.

    Lot i belongs to entry i mod n. An entry with twice as many lots is twice as likely to be drawn first, and likewise
    in each next draw among the rest.
    """
    best[:] = np.iinfo(np.int64).min
    for i in range(lots):
        x = np.int64(key) * lots + i + (np.int64(salt) << 40)
        # Odd factors and invertible shifts: different inputs stay different.
        x = x * np.int64(-4658895280553007687)
        x ^= (x >> 32) & ((np.int64(1) << 32) - 1)
        x = x * np.int64(-7723592293110705685)
        x ^= (x >> 29) & ((np.int64(1) << 35) - 1)
        owner = i % len(best)
        best[owner] = max(best[owner], ~x)  # inverted: the k smallest are chosen
    _choose(best, k, chosen)


@njit(cache=True)
def softmax(logits: Any, g: Any) -> None:
    """eq:gate, written to `g`."""
    B, T, N = logits.shape
    for b in range(B):
        for t in range(T):
            most = logits[b, t, 0]
            for i in range(1, N):
                most = max(most, logits[b, t, i])
            total = 0.0
            for i in range(N):
                g[b, t, i] = np.exp(logits[b, t, i] - most)
                total += g[b, t, i]
            for i in range(N):
                g[b, t, i] /= total


@njit(cache=True)
def top_k(g: Any, S: Any) -> None:
    """The k experts with the highest g, heaviest first; ties go to the lowest index."""
    B, T, N = g.shape
    every, left = np.ones(N, np.bool_), np.empty(N, np.bool_)
    for b in range(B):
        for t in range(T):
            _heaviest(g[b, t], every, left, S[b, t])


@njit(cache=True)
def combine(g: Any, S: Any, w: Any) -> None:
    """The gate probabilities of the selected experts, clamped to the smallest normal number, renormalised."""
    B, T, k = S.shape
    least = np.finfo(g.dtype).tiny
    for b in range(B):
        for t in range(T):
            total = 0.0
            for slot in range(k):
                w[b, t, slot] = max(g[b, t, S[b, t, slot]], least)
                total += w[b, t, slot]
            for slot in range(k):
                w[b, t, slot] /= total


@njit(cache=True)
def window_bonus(g: Any, position: Any, left: Any, k: int, window: int, beta: float, bonus: Any) -> None:
    """β for experts in the top-k of one of the W tokens before, else 0; `left` [B, N] counts its remaining tokens."""
    B, T, N = g.shape
    chosen = np.empty(N, np.bool_)
    for b in range(B):
        for t in range(T):
            if position[b, t] == 0:
                left[b] = 0
            _choose(g[b, t], k, chosen)
            for i in range(N):
                bonus[b, t, i] = beta if left[b, i] > 0 else 0.0
                left[b, i] = window if chosen[i] else max(left[b, i] - 1, 0)


@njit(cache=True)
def hysteresis(logits: Any, g: Any, position: Any, chosen: Any, bonus: float, S: Any) -> None:
    """S = the k best of ℓ_t + m·1[chosen at t−1]; `chosen` [B, N] is updated."""
    B, T, N = logits.shape
    k = S.shape[2]
    scores, left = np.empty(N, logits.dtype), np.empty(N, np.bool_)
    for b in range(B):
        for t in range(T):
            for i in range(N):
                again = chosen[b, i] and position[b, t] > 0
                scores[i] = logits[b, t, i] + bonus if again else logits[b, t, i]
            _choose(scores, k, chosen[b])
            _heaviest(g[b, t], chosen[b], left, S[b, t])


@njit(cache=True)
def residency(
    signal: Any,
    g: Any,
    position: Any,
    demand: Any,
    resident: Any,
    capacity: int,
    pinned: int,
    margin: float,
    decay: float,
    S: Any,
) -> None:
    """S = the k heaviest residents; `resident` and `demand` (a running average) [B, N] are updated.

    The first `pinned` experts are always resident.
    """
    B, T, N = signal.shape
    left = np.empty(N, np.bool_)
    for b in range(B):
        here = resident[b]
        for t in range(T):
            if position[b, t] == 0:
                demand[b] = signal[b, t]
                _choose(demand[b, pinned:], capacity - pinned, here[pinned:])
                here[:pinned] = True
            else:
                loaded, evicted = -1, -1
                for i in range(N):
                    demand[b, i] = decay * demand[b, i] + (1.0 - decay) * signal[b, t, i]
                    if here[i]:
                        if i >= pinned and (evicted < 0 or demand[b, i] <= demand[b, evicted]):
                            evicted = i
                    elif loaded < 0 or demand[b, i] > demand[b, loaded]:
                        loaded = i
                if loaded >= 0 and evicted >= 0 and demand[b, loaded] > demand[b, evicted] + margin:
                    here[loaded], here[evicted] = True, False
            _heaviest(g[b, t], here, left, S[b, t])


@njit(cache=True)
def two_speed(logits: Any, position: Any, slow: Any, decay: float, out: Any) -> None:
    """The first N of `logits` [B, T, 2·N] plus the average of the others; `slow` [B, N] is that average, updated."""
    B, T, N = out.shape
    for b in range(B):
        for t in range(T):
            for i in range(N):
                x = logits[b, t, N + i]
                slow[b, i] = x if position[b, t] == 0 else decay * slow[b, i] + (1.0 - decay) * x
                out[b, t, i] = logits[b, t, i] + slow[b, i]


@njit(cache=True)
def _slot_mean(x: Any, slot: int, capacity: int) -> float:
    """Mean over the experts i mod C = `slot` of one token."""
    total, members = 0.0, 0
    for i in range(slot, len(x), capacity):
        total += x[i]
        members += 1
    return total / members


@njit(cache=True)
def slot_logits(logits: Any, position: Any, averages: Any, capacity: int, d: float, s: float, out: Any) -> None:
    """Slot means averaged with decay d plus the experts' own logits averaged with decay s; slots are i mod C.

    In `logits` [B, T, 2·N], the first N are for slots, the others for experts. In [B, T, 3·N], the last N are averaged
    for slots, and the slot means of the first N are added without averaging. Both `averages` [B, 2·N] are updated.
    """
    B, T, N = out.shape
    token = logits.shape[2] == 3 * N
    for b in range(B):
        fast, slow = averages[b, :N], averages[b, N:]
        for t in range(T):
            start = position[b, t] == 0
            first, own, last = logits[b, t, :N], logits[b, t, N : 2 * N], logits[b, t, -N:]
            for slot in range(min(capacity, N)):
                mean = _slot_mean(last if token else first, slot, capacity)
                now = _slot_mean(first, slot, capacity) if token else 0.0
                for i in range(slot, N, capacity):
                    fast[i] = mean if start else d * fast[i] + (1.0 - d) * mean
                    slow[i] = own[i] if start else s * slow[i] + (1.0 - s) * own[i]
                    out[b, t, i] = fast[i] + now + slow[i]


@njit(cache=True)
def _slot_shares(g: Any, capacity: int, total: Any, share: Any) -> None:
    """Each expert's fraction of the gate weight of its slot, written to `share`; `total` [C] is scratch."""
    total[:] = 0.0
    for i in range(len(g)):
        total[i % capacity] += g[i]
    for i in range(len(g)):
        share[i] = g[i] / total[i % capacity] if total[i % capacity] > 0.0 else 0.0


@njit(cache=True)
def _fill_slots(share: Any, capacity: int, rest: int, resident: Any, age: Any) -> None:
    """The expert with the highest share of each slot becomes resident, free to be replaced at once."""
    N = len(share)
    for slot in range(min(capacity, N)):
        best = slot
        for i in range(slot, N, capacity):
            if share[i] > share[best]:
                best = i
        for i in range(slot, N, capacity):
            resident[i] = i == best
            age[i] = rest if i == best else 0


@njit(cache=True)
def _largest_win(share: Any, capacity: int, margin: float, resident: Any) -> Any:
    """The non-resident that beats the resident of its slot by most, and that resident; −1 if none wins by `margin`."""
    N = len(share)
    loaded, evicted = -1, -1
    for slot in range(min(capacity, N)):
        holder, best = -1, -1
        for i in range(slot, N, capacity):
            if resident[i]:
                holder = i
            elif best < 0 or share[i] > share[best]:
                best = i
        if (
            best >= 0
            and share[best] > share[holder] + margin
            and (loaded < 0 or share[best] - share[holder] > share[loaded] - share[evicted])
        ):
            loaded, evicted = best, holder
    return loaded, evicted


@njit(cache=True)
def slot_choice(
    g: Any,
    keys: Any,
    salt: int,
    position: Any,
    resident: Any,
    age: Any,
    capacity: int,
    margin: float,
    rest: int,
    S: Any,
) -> None:
    """S = the k heaviest residents, one resident for each slot i mod C; `resident` and `age` [B, N] are updated.

    The age of a resident counts tokens since its load, up to `rest`: loads are at least `rest` tokens apart. With
    `keys` [B, T] the k slots of a token are drawn by its key, and a slot has as many lots as experts.
    """
    B, T, N = g.shape
    slots = min(capacity, N)
    left, here = np.empty(N, np.bool_), np.empty(N, np.bool_)
    total, share = np.empty(capacity, g.dtype), np.empty(N, g.dtype)
    best_lot, drawn = np.empty(slots, np.int64), np.empty(slots, np.bool_)
    lots = slots if N % slots == 0 else N
    for b in range(B):
        for t in range(T):
            _slot_shares(g[b, t], capacity, total, share)
            if position[b, t] == 0:
                _fill_slots(share, capacity, rest, resident[b], age[b])
            else:
                rested = True
                for i in range(N):
                    if resident[b, i]:
                        rested = rested and age[b, i] >= rest
                        age[b, i] = min(age[b, i] + 1, rest)
                if rested:
                    loaded, evicted = _largest_win(share, capacity, margin, resident[b])
                    if loaded >= 0:
                        resident[b, loaded], resident[b, evicted] = True, False
                        age[b, loaded], age[b, evicted] = 1, 0
            here[:] = resident[b]
            if keys.size > 0:
                _draw(keys[b, t], salt, lots, best_lot, S.shape[2], drawn)
                for i in range(N):
                    here[i] = here[i] and drawn[i % capacity]
            _heaviest(g[b, t], here, left, S[b, t])


@njit(cache=True)
def rent(g: Any, position: Any, missed: Any, unused: Any, resident: Any, capacity: int, price: float, S: Any) -> None:
    """S = the k heaviest residents; the state [B, N] (weight missed, ranks unused, resident) is updated.

    For a resident, `unused` counts k for each token since its last use, plus the heavier experts of that token.
    """
    B, T, N = g.shape
    k = S.shape[2]
    left = np.empty(N, np.bool_)
    for b in range(B):
        here = resident[b]
        for t in range(T):
            if position[b, t] == 0:
                _choose(g[b, t], capacity, here)
                missed[b] = 0.0
                unused[b] = 0
                _heaviest(g[b, t], here, left, S[b, t])
            else:
                _heaviest(g[b, t], here, left, S[b, t])
                least = g[b, t, S[b, t, k - 1]]
                loaded, evicted = -1, -1
                for i in range(N):
                    if not here[i]:
                        missed[b, i] += max(0.0, g[b, t, i] - least)
                        if g[b, t, i] > least and (loaded < 0 or missed[b, i] > missed[b, loaded]):
                            loaded = i
                    elif (
                        evicted < 0
                        or unused[b, i] > unused[b, evicted]
                        or (unused[b, i] == unused[b, evicted] and g[b, t, i] <= g[b, t, evicted])
                    ):
                        evicted = i
                if loaded >= 0 and missed[b, loaded] > price:
                    here[loaded], here[evicted] = True, False
                    missed[b, loaded], missed[b, evicted] = 0.0, 0.0
                    _heaviest(g[b, t], here, left, S[b, t])
            unused[b] += k
            for slot in range(k):
                unused[b, S[b, t, slot]] = slot


@njit(cache=True)
def segment(logits: Any, g: Any, position: Any, total: Any, chosen: Any, window: int, S: Any) -> None:
    """One choice per W tokens; `chosen` and `total` (sum of the segment's logits so far) [B, N] are updated."""
    B, T, N = logits.shape
    k = S.shape[2]
    left = np.empty(N, np.bool_)
    for b in range(B):
        for t in range(T):
            if position[b, t] % window == 0:
                _choose(logits[b, t] if position[b, t] == 0 else total[b], k, chosen[b])
                total[b] = 0.0
            _heaviest(g[b, t], chosen[b], left, S[b, t])
            total[b] += logits[b, t]


@njit(cache=True)
def span_keys(values: Any, position: Any, boundaries: Any, window: int, last: Any, out: Any) -> None:
    """The value at the start of each token's span; `last` [B, 1] is updated.

    A span is a document, or `window` tokens of it if that is not 0; it also ends at `boundaries` [B, T], if given.
    """
    B, T = out.shape
    for b in range(B):
        for t in range(T):
            place = position[b, t]
            if place == 0 or (window > 0 and place % window == 0) or (boundaries.size > 0 and boundaries[b, t]):
                last[b, 0] = values[b, t]
            out[b, t] = last[b, 0]


@njit(cache=True)
def hashed(keys: Any, g: Any, salt: int, S: Any) -> None:
    """k different experts by a hash of each key, heaviest first; all experts are equally likely."""
    B, T, N = g.shape
    best_lot, chosen, left = np.empty(N, np.int64), np.empty(N, np.bool_), np.empty(N, np.bool_)
    for b in range(B):
        for t in range(T):
            _draw(keys[b, t], salt, N, best_lot, S.shape[2], chosen)
            _heaviest(g[b, t], chosen, left, S[b, t])


@njit(cache=True)
def soft_cache(use: Any, valid: Any, start: Any, capacity: float, held: Any, misses: Any) -> None:
    """a = u·(1−m) to `misses`, m before each token to `held`; tokens that are not `valid` are skipped.

    Then m ← m + a − e, where e evicts what exceeds C, in proportion to m·(1−u).
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
    """Gradient of `soft_cache` with respect to u; `grad` [B, T, N] is the one with respect to the misses a."""
    B, T, N = use.shape
    ahead = np.empty(N, use.dtype)  # with respect to m after the token
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
