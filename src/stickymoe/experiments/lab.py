"""The locality lab: traces opened, compared, and told in tables and words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from stickymoe.errors import ConfigError, DataError, RunError
from stickymoe.locality import figures, metrics
from stickymoe.locality.cache import POLICIES
from stickymoe.locality.devices import Device
from stickymoe.locality.formats import open_trace
from stickymoe.locality.latency import (
    Answer,
    Point,
    Weights,
    in_bytes,
    in_slots,
    in_speed,
    knee,
    plan,
    smallest,
    verdict,
)
from stickymoe.locality.replay import MissCurve, Simulation, allocate, miss_curve, simulate
from stickymoe.locality.streams import Access, Stream, streams
from stickymoe.locality.table import RouteTable
from stickymoe.runs.config import RunConfig
from stickymoe.runs.record import RunRecord


@dataclass(frozen=True)
class Trace:
    """A route table with its name, and what its run record knows of the model: None without one."""

    path: Path
    label: str
    table: RouteTable
    ppl: float | None = None
    expert_bytes: int | None = None

    @property
    def told(self) -> str:
        L, B, T, k = self.table.S.shape
        return f"{self.label}: {L} layers, {self.table.n_experts} experts, top-{k}, {B} × {T} tokens"


def open_traces(paths: Sequence[Path]) -> list[Trace]:
    """Traces to be compared: of the same text and the same shape of model."""
    traces = [_open(path) for path in paths]
    for other in traces[1:]:
        _require_comparable(traces[0], other)
    return traces


def _open(path: Path) -> Trace:
    table = open_trace(path)
    record = next((p / "record.json" for p in (path, path.parent) if (p / "record.json").is_file()), None)
    if record is None:
        return Trace(path, path.name, table, expert_bytes=table.expert_bytes)
    run = RunRecord.read(record)
    if run.status != "complete":
        raise RunError(f"{path}: the run is {run.status}, expected a complete one.")
    config = RunConfig.from_dict(run.config)
    d, f = config.model.d_model, config.model.d_ff
    size = 4 * (2 * d * f + f + d)  # fp32: two matrices with their biases
    return Trace(path, config.variant.label, table, ppl=run.metrics.get("ppl"), expert_bytes=size)


def _require_comparable(a: Trace, b: Trace) -> None:
    for what, x, y in (
        ("layers", a.table.n_layers, b.table.n_layers),
        ("experts", a.table.n_experts, b.table.n_experts),
        ("experts a token", a.table.top_k, b.table.top_k),
        ("sequences and tokens", a.table.mask.shape, b.table.mask.shape),
    ):
        if x != y:
            raise DataError(f"{a.path} and {b.path} cannot be compared: {what} {x} there, {y} here.")
    ours, theirs = a.table.tokens, b.table.tokens
    if ours is not None and theirs is not None and not np.array_equal(ours, theirs):
        raise DataError(f"{a.path} and {b.path} cannot be compared: they are traces of different texts.")


def default_capacities(stream: Stream) -> list[int]:
    """Every capacity of a small cache; of a large one, multiples of what a token needs."""
    entries = stream.n_entries
    if entries <= 16:
        return list(range(1, entries + 1))
    token = stream.k * len(stream.S)
    needed = token if token < entries else stream.k
    multiples = [round(needed * factor) for factor in (1, 1.5, 2, 3, 4, 6, 8)]
    return sorted({c for c in multiples if c < entries} | {entries // 2, entries})


@dataclass(frozen=True)
class LabReport:
    """Simulations of a trace by policy and capacity; capacity is the total where slots were chosen per layer."""

    trace: Trace
    access: Access
    entries: int
    results: dict[str, dict[int, Simulation]]

    @property
    def words(self) -> str:
        """The plain answer, at the smallest capacity that tells policies apart."""
        if self.access.prefetch is not None:
            return "Belady bounds policies that load on demand, so it is not shown beside prefetch"
        if "belady" not in self.results:
            return "add belady to the policies to see whether policy or working set is at fault"
        k = 1 if self.access.top1 else self.trace.table.top_k
        capacities = list(self.results["belady"])
        capacity = next((c for c in capacities if c > k), capacities[-1])
        rates = {policy: by[capacity].miss_rate for policy, by in self.results.items()}
        within = float(figures.working_set(self.trace.table, [16]).mean())
        n_caches = len(self.results["belady"][capacity].caches)
        return verdict(in_slots(str(capacity), n_caches), rates, within)

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": self.trace.label,
            "policies": {
                policy: {
                    str(capacity): {
                        "slots": [c.capacity for c in result.caches],
                        "miss_rate": _number(result.miss_rate),
                        "misses": [c.misses for c in result.caches],
                        "loads_per_token": _number(result.loads_per_token),
                        "wasted": result.wasted,
                    }
                    for capacity, result in by.items()
                }
                for policy, by in self.results.items()
            },
            "words": self.words,
        }


def study(
    trace: Trace, *, policies: Sequence[str], capacities: Sequence[int] | None, access: Access, chosen: bool = False
) -> LabReport:
    """Replay a trace for every policy and capacity. With `chosen`, a capacity is what every cache has on average."""
    caches = streams(trace.table, access)
    entries = max(s.n_entries for s in caches)
    sizes = capacities or default_capacities(caches[0])
    results: dict[str, dict[int, Simulation]] = {}
    for policy in policies:
        curve = miss_curve(trace.table, policy=policy, access=access) if chosen else None
        results[policy] = {
            size: simulate(
                trace.table,
                policy=policy,
                capacity=size if curve is None else allocate(curve, size * len(caches)),
                access=access,
            )
            for size in sizes
        }
    return LabReport(trace, access, entries, results)


def default_policies(access: Access) -> list[str]:
    """All of them; Belady bounds demand policies only, so not where there is prefetch."""
    return [p for p in POLICIES if p != "belady" or access.prefetch is None]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def misses_table(report: LabReport) -> Table:
    """Miss rate by capacity and policy; beside it, loads a token that were prefetched in vain."""
    sizes = list(next(iter(report.results.values())))
    wasteful = report.access.prefetch is not None
    headings = ["slots"]
    for policy in report.results:
        headings += [f"{policy} %", "wasted"] if wasteful else [f"{policy} %"]
    rows = []
    for size in sizes:
        row = [str(size)]
        for by in report.results.values():
            result = by[size]
            row.append(f"{100 * result.miss_rate:.2f}")
            if wasteful:
                row.append(f"{result.wasted / max(result.tokens, 1):.3f}")
        rows.append(row)
    return _table(headings, rows)


def locality_figures(table: RouteTable) -> dict[str, list[float]]:
    """The figures of locality, by layer."""
    k = table.top_k
    slots = min(2 * k, table.n_experts)
    reuse = figures.reuse_by_lag(table, [1, 8])
    within = figures.working_set(table, [16, 64])
    found = {
        "SR": metrics.switch_rate_by_layer(table),
        "run": figures.mean_run_length_by_layer(table),
        "reuse 1": reuse[:, 0],
        "reuse 8": reuse[:, 1],
        "set 16": within[:, 0],
        "set 64": within[:, 1],
        "SRP 16": figures.segment_routing_by_layer(table, 16),
        "SCH 16": figures.segment_cache_by_layer(table, 16, slots),
        "effective": np.exp2(metrics.utilisation_entropy_by_layer(table)),
    }
    if table.doc is not None:
        shares = figures.domain_specialisation(table)
        found["doc peak"] = figures.peak_specialisation_by_layer(shares, k)
    if table.tokens is not None:
        found["token peak"] = figures.peak_specialisation_by_layer(figures.vocabulary_specialisation(table)[1], k)
    return {name: values.tolist() for name, values in found.items()}


def figures_table(found: dict[str, list[float]]) -> Table:
    layers = list(zip(*found.values(), strict=True))
    rows = [[str(i), *(f"{v:.3f}" for v in values)] for i, values in enumerate(layers)]
    rows.append(["mean", *(f"{np.mean(values):.3f}" for values in found.values())])
    return _table(["layer", *found], rows)


def write_json(path: Path, reports: Sequence[LabReport], found: Sequence[dict[str, list[float]]]) -> None:
    entries = [report.as_dict() for report in reports]
    for entry, values in zip(entries, found, strict=False):
        entry["figures"] = {name: [_number(v) for v in by_layer] for name, by_layer in values.items()}
    try:
        path.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise DataError(f"{path} cannot be written ({e.strerror}).") from e


@dataclass(frozen=True)
class Budget:
    """What is asked of a device: bytes of fast memory, and tokens per second if that matters."""

    memory: float
    tokens_per_s: float | None = None


def weights_of(trace: Trace, expert_bytes: float | None, other_bytes: float) -> Weights:
    size = expert_bytes if expert_bytes is not None else trace.expert_bytes
    if size is None:
        raise ConfigError(f"{trace.path} does not say how large an expert is: add --expert_bytes, such as 14MB.")
    return Weights(expert=float(size), other=other_bytes)


def plan_points(
    trace: Trace, device: Device, weights: Weights, *, policies: Sequence[str], access: Access, chosen: bool = False
) -> dict[str, list[Point]]:
    """For every policy a point per capacity."""
    caches = streams(trace.table, access)
    sizes = None if chosen else default_capacities(caches[0])
    points = {}
    for policy in policies:
        curve = miss_curve(trace.table, policy=policy, access=access, capacities=sizes)
        points[policy] = plan(trace.table, curve, device, weights, chosen=chosen)
    return points


def plan_table(points: dict[str, list[Point]]) -> Table:
    """Memory, misses and speed of every cache; ◂ marks each policy's knee."""
    rows = []
    for policy, found in points.items():
        bend = knee(found)
        for p in found:
            slots = str(p.slots[0]) if len(set(p.slots)) == 1 else ",".join(map(str, p.slots))
            rows.append(
                [
                    policy,
                    slots,
                    in_bytes(p.memory),
                    f"{100 * p.miss_rate:.2f}",
                    f"{p.loads_per_token:.2f}",
                    f"{p.ms_per_token:.3g}",
                    in_speed(p.tokens_per_s) + (" ◂" if p is bend else "  "),
                ]
            )
    return _table(["policy", "slots", "memory", "misses %", "loads/token", "ms/token", "tokens/s  "], rows)


