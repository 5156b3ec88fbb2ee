"""From misses to milliseconds: what every cache costs on a device, and the smallest that does what is asked.

τ = τ_compute + loads · τ_load per token: the paper's step latency with the misses counted, since k > 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stickymoe.errors import ConfigError, require
from stickymoe.locality.cache import ONLINE
from stickymoe.locality.devices import Device
from stickymoe.locality.replay import MissCurve, allocate
from stickymoe.locality.table import RouteTable

ENOUGH = 0.01  # misses per access that a cache may have and be called large enough
BLAMELESS = 0.25  # share of a policy's misses that Belady may avoid for the policy to be called blameless


@dataclass(frozen=True)
class Weights:
    """Bytes of a model: of one expert, and of everything that is resident and used for every token."""

    expert: float
    other: float = 0.0

    def __post_init__(self) -> None:
        require(self.expert >= 1, "expert_bytes", self.expert, "a number ≥ 1")
        require(self.other >= 0, "other_bytes", self.other, "a number ≥ 0")


@dataclass(frozen=True)
class Point:
    """One cache on one device. `slots` per cache; `memory` holds them and what is always resident."""

    policy: str
    slots: tuple[int, ...]
    memory: float
    miss_rate: float
    loads_per_token: float
    ms_per_token: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.ms_per_token


def token_ms(table: RouteTable, device: Device, weights: Weights) -> float:
    """What a token computes, everything it needs in memory."""
    return device.compute_ms(table.n_layers * table.top_k * weights.expert + weights.other)


def plan(table: RouteTable, curve: MissCurve, device: Device, weights: Weights, *, chosen: bool = False) -> list[Point]:
    """A point for every capacity of a curve, smallest first; `chosen` divides the same slots over the caches anew."""
    if curve.tokens == 0:
        raise ConfigError("The trace holds no token, so there is nothing to plan for.")
    n_caches, compute_ms = len(curve.misses), token_ms(table, device, weights)
    points = []
    for i, capacity in enumerate(curve.capacities.tolist()):
        if chosen:
            slots = allocate(curve, n_caches * capacity)
            misses = sum(int(curve.misses[cache, c - 1]) for cache, c in enumerate(slots))
        else:
            slots, misses = [capacity] * n_caches, int(curve.misses[:, i].sum())
        loads = misses / curve.tokens
        points.append(
            Point(
                policy=curve.policy,
                slots=tuple(slots),
                memory=sum(slots) * weights.expert + weights.other,
                miss_rate=misses / int(curve.accesses.sum()),
                loads_per_token=loads,
                ms_per_token=compute_ms + loads * device.load_ms(weights.expert),
            )
        )
    return points


def knee(points: Sequence[Point]) -> Point:
    """Where more memory begins to bring less: the point farthest below the chord of milliseconds over memory."""
    first, last = points[0], points[-1]
    width, height = last.memory - first.memory, first.ms_per_token - last.ms_per_token
    if width <= 0 or height <= 0:
        return first
    return max(points, key=lambda p: (first.ms_per_token - p.ms_per_token) / height - (p.memory - first.memory) / width)


@dataclass(frozen=True)
class Answer:
    """The smallest cache that fits `memory` and reaches `tokens_per_s`, or none and why, in words."""

    point: Point | None
    words: str


def smallest(points: Sequence[Point], *, memory: float, tokens_per_s: float | None = None) -> Answer:
    """The smallest cache that is fast enough; without a wish for speed, the fastest that fits `memory`."""
    fitting = [p for p in points if p.memory <= memory]
    if not fitting:
        least = min(points, key=lambda p: p.memory)
        return Answer(
            None, f"No cache fits {in_bytes(memory)}: the smallest, {_slots(least)}, takes {in_bytes(least.memory)}."
        )
    if tokens_per_s is None:
        best = max(fitting, key=lambda p: (p.tokens_per_s, -p.memory))
        return Answer(best, f"In {in_bytes(memory)}: {_told(best)}.")
    enough = [p for p in fitting if p.tokens_per_s >= tokens_per_s]
    if enough:
        best = min(enough, key=lambda p: (p.memory, -p.tokens_per_s))
        return Answer(best, f"{tokens_per_s:g} tokens/s: {_told(best)}.")
    best = max(fitting, key=lambda p: p.tokens_per_s)
    return Answer(
        None, f"No cache reaches {tokens_per_s:g} tokens/s in {in_bytes(memory)}: {_why(points, best, tokens_per_s)}."
    )


def _why(points: Sequence[Point], best: Point, tokens_per_s: float) -> str:
    faster = [p for p in points if p.tokens_per_s >= tokens_per_s]
    if faster:
        needed = min(faster, key=lambda p: p.memory)
        return (
            f"that takes {in_bytes(needed.memory)} ({_slots(needed)}), here {in_speed(best.tokens_per_s)} is the most"
        )
    fastest = max(points, key=lambda p: p.tokens_per_s)
    loads = f"{fastest.loads_per_token:.3g} loads a token remain"
    return f"even the fastest cache, {_slots(fastest)}, gives {in_speed(fastest.tokens_per_s)} ({loads})"


def _told(point: Point) -> str:
    return (
        f"{point.policy} with {_slots(point)} ({in_bytes(point.memory)}) gives {in_speed(point.tokens_per_s)} tokens/s "
        f"at {point.miss_rate:.1%} misses"
    )


def _slots(point: Point) -> str:
    each = sorted(set(point.slots))
    number = str(each[0]) if len(each) == 1 else f"{each[0]}–{each[-1]}"
    return in_slots(number, len(point.slots))


def in_slots(number: str, n_caches: int) -> str:
    return f"{number} slot{'s' * (number != '1')} {'a cache' if n_caches > 1 else 'in all'}"


def in_bytes(n: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def in_speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def verdict(told: str, rates: dict[str, float], *, cold: float, working_set: float) -> str:
    """Policy or working set? `rates` are miss rates of the cache that `told` names, Belady's among them.

    `cold` is the rate that is left with room for all; `working_set` counts the experts of a layer in use within 16
    tokens, NaN if no text is that long.
    """
    bound, policy = rates["belady"], _best(rates)
    rate = rates[policy]
    told = f"with {told}: {rate:.1%} misses ({policy}), Belady {bound:.1%}"
    if rate <= ENOUGH:
        return f"{told}, so the cache is large enough"
    if avoidable(rates) > BLAMELESS:
        return f"{told}, so a better policy could avoid up to {avoidable(rates):.0%} of the misses"
    if bound <= cold:
        return f"{told}, so only cold starts remain"
    used = "" if math.isnan(working_set) else f": 16 tokens use {working_set:.1f} experts of a layer"
    return f"{told}, so the policy is not the problem{used}"


def avoidable(rates: dict[str, float]) -> float:
    """The share of the best policy's misses that Belady avoids; none where there are hardly any."""
    rate = rates[_best(rates)]
    return 1 - rates["belady"] / rate if rate > ENOUGH else 0.0


def _best(rates: dict[str, float]) -> str:
    """The policy with the fewest misses that a device can run."""
    return min((p for p in rates if p in ONLINE), key=rates.__getitem__)
