"""Tables and notes of simulate and plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from stickymoe.locality.devices import Device
from stickymoe.locality.measure import measure
from stickymoe.locality.plan import knee, plan
from stickymoe.locality.streams import Access
from stickymoe.locality.study import study
from stickymoe.locality.table import RouteTable
from stickymoe.reports import locality as report
from stickymoe.runs.traces import Trace
from strategies import sticky_choices

DEVICE = Device("d", fast_memory=1e9, load_bandwidth=1e3, load_latency_ms=1.0, compute_bandwidth=1e6)


def table(n_experts=6, shape=(2, 2, 40, 2), **more):
    S = sticky_choices(np.random.default_rng(0), shape, n_experts, stay=0.6).astype(np.uint8)
    sizes = {"expert_bytes": (10,) * shape[0]}
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(shape[1:3], bool), **(sizes | more))


def trace(label="a", ppl=None, **more):
    return Trace(Path(label), label, table(**more), ppl)


def test_misses_are_shown_by_capacity_and_policy():
    found = study(table(), policies=["lru", "belady"], capacities=[3, 9])
    shown = report.misses_table(found)
    assert shown.headings == ("slots", "lru %", "belady* %")
    expected = [f"{100 * found.results[policy][3].miss_rate:.2f}" for policy in ("lru", "belady")]
    assert shown.rows[0] == ("3", *expected)
    assert report.star_note(found.results) == "* knows the trace: a bound that no device can run"
    assert report.star_note(["lru", "sieve"]) is None


def test_prefetch_adds_the_wasted_loads():
    t = table()
    found = study(t, policies=["lru"], capacities=[3], access=Access(prefetch=np.array((t.S + 1) % 6)))
    shown = report.misses_table(found)
    assert shown.headings == ("slots", "lru %", "wasted")
    assert shown.rows[0][2] == f"{found.results['lru'][3].wasted / 80:.3f}" != "0.000"


def test_a_larger_cache_than_there_are_experts_is_noted():
    found = study(table(), policies=["lru"], capacities=[3, 9])
    expected = "9 slots are more than the 6 entries of a cache: only cold misses remain"
    assert report.capacity_note(found) == expected
    assert report.capacity_note(study(table(), policies=["lru"], capacities=[6])) is None


def test_figures_are_those_of_measure():
    t = table(tokens=np.zeros((2, 40), np.int32))
    measured = measure(t)
    shown = report.figures_table(measured)
    assert shown.headings[:3] == ("layer", "SR", "run")
    assert "doc peak" not in shown.headings
    column = shown.headings.index("SR")
    by_layer = measured.per_layer["switch_rate"]
    assert [row[column] for row in shown.rows] == [f"{v:.3f}" for v in (*by_layer, by_layer.mean())]
    assert {row[shown.headings.index("set 64")] for row in shown.rows} == {"nan"}


def test_what_the_memory_counts_is_noted():
    known, bare = trace(other_bytes=2000), trace()
    note = "a: 2 kB outside the experts are always resident"
    assert report.sizes_note(known, plan(known.table, DEVICE), other_given=False) == note
    given = plan(bare.table, DEVICE, other_bytes=2000.0)
    assert report.sizes_note(bare, given, other_given=True) == note
    assert "only experts are counted" in report.sizes_note(bare, plan(bare.table, DEVICE), other_given=False)


def test_loads_that_a_speed_leaves_time_for():
    t = trace()
    load, compute = 11.0, 1000 * 40 / 1e6
    note = f"an expert has 10 B and loads in {load:.3g} ms; computing a token takes {compute:.3g} ms"
    assert report.loads_note(t, plan(t.table, DEVICE)) == note
    assert report.loads_note(t, plan(t.table, DEVICE, tokens_per_s=1e6)).endswith("there is no time for loads")
    left = (1000 / 20 - compute) / load / 2
    asked = report.loads_note(t, plan(t.table, DEVICE, tokens_per_s=20.0))
    assert asked == f"{note}; at 20 tokens/s there is time for {left:.3g} loads per token and layer"
    overlapping = report.loads_note(t, plan(t.table, replace(DEVICE, overlap=1.0), tokens_per_s=20.0))
    assert (
        overlapping == f"{note}; at 20 tokens/s there is time for {1000 / 20 / load / 2:.3g} loads per token and layer"
    )


def test_a_plan_shows_the_chosen_capacities_the_knee_and_the_answer():
    found = plan(table(n_experts=64, shape=(4, 1, 40, 8)), DEVICE, memory=28.0, policies=["lru"], expert_bytes=1.0)
    rows = report.plan_table(found, [8, 64]).rows
    bend, answer = knee(found.points["lru"]), found.answer.point
    assert len(rows) == len({8, 64, answer.slots[0], bend.slots[0]})
    assert [row[0] for row in rows] == ["lru"] * len(rows)
    assert [row[-1].endswith("◂") for row in rows] == [row[1] == str(bend.slots[0]) for row in rows]


def test_the_chosen_run_is_marked_and_explained():
    traces = [trace("loose", 30.0), trace("sticky", 33.0)]
    plans = [plan(t.table, DEVICE, memory=1e6, tokens_per_s=1.0) for t in traces]
    shown = report.runs_table(traces, plans, 0)
    assert [row[:2] for row in shown.rows] == [("loose ◂", "30.00"), ("sticky", "33.00")]
    (note,) = report.choice_notes(traces, plans, 0)
    assert note.startswith("loose has the lowest perplexity of the runs that reach 1 tokens/s in 1 MB. 1 tokens/s: lru")
    by_memory = [plan(t.table, DEVICE, memory=1e6, useful=True) for t in traces]
    (note,) = report.choice_notes(traces, by_memory, 1)
    assert note.startswith("sticky has the lowest perplexity of the runs whose smallest useful cache fits 1 MB. ")


def test_without_a_run_every_reason_is_given():
    traces = [trace("a", 30.0), trace("b", 31.0)]
    plans = [plan(t.table, DEVICE, memory=1.0) for t in traces]
    notes = report.choice_notes(traces, plans, None)
    assert notes == ["No run meets the budget.", *(f"{t.label}: {plans[0].answer.message}" for t in traces)]
    assert report.runs_table(traces, plans, None).rows[0][2:] == ("–",) * 4


def test_allocated_slots_are_listed():
    uneven = replace(table(shape=(2, 2, 40, 1)), S=np.stack([np.zeros((2, 40, 1), np.uint8), table().S[1, ..., :1]]))
    found = plan(uneven, DEVICE, policies=["lru"], allocated=True)
    assert any("," in row[1] for row in report.plan_table(found, range(1, 7)).rows)