def answer(points: dict[str, list[Point]], budget: Budget) -> Answer:
    """Over all policies that a device can really run."""
    real = [p for policy, found in points.items() if policy != "belady" for p in found]
    return smallest(real or points["belady"], memory=budget.memory, tokens_per_s=budget.tokens_per_s)


def choose_run(traces: Sequence[Trace], answers: Sequence[Answer]) -> int | None:
    """The run with the lowest perplexity whose cache meets the budget."""
    for trace in traces:
        if trace.ppl is None:
            raise RunError(f"{trace.path} has no perplexity: runs are chosen among run folders.")
    fitting = [i for i, found in enumerate(answers) if found.point is not None]
    return min(fitting, key=lambda i: traces[i].ppl or math.inf, default=None)


def runs_table(traces: Sequence[Trace], answers: Sequence[Answer], best: int | None) -> Table:
    rows = []
    for i, (trace, found) in enumerate(zip(traces, answers, strict=True)):
        p = found.point
        cells = ["–"] * 4 if p is None else [p.policy, str(max(p.slots)), in_bytes(p.memory), in_speed(p.tokens_per_s)]
        rows.append([trace.label + (" ◂" if i == best else ""), f"{trace.ppl:.2f}", *cells])
    return _table(["run", "PPL", "policy", "slots", "memory", "tokens/s"], rows)


def capacity_note(report: LabReport) -> str | None:
    """What happens above the number of experts."""
    beyond = [c for c in next(iter(report.results.values())) if c > report.entries]
    if not beyond:
        return None
    told = f"{beyond[0]} slots are more than the {report.entries} entries of a cache"
    return f"{told}: as good as {report.entries}, only cold misses"


def curves(trace: Trace, *, policies: Sequence[str], access: Access) -> dict[str, MissCurve]:
    """Whole miss-ratio curves, Belady's bound among them, for a page."""
    names = dict.fromkeys([*policies, "belady"] if access.prefetch is None else policies)
    return {policy: miss_curve(trace.table, policy=policy, access=access) for policy in names}
