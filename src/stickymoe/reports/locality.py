"""Tables and notes of `simulate` and `plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from stickymoe.locality.measure import SEGMENT, Measurement
from stickymoe.locality.plan import Plan, Point, bytes_text, knee, speed_text
from stickymoe.locality.policies import find_policy
from stickymoe.locality.row_replay import RowSimulation
from stickymoe.locality.study import Study
from stickymoe.reports.tables import Table
from stickymoe.runs.traces import Trace

# Column headings of the metrics that `simulate --figures` shows.
_FIGURES = {
    "SR": "switch_rate",
    "run": "run_length",
    "reuse 1": "reuse_1",
    "reuse 8": "reuse_8",
    "set 16": "working_set_16",
    "set 64": "working_set_64",
    f"SRP {SEGMENT}": f"segment_routing_{SEGMENT}",
    f"SCH {SEGMENT}": f"segment_cache_{SEGMENT}",
    "effective": "effective_experts",
    "doc peak": "document_specialisation",
    "token peak": "word_specialisation",
}


def _table(name: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(name, "", tuple(headings), tuple(tuple(row) for row in rows))


def starred(policy: str) -> str:
    """A policy's name, with a star if it knows the trace."""
    return policy if find_policy(policy).online else f"{policy}*"


def star_note(policies: Collection[str]) -> str | None:
    offline = any(not find_policy(policy).online for policy in policies)
    return "* knows the trace: a bound that no device can run" if offline else None


def knee_note() -> str:
    return "◂ knee: beyond it, more memory brings less"


def misses_table(study: Study) -> Table:
    """Miss rate by capacity and policy; with prefetch also the wasted loads per token."""
    sizes = list(next(iter(study.results.values())))
    wasteful = study.access.prefetch is not None
    headings = ["slots"]
    for policy in study.results:
        headings += [f"{starred(policy)} %", "wasted"] if wasteful else [f"{starred(policy)} %"]
    rows = []
    for size in sizes:
        row = [str(size)]
        for by in study.results.values():
            result = by[size]
            row.append(f"{100 * result.miss_rate:.2f}")
            if wasteful:
                row.append(f"{result.wasted / max(result.tokens, 1):.3f}")
        rows.append(row)
    return _table("misses", headings, rows)


def rows_table(found: Mapping[float, Sequence[RowSimulation]]) -> Table:
    """Hits of rows and bytes read per token, by the memory for hot rows."""
    headings = ["hot rows", "memory"]
    for result in next(iter(found.values())):
        headings += [f"{starred(result.policy)} hits %", "read/token"]
    rows = []
    for share, results in found.items():
        row = [f"{share:.0%}", bytes_text(results[0].memory)]
        for result in results:
            row += [f"{100 * result.hit_rate:.2f}", bytes_text(result.bytes_per_token)]
        rows.append(row)
    return _table("rows", headings, rows)


def capacity_note(study: Study) -> str | None:
    """A note on capacities above the number of experts."""
    beyond = [c for c in next(iter(study.results.values())) if c > study.entries]
    if not beyond:
        return None
    return f"{beyond[0]} slots are more than the {study.entries} entries of a cache: only cold misses remain"


def figures_table(measured: Measurement) -> Table:
    """Locality metrics by layer."""
    shown = {heading: measured.per_layer[name] for heading, name in _FIGURES.items() if name in measured.per_layer}
    layers = zip(*shown.values(), strict=True)
    rows = [[str(i), *(f"{v:.3f}" for v in values)] for i, values in enumerate(layers)]
    rows.append(["mean", *(f"{np.mean(values):.3f}" for values in shown.values())])
    return _table("figures", ["layer", *shown], rows)


def sizes_note(trace: Trace, plan: Plan, *, other_given: bool) -> str:
    """What the memory includes."""
    if not other_given and trace.table.other_bytes is None:
        return f"{trace.label}: only experts are counted; pass --other_bytes for what else is always resident"
    return f"{trace.label}: {bytes_text(plan.sizes.other)} outside the experts are always resident"


def loads_note(trace: Trace, plan: Plan) -> str:
    """The cost of a load and of a token, and how many loads per token and layer the wanted speed allows."""
    size = max(plan.sizes.experts)
    load = plan.device.load_ms(size)
    note = (
        f"an expert has {bytes_text(size)} and loads in {load:.3g} ms; computing a token takes {plan.compute_ms:.3g} ms"
    )
    if plan.budget.tokens_per_s is None:
        return note
    left = 1000 / plan.budget.tokens_per_s - plan.compute_ms
    speed = f"at {speed_text(plan.budget.tokens_per_s)} tokens/s there is"
    if left < 0:
        return f"{note}; {speed} no time for loads"
    left += plan.device.overlap * plan.compute_ms
    return f"{note}; {speed} time for {left / (load * trace.table.n_layers):.3g} loads per token and layer"


def plan_table(plan: Plan, shown: Collection[int]) -> Table:
    """Memory, misses and speed of the caches `shown`, of the answer, and of each policy's knee (◂)."""
    rows = []
    for policy, line in plan.points.items():
        bend = knee(line)
        for capacity, p in enumerate(line, start=1):
            if capacity in shown or p is bend or p is plan.answer.point:
                rows.append(_plan_row(policy, p, mark=p is bend))
    headings = ["policy", "slots", "memory", "misses %", "loads/token", "read/token", "ms/token", "tokens/s  "]
    return _table("plan", headings, rows)


def _plan_row(policy: str, p: Point, *, mark: bool) -> list[str]:
    return [
        starred(policy),
        str(p.slots[0]) if len(set(p.slots)) == 1 else ",".join(map(str, p.slots)),
        bytes_text(p.memory),
        f"{100 * p.miss_rate:.2f}",
        f"{p.loads_per_token:.2f}",
        bytes_text(p.bytes_per_token),
        f"{p.ms_per_token:.3g}",
        speed_text(p.tokens_per_s) + (" ◂" if mark else "  "),
    ]


def runs_table(traces: Sequence[Trace], plans: Sequence[Plan], best: int | None) -> Table:
    """The answer for each run; the chosen one is marked (◂)."""
    rows = []
    for i, (trace, found) in enumerate(zip(traces, plans, strict=True)):
        p = found.answer.point
        cells = ["–"] * 4
        if p is not None:
            cells = [p.policy, str(max(p.slots)), bytes_text(p.memory), speed_text(p.tokens_per_s)]
        rows.append([trace.label + (" ◂" if i == best else ""), f"{trace.ppl:.2f}", *cells])
    return _table("runs", ["run", "PPL", "policy", "slots", "memory", "tokens/s"], rows)


def choice_notes(traces: Sequence[Trace], plans: Sequence[Plan], best: int | None) -> list[str]:
    """Which run was chosen and why; or why each run fails."""
    if best is None:
        reasons = [f"{trace.label}: {found.answer.message}" for trace, found in zip(traces, plans, strict=True)]
        return ["No run meets the budget.", *reasons]
    budget = plans[best].budget
    rule = f"whose smallest useful cache fits {bytes_text(budget.memory)}"
    if budget.tokens_per_s is not None:
        rule = f"that reach {budget.tokens_per_s:g} tokens/s in {bytes_text(budget.memory)}"
    return [f"{traces[best].label} has the lowest perplexity of the runs {rule}. {plans[best].answer.message}"]
