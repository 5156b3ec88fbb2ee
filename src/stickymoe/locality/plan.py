"""`plan`: what every cache costs on a device, and the smallest one that meets a budget.

τ = τ_compute + Σ loads · τ_load per token: the paper's step latency, with every miss counted, since k > 1.
If the device overlaps loads with compute, some of them are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stickymoe.errors import ConfigError, require
from stickymoe.locality.devices import Device, load_device
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.replay import MissCurve, allocate, miss_curve
from stickymoe.locality.row_replay import simulate_rows
from stickymoe.locality.streams import Access
from stickymoe.locality.study import slots_text, smallest_useful
from stickymoe.locality.table import RouteTable


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model: of one expert in each layer, and of everything that is always resident."""

    experts: tuple[float, ...]
    other: float = 0.0

    def __post_init__(self) -> None:
        for size in self.experts:
            require(size >= 1, "expert_bytes", size, "a number ≥ 1")
        require(self.other >= 0, "other_bytes", self.other, "a number ≥ 0")

    @classmethod
    def of(cls, table: RouteTable, expert: float | None = None, other: float | None = None) -> Sizes:
        """Sizes as given, or as the table has them."""
        if expert is not None:
            experts: tuple[float, ...] = (expert,) * table.n_layers
        elif table.expert_bytes is not None:
            experts = tuple(float(size) for size in table.expert_bytes)
        else:
            raise ConfigError("The trace has no expert size: pass expert_bytes, such as 14MB.")
        return cls(experts, float(table.other_bytes or 0) if other is None else other)

    def of_slots(self, layers_per_cache: int) -> list[float]:
        """Bytes of a slot of each cache: it must hold the largest expert of the layers that the cache serves."""
        first_layers = range(0, len(self.experts), layers_per_cache)
        return [max(self.experts[first : first + layers_per_cache]) for first in first_layers]


@dataclass(frozen=True)
class RowReads:
    """Rows of tables in slow memory: bytes that a token reads, and bytes of memory for hot rows."""

    per_token: float
    memory: float = 0.0

    @classmethod
    def of(cls, table: RouteTable, memory: float = 0.0) -> RowReads:
        """Those of a trace, with so much memory for the rows that were used last. They stay between texts."""
        if not memory:
            return cls(float(table.row_bytes))
        if not table.row_bytes:
            raise ConfigError(f"rows: got {bytes_text(memory)}, but the trace reads no rows: omit it.")
        of_a_token = sum(key.nbytes for key in table.row_keys)
        if of_a_token and memory < of_a_token:
            expected = f"0 or at least {bytes_text(of_a_token)}, the rows of a token"
            raise ConfigError(f"rows: got {bytes_text(memory)}, expected {expected}.")
        tokens = int(memory / of_a_token) if of_a_token else 1
        found = simulate_rows(table, tokens=tokens, access=Access(order="decode", warm=True))
        return cls(found.bytes_per_token, float(found.memory))


@dataclass(frozen=True)
class Budget:
    """The requirements: bytes of fast memory, and optionally tokens per second."""

    memory: float
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        speed = self.tokens_per_s
        require(speed is None or (math.isfinite(speed) and speed > 0), "tokens_per_s", speed, "a finite number > 0")


@dataclass(frozen=True)
class Point:
    """One cache on one device.

    Attributes:
        policy: name of the policy
        slots: slots of each cache
        memory: bytes of the slots, of hot rows and of what is always resident
        miss_rate: misses / accesses
        loads_per_token: experts that a token loads, over all layers
        bytes_per_token: bytes that a token loads, rows included
        ms_per_token: milliseconds of a token, loads included
    """

    policy: str
    slots: tuple[int, ...]
    memory: float
    miss_rate: float
    loads_per_token: float
    bytes_per_token: float
    ms_per_token: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return 1000 / self.ms_per_token


@dataclass(frozen=True)
class Answer:
    """The cache that meets a budget.

    Attributes:
        point: this cache; None if there is none
        message: one sentence about it
    """

    point: Point | None
    message: str


@dataclass(frozen=True)
class Plan:
    """What `plan` returns: what every cache costs on a device.

    Attributes:
        device: the profile of the device
        sizes: bytes of the experts and of everything else
        budget: memory, and tokens per second if a speed is asked for
        points: for each policy a point for every capacity, smallest first
        compute_ms: milliseconds of a token without loads
        answer: the cache that meets the budget
    """

    device: Device
    sizes: Sizes
    budget: Budget
    points: dict[str, list[Point]]
    compute_ms: float
    answer: Answer


