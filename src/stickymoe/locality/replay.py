"""Requests replayed against caches: how many of them were there already, and how many would be with other slots?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer

from stickymoe.errors import ConfigError, DataError, require
from stickymoe.locality import kernels
from stickymoe.locality.cache import require_policy, require_slots
from stickymoe.locality.streams import Access, Block, Stream, streams
from stickymoe.locality.table import RouteTable, extremes

_QUEUES = {"lru": kernels.LRU, "fifo": kernels.FIFO, "sieve": kernels.SIEVE}
_SCORES = {"lfu": kernels.LFU, "static": kernels.STATIC, "belady": kernels.BELADY}
STACK_POLICIES = ("lru", "static", "belady")  # a larger cache holds what a smaller one holds


@dataclass(frozen=True)
class CacheStats:
    """What one cache of `capacity` slots made of its requests; `wasted` were prefetched and left unused."""

    policy: str
    capacity: int
    hits: int
    misses: int
    prefetched: int = 0
    wasted: int = 0

    @property
    def accesses(self) -> int:
        return self.hits + self.misses

    @property
    def loads(self) -> int:
        return self.misses + self.prefetched

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else float("nan")

    @property
    def miss_rate(self) -> float:
        return self.misses / self.accesses if self.accesses else float("nan")


def replay(
    requests: Integer[np.ndarray, ...] | list[Any],  # [sequences, steps] or [sequences, steps, k]
    *,
    capacity: SupportsIndex,
    n_experts: int,
    policy: str = "lru",
    mask: Bool[np.ndarray, ...] | None = None,
    doc: Integer[np.ndarray, ...] | None = None,
    warm: bool = False,
) -> CacheStats:
    """Hits and misses of one cache, summed over sequences that each start cold unless `warm`.

    A step's k experts, heaviest first, are one request (see `Cache`). Steps outside `mask` ask for nothing; where
    `doc` changes the cache starts cold again.
    """
    stream = _stream(requests, n_experts=n_experts, mask=mask, doc=doc, warm=warm)
    return replay_stream(stream, policy=policy, capacity=capacity)


def _stream(
    requests: Integer[np.ndarray, ...] | list[Any],
    *,
    n_experts: int,
    mask: Bool[np.ndarray, ...] | None,
    doc: Integer[np.ndarray, ...] | None,
    warm: bool,
) -> Stream:
    S = requests if isinstance(requests, np.ndarray) else np.asarray(requests)
    if S.ndim not in (2, 3):
        raise DataError(f"requests: got {S.ndim} dimensions, expected [sequences, steps] or [sequences, steps, k].")
    if S.size:
        least, most = extremes(S)
        if not 0 <= least <= most < n_experts:
            raise DataError(
                f"requests: got experts {least} … {most}, expected 0 … {n_experts - 1} (n_experts={n_experts})."
            )
    if S.ndim == 2:
        S = S[:, :, None]
    for name, array in (("mask", mask), ("doc", doc)):
        if array is not None and array.shape != S.shape[:2]:
            raise DataError(f"{name}: got shape {array.shape}, expected {S.shape[:2]} as in requests.")
    return Stream(
        S=S.reshape(1, -1, S.shape[2]),
        n_entries=n_experts,
        offset=np.zeros(1, np.int64),
        length=max(S.shape[1], 1),
        mask=None if mask is None else mask.reshape(-1),
        doc=None if doc is None else doc.reshape(-1),
        access=Access(warm=warm),
    )


def replay_stream(stream: Stream, *, policy: str, capacity: SupportsIndex) -> CacheStats:
    """What one cache makes of a stream."""
    require_policy(policy)
    slots = require_slots(capacity)
    if policy == "belady" and stream.access.prefetch is not None:
        raise ConfigError("belady bounds policies that load on demand: choose another policy, or no prefetch.")
    held = min(slots, stream.n_entries)
    counts = _queue(stream, policy, held) if policy in _QUEUES else _scored(stream, policy, held)
    hits, fetched, useful = (int(counts[i]) for i in (kernels.HITS, kernels.FETCHED, kernels.USEFUL))
    return CacheStats(
        policy=policy,
        capacity=slots,
        hits=hits,
        misses=stream.accesses - hits,
        prefetched=fetched,
        wasted=fetched - useful,
    )


def _queue(stream: Stream, policy: str, capacity: int) -> Int64[np.ndarray, " counts"]:
    newer, older = np.empty((2, stream.n_entries + 1), np.int32)
    resident, marked, ahead, pinned = np.zeros((4, stream.n_entries), np.bool_)
    counts = np.zeros(7, np.int64)
    for block in stream.blocks():
        kernels.queue_replay(
            _QUEUES[policy],
            *block,
            stream.k,
            stream.ahead_k,
            capacity,
            newer,
            older,
            resident,
            marked,
            ahead,
            pinned,
            counts,
        )
    return counts


def _scored(stream: Stream, policy: str, capacity: int) -> Int64[np.ndarray, " counts"]:
    holds, score, stamp = np.zeros((3, capacity), np.int64)
    slot_of, uses = np.zeros((2, stream.n_entries), np.int64)
    ahead = np.zeros(stream.n_entries, np.bool_)
    counts = np.zeros(7, np.int64)
    rank = _rank(stream) if policy == "static" else np.empty(0, np.int64)
    for block, future in _with_future(stream, policy):
        kernels.scored_replay(
            _SCORES[policy],
            *block,
            stream.k,
            stream.ahead_k,
            capacity,
            future,
            rank,
            holds,
            score,
            stamp,
            slot_of,
            uses,
            ahead,
            counts,
        )
    return counts


def _rank(stream: Stream) -> Int64[np.ndarray, " entries"]:
    """The standing of every entry by its uses in the whole stream; of equals the lowest index stands higher."""
    uses = np.zeros(stream.n_entries, np.int64)
    for steps, kind, _ in stream.blocks():
        uses += np.bincount(steps[kind == kernels.ASK, : stream.k].reshape(-1), minlength=stream.n_entries)
    rank = np.empty(stream.n_entries, np.int64)
    rank[np.lexsort((-np.arange(stream.n_entries), uses))] = np.arange(stream.n_entries)
    return rank


def _with_future(stream: Stream, policy: str) -> Iterator[tuple[Block, Int64[np.ndarray, "n k"]]]:
    """The stream's blocks; for Belady as one, with the next use of every access: nine bytes each in memory."""
    if policy != "belady":
        for block in stream.blocks():
            yield block, np.empty((0, 0), np.int64)
        return
    parts = list(stream.blocks())
    if parts:
        whole = Block(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        yield whole, kernels.next_uses(whole.steps, whole.kind, stream.k, stream.n_entries)


@dataclass(frozen=True)
class Simulation:
    """What the caches of a device made of a table: `caches` in the order of their layers."""

    caches: tuple[CacheStats, ...]
    tokens: int

    @property
    def hits(self) -> int:
        return sum(c.hits for c in self.caches)

    @property
    def misses(self) -> int:
        return sum(c.misses for c in self.caches)

    @property
    def loads(self) -> int:
        return sum(c.loads for c in self.caches)

    @property
    def wasted(self) -> int:
        return sum(c.wasted for c in self.caches)

    @property
    def slots(self) -> int:
        return sum(c.capacity for c in self.caches)

    @property
    def miss_rate(self) -> float:
        accesses = self.hits + self.misses
        return self.misses / accesses if accesses else float("nan")

    @property
    def loads_per_token(self) -> float:
        return self.loads / self.tokens if self.tokens else float("nan")


def simulate(
    table: RouteTable, *, capacity: SupportsIndex | Sequence[int], policy: str = "lru", access: Access | None = None
) -> Simulation:
    """Replay a table: `capacity` slots in each cache (see `Access` for which there are), or one number per cache."""
    found = streams(table, access or Access())
    capacities = [capacity] * len(found) if hasattr(capacity, "__index__") else list(capacity)
    if len(capacities) != len(found):
        raise ConfigError(
            f"capacity: got {len(capacities)} numbers, expected one, or one for each of {len(found)} caches."
        )
    stats = (replay_stream(s, policy=policy, capacity=c) for s, c in zip(found, capacities, strict=True))
    return Simulation(tuple(stats), tokens=found[0].real_tokens if found else 0)


@dataclass(frozen=True)
class MissCurve:
    """Misses of each cache for each number of slots."""

    policy: str
    capacities: Integer[np.ndarray, " sizes"]
    misses: Integer[np.ndarray, "caches sizes"]
    accesses: Integer[np.ndarray, " caches"]
    tokens: int

    @property
    def rates(self) -> Float[np.ndarray, " sizes"]:
        """Miss rate where every cache has the same number of slots."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.misses.sum(0) / self.accesses.sum())

    def rate(self, capacity: int) -> float:
        """Miss rate with `capacity` slots in every cache; more than the largest are as good as the largest."""
        return float(self.rates[self._place(capacity)])

    def at(self, capacity: int) -> Simulation:
        """What `simulate` makes of the table with `capacity` slots in every cache."""
        counts = zip(self.accesses.tolist(), self.misses[:, self._place(capacity)].tolist(), strict=True)
        caches = (CacheStats(self.policy, capacity, hits=n - misses, misses=misses) for n, misses in counts)
        return Simulation(tuple(caches), self.tokens)

    def _place(self, capacity: int) -> int:
        found = np.flatnonzero(self.capacities == min(capacity, int(self.capacities[-1])))
        require(len(found) == 1, "capacity", capacity, f"one of {self.capacities.tolist()}")
        return int(found[0])


def miss_curve(
    table: RouteTable,
    *,
    policy: str = "lru",
    access: Access | None = None,
    capacities: Sequence[int] | None = None,
) -> MissCurve:
    """Misses for every capacity up to the number of entries, or for the given ones.

    LRU, static and Belady are stack policies: from k slots on a larger cache holds all that a smaller one holds, so one
    pass counts every capacity; below k, where a request is served one expert after another, a second pass does. The
    others are replayed at each capacity, and so is a cache that prefetches.
    """
    require_policy(policy)
    found = streams(table, access or Access())
    entries = max((s.n_entries for s in found), default=0)
    wanted = range(1, entries + 1) if capacities is None else sorted({require_slots(c) for c in capacities})
    curves = []
    for stream in found:
        if policy in STACK_POLICIES and stream.access.prefetch is None:
            whole = stack_misses(stream, policy)
            curves.append([int(whole[min(c, stream.n_entries) - 1]) for c in wanted])
        else:
            curves.append([replay_stream(stream, policy=policy, capacity=c).misses for c in wanted])
    return MissCurve(
        policy=policy,
        capacities=np.array(wanted, np.int64),
        misses=np.array(curves, np.int64).reshape(len(found), len(wanted)),
        accesses=np.array([s.accesses for s in found], np.int64),
        tokens=found[0].real_tokens if found else 0,
    )


def stack_misses(stream: Stream, policy: str) -> Int64[np.ndarray, " entries"]:
    """Misses of a stack policy with 1 … n slots."""
    misses = stream.accesses - np.cumsum(_depths(stream, policy, joint=True)[1:])
    if stream.k > 1:
        single = stream.accesses - np.cumsum(_depths(stream, policy, joint=False)[1:])
        misses[: stream.k - 1] = single[: stream.k - 1]
    return misses


def _depths(stream: Stream, policy: str, *, joint: bool) -> Int64[np.ndarray, " depths"]:
    """How many accesses need d slots to hit, k experts together or one after another."""
    k = stream.k if joint else 1
    depths = np.zeros(stream.n_entries + 1, np.int64)
    last = np.zeros(stream.n_entries, np.int32)
    value, stack, place = np.zeros((3, stream.n_entries), np.int64)
    rank = _rank(stream) if policy == "static" else np.empty(0, np.int64)
    state = 0
    for block, future in _with_future(stream, policy):
        steps, kind, cold = block if joint else _one_by_one(block, stream.k)
        if policy == "lru":
            state = kernels.recency_depths(steps, kind, cold, k, last, depths, state)
        else:
            ahead = future.reshape(-1, k) if policy == "belady" else future
            state = kernels.stack_depths(steps, kind, cold, k, ahead, rank, value, stack, place, depths, state)
    return depths


def _one_by_one(block: Block, k: int) -> Block:
    """Each expert a request of its own, heaviest first."""
    cold = np.zeros((len(block.steps), k), np.bool_)
    cold[:, 0] = block.cold
    return Block(block.steps.reshape(-1, 1), np.repeat(block.kind, k), cold.reshape(-1))


def allocate(curve: MissCurve, total: int) -> list[int]:
    """Slots for each cache, `total` together and at least one each, with the fewest misses.

    Exact, by dynamic programming over the caches: misses need not fall evenly, or at all, as a cache grows.
    """
    n_caches, sizes = curve.misses.shape
    if curve.capacities.tolist() != list(range(1, sizes + 1)):
        raise ConfigError("Slots are chosen from whole miss curves: leave capacities out.")
    require(total >= n_caches, "total", total, f"at least one slot for each of the {n_caches} caches")
    total = min(total, n_caches * sizes)
    best = np.full(total + 1, np.inf)
    best[0] = 0
    choices = []
    for misses in curve.misses:
        options = np.full((sizes, total + 1), np.inf)
        for c in range(1, min(sizes, total) + 1):
            options[c - 1, c:] = best[: total + 1 - c] + misses[c - 1]
        choices.append(options.argmin(0))
        best = options.min(0)
    left = int(best.argmin())  # more slots can miss more below k, so the best may leave some unused
    slots = []
    for choice in reversed(choices):
        slots.append(int(choice[left]) + 1)
        left -= slots[-1]
    return slots[::-1]
