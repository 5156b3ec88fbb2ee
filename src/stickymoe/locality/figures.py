"""Locality metrics beyond the switch rate: reuse, working sets, runs, segment consistency, specialisation.

All are per layer, never cross a document border, and count real tokens only. A metric over nothing is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer

from stickymoe.errors import ConfigError, require
from stickymoe.locality import kernels
from stickymoe.locality.table import RouteTable


def documents(table: RouteTable) -> Int64[np.ndarray, "B T"]:
    """Numbers that change where a sequence or a document begins, and nowhere else."""
    return np.asarray(table.starts.reshape(-1).cumsum().reshape(table.starts.shape))


def reuse_by_lag(table: RouteTable, lags: Sequence[int] = (1, 2, 4, 8, 16)) -> Float[np.ndarray, "L lags"]:
    """Fraction of a token's experts that were also chosen `lag` tokens earlier."""
    unit = documents(table)
    out = np.full((table.n_layers, len(lags)), np.nan)
    for column, lag in enumerate(lags):
        require(lag >= 1, "lag", lag, "a whole number ≥ 1")
        both = table.mask[:, lag:] & table.mask[:, :-lag] & (unit[:, lag:] == unit[:, :-lag])
        if both.any():
            for layer, S in enumerate(table.S):
                now, before = S[:, lag:][both], S[:, :-lag][both]
                used = now < table.n_experts
                reused = (now[:, :, None] == before[:, None, :]).any(-1) & used
                out[layer, column] = reused.sum() / used.sum() if used.any() else np.nan
    return out


def run_lengths(table: RouteTable) -> Int64[np.ndarray, "L lengths"]:
    """Number of runs of n tokens with the same heaviest expert, for every n from 0 to T."""
    T = table.S.shape[2]
    joined = table.pairs
    counts = np.zeros((table.n_layers, T + 1), np.int64)
    for layer, S in enumerate(table.S):
        top1 = S[..., 0]
        begins = table.mask.copy()
        begins[:, 1:] &= ~(joined & (top1[:, 1:] == top1[:, :-1]))
        run = begins.reshape(-1).cumsum()[table.mask.reshape(-1)]
        counts[layer] = np.bincount(np.bincount(run)[1:], minlength=T + 1)
    return counts


def mean_run_length_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """Mean number of tokens for which the heaviest expert stays the same."""
    counts = run_lengths(table)
    with np.errstate(invalid="ignore"):
        return np.asarray(counts @ np.arange(counts.shape[1]) / counts.sum(1))


def working_set(table: RouteTable, windows: Sequence[int] = (1, 4, 16, 64, 256)) -> Float[np.ndarray, "L windows"]:
    """Mean number of different experts that `window` adjacent tokens use."""
    return np.stack([_working_set(_segment_uses(table, window)) for window in windows], axis=1)


def _working_set(uses: Int64[np.ndarray, "L counts"]) -> Float[np.ndarray, " L"]:
    n_segments = uses[:, -1]
    with np.errstate(invalid="ignore"):
        return np.asarray(uses[:, 1:-1].sum(1) / n_segments)


def _segment_uses(table: RouteTable, window: int) -> Int64[np.ndarray, "L counts"]:
    """Number of (segment, expert) pairs with 0 … `window` uses; the last column is the number of segments."""
    require(window >= 1, "window", window, "a whole number ≥ 1")
    unit = documents(table)
    out = np.zeros((table.n_layers, window + 2), np.int64)
    for layer, S in enumerate(table.S):
        kernels.segment_uses(np.ascontiguousarray(S), np.asarray(table.mask), unit, table.n_experts, window, out[layer])
    return out


def segment_routing_by_layer(table: RouteTable, window: int) -> Float[np.ndarray, " L"]:
    """SRP: how well a fixed group of experts per segment can replace the router, as the best F1.

    Segment Routing Best Performance of Liang et al., "Not All Models Suit Expert Offloading" (arXiv 2505.16056; code
    ljcleo/moe-lrc, src/30_srp_calc.py and 31_srp_refine.py). In each segment of `window` tokens, an expert is kept for
    the whole segment if it has at least τ uses there. The metric is the F1 of kept against chosen experts, over all
    segments, for the best τ of the layer.
    """
    uses = _segment_uses(table, window)[:, :-1]
    counts = np.arange(window + 1)
    right = (uses * counts)[:, ::-1].cumsum(1)[:, ::-1]  # uses covered with τ = column
    kept = window * uses[:, ::-1].cumsum(1)[:, ::-1]
    with np.errstate(invalid="ignore"):
        return np.asarray((2 * right / (kept + right[:, :1])).max(1))


