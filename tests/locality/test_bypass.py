"""Bypass: which misses are not admitted, against plain loops, by the laws of caches, and in every way it is run."""

from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality.cache import Cache, Load
from stickymoe.locality.plan import plan
from stickymoe.locality.policies import policy_names
from stickymoe.locality.replay import miss_curve, simulate
from stickymoe.locality.serving import FADE
from stickymoe.locality.streams import Access
from stickymoe.locality.study import default_policies, study
from stickymoe.locality.table import RouteTable
from strategies import costly, sticky_choices, tables, thorough

ONLINE = policy_names(online=True)
BYPASS = Access(on_miss="bypass")
COUNTS = ("hits", "misses", "prefetched", "wasted", "evictions", "bypassed")
N = 7

requests = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "union", "prefetch"]),
        st.lists(st.integers(0, N - 1), min_size=1, max_size=5, unique=True),
    ),
    max_size=60,
)


@pytest.mark.parametrize("on_miss", ["load", "bypass"])
@pytest.mark.parametrize("policy", ONLINE)
@thorough
@given(requests, st.integers(1, N + 1))
def test_the_object_counts_what_the_reference_counts(policy, on_miss, requests, C):
    cache = Cache(policy=policy, capacity=C, on_miss=on_miss)
    requests = [(kind, sorted(experts) if kind == "union" else experts) for kind, experts in requests]
    for kind, experts in requests:
        {"ask": cache.request, "union": cache.request_union, "prefetch": cache.prefetch}[kind](experts)
    stats = cache.stats
    assert {name: getattr(stats, name) for name in COUNTS} == reference.counts(requests, C, policy, on_miss)
    assert stats.evictions + stats.bypassed <= stats.loads
    assert on_miss == "bypass" or stats.bypassed == 0


@pytest.mark.parametrize("policy", ONLINE)
@costly
@given(tables(), st.integers(0, 2))
def test_a_cache_for_every_expert_has_nothing_to_bypass(policy, table, spare):
    C = table.n_experts + spare
    bypass = simulate(table, policy=policy, capacity=C, access=BYPASS)
    assert bypass == simulate(table, policy=policy, capacity=C)
    assert bypass.evictions == 0


@pytest.mark.parametrize("policy", ONLINE)
@costly
@given(tables())
def test_the_curve_is_the_replay_at_every_capacity(policy, table):
    curve = miss_curve(table, policy=policy, access=BYPASS)
    for C, misses in zip(curve.capacities.tolist(), curve.misses.T.tolist(), strict=True):
        assert misses == [c.misses for c in simulate(table, policy=policy, capacity=C, access=BYPASS).caches]


def test_a_rare_expert_is_not_admitted_until_it_was_asked_for_as_often_as_the_victim():
    cache = Cache(capacity=1, on_miss="bypass")
    for _ in range(2):
        cache.request([0])
    outcome = cache.request([1])
    assert outcome.loads == (Load(expert=1, slot=None, evicted=None),)
    assert (outcome.bypassed, outcome.evictions, cache.resident) == ((1,), (), {0})
    assert cache.request([1]).loads == (Load(expert=1, slot=0, evicted=0),)
    assert (cache.stats.misses, cache.stats.loads, cache.stats.evictions, cache.stats.bypassed) == (3, 3, 1, 1)


def test_counts_fade_so_that_an_old_favourite_can_go():
    cache = Cache(capacity=1, on_miss="bypass")
    for _ in range(FADE):
        cache.request([0])
    needed = 0
    while 1 not in cache.resident:
        cache.request([1])
        needed += 1
    assert needed == FADE // 2  # the count of 0 was halved once


def test_a_prefetch_is_admitted_and_not_counted():
    cache = Cache(capacity=1, on_miss="bypass")
    for _ in range(3):
        cache.request([0])
    assert cache.prefetch([1]).loads == (Load(expert=1, slot=0, evicted=0),)
    assert cache.request([2]).evictions == (1,)


def test_a_union_larger_than_the_cache_bypasses_too():
    cache = Cache(capacity=2, on_miss="bypass")
    for _ in range(3):
        cache.request([0, 1])
    outcome = cache.request_union(range(5))
    assert (outcome.hits, outcome.bypassed, cache.resident) == ((0, 1), (2, 3, 4), {0, 1})


@pytest.mark.parametrize("policy", policy_names(online=False))
def test_a_policy_that_knows_the_trace_is_refused(policy):
    says = rf"^{policy} admits every load: choose another policy, or on_miss load\.$"
    table = a_table()
    with pytest.raises(StickyError, match=says):
        Cache(policy=policy, capacity=2, on_miss="bypass", requests=[[0]])
    for run in (simulate, miss_curve):
        with pytest.raises(StickyError, match=says):
            run(table, policy=policy, access=BYPASS, **({"capacity": 2} if run is simulate else {}))


def a_table():
    S = sticky_choices(np.random.default_rng(3), (2, 2, 40, 2), 6, stay=0.3).astype(np.uint8)
    return RouteTable(S=S, n_experts=6, mask=np.ones((2, 40), bool), expert_bytes=(8, 8))


def test_a_study_shows_what_a_device_can_run():
    found = study(a_table(), capacities=[3], access=BYPASS)
    assert tuple(found.results) == tuple(default_policies(BYPASS)) == ONLINE
    assert found.results["lru"][3] == simulate(a_table(), capacity=3, access=BYPASS)
    assert found.verdict == "Belady bounds policies that admit every load, so it is not shown with bypass"
    record = found.as_dict()
    assert record["access"]["on_miss"] == "bypass"
    assert record["policies"]["lru"]["3"]["bypassed"] == found.results["lru"][3].bypassed > 0


def test_what_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets, who checks no types
    with pytest.raises(StickyError, match=r"^on_miss: got 'drop', expected load or bypass\.$"):
        Cache(capacity=2, on_miss="drop")
    with pytest.raises(StickyError, match=r"^plan: got on_miss bypass, but it counts no scratch memory; use simulate"):
        plan(a_table(), "raspberry-pi-5", access=replace(BYPASS, order="decode"))