def plan(
    table: RouteTable,
    device: Device | str,
    *,
    memory: float | None = None,
    tokens_per_s: float | None = None,
    policies: Sequence[str] = ("lru", "belady"),
    expert_bytes: float | None = None,
    other_bytes: float | None = None,
    access: Access | None = None,
    allocated: bool = False,
    useful: bool = False,
    rows: float = 0.0,
) -> Plan:
    """Plan for a device, or a profile by its name; `memory` is the device's fast memory by default.

    If the trace has prompts, the plan is about the tokens that are decoded after them. Rows of tables are read from
    slow memory, except those that a cache of `rows` bytes holds.
    The answer is the smallest cache that reaches `tokens_per_s`, or, without a speed, the fastest that fits. Bytes
    default to those of the table. `allocated` divides the slots over the caches by their miss curves. `useful` leaves
    out caches that cannot hold a token's experts.
    """
    device = load_device(device) if isinstance(device, str) else device
    access = access or Access(order="decode")
    require(len(policies) > 0, "policies", tuple(policies), "at least one policy")
    if access.prefetch is not None:
        raise ConfigError("plan: got a prefetch, but it counts loads on demand only; use simulate for prefetch.")
    if access.on_miss == "bypass":
        raise ConfigError("plan: got on_miss bypass, but it counts no scratch memory; use simulate for bypass.")
    budget = Budget(device.fast_memory if memory is None else memory, tokens_per_s)
    sizes = Sizes.of(table, expert_bytes, other_bytes)
    points, hot = {}, RowReads.of(table, rows)
    for policy in policies:
        curve = _of_decoding(table, miss_curve(table, policy=policy, access=access), access)
        points[policy] = cache_points(table, curve, device, sizes, access=access, allocated=allocated, rows=hot)
    if useful:
        least = smallest_useful(table, access)
        points = {policy: line[least - 1 :] for policy, line in points.items()}
    return Plan(device, sizes, budget, points, token_ms(table, device, sizes), _answer(points, budget))


def _of_decoding(table: RouteTable, curve: MissCurve, access: Access) -> MissCurve:
    """The misses of decoded tokens, if the trace has prompts before them: a plan predicts the speed of decoding.

    A prompt misses the same whatever follows it, so its misses are those of the prompts alone. (For an offline policy,
    which knows what follows, they are nearly the same.)
    """
    prompt = table.mask if table.phase is None else table.mask & (table.phase == 0)
    if table.phase is None or not prompt.any() or prompt.sum() == table.mask.sum():
        return curve
    follows = np.diff(table.phase.astype(np.int8), axis=1) < 0  # a prompt after decoded tokens
    texts = int(table.starts.sum())
    if (follows & ~table.starts[:, 1:] & table.mask[:, 1:]).any() or (texts > 1 and (access.warm or access.batch)):
        return curve
    before = miss_curve(replace(table, mask=prompt), policy=curve.policy, access=access)
    return replace(
        curve,
        misses=np.maximum(curve.misses - before.misses, 0),
        accesses=curve.accesses - before.accesses,
        tokens=curve.tokens - before.tokens,
    )


def token_ms(table: RouteTable, device: Device, sizes: Sizes) -> float:
    """The time to compute one token if everything it needs is resident."""
    return device.compute_ms(table.top_k * sum(sizes.experts) + sizes.other)


def cache_points(
    table: RouteTable,
    curve: MissCurve,
    device: Device,
    sizes: Sizes,
    *,
    access: Access,
    allocated: bool = False,
    rows: RowReads | None = None,
) -> list[Point]:
    """A point for every capacity of a miss curve of `access`, smallest first. By default every row is read."""
    if curve.tokens == 0:
        raise ConfigError("The trace has no tokens, so there is nothing to plan for.")
    n_caches, compute_ms = len(curve.misses), token_ms(table, device, sizes)
    slot_bytes = sizes.of_slots(access.layers_per_cache(table))
    rows = rows or RowReads.of(table)
    rows_ms = device.load_ms(rows.per_token) if rows.per_token else 0.0  # one read: all addresses are known at once
    points = []
    for i, capacity in enumerate(curve.capacities.tolist()):
        if allocated:
            slots = allocate(curve, n_caches * capacity)
            misses = [int(curve.misses[cache, c - 1]) for cache, c in enumerate(slots)]
        else:
            slots, misses = [capacity] * n_caches, curve.misses[:, i].tolist()
        loads = list(zip(misses, slot_bytes, strict=True))
        loads_ms = sum(n * device.load_ms(size) for n, size in loads) / curve.tokens
        points.append(
            Point(
                policy=curve.policy,
                slots=tuple(slots),
                memory=sum(c * size for c, size in zip(slots, slot_bytes, strict=True)) + sizes.other + rows.memory,
                miss_rate=sum(misses) / int(curve.accesses.sum()),
                loads_per_token=sum(misses) / curve.tokens,
                bytes_per_token=sum(n * size for n, size in loads) / curve.tokens + rows.per_token,
                ms_per_token=device.token_ms(compute_ms, rows_ms + loads_ms),
            )
        )
    return points


