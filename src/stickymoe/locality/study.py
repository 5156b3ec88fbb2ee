"""`study`: a trace replayed for several policies and capacities. Is the policy or the working set the problem?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from stickymoe.locality import figures
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.replay import Simulation, allocate, miss_curve, simulate
from stickymoe.locality.streams import Access, Stream, forward_passes, streams
from stickymoe.locality.table import RouteTable

NEGLIGIBLE = 0.01  # misses per access below which a cache is large enough
AVOIDABLE = 0.25  # fraction of a policy's misses that Belady must avoid for the policy to be the problem


@dataclass(frozen=True)
class Study:
    """What `study` returns: simulations of a table by policy and capacity.

    Attributes:
        table: the table
        access: how the device runs through it
        entries: experts that one cache serves, at most
        results: the simulations, by policy and capacity: the slots of each cache, their mean if slots were allocated
        allocated: whether the slots were divided over the caches by their miss curves
    """

    table: RouteTable
    access: Access
    entries: int
    results: dict[str, dict[int, Simulation]]
    allocated: bool = False

    @cached_property
    def verdict(self) -> str:
        """One sentence: at the capacity where a better policy would help most, is the policy the problem?"""
        if self.access.prefetch is not None:
            return "Belady bounds policies that load on demand, so it is not shown with prefetch"
        if self.access.on_miss == "bypass":
            return "Belady bounds policies that admit every load, so it is not shown with bypass"
        if "belady" not in self.results:
            return "add belady to the policies to see whether the policy or the working set causes the misses"
        online = policy_names(online=True, routed=self.table.residents is not None)
        if not any(policy in online for policy in self.results):
            return f"add a policy that a device can run: {', '.join(online)}"
        single = forward_passes(self.table, self.access) is None  # unions differ between policies with any capacity
        tie = largest_tie(self.table, self.access) if single else 0
        found = [c for c in sorted(self.results["belady"]) if c > tie or c >= self.entries]
        if not found:
            return f"all policies tie up to {tie} slots: add a larger capacity"
        rates_at = {c: {policy: by[c].miss_rate for policy, by in self.results.items()} for c in found}
        capacity = max(found, key=lambda c: avoidable(rates_at[c]))
        if avoidable(rates_at[capacity]) <= AVOIDABLE:
            capacity = found[0]
        cold = simulate(self.table, capacity=self.entries, access=self.access).miss_rate
        in_use = float(figures.working_set(self.table, [16]).mean())
        n_caches = len(self.results["belady"][capacity].caches)
        return judge(slots_text(str(capacity), n_caches), rates_at[capacity], cold=cold, working_set=in_use)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        access, prefetch = self.access, self.access.prefetch
        return {
            "access": {
                "order": access.order,
                "pool": access.pool,
                "share_block": access.layers_per_tensor(self.table),
                "warm": access.warm,
                "top1": access.top1,
                "batch": access.batch,
                "prefetch": "predicted" if isinstance(prefetch, np.ndarray) else prefetch,
                "on_miss": access.on_miss,
                "allocated": self.allocated,
            },
            "policies": {
                policy: {str(capacity): _as_dict(result) for capacity, result in by.items()}
                for policy, by in self.results.items()
            },
            "verdict": self.verdict,
        }


def _as_dict(result: Simulation) -> dict[str, Any]:
    return {
        "slots": [c.capacity for c in result.caches],
        "miss_rate": finite(result.miss_rate),
        "misses": [c.misses for c in result.caches],
        "loads_per_token": finite(result.loads_per_token),
        "wasted": result.wasted,
        "bypassed": result.bypassed,
    }


def finite(value: float) -> float | None:
    """The value, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def study(
    table: RouteTable,
    *,
    policies: Iterable[str] | None = None,
    capacities: Sequence[int] | Literal["all"] | None = None,
    access: Access | None = None,
    allocated: bool = False,
) -> Study:
    """Replay a table for every policy and capacity.

    By default: every policy that the access allows, and capacities that show the curve. With `allocated`, the slots
    are divided over the caches by their miss curves, and a capacity is the mean over caches.
    """
    access = access or Access()
    caches = streams(table, access)
    entries = max((s.n_entries for s in caches), default=0)
    if capacities == "all":
        sizes: Sequence[int] = range(1, entries + 1)
    else:
        sizes = capacities or (default_capacities(caches[0]) if caches else [])
    results: dict[str, dict[int, Simulation]] = {}
    for policy in default_policies(access, table) if policies is None else policies:
        if allocated:
            curve = miss_curve(table, policy=policy, access=access)
            slots: dict[int, int | list[int]] = {c: allocate(curve, c * len(caches)) for c in sizes}
        else:
            slots = {c: c for c in sizes}
        if allocated or access.prefetch is not None or access.on_miss == "bypass":
            results[policy] = {
                c: simulate(table, policy=policy, capacity=each, access=access) for c, each in slots.items()
            }
        else:
            curve = miss_curve(table, policy=policy, access=access, capacities=sizes)
            results[policy] = {c: curve.at(c) for c in sizes}
    return Study(table, access, entries, results, allocated)


