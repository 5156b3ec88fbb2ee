"""Requests replayed against caches: hits and misses for one capacity, or for every capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer

from stickymoe.errors import ConfigError, DataError, require
from stickymoe.locality import kernels
from stickymoe.locality import policies as p
from stickymoe.locality.cache import CacheStats, require_slots
from stickymoe.locality.policies import Policy, find_policy
from stickymoe.locality.serving import ASK, PREFETCH, Loops
from stickymoe.locality.streams import Access, Rows, Stream, join, no_residents, streams
from stickymoe.locality.table import RouteTable, extremes

# From k slots on, a larger cache of these policies holds all that a smaller one holds: one pass gives a whole curve.
STACK_POLICIES = ("lru", "static", "belady")


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

    A step's k experts, heaviest first, are one request. Steps outside `mask` are padding. Where `doc` changes, the
    cache starts cold again.
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
        n_experts=n_experts,
        n_entries=n_experts,
        offset=np.zeros(1, np.int64),
        length=max(S.shape[1], 1),
        mask=None if mask is None else mask.reshape(-1),
        doc=None if doc is None else doc.reshape(-1),
        access=Access(warm=warm),
    )


def replay_stream(stream: Stream, *, policy: str, capacity: SupportsIndex) -> CacheStats:
    """The hits and misses of one cache that gets a stream of requests."""
    found, slots = find_policy(policy), require_slots(capacity)
    if found.knows == "next_use" and stream.access.prefetch is not None:
        raise ConfigError(f"{policy} bounds policies that load on demand: choose another policy, or omit prefetch.")
    if found.routed and stream.residents is None:
        raise no_residents()
    loops = found.loops_for(stream.access.on_miss)
    state = p.new_state(stream.n_entries, min(slots, stream.n_entries))
    if found.knows == "rank":
        state[p.HINT, : stream.n_entries] = _rank(stream)
    if stream.passes is None:
        for rows, future in _rows_with_future(stream, found):
            loops.replay_rows(state, *rows, stream.k, stream.prefetch_size, future)
    else:
        _replay_requests(stream, found, loops, state)
    misses = stream.accesses - int(state[p.VAR, p.HITS])
    return CacheStats.of(state, policy=policy, capacity=slots, misses=misses)


def _replay_requests(stream: Stream, policy: Policy, loops: Loops, state: p.State) -> None:
    """Replay requests of any size; for Belady in one piece."""
    if policy.knows == "next_use":
        whole = join(stream.requests())
        future = kernels.next_uses_of_requests(whole.entries, whole.bounds, whole.kind, stream.n_entries)
        loops.replay_requests(state, *whole[:4], future)
        return
    sets = stream.residents
    if policy.routed and sets is not None:
        kept = np.full((sets.shape[0], sets.shape[2]), stream.n_experts, np.int64)
        for block in stream.requests():
            loops.replay_routed(state, *block, sets, stream.offset, stream.n_experts, kept)
        return
    for block in stream.requests():
        loops.replay_requests(state, *block[:4], np.empty(0, np.int64))


def _rank(stream: Stream) -> Int64[np.ndarray, " entries"]:
    """The rank of every entry by its uses in the whole stream; among equals the lowest index ranks highest."""
    uses = np.zeros(stream.n_entries, np.int64)
    if stream.passes is None:
        for steps, kind, _ in stream.rows():
            uses += np.bincount(steps[kind == ASK, : stream.k].reshape(-1), minlength=stream.n_entries)
    else:
        for block in stream.requests():
            asked = np.repeat(block.kind != PREFETCH, np.diff(block.bounds))
            uses += np.bincount(block.entries[asked], minlength=stream.n_entries)
    rank = np.empty(stream.n_entries, np.int64)
    rank[np.lexsort((-np.arange(stream.n_entries), uses))] = np.arange(stream.n_entries)
    return rank


def _rows_with_future(stream: Stream, policy: Policy) -> Iterator[tuple[Rows, Int64[np.ndarray, "n k"]]]:
    """The stream's rows; for Belady in one piece, with the next use of every access: nine bytes each in memory."""
    if policy.knows != "next_use":
        for rows in stream.rows():
            yield rows, np.empty((0, 0), np.int64)
        return
    parts = list(stream.rows())
    if parts:
        whole = Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        yield whole, kernels.next_uses(whole.steps, whole.kind, stream.k, stream.n_entries)


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns: the counts of all caches of a device.

    Attributes:
        caches: the counts of each cache, in the order of their layers
        tokens: real tokens of the table
    """

    caches: tuple[CacheStats, ...]
    tokens: int

    @property
    def hits(self) -> int:
        """Accesses to resident experts, over all caches."""
        return sum(c.hits for c in self.caches)

    @property
    def misses(self) -> int:
        """Accesses to experts that had to be loaded, over all caches."""
        return sum(c.misses for c in self.caches)

    @property
    def loads(self) -> int:
        """Misses and prefetches, over all caches."""
        return sum(c.loads for c in self.caches)

    @property
    def wasted(self) -> int:
        """Experts that were prefetched and not used, over all caches."""
        return sum(c.wasted for c in self.caches)

    @property
    def evictions(self) -> int | None:
        """Evictions of all caches; None if the simulation is a point of a miss curve."""
        counts = [c.evictions for c in self.caches if c.evictions is not None]
        return sum(counts) if len(counts) == len(self.caches) else None

    @property
    def bypassed(self) -> int:
        """Misses that were not admitted to a cache."""
        return sum(c.bypassed for c in self.caches)

    @property
    def slots(self) -> int:
        """Slots of all caches together."""
        return sum(c.capacity for c in self.caches)

    @property
    def miss_rate(self) -> float:
        """Misses / accesses."""
        accesses = self.hits + self.misses
        return self.misses / accesses if accesses else float("nan")

    @property
    def loads_per_token(self) -> float:
        """Loads / tokens."""
        return self.loads / self.tokens if self.tokens else float("nan")


def simulate(
    table: RouteTable, *, capacity: SupportsIndex | Sequence[int], policy: str = "lru", access: Access | None = None
) -> Simulation:
    """Replay a table: `capacity` slots in each cache (see `Access` for which there are), or one number per cache."""
    found = streams(table, access or Access(), routed=find_policy(policy).routed)
    capacities = [capacity] * len(found) if hasattr(capacity, "__index__") else list(capacity)
    if len(capacities) != len(found):
        raise ConfigError(
            f"capacity: got {len(capacities)} numbers, expected one, or one for each of {len(found)} caches."
        )
    stats = (replay_stream(s, policy=policy, capacity=c) for s, c in zip(found, capacities, strict=True))
    return Simulation(tuple(stats), tokens=found[0].real_tokens if found else 0)


@dataclass(frozen=True)
class MissCurve:
    """What `miss_curve` returns: the misses of each cache for each number of slots.

    Attributes:
        policy: name of the policy
        capacities: numbers of slots, smallest first
        misses: for each cache and capacity
        accesses: for each cache
        tokens: real tokens of the table
    """

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
        """Miss rate with `capacity` slots in every cache; more slots than the largest change nothing."""
        return float(self.rates[self._place(capacity)])

    def at(self, capacity: int) -> Simulation:
        """The result of `simulate` with `capacity` slots in every cache, without evictions."""
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

    For a stack policy, one pass counts every capacity from k on. Below k, a request is served one expert after another,
    and a second pass counts the misses. Other policies, prefetch, bypass, prompts and batches are replayed at each
    capacity.
    """
    access = access or Access()
    stack = find_policy(policy).name in STACK_POLICIES and access.prefetch is None and access.on_miss == "load"
    found = streams(table, access, routed=find_policy(policy).routed)
    entries = max((s.n_entries for s in found), default=0)
    wanted = range(1, entries + 1) if capacities is None else sorted({require_slots(c) for c in capacities})
    curves = []
    for stream in found:
        if stack and stream.passes is None:
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
    """How many accesses need d slots to hit, if k experts are served together (`joint`) or one after another."""
    k = stream.k if joint else 1
    depths = np.zeros(stream.n_entries + 1, np.int64)
    last = np.zeros(stream.n_entries, np.int32)
    value, stack, place = np.zeros((3, stream.n_entries), np.int64)
    rank = _rank(stream) if policy == "static" else np.empty(0, np.int64)
    state = 0
    for rows, future in _rows_with_future(stream, find_policy(policy)):
        steps, kind, cold = rows if joint else _one_by_one(rows, stream.k)
        if policy == "lru":
            state = kernels.recency_depths(steps, kind, cold, k, last, depths, state)
        else:
            ahead = future.reshape(-1, k) if policy == "belady" else future
            state = kernels.stack_depths(steps, kind, cold, k, ahead, rank, value, stack, place, depths, state)
    return depths


def _one_by_one(rows: Rows, k: int) -> Rows:
    """Make each expert a request of its own, heaviest first."""
    cold = np.zeros((len(rows.steps), k), np.bool_)
    cold[:, 0] = rows.cold
    return Rows(rows.steps.reshape(-1, 1), np.repeat(rows.kind, k), cold.reshape(-1))


def allocate(curve: MissCurve, total: int) -> list[int]:
    """Slots for each cache, `total` together and at least one each, with the fewest misses.

    Exact, by dynamic programming over the caches: misses need not fall evenly, or at all, as a cache grows.
    """
    n_caches, sizes = curve.misses.shape
    if curve.capacities.tolist() != list(range(1, sizes + 1)):
        raise ConfigError("allocate needs the miss curve of every capacity: compute it without capacities.")
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
