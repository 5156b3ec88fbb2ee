"""Replay and the cache it replays: against the reference, against libCacheSim, and by law."""

from itertools import pairwise

import libcachesim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality.cache import Cache, Load
from stickymoe.locality.replay import replay
from strategies import Requests, requests, sticky_choices, thorough

capacities = st.integers(1, 7)


def run(case, C):
    return replay(case.S, capacity=C, policy="lru", n_experts=case.n_experts, mask=case.mask, doc=case.doc)


def streams(case):
    return reference.streams(case.S, case.mask, case.doc)


def hits(S, *, capacity, n_experts):
    return replay(np.array(S), capacity=capacity, policy="lru", n_experts=n_experts).hits


# Against the reference


@thorough
@given(requests(), capacities)
def test_replay_counts_what_the_reference_counts(case, C):
    counts = [reference.lru(stream, C) for stream in streams(case)]
    result = run(case, C)
    assert (result.hits, result.misses) == tuple(map(sum, zip(*counts, strict=True)))


@thorough
@given(requests(), capacities)
def test_replay_equals_a_fresh_cache_per_sequence(case, C):
    n_hits = n_loads = 0
    for stream in streams(case):
        cache = Cache(policy="lru", capacity=C)
        for request in stream:
            outcome = cache.request(request)
            n_hits += len(outcome.hits)
            n_loads += len(outcome.loads)
    result = run(case, C)
    assert (result.hits, result.misses) == (n_hits, n_loads)


@thorough
@given(requests(), capacities)
def test_cache_serves_every_request_as_the_reference_does(case, C):
    for stream in streams(case):
        cache, resident = Cache(policy="lru", capacity=C), []
        assert cache.resident == frozenset()
        for request in stream:
            outcome = cache.request(request)
            hit, loaded, evicted = reference.lru_request(resident, request, C)
            assert sorted(outcome.hits) == sorted(hit)
            assert sorted(load.expert for load in outcome.loads) == sorted(loaded)
            assert sorted(outcome.evictions) == sorted(evicted)
            assert cache.resident == frozenset(resident)


@thorough
@given(requests(), capacities)
def test_evictions_are_those_of_the_reference(case, C):
    evictions = 0
    for stream in streams(case):
        resident = []
        for request in stream:
            evictions += len(reference.lru_request(resident, request, C)[2])
    result = run(case, C)
    assert result.evictions == evictions <= result.loads


@thorough
@given(requests(), st.integers(0, 2))
def test_a_cache_for_every_expert_evicts_nothing_and_a_cold_start_is_no_eviction(case, spare):
    assert run(case, case.n_experts + spare).evictions == 0


# By hand


def test_an_expert_of_the_request_is_no_victim():
    # After (1, 0) and (2, 1) expert 0 is the least recent; (3, 0) needs a slot, but 0 is pinned, so 1 goes.
    cache = Cache(policy="lru", capacity=3)
    cache.request([1, 0])
    cache.request([2, 1])
    outcome = cache.request([3, 0])
    assert (outcome.hits, outcome.loads) == ((0,), (Load(expert=3, slot=0, evicted=1),))
    assert cache.resident == {0, 2, 3}


def test_the_lightest_expert_of_a_request_is_the_first_to_go():
    cache = Cache(policy="lru", capacity=3)
    cache.request([0, 1])
    assert cache.request([2, 3]).evictions == (1,)
    assert cache.resident == {0, 2, 3}


def test_a_hit_too_renews_recency_from_the_lightest_to_the_heaviest():
    cache = Cache(policy="lru", capacity=2)
    cache.request([1, 0])
    assert cache.request([0, 1]).hits in {(0, 1), (1, 0)}
    assert cache.request([2]).evictions == (1,)


def test_a_request_larger_than_the_cache_is_served_one_after_another():
    # C = 1: 0 and 1 miss; then 1, still there, hits, and 0 misses.
    cache = Cache(policy="lru", capacity=1)
    cache.request([0, 1])
    assert cache.resident == {1}
    outcome = cache.request([1, 0])
    assert (outcome.hits, outcome.loads) == ((1,), (Load(expert=0, slot=0, evicted=1),))
    assert hits([[[0, 1], [1, 0]]], capacity=1, n_experts=2) == 1
    assert hits([[[0, 1], [0, 1]]], capacity=1, n_experts=2) == 0


def test_a_masked_step_makes_no_access_and_a_border_empties_the_cache():
    S = np.array([[0, 1, 2, 0]])
    lru = {"capacity": 2, "policy": "lru", "n_experts": 3}
    assert replay(S, **lru, mask=np.array([[True, False, False, True]])).hits == 1
    assert replay(S, **lru).hits == 0
    assert replay(np.zeros((1, 4), dtype=int), **lru, doc=np.array([[0, 0, 1, 1]])).hits == 2


# By law


@thorough
@given(requests(), capacities)
def test_every_access_hits_or_misses(case, C):
    real = case.S.shape[0] * case.S.shape[1] if case.mask is None else int(case.mask.sum())
    result = run(case, C)
    assert result.hits + result.misses == result.accesses == real * case.S.shape[2]
    assert (result.capacity, result.policy) == (C, "lru")


