"""The locality lab: traces opened, compared, and told in tables and words."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stickymoe.errors import ConfigError, DataError, RunError
from stickymoe.locality import figures, metrics
from stickymoe.locality.cache import INFORMED, ONLINE, POLICIES
from stickymoe.locality.devices import Device
from stickymoe.locality.formats import open_trace
from stickymoe.locality.latency import (
    BLAMELESS,
    Answer,
    Point,
    Weights,
    avoidable,
    in_bytes,
    in_slots,
    in_speed,
    knee,
    plan,
    smallest,
    token_ms,
    verdict,
)
from stickymoe.locality.replay import MissCurve, Simulation, allocate, miss_curve, simulate
from stickymoe.locality.streams import Access, Stream, streams
from stickymoe.locality.table import RouteTable
from stickymoe.reports.tables import Table
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.record import RunRecord


@dataclass(frozen=True)
class Trace:
    """A route table with its name, and what its run record knows of the model: None without one.

    other_bytes: weights outside the experts
    share_block: layers that share their experts
    """

    path: Path
    label: str
    table: RouteTable
    ppl: float | None = None
    expert_bytes: int | None = None
    other_bytes: int | None = None
    share_block: int | None = None

    @property
    def told(self) -> str:
        L, B, T, k = self.table.S.shape
        return f"{self.label}: {L} layers, {self.table.n_experts} experts, top-{k}, {B} × {T} tokens"


def open_traces(paths: Sequence[Path]) -> list[Trace]:
    """Traces to be compared: of the same text and the same shape of model."""
    traces = [_open(path) for path in paths]
    for other in traces[1:]:
        _require_comparable(traces[0], other)
    times = Counter(trace.label for trace in traces)
    return [_told_apart(trace) if times[trace.label] > 1 else trace for trace in traces]


def _open(path: Path) -> Trace:
    folder = _folder(path)
    record = folder / "record.json"
    if not record.is_file():
        table = open_trace(path)
        return Trace(path, path.name, table, expert_bytes=table.expert_bytes)
    run = RunRecord.read(record)
    if run.status != "complete":
        go_on = f"stickymoe train --resume --out {folder} goes on with it"
        raise RunError(f"{path}: the run is {run.status}, expected a complete one; {go_on}.")
    config = RunConfig.from_dict(run.config)
    if config.variant.name == "dense":
        raise RunError(
            f"{path}: a dense model has no experts, so nothing is routed; expected a run of another variant."
        )
    table = open_trace(path)
    vocab_size = run.data.get("vocab_size")
    return Trace(
        path,
        config.variant.label,
        table,
        ppl=run.metrics.get("ppl"),
        expert_bytes=expert_bytes(config.model),
        other_bytes=None if vocab_size is None else other_bytes(config.model, vocab_size),
        share_block=config.model.layers_per_pool,
    )


def _folder(path: Path) -> Path:
    """Where a run's record would be."""
    return path.parent if path.name == "routes" else path


def _told_apart(trace: Trace) -> Trace:
    name = _folder(trace.path).name
    return replace(trace, label=f"{trace.label} ({trace.path if name == trace.label else name})")


def expert_bytes(model: ModelConfig) -> int:
    """One expert in fp32: two matrices with their biases."""
    d, f = model.d_model, model.d_ff
    return 4 * (2 * d * f + f + d)


def other_bytes(model: ModelConfig, vocab_size: int) -> int:
    """Every weight outside the experts in fp32: embeddings, attention, norms and gates."""
    d = model.d_model
    layer = 4 * d * d + 4 * d + 2 * 2 * d + d * model.pool_size
    return 4 * ((vocab_size + model.seq_len) * d + model.n_layers * layer + 2 * d)