def segment_cache_by_layer(table: RouteTable, window: int, capacity: int) -> Float[np.ndarray, " L"]:
    """SCH: hit rate of a cache that sees `window` tokens, this one included, and evicts the expert they use least.

    Segment Cache Best Hit Rate of the same study (src/41_sch_calc.py), with the requests of `serving`: members are
    pinned, and caches start cold with every sequence or document. Among experts with equally few uses, the cache evicts
    the one that was used longest ago.
    """
    require(window >= 1, "window", window, "a whole number ≥ 1")
    require(capacity >= table.top_k, "capacity", capacity, f"at least the {table.top_k} experts of a token")
    unit = documents(table)
    n = table.used_slots / max(table.n_layers, 1)
    hits = [
        kernels.segment_cache_hits(
            np.ascontiguousarray(S), np.asarray(table.mask), unit, table.n_experts, window, capacity
        )
        for S in table.S
    ]
    return np.array(hits) / n if n else np.full(table.n_layers, np.nan)


def by_domain(
    figure: Callable[[RouteTable], Float[np.ndarray, ...]],
    table: RouteTable,
    domain: Integer[np.ndarray, "B T"] | None = None,
) -> dict[int, Float[np.ndarray, ...]]:
    """A metric of each domain, or of each document, with the tokens of all others masked."""
    of = _domains(table) if domain is None else domain
    return {int(d): figure(dataclasses.replace(table, mask=table.mask & (of == d))) for d in np.unique(of[table.mask])}


def _domains(table: RouteTable) -> Integer[np.ndarray, "B T"]:
    if table.doc is None:
        raise ConfigError("The trace has no documents: pass the domain of each token.")
    return table.doc


def domain_specialisation(
    table: RouteTable, domain: Integer[np.ndarray, "B T"] | None = None
) -> Float[np.ndarray, "L domains N"]:
    """Fraction of a domain's tokens that choose each expert; k/N everywhere is no specialisation.

    As OLMoE reports it (Muennighoff et al., arXiv 2409.02060, section 5.3). `domain` numbers the domains from 0;
    by default, every document is a domain.
    """
    if domain is None:
        domain = np.unique(_domains(table), return_inverse=True)[1].reshape(table.mask.shape)
    return _shares(table, domain, int(domain.max()) + 1 if domain.size else 0)


def vocabulary_specialisation(
    table: RouteTable, least: int = 10
) -> tuple[Int64[np.ndarray, " ids"], Float[np.ndarray, "L ids N"]]:
    """Token ids that occur at least `least` times, and the fraction of their occurrences that choose each expert.

    As OLMoE reports it (section 5.4), for input tokens.
    """
    if table.tokens is None:
        raise ConfigError("The trace has no token ids, which vocabulary specialisation needs.")
    ids, inverse, counts = np.unique(table.tokens[table.mask], return_inverse=True, return_counts=True)
    frequent = counts >= least
    number = np.full(table.mask.shape, -1)
    number[table.mask] = np.where(frequent, frequent.cumsum() - 1, -1)[inverse.reshape(-1)]
    return ids[frequent].astype(np.int64), _shares(table, number, int(frequent.sum()))


def _shares(table: RouteTable, group: Integer[np.ndarray, "B T"], n_groups: int) -> Float[np.ndarray, "L groups N"]:
    counted: Bool[np.ndarray, "B T"] = table.mask & (group >= 0)
    of = group[counted]
    sizes = np.bincount(of, minlength=n_groups)
    width = table.n_experts + 1  # the last column counts slots that use no expert
    out = np.empty((table.n_layers, n_groups, table.n_experts))
    with np.errstate(invalid="ignore"):
        for layer, S in enumerate(table.S):
            cells = (of[:, None] * width + S[counted]).reshape(-1)
            uses = np.bincount(cells, minlength=n_groups * width).reshape(n_groups, width)
            out[layer] = uses[:, : table.n_experts] / sizes[:, None]
    return out


def peak_specialisation_by_layer(shares: Float[np.ndarray, "L groups N"], top_k: int) -> Float[np.ndarray, " L"]:
    """The fraction of a group's most frequent expert, as a multiple of the uniform k/N, averaged over groups."""
    highest = shares.max(2)
    if np.isnan(highest).all():
        return np.full(len(shares), np.nan)
    return np.asarray(np.nanmean(highest, axis=1) * shares.shape[2] / top_k)