def default_policies(access: Access, table: RouteTable | None = None) -> list[str]:
    """All policies; with prefetch without those that know the next use, with bypass only those that a device can run.

    The others bound policies that load on demand and admit every load. Policies that need the resident sets of routers
    are among them if the table has such sets, and the access allows them.
    """
    bypass = access.on_miss == "bypass"
    routed = table is not None and table.residents is not None and not bypass and not access.batch
    names = policy_names(online=True if bypass else None, routed=routed)
    return [name for name in names if access.prefetch is None or find_policy(name).knows != "next_use"]


def default_capacities(stream: Stream) -> list[int]:
    """Every capacity of a small cache; of a large one, multiples of what a token needs."""
    entries = stream.n_entries
    if entries <= 16:
        return list(range(1, entries + 1))
    token = stream.k * len(stream.S)
    needed = token if token < entries else stream.k
    multiples = [round(needed * factor) for factor in (1, 1.5, 2, 3, 4, 6, 8)]
    return sorted({c for c in multiples if c < entries} | {entries // 2, entries})


def largest_tie(table: RouteTable, access: Access) -> int:
    """The largest number of slots where all policies tie: a token's experts, or a pool's requests between two uses."""
    return max(_needed(table, access), _between(table, access))


def smallest_useful(table: RouteTable, access: Access) -> int:
    """The fewest slots that hold a token's experts at a layer and, for a pool in decode order, can hit at all."""
    return max(_needed(table, access), _between(table, access) + 1)


def _needed(table: RouteTable, access: Access) -> int:
    return 1 if access.top1 else table.top_k


def _between(table: RouteTable, access: Access) -> int:
    """Entries of other layers that are requested from a pool before the same layer comes again."""
    if not access.pool or access.order != "decode":
        return 0
    tensors = math.ceil(table.n_layers / access.layers_per_tensor(table))
    return (tensors - 1) * _needed(table, access)


def slots_text(number: str, n_caches: int) -> str:
    return f"{number} slot{'s' * (number != '1')} {'per cache' if n_caches > 1 else 'in total'}"


def judge(setting: str, rates: dict[str, float], *, cold: float, working_set: float) -> str:
    """Policy or working set? `rates` are the miss rates of each policy in one `setting`, Belady among them.

    `cold` is the miss rate with room for everything. `working_set` counts the experts of a layer that 16 tokens use;
    NaN if no text is that long.
    """
    bound, policy = rates["belady"], _best(rates)
    rate = rates[policy]
    found = f"with {setting}: {rate:.1%} misses ({policy}), Belady {bound:.1%}"
    if rate <= NEGLIGIBLE:
        return f"{found}, so the cache is large enough"
    if avoidable(rates) > AVOIDABLE:
        return f"{found}, so a better policy could avoid up to {avoidable(rates):.0%} of the misses"
    if bound <= cold:
        return f"{found}, so only cold misses remain"
    used = "" if math.isnan(working_set) else f": 16 tokens use {working_set:.1f} experts of a layer"
    return f"{found}, so the policy is not the problem{used}"


def avoidable(rates: dict[str, float]) -> float:
    """The fraction of the best policy's misses that Belady avoids; 0 where there are hardly any misses."""
    rate = rates[_best(rates)]
    return 1 - rates["belady"] / rate if rate > NEGLIGIBLE else 0.0


def _best(rates: dict[str, float]) -> str:
    """The policy with the fewest misses that a device can run."""
    online = policy_names(online=True, routed=True)
    return min((policy for policy in rates if policy in online), key=rates.__getitem__)