def knee(points: Sequence[Point]) -> Point:
    """The point farthest below the chord of milliseconds over memory: beyond it, more memory brings less."""
    first, last = points[0], points[-1]
    width, height = last.memory - first.memory, first.ms_per_token - last.ms_per_token
    if width <= 0 or height <= 0:
        return first
    return max(points, key=lambda p: (first.ms_per_token - p.ms_per_token) / height - (p.memory - first.memory) / width)


def _answer(points: dict[str, list[Point]], budget: Budget) -> Answer:
    """Over all policies that a device can run; with `static` alone, a bound."""
    online = [p for policy, line in points.items() if find_policy(policy).online for p in line]
    found = online or points.get("static", [])
    if not found:
        names = ", ".join(policy_names(online=True))
        return Answer(None, f"No device can run {' or '.join(points)}, which knows the trace: add one of {names}.")
    answer = smallest(found, budget)
    return answer if online else Answer(answer.point, f"A bound, since static knows the trace. {answer.message}")


def smallest(points: Sequence[Point], budget: Budget) -> Answer:
    """The smallest cache that is fast enough; without a required speed, the fastest that fits."""
    fitting = [p for p in points if p.memory <= budget.memory]
    if not fitting:
        least = min(points, key=lambda p: p.memory)
        size = f"the smallest, {_slots(least)}, needs {bytes_text(least.memory)}"
        return Answer(None, f"No cache fits {bytes_text(budget.memory)}: {size}.")
    speed = budget.tokens_per_s
    if speed is None:
        best = max(fitting, key=lambda p: (p.tokens_per_s, -p.memory))
        return Answer(best, f"In {bytes_text(budget.memory)}: {_describe(best)}.")
    enough = [p for p in fitting if p.tokens_per_s >= speed]
    if enough:
        best = min(enough, key=lambda p: (p.memory, -p.tokens_per_s))
        return Answer(best, f"{speed:g} tokens/s: {_describe(best)}.")
    best = max(fitting, key=lambda p: p.tokens_per_s)
    reason = _why_too_slow(points, best, speed)
    return Answer(None, f"No cache reaches {speed:g} tokens/s in {bytes_text(budget.memory)}: {reason}.")


def _why_too_slow(points: Sequence[Point], best: Point, tokens_per_s: float) -> str:
    faster = [p for p in points if p.tokens_per_s >= tokens_per_s]
    if faster:
        needed = min(faster, key=lambda p: p.memory)
        most = f"this budget reaches at most {speed_text(best.tokens_per_s)}"
        return f"it needs {bytes_text(needed.memory)} ({_slots(needed)}); {most}"
    fastest = max(points, key=lambda p: p.tokens_per_s)
    loads = f"{fastest.loads_per_token:.3g} loads per token remain"
    return f"even the fastest cache, {_slots(fastest)}, reaches {speed_text(fastest.tokens_per_s)} ({loads})"


def choose_run(perplexities: Sequence[float], plans: Sequence[Plan]) -> int | None:
    """The run with the lowest perplexity whose cache meets the budget."""
    fitting = [i for i, found in enumerate(plans) if found.answer.point is not None]
    return min(fitting, key=lambda i: perplexities[i], default=None)


def _describe(point: Point) -> str:
    return (
        f"{point.policy} with {_slots(point)} ({bytes_text(point.memory)}) reaches {speed_text(point.tokens_per_s)} "
        f"tokens/s at {point.miss_rate:.1%} misses"
    )


def _slots(point: Point) -> str:
    each = sorted(set(point.slots))
    number = str(each[0]) if len(each) == 1 else f"{each[0]}–{each[-1]}"
    return slots_text(number, len(point.slots))


def bytes_text(n: int | float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def speed_text(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"
