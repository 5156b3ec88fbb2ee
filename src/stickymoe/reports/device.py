"""The cost of routing on a device, for the report: misses, speed and working set of each run, and a summary."""

from __future__ import annotations

from dataclasses import dataclass

from stickymoe.errors import StickyError
from stickymoe.locality.devices import Device
from stickymoe.locality.figures import working_set
from stickymoe.locality.plan import Budget, Point, Sizes, bytes_text, cache_points, smallest
from stickymoe.locality.replay import MissCurve, miss_curve
from stickymoe.locality.streams import Access
from stickymoe.locality.study import judge, slots_text
from stickymoe.reports import figures
from stickymoe.reports.charts import Chart
from stickymoe.reports.collection import Group, Row
from stickymoe.reports.tables import ALL_SLOTS, capacities
from stickymoe.runs.traces import Trace, open_traces

MOST = 6  # runs that one figure can show legibly
POLICIES = ("lru", "lfu")  # shown with the bound
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Costs:
    """What the routing of a run costs: miss curves by policy, the plan for the device, working set by window.

    other: bytes of all weights outside the experts
    """

    trace: Trace
    curves: dict[str, MissCurve]
    points: list[Point]
    other: float
    in_use: list[float]

    def summary(self, budget: float) -> str:
        """Whether policy or working set limits the hit rate, and what the memory budget allows."""
        table, lru = self.trace.table, self.curves["lru"]
        capacity = min(table.top_k + 1, table.n_experts)
        rates = {policy: curve.rate(capacity) for policy, curve in self.curves.items()}
        setting = slots_text(str(capacity), len(lru.misses))
        cold = lru.rate(table.n_experts)
        verdict = judge(setting, rates, cold=cold, working_set=self.in_use[WINDOWS.index(16)])
        return f"{verdict}. {smallest(self.points, Budget(budget)).message}"


@dataclass(frozen=True)
class OnDevice:
    """The costs of the runs of a group, the device and its memory budget; `unread` says why routes were skipped."""

    device: Device
    budget: float
    costs: dict[str, Costs]
    unread: list[tuple[str, str]]

    @property
    def figures(self) -> list[tuple[str, str, str, Chart]]:
        """Short name, title, note and chart of each figure."""
        if not self.costs:
            return []
        curves = {
            label: {policy: (curve.capacities.tolist(), curve.rates.tolist()) for policy, curve in costs.curves.items()}
            for label, costs in self.costs.items()
        }
        speeds = {
            label: [(p.memory, p.tokens_per_s, max(p.slots)) for p in c.points] for label, c in self.costs.items()
        }
        in_use = {label: list(zip(WINDOWS, costs.in_use, strict=True)) for label, costs in self.costs.items()}
        return [
            (
                "miss-curves",
                "Misses for every cache",
                "All k experts of a token count. Each layer, or each block of layers that share experts, has its own "
                "cache. Every sequence starts with an empty cache. No policy misses less than Belady.",
                figures.miss_curves(curves),
            ),
            (
                "speed",
                f"Tokens per second on {self.device.name}",
                f"LRU. The vertical line is the memory budget, {bytes_text(self.budget)}. {self._counted}",
                figures.speed(speeds, self.budget),
            ),
            (
                "working-set",
                "Working set",
                "Distinct experts of a layer in a window of tokens. A cache of this size misses each only once.",
                figures.working_sets(in_use),
            ),
        ]

    @property
    def _counted(self) -> str:
        alone = [label for label, costs in self.costs.items() if costs.trace.table.other_bytes is None]
        return "All weights are counted" + (f"; of {', '.join(alone)} only the experts." if alone else ".")

    @property
    def summaries(self) -> list[tuple[str, str]]:
        """The label of each run and its summary."""
        return [(label, costs.summary(self.budget)) for label, costs in self.costs.items()] + self.unread


def on_device(group: Group, device: Device, memory: float | None) -> OnDevice | None:
    """The costs of the runs that kept their routes; by default `memory` holds half of the experts and all else."""
    costs: dict[str, Costs] = {}
    unread: list[tuple[str, str]] = []
    for row in _shown(group):
        found, reasons = _costs(row, device)
        unread += [(row.label, reason) for reason in reasons]
        if found is not None:
            costs[row.label] = found
    if not costs and not unread:
        return None
    half = max(
        (found.other + (p.memory - found.other) / 2 for found in costs.values() for p in found.points), default=0
    )
    return OnDevice(device, half if memory is None else memory, costs, unread)


def _shown(group: Group) -> list[Row]:
    """The baseline and the rows with the fewest misses, in the order of the table."""
    kept = [row for row in group.routed if any(run.folder and run.folder.routes.exists() for run in row.complete)]
    most = max(capacities(kept), default=0)
    by_hits = sorted(kept, key=lambda row: (row is not group.baseline, -(row.mean(f"{ALL_SLOTS}{most}") or 0.0)))
    return [row for row in kept if row in by_hits[:MOST]]


def _costs(row: Row, device: Device) -> tuple[Costs | None, list[str]]:
    """The costs of the first run whose routes can be read, and why earlier runs were skipped."""
    reasons: list[str] = []
    for run in row.complete:
        if run.folder is not None and run.folder.routes.exists():
            try:
                (trace,) = open_traces([run.folder.path])
                return _costs_of(trace, device), reasons
            except StickyError as e:
                reasons.append(f"skipped: {e}")
    return None, reasons


def _costs_of(trace: Trace, device: Device) -> Costs:
    table, access = trace.table, Access(order="decode")
    curves = {policy: miss_curve(table, policy=policy, access=access) for policy in (*POLICIES, "belady")}
    sizes = Sizes.of(table)
    points = cache_points(table, curves["lru"], device, sizes, access=access)
    return Costs(trace, curves, points, sizes.other, working_set(table, WINDOWS).mean(0).tolist())
