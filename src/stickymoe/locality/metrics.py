"""Metrics of locality and load balance: the paper's four metrics, and others that show what those hide.

Functions named `*_by_layer` return one value per layer. A rate over nothing is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Integer

from stickymoe.locality.replay import replay_stream
from stickymoe.locality.streams import Access, streams
from stickymoe.locality.table import RouteTable

NEGLECTED_BELOW = 10  # an expert is neglected below 1/10 of the uniform share


def _rate(events: Bool[np.ndarray, "L B steps"], pairs: Bool[np.ndarray, "B steps"]) -> Float[np.ndarray, " L"]:
    n = int(pairs.sum())
    if n == 0:
        return np.full(events.shape[0], np.nan)
    return np.asarray((events & pairs).sum((1, 2)) / n)


def switch_rate_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """eq:sr_metric. How often the heaviest expert changes between adjacent tokens, pooled over pairs."""
    top1 = table.S[..., 0]
    return _rate(top1[:, :, 1:] != top1[:, :, :-1], table.pairs)


def set_switch_rate_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """eq:switch_rate. How often the set of selected experts changes; its order does not count."""
    chosen = np.sort(table.S, axis=-1)
    return _rate((chosen[:, :, 1:] != chosen[:, :, :-1]).any(-1), table.pairs)


def _hit_rate_by_layer(table: RouteTable, capacity: int, slots: int) -> Float[np.ndarray, " L"]:
    per_token = replace(table, phase=None, share_block=1)
    layers = streams(per_token, Access(top1=slots == 1))
    return np.array([replay_stream(layer, policy="lru", capacity=capacity).hit_rate for layer in layers])


def cache_hit_rate_by_layer(table: RouteTable, capacity: int = 2) -> Float[np.ndarray, " L"]:
    """The paper's CHR: an LRU cache per layer, cold for every sequence, that serves the heaviest expert only."""
    return _hit_rate_by_layer(table, capacity, slots=1)


def cache_hit_rate_all_by_layer(table: RouteTable, capacity: int) -> Float[np.ndarray, " L"]:
    """Hit rate of the same cache if it serves all k experts of a token at once, which is what a device pays."""
    return _hit_rate_by_layer(table, capacity, slots=table.top_k)


def _uses_by_layer(table: RouteTable) -> Integer[np.ndarray, "L N"]:
    """Number of real tokens that choose each expert."""
    N = table.n_experts
    return np.stack([np.bincount(layer.ravel(), minlength=N)[:N] for layer in table.S[:, table.mask]])


def utilisation_by_layer(table: RouteTable) -> Float[np.ndarray, "L N"]:
    """Each expert's share of all k slots of the real tokens."""
    counts = _uses_by_layer(table)
    with np.errstate(invalid="ignore"):
        return np.asarray(counts / counts.sum(-1, keepdims=True))


def utilisation_entropy_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """Entropy of the expert shares in bits: log₂ N if all experts are used equally, 0 if only one is used."""
    p = utilisation_by_layer(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(-np.where(p == 0, 0.0, p * np.log2(p)).sum(-1) + 0.0)  # no −0


def effective_experts_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """2^UE: how many equally used experts would have this entropy."""
    return np.asarray(np.exp2(utilisation_entropy_by_layer(table)))


def switch_rate(table: RouteTable) -> float:
    """eq:sr_metric, mean over layers: how often the heaviest expert changes between adjacent tokens."""
    return float(switch_rate_by_layer(table).mean())


def cache_hit_rate_all(table: RouteTable, capacity: int) -> float:
    """Hit rate over all k experts, mean over layers."""
    return float(cache_hit_rate_all_by_layer(table, capacity).mean())


def utilisation_entropy(table: RouteTable) -> float:
    """The paper's UE in bits, mean over layers: log₂ N if all experts are used equally."""
    return float(utilisation_entropy_by_layer(table).mean())


def neglected_experts(table: RouteTable) -> int:
    """Number of experts, over all layers, with less than a tenth of the uniform share."""
    uses = _uses_by_layer(table)
    return int((uses * NEGLECTED_BELOW * table.n_experts < uses.sum(-1, keepdims=True)).sum())  # exact in integers
