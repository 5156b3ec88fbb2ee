"""The report on devices: the numbers are those of the simulator, the words follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.records import a_run, write
from stickymoe.locality.devices import load_device
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.reports.collection import collect
from stickymoe.reports.device import MOST, on_device

PI = load_device("raspberry-pi-5")


def group_of(tmp_path):
    (group,) = collect([tmp_path]).groups
    return group


def test_curves_and_words_are_the_simulators(tmp_path):
    run = write(a_run("vanilla"), tmp_path, words=("one", "two"))
    section = on_device(group_of(tmp_path), PI, memory=None)
    costs = section.costs["vanilla"]
    table = load_table(run / "routes")
    for policy in ("lru", "lfu", "belady"):
        for C in (1, 2, 3, 4):
            assert costs.curves[policy].rate(C) == simulate(table, capacity=C, policy=policy).miss_rate
    rates = {policy: simulate(table, capacity=3, policy=policy).miss_rate for policy in ("lru", "lfu", "belady")}
    best = min(("lru", "lfu"), key=rates.__getitem__)
    ((label, words),) = section.summaries
    assert label == "vanilla"
    assert f"with 3 slots per cache: {rates[best]:.1%} misses ({best}), Belady {rates['belady']:.1%}" in words
    dashed = section.figures[0][3].to_dict()["encoding"]["strokeDash"]["scale"]
    assert dashed["domain"] == ["lru", "lfu", "belady"]
    assert len({tuple(dash) for dash in dashed["range"]}) == 3
    assert "2 slots per cache" in words  # half of the experts fit
    assert section.budget == pytest.approx(4 * 2 * costs.trace.table.expert_bytes[0])
    (_, _, caption, _) = section.figures[1]
    assert caption.endswith("All weights are counted; of vanilla only the experts.")


def test_measured_bytes_count_what_is_always_resident(tmp_path):
    run = write(a_run("vanilla"), tmp_path, words=("one", "two"))
    save_table(replace(load_table(run / "routes"), expert_bytes=(10, 20, 30, 40), other_bytes=7), run / "routes")
    section = on_device(group_of(tmp_path), PI, memory=None)
    assert section.budget == pytest.approx(2 * (10 + 20 + 30 + 40) + 7)
    assert [p.memory for p in section.costs["vanilla"].points] == [C * 100 + 7 for C in (1, 2, 3, 4)]
    (_, _, caption, _) = section.figures[1]
    assert caption.endswith("All weights are counted.")


def test_a_budget_below_one_slot_is_said_to_fit_nothing(tmp_path):
    write(a_run("vanilla"), tmp_path, words=("one",))
    ((_, words),) = on_device(group_of(tmp_path), PI, memory=1000.0).summaries
    assert "No cache fits 1 kB" in words


def test_the_baseline_and_the_rows_that_miss_least_are_shown(tmp_path):
    write(a_run("vanilla", cache_hit_rate_all_c3=0.1), tmp_path, words=("one",))
    for i in range(1, 9):
        write(a_run({"name": "soft", "lam": i / 10}, cache_hit_rate_all_c3=i / 10), tmp_path, words=("one",))
    shown = list(on_device(group_of(tmp_path), PI, None).costs)
    assert len(shown) == MOST
    assert shown == ["vanilla", *(f"soft λ=0.{i}" for i in range(4, 9))]


def test_runs_without_routes_have_no_section(tmp_path):
    write(a_run("vanilla"), tmp_path)
    write(a_run("dense"), tmp_path)
    assert on_device(group_of(tmp_path), PI, None) is None


def test_shared_experts_are_shared_in_the_section(tmp_path):
    run = write(a_run("vanilla", settings={"model": {"share_block": 2}}), tmp_path, words=("one",))
    costs = on_device(group_of(tmp_path), PI, None).costs["vanilla"]
    access = Access(order="decode", share_block=2)
    assert costs.curves["lru"].rate(3) == simulate(load_table(run / "routes"), capacity=3, access=access).miss_rate
    assert costs.points[-1].slots == (4, 4)


def test_routes_that_cannot_be_read_are_named(tmp_path):
    write(a_run("vanilla"), tmp_path, words=("one",))
    broken = write(a_run({"name": "soft", "lam": 0.1}), tmp_path, words=("one",))
    (broken / "routes" / "header.json").unlink()
    section = on_device(group_of(tmp_path), PI, None)
    assert list(section.costs) == ["vanilla"]
    (label, words) = section.summaries[-1]
    assert label == "soft λ=0.1"
    assert "skipped: " in words
    assert "has no route table (header.json)" in words