def _require_comparable(a: Trace, b: Trace) -> None:
    for what, x, y in (
        ("layers", a.table.n_layers, b.table.n_layers),
        ("experts", a.table.n_experts, b.table.n_experts),
        ("experts a token", a.table.top_k, b.table.top_k),
        ("sequences and tokens", a.table.mask.shape, b.table.mask.shape),
        ("bytes of an expert", a.expert_bytes, b.expert_bytes),
    ):
        if x != y and None not in (x, y):
            raise DataError(f"{a.path} and {b.path} cannot be compared: {what} {x} there, {y} here.")
    for what, ours, theirs in (
        ("they are traces of different texts", a.table.tokens, b.table.tokens),
        ("other tokens are real", a.table.mask, b.table.mask),
        ("their documents differ", a.table.doc, b.table.doc),
    ):
        if ours is not None and theirs is not None and not np.array_equal(ours, theirs):
            raise DataError(f"{a.path} and {b.path} cannot be compared: {what}.")
    if (a.table.doc is None) != (b.table.doc is None):
        raise DataError(f"{a.path} and {b.path} cannot be compared: only one of them knows its documents.")


def sharing(trace: Trace, asked: str | None) -> int:
    """Layers that share their weights: as the run has them, else as asked for, else 1."""
    if asked is None:
        return trace.share_block or 1
    full = asked in ("full", "universal")
    if not full and not asked.isdecimal():
        raise ConfigError(f"--share_block: got '{asked}', expected a whole number of layers, full or universal.")
    found = trace.table.n_layers if full else int(asked)
    if trace.share_block not in (None, found):
        raise ConfigError(
            f"--share_block: got {asked}, but {trace.path} is a run with share_block={trace.share_block}."
        )
    return found


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
    """Simulations of a trace by policy and capacity: slots of each cache, their mean where they were `chosen`."""

    trace: Trace
    access: Access
    entries: int
    results: dict[str, dict[int, Simulation]]
    chosen: bool = False

    @cached_property
    def words(self) -> str:
        """The plain answer, where a better policy would help most, or else with the fewest slots that tell."""
        if self.access.prefetch is not None:
            return "Belady bounds policies that load on demand, so it is not shown beside prefetch"
        if "belady" not in self.results:
            return "add belady to the policies to see whether policy or working set is at fault"
        if not any(policy in ONLINE for policy in self.results):
            return f"add a policy that a device can run to see whether it is at fault: {', '.join(ONLINE)}"
        table, enough = self.trace.table, tied(self.trace.table, self.access)
        found = [c for c in sorted(self.results["belady"]) if c > enough or c >= self.entries]
        if not found:
            return f"up to {enough} slots do not tell policies apart: add a larger capacity"
        rates_at = {c: {policy: by[c].miss_rate for policy, by in self.results.items()} for c in found}
        capacity = max(found, key=lambda c: avoidable(rates_at[c]))
        if avoidable(rates_at[capacity]) <= BLAMELESS:
            capacity = found[0]
        cold = simulate(table, capacity=self.entries, access=self.access).miss_rate
        within = float(figures.working_set(table, [16]).mean())
        n_caches = len(self.results["belady"][capacity].caches)
        return verdict(in_slots(str(capacity), n_caches), rates_at[capacity], cold=cold, working_set=within)

    def as_dict(self) -> dict[str, Any]:
        access, prefetch = self.access, self.access.prefetch
        return {
            "trace": self.trace.label,
            "path": str(self.trace.path),
            "access": {
                "order": access.order,
                "pool": access.pool,
                "share_block": access.share_block,
                "warm": access.warm,
                "top1": access.top1,
                "prefetch": "predicted" if isinstance(prefetch, np.ndarray) else prefetch,
                "chosen": self.chosen,
            },
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


def tied(table: RouteTable, access: Access) -> int:
    """Slots up to which policies cannot differ: what a token needs, or all that a pool is asked between two uses."""
    return max(_needed(table, access), _between(table, access))


def least_useful(table: RouteTable, access: Access) -> int:
    """The fewest slots that hold a token's experts at a layer and, of a pool in decode order, can hit at all."""
    return max(_needed(table, access), _between(table, access) + 1)


def _needed(table: RouteTable, access: Access) -> int:
    return 1 if access.top1 else table.top_k


def _between(table: RouteTable, access: Access) -> int:
    """Entries of other layers that a pool is asked for before a layer's turn comes again."""
    if not access.pool or access.order != "decode":
        return 0
    tensors = 1 if access.share_block is None else math.ceil(table.n_layers / access.share_block)
    return (tensors - 1) * _needed(table, access)


def study(
    trace: Trace,
    *,
    policies: Sequence[str],
    capacities: Sequence[int] | None,
    access: Access,
    chosen: bool = False,
    whole: bool = False,
) -> LabReport:
    """Replay a trace for every policy and capacity; `whole` takes every capacity there is.

    With `chosen`, a capacity is what every cache has on average.
    """
    caches = streams(trace.table, access)
    entries = max(s.n_entries for s in caches)
    sizes = range(1, entries + 1) if whole else capacities or default_capacities(caches[0])
    results: dict[str, dict[int, Simulation]] = {}
    for policy in policies:
        if chosen or access.prefetch is not None:
            curve = miss_curve(trace.table, policy=policy, access=access) if chosen else None
            slots = {c: c if curve is None else allocate(curve, c * len(caches)) for c in sizes}
            results[policy] = {
                c: simulate(trace.table, policy=policy, capacity=each, access=access) for c, each in slots.items()
            }
        else:
            curve = miss_curve(trace.table, policy=policy, access=access, capacities=sizes)
            results[policy] = {c: curve.at(c) for c in sizes}
    return LabReport(trace, access, entries, results, chosen)


def default_policies(access: Access) -> list[str]:
    """All of them; Belady bounds demand policies only, so not where there is prefetch."""
    return [p for p in POLICIES if p != "belady" or access.prefetch is None]


def starred(policy: str) -> str:
    """A policy's name, with a star if it knows the trace."""
    return f"{policy}*" if policy in INFORMED else policy


def star_note(policies: Collection[str]) -> str | None:
    return "* knows the trace: a bound, no device runs it" if any(p in INFORMED for p in policies) else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _table(name: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(name, "", tuple(headings), tuple(tuple(row) for row in rows))


def misses_table(report: LabReport) -> Table:
    """Miss rate by capacity and policy; beside it, loads a token that were prefetched in vain."""
    sizes = list(next(iter(report.results.values())))
    wasteful = report.access.prefetch is not None
    headings = ["slots"]
    for policy in report.results:
        headings += [f"{starred(policy)} %", "wasted"] if wasteful else [f"{starred(policy)} %"]
    rows = []
    for size in sizes:
        row = [str(size)]
        for by in report.results.values():
            result = by[size]
            row.append(f"{100 * result.miss_rate:.2f}")
            if wasteful:
                row.append(f"{result.wasted / max(result.tokens, 1):.3f}")
        rows.append(row)
    return _table("misses", headings, rows)


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
    return _table("figures", ["layer", *found], rows)


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


def weights_of(trace: Trace, expert: float | None, other: float | None) -> Weights:
    """Sizes as given, or as the trace knows them."""
    size = expert if expert is not None else trace.expert_bytes
    if size is None:
        raise ConfigError(f"{trace.path} does not say how large an expert is: add --expert_bytes, such as 14MB.")
    return Weights(expert=float(size), other=float(trace.other_bytes or 0) if other is None else other)


def weights_note(trace: Trace, weights: Weights, other: float | None) -> str:
    """What the memory counts."""
    if other is None and trace.other_bytes is None:
        return f"{trace.label}: experts alone counted; add --other_bytes for what else is always resident"
    return f"{trace.label}: {in_bytes(weights.other)} beside the experts are always resident"


def loads_note(trace: Trace, device: Device, weights: Weights, budget: Budget) -> str:
    """What a load and a token cost there, and the loads per token and layer that the wanted speed leaves time for."""
    load, compute = device.load_ms(weights.expert), token_ms(trace.table, device, weights)
    told = f"an expert is {in_bytes(weights.expert)} and loads in {load:.3g} ms; a token computes for {compute:.3g} ms"
    if budget.tokens_per_s is None:
        return told
    left = 1000 / budget.tokens_per_s - compute
    speed = f"{in_speed(budget.tokens_per_s)} tokens/s leave"
    if left < 0:
        return f"{told}: {speed} no time for loads"
    return f"{told}: {speed} time for {left / (load * trace.table.n_layers):.3g} loads per token and layer"


def plan_points(
    trace: Trace, device: Device, weights: Weights, *, policies: Sequence[str], access: Access, chosen: bool = False
) -> dict[str, list[Point]]:
    """For every policy a point for every capacity there is, from 1 slot on."""
    curves = (miss_curve(trace.table, policy=policy, access=access) for policy in policies)
    return {curve.policy: plan(trace.table, curve, device, weights, chosen=chosen) for curve in curves}


def plan_table(points: dict[str, list[Point]], shown: Collection[int], found: Point | None = None) -> Table:
    """Memory, misses and speed of the caches `shown`, of the one that was `found` and of each policy's knee (◂)."""
    rows = []
    for policy, line in points.items():
        bend = knee(line)
        for capacity, p in enumerate(line, start=1):
            if capacity not in shown and p is not bend and p is not found:
                continue
            slots = str(p.slots[0]) if len(set(p.slots)) == 1 else ",".join(map(str, p.slots))
            rows.append(
                [
                    starred(policy),
                    slots,
                    in_bytes(p.memory),
                    f"{100 * p.miss_rate:.2f}",
                    f"{p.loads_per_token:.2f}",
                    f"{p.ms_per_token:.3g}",
                    in_speed(p.tokens_per_s) + (" ◂" if p is bend else "  "),
                ]
            )
    return _table("plan", ["policy", "slots", "memory", "misses %", "loads/token", "ms/token", "tokens/s  "], rows)


def answer(points: dict[str, list[Point]], budget: Budget) -> Answer:
    """Over all policies that a device can really run; with `static` alone, a bound."""
    real = [p for policy, line in points.items() if policy in ONLINE for p in line]
    found = real or points.get("static", [])
    if not found:
        return Answer(None, f"Belady is a bound, no device runs it: add one of {', '.join(ONLINE)}.")
    answered = smallest(found, memory=budget.memory, tokens_per_s=budget.tokens_per_s)
    return answered if real else Answer(answered.point, f"A bound, static knows the trace. {answered.words}")


def useful(points: dict[str, list[Point]], least: int) -> dict[str, list[Point]]:
    """The caches of at least `least` slots, on average."""
    return {policy: line[least - 1 :] for policy, line in points.items()}


def require_perplexities(traces: Sequence[Trace]) -> None:
    for trace in traces:
        if trace.ppl is None:
            raise RunError(f"{trace.path} has no perplexity: runs are chosen among run folders.")


def choose_run(traces: Sequence[Trace], answers: Sequence[Answer]) -> int | None:
    """The run with the lowest perplexity whose cache meets the budget."""
    fitting = [i for i, found in enumerate(answers) if found.point is not None]
    return min(fitting, key=lambda i: traces[i].ppl or math.inf, default=None)


def choice_words(traces: Sequence[Trace], answers: Sequence[Answer], best: int | None, budget: Budget) -> list[str]:
    """Which run, and by what rule; or every run's own reason."""
    if best is None:
        reasons = [f"{trace.label}: {found.words}" for trace, found in zip(traces, answers, strict=True)]
        return ["No run meets the budget.", *reasons]
    rule = f"whose smallest useful cache fits {in_bytes(budget.memory)}"
    if budget.tokens_per_s is not None:
        rule = f"that reaches {budget.tokens_per_s:g} tokens/s in {in_bytes(budget.memory)}"
    return [f"The lowest perplexity {rule} has {traces[best].label}. {answers[best].words}"]


def runs_table(traces: Sequence[Trace], answers: Sequence[Answer], best: int | None) -> Table:
    rows = []
    for i, (trace, found) in enumerate(zip(traces, answers, strict=True)):
        p = found.point
        cells = ["–"] * 4 if p is None else [p.policy, str(max(p.slots)), in_bytes(p.memory), in_speed(p.tokens_per_s)]
        rows.append([trace.label + (" ◂" if i == best else ""), f"{trace.ppl:.2f}", *cells])
    return _table("runs", ["run", "PPL", "policy", "slots", "memory", "tokens/s"], rows)


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
