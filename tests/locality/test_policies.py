"""Every policy: its object against a naive account, its compiled loop against the object, and the laws of caches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality.cache import Cache
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.replay import replay
from strategies import costly, requests, thorough

capacities = st.integers(1, 7)
policies = pytest.mark.parametrize("policy", policy_names())


def streams(case):
    return reference.streams(case.S, case.mask, case.doc)


def run(case, C, policy):
    return replay(case.S, capacity=C, policy=policy, n_experts=case.n_experts, mask=case.mask, doc=case.doc)


def make(policy, C, stream, everything):
    """A cache for one cold stream; static counts over the whole trace."""
    known = {"rank": everything, "next_use": stream, None: None}[find_policy(policy).knows]
    return Cache(policy=policy, capacity=C, requests=known)


def object_misses(case, C, policy):
    everything = [r for stream in streams(case) for r in stream]
    count = 0
    for stream in streams(case):
        cache = make(policy, C, stream, everything)
        for request in stream:
            outcome = cache.request(request)
            count += len(outcome.loads)
            assert set(request) <= cache.resident or len(request) > C
            assert len(cache.resident) <= C
    return count


@policies
@thorough
@given(requests(), capacities)
def test_the_compiled_loop_counts_what_the_object_does(policy, case, C):
    result = run(case, C, policy)
    assert result.misses == object_misses(case, C, policy)
    assert result.hits + result.misses == sum(len(r) for stream in streams(case) for r in stream)


@pytest.mark.parametrize("policy", ["fifo", "sieve", "lfu", "static"])
@thorough
@given(requests(max_T=25), capacities)
def test_the_object_does_what_its_definition_says(policy, case, C):
    for stream in streams(case):
        cache = make(policy, C, stream, stream)
        loads = sum(len(cache.request(r).loads) for r in stream)
        assert loads == reference.misses(stream, C, policy)


@thorough
@given(requests(max_T=10), st.integers(1, 4))
def test_belady_misses_as_little_as_any_choice_of_victims(case, C):
    expected = sum(reference.fewest_misses(stream, C) for stream in streams(case))
    assert run(case, C, "belady").misses == expected


@pytest.mark.parametrize("policy", [p for p in policy_names() if p != "belady"])
@costly
@given(requests(max_T=30), capacities)
def test_no_policy_beats_belady(policy, case, C):
    assert run(case, C, policy).misses >= run(case, C, "belady").misses


@policies
@costly
@given(requests(), st.integers(0, 2))
def test_a_cache_for_every_expert_misses_each_once(policy, case, spare):
    distinct = sum(len({e for request in stream for e in request}) for stream in streams(case))
    assert run(case, case.n_experts + spare, policy).misses == distinct


@policies
@costly
@given(requests())
def test_all_policies_tie_where_the_cache_holds_just_a_request(policy, case):
    k = case.S.shape[2]
    assert run(case, k, policy).misses == run(case, k, "lru").misses


@policies
@costly
@given(requests(), capacities)
def test_a_warm_cache_sees_one_long_sequence(policy, case, C):
    flat = case.S.reshape(1, -1, case.S.shape[2])
    mask = None if case.mask is None else case.mask.reshape(1, -1)
    warm = replay(case.S, capacity=C, policy=policy, n_experts=case.n_experts, mask=case.mask, warm=True)
    assert warm == replay(flat, capacity=C, policy=policy, n_experts=case.n_experts, mask=mask)


def test_ageing_lets_an_old_favourite_go():
    """0 is used five times, then never again; without ageing it would keep its slot for ever."""
    S = np.array([[0, 0, 0, 0, 0] + [1, 2] * 6])
    assert replay(S, capacity=2, n_experts=3, policy="lfu").misses < 1 + 12
    cache = Cache(policy="lfu", capacity=2)
    for e in S[0]:
        cache.request([int(e)])
    assert cache.resident == {1, 2}


def test_static_keeps_the_most_frequent_and_counts_its_load():
    S = np.array([[0, 1, 0, 2, 0, 1, 0, 2]])
    assert replay(S, capacity=2, n_experts=3, policy="static").misses == 1 + 4
    assert replay(S, capacity=2, n_experts=3, policy="lru").misses == 1 + 4
    S = np.array([[0, 1, 2, 0, 1, 2, 0, 1, 2]])  # LRU's worst: it always evicts what comes next
    assert replay(S, capacity=2, n_experts=3, policy="lru").misses == 9
    assert replay(S, capacity=2, n_experts=3, policy="static").misses == 1 + 6
    assert replay(S, capacity=2, n_experts=3, policy="belady").misses == 6


@pytest.mark.parametrize("policy", policy_names(online=False))
def test_a_policy_that_knows_the_trace_must_be_given_it(policy):
    says = rf"^policy: '{policy}' must know the trace: pass requests=…, or choose another policy\.$"
    with pytest.raises(StickyError, match=says):
        Cache(policy=policy, capacity=2)
