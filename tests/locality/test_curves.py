"""Whole miss curves against a replay at every capacity, and slots chosen from them against every choice there is."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import StickyError
from stickymoe.locality import kernels
from stickymoe.locality.policies import policy_names
from stickymoe.locality.replay import MissCurve, allocate, miss_curve, simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from strategies import costly, sticky_choices, tables


@st.composite
def plain_accesses(draw, table):
    return Access(
        order=draw(st.sampled_from(["layer", "decode"])),
        pool=draw(st.booleans()),
        share_block=draw(st.sampled_from([None, "full", *range(1, table.n_layers + 1)])),
        warm=draw(st.booleans()),
        top1=draw(st.booleans()),
    )


@pytest.mark.parametrize("policy", policy_names())
@costly
@given(data=st.data())
def test_the_curve_is_the_replay_at_every_capacity(policy, data):
    table = data.draw(tables())
    access = data.draw(plain_accesses(table))
    curve = miss_curve(table, policy=policy, access=access)
    for i, C in enumerate(curve.capacities.tolist()):
        result = simulate(table, policy=policy, capacity=C, access=access)
        assert curve.misses[:, i].tolist() == [c.misses for c in result.caches]
        assert curve.rates[i] == pytest.approx(result.miss_rate, nan_ok=True)
    assert curve.capacities[-1] >= table.n_experts


@costly
@given(tables(), st.sampled_from(policy_names()))
def test_chosen_capacities_are_points_of_the_whole_curve(table, policy):
    whole = miss_curve(table, policy=policy)
    some = miss_curve(table, policy=policy, capacities=[table.n_experts + 3, 1])
    assert some.capacities.tolist() == [1, table.n_experts + 3]
    np.testing.assert_equal(some.rates, whole.rates[[0, -1]])


@pytest.mark.parametrize("policy", ["lru", "static", "belady"])
@costly
@given(data=st.data())
def test_stack_policies_never_lose_by_a_larger_cache_that_holds_a_request(policy, data):
    table = data.draw(tables())
    misses = miss_curve(table, policy=policy).misses[:, table.top_k - 1 :]
    assert (np.diff(misses, axis=1) <= 0).all()


def test_a_long_clock_is_renumbered():
    last = np.array([0, 2_000_000_005, 7, 2_000_000_001], np.int32)
    assert kernels._renumber(last) == 3
    assert last.tolist() == [0, 3, 1, 2]
    steps = np.array([[1], [2], [3], [0], [3]], np.uint8)
    fresh, used = np.zeros(4, np.int32), np.zeros(4, np.int32)
    depths, far = np.zeros(5, np.int64), np.zeros(5, np.int64)
    kind, cold = np.ones(5, np.uint8), np.zeros(5, bool)
    kernels.recency_depths(steps, kind, cold, 1, fresh, depths, 0)
    kernels.recency_depths(steps[:2], kind[:2], cold[:2], 1, used, far, 2_000_000_000 - 1)
    clock = kernels.recency_depths(steps[2:], kind[2:], cold[2:], 1, used, far, 2_000_000_001)
    assert clock < 10
    assert far.tolist() == depths.tolist() == [0, 0, 1, 0, 0]


# Slots per layer


@costly
@given(st.data())
def test_chosen_slots_miss_least_of_all_choices(data):
    n_caches, sizes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    misses = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 9), min_size=sizes, max_size=sizes), min_size=n_caches, max_size=n_caches)
        )
    )
    curve = MissCurve("lru", np.arange(1, sizes + 1), misses, np.full(n_caches, 10), 10)
    total = data.draw(st.integers(n_caches, n_caches * sizes + 2))
    slots = allocate(curve, total)
    assert sum(slots) <= total
    assert min(slots) >= 1
    cost = {
        choice: sum(int(misses[i, c - 1]) for i, c in enumerate(choice))
        for choice in product(range(1, sizes + 1), repeat=n_caches)
        if sum(choice) <= total
    }
    assert cost[tuple(slots)] == min(cost.values())


def test_slots_go_where_they_save_loads():
    """Layer 0 always uses one expert, layer 1 goes round four."""
    S = np.zeros((2, 1, 40, 1), int)
    S[1, 0, :, 0] = np.arange(40) % 4
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 40), bool))
    slots = allocate(miss_curve(table), 5)
    assert slots == [1, 4]
    assert simulate(table, capacity=slots).misses == 1 + 4
    assert simulate(table, capacity=[2, 3]).misses == 1 + 40


@pytest.mark.parametrize(
    ("total", "capacities", "says"),
    [
        (1, None, r"^total: got 1, expected at least one slot for each of the 2 caches\.$"),
        (4, [2], r"the miss curve of every capacity"),
    ],
)
def test_refused(total, capacities, says):
    S = sticky_choices(np.random.default_rng(0), (2, 1, 9, 1), 3, stay=0.5)
    table = RouteTable(S=S, n_experts=3, mask=np.ones((1, 9), bool))
    with pytest.raises(StickyError, match=says):
        allocate(miss_curve(table, capacities=capacities), total)


def test_a_rate_that_was_not_measured_is_refused():
    table = RouteTable(S=np.zeros((1, 1, 3, 1), int), n_experts=4, mask=np.ones((1, 3), bool))
    curve = miss_curve(table, capacities=[1, 4])
    assert curve.rate(9) == curve.rate(4) == 1 / 3
    with pytest.raises(StickyError, match=r"^capacity: got 2, expected one of \[1, 4\]\.$"):
        curve.rate(2)