@thorough
@given(requests(max_k=1))
def test_top_1_hits_never_fall_as_the_cache_grows(case):
    counts = [run(case, C).hits for C in range(1, case.n_experts + 2)]
    assert counts == sorted(counts)


@thorough
@given(requests())
def test_hits_never_fall_as_a_cache_grows_that_holds_a_request(case):
    counts = [run(case, C).hits for C in range(case.S.shape[2], case.n_experts + 2)]
    assert counts == sorted(counts)


@thorough
@given(requests(), st.integers(0, 2))
def test_a_cache_for_every_expert_misses_each_once(case, spare):
    distinct = sum(len({e for request in stream for e in request}) for stream in streams(case))
    assert run(case, case.n_experts + spare).misses == distinct


@thorough
@given(requests())
def test_a_cache_of_k_holds_exactly_the_last_request(case):
    overlap = sum(len(set(before) & set(now)) for stream in streams(case) for before, now in pairwise(stream))
    assert run(case, case.S.shape[2]).hits == overlap


@thorough
@given(requests(max_k=1), capacities)
def test_one_expert_per_request_needs_no_last_axis(case, C):
    flat = Requests(case.S[..., 0], *case[1:])
    assert (run(flat, C).hits, run(flat, C).misses) == (run(case, C).hits, run(case, C).misses)


@thorough
@given(requests(), capacities)
def test_the_integer_type_of_the_requests_does_not_matter(case, C):
    small = case._replace(S=case.S.astype(np.uint8))
    assert (run(small, C).hits, run(small, C).misses) == (run(case, C).hits, run(case, C).misses)


# Against another simulator


@pytest.mark.parametrize("capacity", [1, 2, 5, 12, 31])
def test_lru_agrees_with_libcachesim(capacity):
    n_experts = 32
    S = sticky_choices(np.random.default_rng(capacity), (3, 4000, 1), n_experts, stay=0.3)[..., 0]
    S = np.minimum(S, S[:, ::-1])  # some experts more popular than others
    expected = 0
    for row in S:
        other = libcachesim.LRU(cache_size=capacity, hashpower=8)
        expected += sum(other.get(libcachesim.Request(obj_id=int(e), obj_size=1)) for e in row)
    assert 0 < expected < S.size
    assert hits(S, capacity=capacity, n_experts=n_experts) == expected


# Refused


@pytest.mark.parametrize(
    ("S", "settings", "says"),
    [
        ([[0, 4]], {}, r"experts? .*\b4\b.*expected 0 … 3\b"),
        ([[[0, 1], [2, 9]]], {}, r"experts? .*\b9\b.*expected 0 … 3\b"),
        ([[0, -1]], {}, r"experts? .*-1\b.*expected 0 … 3\b"),
        ([[0, 1]], {"capacity": 0}, r"capacity.*\b0\b"),
        ([[0, 1]], {"capacity": -3}, r"capacity.*-3\b"),
        ([[0, 1]], {"policy": "lruu"}, r"policy 'lruu'. Did you mean 'lru'"),
        ([[0, 1]], {"policy": "zzz"}, r"policy 'zzz'. Known: .*lru"),
        ([0, 1], {}, r"requests.*\b(1|\(2,\))"),
        ([[[[0, 1]]]], {}, r"requests.*\b(4|\(1, 1, 1, 2\))"),
    ],
    ids=["top-1", "all slots", "negative", "no slot", "fewer", "near name", "far name", "1 axis", "4 axes"],
)
def test_replay_refuses_in_one_line(S, settings, says):
    with pytest.raises(StickyError, match=rf"\A[^\n]*{says}[^\n]*\Z"):
        replay(np.array(S), **{"capacity": 2, "policy": "lru", "n_experts": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "lru", "capacity": 0}, r"capacity.*\b0\b"),
        ({"policy": "lruu", "capacity": 2}, r"policy 'lruu'. Did you mean 'lru'"),
    ],
)
def test_cache_refuses_in_one_line(settings, says):
    with pytest.raises(StickyError, match=rf"\A[^\n]*{says}[^\n]*\Z"):
        Cache(**settings)


@pytest.mark.parametrize("name", ["mask", "doc"])
def test_replay_refuses_a_mask_or_doc_of_another_shape(name):
    wrong = np.ones((1, 2), np.bool_ if name == "mask" else np.int64)
    with pytest.raises(StickyError, match=rf"^{name}: got shape \(1, 2\), expected \(1, 3\)"):
        replay(np.zeros((1, 3), np.int64), capacity=1, n_experts=2, **{name: wrong})


def test_an_expert_twice_in_one_request_is_refused_but_padding_may_hold_anything():
    requests = np.array([[[0, 1], [2, 2]]])
    with pytest.raises(StickyError, match="twice in one request"):
        replay(requests, capacity=2, n_experts=3)
    assert replay(requests, capacity=2, n_experts=3, mask=np.array([[True, False]])).misses == 2
    with pytest.raises(StickyError, match="expected different indices"):
        Cache(capacity=2).request([2, 2])
