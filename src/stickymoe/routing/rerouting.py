"""Rules that look at a cache: prefer experts that are resident, or skip experts that are not.

The resident set is that of a real cache policy, which serves the experts that the rule chose. They need no training, so
they work on any trained gate. Each sequence and document starts with an empty cache.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from stickymoe.errors import require
from stickymoe.locality import policies as p
from stickymoe.locality.serving import ASK
from stickymoe.routing.arrays import as_numpy, as_tensor
from stickymoe.routing.rules import RouterInput, RouterState, ScannedChoice, state_of


@dataclass(frozen=True, kw_only=True)
class ExpertCache:
    """C slots per sequence and layer, with an online policy."""

    capacity: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "variant.capacity", self.capacity, "a whole number of slots ≥ 1")
        require(p.find_policy(self.policy).online, "variant.policy", self.policy, "a policy that a device can run")

    @cached_property
    def request(self) -> Any:
        """The compiled function that serves a request."""
        return p.find_policy(self.policy).loops.request

    def continued(self, state: RouterState, position: Any, n_experts: int) -> Any:
        """The caches of all sequences [B, rows, columns] after the tokens so far."""
        shape = p.new_state(n_experts, self.capacity).shape
        flat = state.remembered("cache", position, shape[0] * shape[1], np.int64)
        caches = flat.reshape(len(flat), *shape)
        caches[:, p.VAR, p.CAPACITY] = self.capacity
        return caches


@dataclass(frozen=True, kw_only=True)
class CacheAwareChoice(ScannedChoice):
    """The `kept` experts with the highest rank are always chosen; for the other slots, residents are preferred."""

    cache: ExpertCache
    kept: int = 1

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        position = x.array("position")
        caches = self.cache.continued(state, position, g.shape[-1])
        ranges = state.remembered("ranges", position, 2, np.float64)
        method, strength = self.method
        _choose(self.cache.request, method, strength, self.kept, rank, g, position, caches, ranges, S)
        return state_of(cache=caches.reshape(len(caches), -1), ranges=ranges)

    @property
    @abstractmethod
    def method(self) -> tuple[int, float]:
        """The number of the method in the compiled loop, and its strength."""


_PRIOR, _RANK, _TAU = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class CachePrior(CacheAwareChoice):
    """Rank by z + λ·Δ̄·[resident]; Δ̄ is the running mean of max z − min z over the tokens of the document so far."""

    lam: float

    @property
    def method(self) -> tuple[int, float]:
        return _PRIOR, self.lam


@dataclass(frozen=True, kw_only=True)
class MaxRank(CacheAwareChoice):
    """Fill the other slots with residents among the M experts with the highest rank, then with the rest in order."""

    rank: int

    @property
    def method(self) -> tuple[int, float]:
        return _RANK, float(self.rank)


@dataclass(frozen=True, kw_only=True)
class TauReroute(CacheAwareChoice):
    """Replace an expert that is not resident by the best resident whose g is at least (1−τ) of its own."""

    tau: float

    @property
    def method(self) -> tuple[int, float]:
        return _TAU, self.tau


@njit
def _choose(
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
                    if method == _PRIOR:
                        for e in range(N):
                            if s[p.SLOT, e] >= 0:
                                value[e] += strength * ranges[b, 0] / ranges[b, 1]
                        best = _best(value, taken)
                    elif s[p.SLOT, best] < 0:
                        for e in range(N):
                            allowed = s[p.SLOT, e] >= 0
                            if method == _TAU:
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


@dataclass(frozen=True, kw_only=True)
class DropCold:
    """Skip a chosen expert that is not resident and weighs less than the fraction `share` of an even split.

    The heaviest expert of a token is never skipped. The weights of the others grow, so that their sum stays the same.
    A skipped expert is not loaded.
    """

    cache: ExpertCache
    share: float

    def __call__(
        self, S: Int[Tensor, "B T k"], w: Float[Tensor, "B T k"], x: RouterInput, state: RouterState, n_experts: int
    ) -> tuple[Float[Tensor, "B T k"], RouterState]:
        position = x.array("position")
        caches = self.cache.continued(state, position, n_experts)
        used = np.empty(S.shape, np.bool_)
        _drop(self.cache.request, self.share, as_numpy(S), as_numpy(w.float()), position, caches, used)
        kept = torch.where(as_tensor(used, w), w, 0.0)
        total = kept.sum(-1, keepdim=True)
        grown = kept * (w.sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total))
        return grown, state_of(cache=caches.reshape(len(caches), -1))


@njit
def _drop(request: Any, share: float, S: Any, w: Any, position: Any, caches: Any, used: Any) -> None:
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
