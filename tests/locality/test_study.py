"""Studies of a table: the capacities shown, the verdict on policy or working set, and JSON-ready results."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from stickymoe.locality.policies import policy_names
from stickymoe.locality.replay import allocate, miss_curve, simulate
from stickymoe.locality.streams import Access, streams
from stickymoe.locality.study import (
    default_capacities,
    default_policies,
    judge,
    largest_tie,
    smallest_useful,
    study,
)
from stickymoe.locality.table import RouteTable
from strategies import sticky_choices

BOTH = ["lru", "belady"]


def table(n_experts=6, shape=(2, 2, 40, 2), **more):
    S = sticky_choices(np.random.default_rng(0), shape, n_experts, stay=0.6).astype(np.uint8)
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(shape[1:3], bool), **more)


@pytest.mark.parametrize(
    ("n_experts", "k", "access", "expected"),
    [
        (4, 2, {}, [1, 2, 3, 4]),
        (64, 8, {}, [8, 12, 16, 24, 32, 48, 64]),
        (64, 8, {"pool": True}, [16, 24, 32, 48, 64, 96, 128]),
        (20, 8, {"share_block": "full"}, [10, 16, 20]),
        (20, 12, {"share_block": "full"}, [10, 12, 18, 20]),
    ],
)
def test_default_capacities(n_experts, k, access, expected):
    found = streams(table(n_experts=n_experts, shape=(2, 1, 3, k)), Access(**access))
    assert default_capacities(found[0]) == expected


def test_default_policies_are_all_that_make_sense():
    assert default_policies(Access()) == list(policy_names())
    assert default_policies(Access(prefetch="previous")) == [p for p in policy_names() if p != "belady"]
    assert list(study(table(shape=(1, 1, 5, 1))).results) == list(policy_names())


def test_policies_are_judged_where_they_can_differ():
    t, pool = table(), Access(order="decode", pool=True)  # 2 layers, top-2
    assert largest_tie(t, Access()) == smallest_useful(t, Access()) == 2
    assert largest_tie(t, Access(top1=True)) == 1
    assert largest_tie(table(shape=(4, 1, 40, 2)), pool) == 6
    assert smallest_useful(table(shape=(4, 1, 40, 2)), pool) == 7
    verdict = study(t, policies=BOTH, capacities=[1, 2, 4, 5]).verdict
    assert verdict.startswith("with 4 slots per cache: ")
    tied = study(t, policies=BOTH, capacities=[1, 2]).verdict
    assert tied == "all policies tie up to 2 slots: add a larger capacity"
    offline = study(t, policies=["static", "belady"], capacities=[4]).verdict
    assert offline == "add a policy that a device can run: lru, lfu, fifo, sieve"
    assert "only cold misses remain" in study(t, policies=BOTH, capacities=[6]).verdict
    assert "add belady" in study(t, policies=["lru"], capacities=[6]).verdict
    with_prefetch = study(t, capacities=[3], access=Access(prefetch="previous")).verdict
    assert with_prefetch == "Belady bounds policies that load on demand, so it is not shown with prefetch"


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        (
            {"lru": 0.118, "static": 0.05, "belady": 0.099},
            "with 2 slots per cache: 11.8% misses (lru), Belady 9.9%, so the policy is not the problem: 16 tokens use "
            "5.0 experts of a layer",
        ),
        (
            {"lru": 0.4, "lfu": 0.3, "belady": 0.1},
            "30.0% misses (lfu), Belady 10.0%, so a better policy could avoid up to 67%",
        ),
        ({"lru": 0.002, "belady": 0.001}, "so the cache is large enough"),
        ({"lru": 0.06, "belady": 0.05}, "6.0% misses (lru), Belady 5.0%, so only cold misses remain"),
    ],
)
def test_policy_or_working_set(rates, says):
    assert says in judge("2 slots per cache", rates, cold=0.05, working_set=5.0)


def test_an_unknown_working_set_is_left_out():
    assert judge("1 slot", {"lru": 0.5, "belady": 0.5}, cold=0.1, working_set=float("nan")).endswith("not the problem")


def without_evictions(simulation):
    """What a miss curve knows of a simulation."""
    return replace(simulation, caches=tuple(replace(c, evictions=None) for c in simulation.caches))


def test_every_capacity_is_what_simulate_counts():
    t = table()
    found = study(t, policies=["lru", "fifo"], capacities="all")
    for policy, by in found.results.items():
        assert by == {C: without_evictions(simulate(t, policy=policy, capacity=C)) for C in range(1, 7)}
        assert all(result.evictions is None for result in by.values())


def test_more_slots_than_entries_change_nothing():
    found = study(table(), policies=["lru"], capacities=[6, 9])
    assert found.entries == 6
    assert found.results["lru"][9].misses == found.results["lru"][6].misses


def test_slots_are_allocated_by_the_miss_curves():
    t = table()
    found = study(t, policies=["lru"], capacities=[3], allocated=True)
    slots = allocate(miss_curve(t), 6)
    assert found.results["lru"][3] == simulate(t, capacity=slots)
    assert found.as_dict()["policies"]["lru"]["3"]["slots"] == slots


@pytest.mark.parametrize("prefetch", [None, "previous", "predicted"])
def test_as_dict_is_json_with_every_number(prefetch):
    t = table()
    access = Access(order="decode", warm=True, prefetch=np.array(t.S) if prefetch == "predicted" else prefetch)
    found = study(t, policies=["lru", "sieve"], capacities=[2, 3], access=access)
    entry = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert entry["access"] == {
        "order": "decode",
        "pool": False,
        "share_block": 1,
        "warm": True,
        "top1": False,
        "batch": False,
        "prefetch": prefetch,
        "on_miss": "load",
        "allocated": False,
    }
    assert entry["verdict"] == found.verdict
    for policy, C in itertools.product(("lru", "sieve"), (2, 3)):
        expected = simulate(t, policy=policy, capacity=C, access=access)
        got = entry["policies"][policy][str(C)]
        assert got["misses"] == [c.misses for c in expected.caches]
        assert got["wasted"] == expected.wasted
        assert got["loads_per_token"] == expected.loads_per_token


def test_a_table_without_tokens_has_no_rates():
    empty = table(shape=(2, 1, 3, 2))
    empty = RouteTable(S=empty.S, n_experts=6, mask=np.zeros((1, 3), bool))
    entry = study(empty, policies=["lru"], capacities=[2]).as_dict()
    assert entry["policies"]["lru"]["2"]["miss_rate"] is None


def test_prompts_and_batches_are_studied_too():
    phase = np.arange(80).reshape(2, 40) % 40 >= 20
    t = table(phase=phase.astype(np.uint8))
    for access in (Access(), Access(batch=True)):
        found = study(t, policies=BOTH, capacities=[3, 6], access=access)
        assert found.results["lru"][3] == without_evictions(simulate(t, capacity=3, access=access))
        assert found.results["belady"][3].misses <= found.results["lru"][3].misses
        assert "slots per cache" in found.verdict
