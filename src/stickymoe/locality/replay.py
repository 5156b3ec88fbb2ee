"""Requests replayed against a cache: how many of them were there already?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Integer

from stickymoe.errors import DataError
from stickymoe.locality.cache import require_policy, require_slots
from stickymoe.locality.kernels import lru_hits

KERNELS: dict[str, Callable[..., int]] = {"lru": lru_hits}  # each counts what its policy's `Cache` would


@dataclass(frozen=True)
class CacheStats:
    """What a cache of `capacity` slots made of a trace."""

    policy: str
    capacity: int
    hits: int
    misses: int

    @property
    def accesses(self) -> int:
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else float("nan")


def replay(
    requests: Integer[np.ndarray, ...] | list[Any],  # [sequences, steps] or [sequences, steps, k]
    *,
    capacity: SupportsIndex,
    n_experts: int,
    policy: str = "lru",
    mask: Bool[np.ndarray, ...] | None = None,
    doc: Integer[np.ndarray, ...] | None = None,
) -> CacheStats:
    """Hits and misses of one cache, summed over sequences that each start cold.

    A step's k experts, heaviest first, are one request (see `Cache`). Steps outside `mask` ask for nothing; where
    `doc` changes the cache starts cold again.
    """
    require_policy(policy, KERNELS)
    slots = require_slots(capacity)
    requests = np.asarray(requests)
    if requests.ndim not in (2, 3):
        raise DataError(
            f"requests: got {requests.ndim} dimensions, expected [sequences, steps] or [sequences, steps, k]."
        )
    if requests.size and not 0 <= int(requests.min()) <= int(requests.max()) < n_experts:
        raise DataError(
            f"requests: got experts {int(requests.min())} … {int(requests.max())}, "
            f"expected 0 … {n_experts - 1} (n_experts={n_experts})."
        )
    if requests.ndim == 2:
        requests = requests[:, :, None]
    sequences, steps, k = requests.shape
    for name, array in (("mask", mask), ("doc", doc)):
        if array is not None and array.shape != (sequences, steps):
            raise DataError(f"{name}: got shape {array.shape}, expected {(sequences, steps)} as in requests.")
    valid = np.ones((sequences, steps), np.bool_) if mask is None else mask
    for i, j in combinations(range(k), 2):
        if ((requests[:, :, i] == requests[:, :, j]) & valid).any():
            raise DataError("requests: got an expert twice in one request, expected k different ones.")
    cold = np.zeros((sequences, steps), np.bool_)
    cold[:, :1] = True
    if doc is not None:
        cold[:, 1:] = doc[:, 1:] != doc[:, :-1]
    hits = int(KERNELS[policy](requests, valid, cold, min(slots, n_experts), n_experts))
    return CacheStats(policy=policy, capacity=slots, hits=hits, misses=int(valid.sum()) * k - hits)
