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
from torch import Tensor

from stickymoe.errors import require
from stickymoe.locality import policies as p
from stickymoe.routing import cache_kernels as kernels
from stickymoe.routing.arrays import as_numpy, as_tensor
from stickymoe.routing.rules import RouterInput, RouterState, ScannedChoice, state_of


@dataclass(frozen=True, kw_only=True)
class ExpertCache:
    """C slots per sequence and layer, with an online policy."""

    capacity: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "variant.capacity", self.capacity, "a whole number of slots ≥ 1")
        ok = p.find_policy(self.policy).knows is None
        require(ok, "variant.policy", self.policy, "a policy that a device can run without resident sets of a router")

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
        kernels.choose(self.cache.request, method, strength, self.kept, rank, g, position, caches, ranges, S)
        return state_of(cache=caches.reshape(len(caches), -1), ranges=ranges)

    @property
    @abstractmethod
    def method(self) -> tuple[int, float]:
        """The number of the method in the compiled loop, and its strength."""


@dataclass(frozen=True, kw_only=True)
class CachePrior(CacheAwareChoice):
    """Rank by z + λ·Δ̄·[resident]; Δ̄ is the running mean of max z − min z over the tokens of the document so far."""

    lam: float

    @property
    def method(self) -> tuple[int, float]:
        return kernels.PRIOR, self.lam


@dataclass(frozen=True, kw_only=True)
class MaxRank(CacheAwareChoice):
    """Fill the other slots with residents among the M experts with the highest rank, then with the rest in order."""

    rank: int

    @property
    def method(self) -> tuple[int, float]:
        return kernels.RANK, float(self.rank)


@dataclass(frozen=True, kw_only=True)
class TauReroute(CacheAwareChoice):
    """Replace an expert that is not resident by the best resident whose g is at least (1−τ) of its own."""

    tau: float

    @property
    def method(self) -> tuple[int, float]:
        return kernels.TAU, self.tau


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
        kernels.drop(self.cache.request, self.share, as_numpy(S), as_numpy(w.float()), position, caches, used)
        kept = torch.where(as_tensor(used, w), w, 0.0)
        total = kept.sum(-1, keepdim=True)
        grown = kept * (w.sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total))
        return grown, state_of(cache=caches.reshape(len(caches), -1))
