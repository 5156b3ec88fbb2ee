"""Experts that are loaded in groups: one group is one cache entry, and a switch inside it is free.

L layers, B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Integer

from stickymoe.errors import require
from stickymoe.locality.cache import Cache
from stickymoe.locality.table import RouteTable


def group_of(n_experts: int, groups: int) -> Integer[np.ndarray, " N"]:
    """The group ⌊i·groups/N⌋ of every expert i, as in the loss of the variant `grouped`."""
    require(1 <= groups <= n_experts, "groups", groups, f"a whole number in 1 … {n_experts}")
    return np.arange(n_experts) * groups // n_experts


def _groups(table: RouteTable, groups: int) -> Integer[np.ndarray, " classes"]:
    """The group of every value in S; a slot that uses no expert has a group of its own."""
    return np.append(group_of(table.n_experts, groups), groups)


def group_switch_rate_by_layer(table: RouteTable, groups: int) -> Float[np.ndarray, " L"]:
    """How often the group of the heaviest expert changes between adjacent tokens, pooled over pairs."""
    group = _groups(table, groups)[table.S[..., 0]]
    n = table.pairs.sum()
    changes = ((group[:, :, 1:] != group[:, :, :-1]) & table.pairs).sum((1, 2))
    return np.asarray(changes / n if n else np.full(table.n_layers, np.nan))


def group_misses_by_layer(table: RouteTable, groups: int, capacity: int) -> Float[np.ndarray, " L"]:
    """Groups that an LRU cache of `capacity` groups loads per real token; it starts cold with every text."""
    group = _groups(table, groups)[table.S]
    misses = np.zeros(table.n_layers)
    for layer, b in np.ndindex(group.shape[:2]):
        cache = Cache(capacity=capacity)
        for t in range(group.shape[2]):
            if table.starts[b, t]:
                cache = Cache(capacity=capacity)
            if table.mask[b, t]:
                asked = [i for i in dict.fromkeys(group[layer, b, t].tolist()) if i < groups]
                misses[layer] += len(cache.request(asked).loads)
    return np.asarray(misses / table.mask.sum() if table.mask.any() else np.full(table.n_layers, np.nan))
