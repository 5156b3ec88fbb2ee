"""The report on devices: the numbers are those of the simulator, the words follow from them."""

from __future__ import annotations

import pytest

from experiments.records import a_run, write
from stickymoe.experiments.collection import collect
from stickymoe.experiments.on_device import MOST, on_device
from stickymoe.locality.devices import load_device
from stickymoe.locality.formats import load_table
from stickymoe.locality.replay import simulate

PI = load_device("raspberry-pi-5")


def group_of(tmp_path):
    (group,) = collect([tmp_path]).groups
    return group


def test_curves_and_words_are_the_simulators(tmp_path):
    run = write(a_run("vanilla"), tmp_path, words=("one", "two"))
    section = on_device(group_of(tmp_path), PI, memory=None)
    costs = section.costs["vanilla"]
    table = load_table(run / "routes")
    for policy in ("lru", "belady"):
        for C in (1, 2, 3, 4):
            assert costs.curves[policy].rate(C) == simulate(table, capacity=C, policy=policy).miss_rate
    lru, bound = (simulate(table, capacity=3, policy=policy).miss_rate for policy in ("lru", "belady"))
    ((label, words),) = section.words
    assert label == "vanilla"
    assert f"with 3 slots a cache: {lru:.1%} misses (lru), Belady {bound:.1%}" in words
    assert "2 slots a cache" in words  # half of the experts fit
    assert section.budget == pytest.approx(4 * 2 * 4 * (2 * 128 * 512 + 512 + 128))


def test_a_budget_below_one_slot_is_said_to_fit_nothing(tmp_path):
    write(a_run("vanilla"), tmp_path, words=("one",))
    ((_, words),) = on_device(group_of(tmp_path), PI, memory=1000.0).words
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
