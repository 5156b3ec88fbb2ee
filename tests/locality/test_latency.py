"""From misses to milliseconds: the equation, the knee, and the smallest cache that does it or why none does."""

import re

import pytest
from hypothesis import given

from stickymoe.errors import StickyError
from stickymoe.locality.devices import Device
from stickymoe.locality.latency import Point, Weights, knee, plan, smallest, verdict
from stickymoe.locality.replay import miss_curve, simulate
from strategies import costly, tables

DEVICE = Device("d", fast_memory=1e3, load_bandwidth=1e3, load_latency_ms=2.0, compute_bandwidth=4e3)


def point(memory, ms, slots=(1,)):
    return Point("lru", slots, float(memory), 0.5, ms / 8, float(ms))


@costly
@given(tables())
def test_a_token_costs_its_compute_and_its_loads(table):
    if not table.mask.any():
        with pytest.raises(StickyError, match="holds no token"):
            plan(table, miss_curve(table), DEVICE, Weights(50.0))
        return
    points = plan(table, miss_curve(table), DEVICE, Weights(50.0, other=8.0))
    for C, p in enumerate(points, start=1):
        misses = simulate(table, capacity=C).misses
        active = table.n_layers * table.top_k * 50 + 8
        expected = 1000 * active / 4000 + misses / table.mask.sum() * (2 + 1000 * 50 / 1000)
        assert p.ms_per_token == pytest.approx(expected)
        assert p.memory == C * table.n_layers * 50 + 8
        assert p.tokens_per_s == pytest.approx(1000 / expected)


@costly
@given(tables())
def test_chosen_slots_never_miss_more_than_equal_ones_in_the_same_memory(table):
    if table.mask.any():
        curve = miss_curve(table)
        equal, chosen = (plan(table, curve, DEVICE, Weights(1.0), chosen=c) for c in (False, True))
        for e, c in zip(equal, chosen, strict=True):
            assert c.loads_per_token <= e.loads_per_token
            assert c.memory <= e.memory


def test_the_knee_is_where_the_curve_bends():
    points = [point(1, 100), point(2, 20), point(3, 15), point(4, 10)]
    assert knee(points) is points[1]
    assert knee(points[:1]) is points[0]
    assert knee([point(1, 5), point(2, 5)]).memory == 1


def test_the_smallest_cache_that_is_fast_enough():
    points = [point(100, 100, (1, 1)), point(200, 50, (2, 2)), point(300, 10, (3, 3))]
    assert smallest(points, memory=1e3, tokens_per_s=20.0).point is points[1]
    assert smallest(points, memory=250.0).point is points[1]
    assert (
        smallest(points, memory=250.0).words
        == "In 250 B: lru with 2 slots a cache (200 B) gives 20 tokens/s at 50.0% misses."
    )


@pytest.mark.parametrize(
    ("memory", "speed", "says"),
    [
        (50.0, None, r"^No cache fits 50 B: the smallest, 1 slot a cache, takes 100 B\.$"),
        (
            250.0,
            90.0,
            r"^No cache reaches 90 tokens/s in 250 B: that takes 300 B \(3 slots a cache\), here 20 is the most\.$",
        ),
        (
            1e3,
            500.0,
            r"^No cache reaches 500 tokens/s in 1 kB: even the fastest cache, 3 slots a cache, gives 100 "
            r"\(1.25 loads a token remain\)\.$",
        ),
    ],
)
def test_none_does_it_and_why(memory, speed, says):
    points = [point(100, 100, (1, 1)), point(200, 50, (2, 2)), point(300, 10, (3, 3))]
    found = smallest(points, memory=memory, tokens_per_s=speed)
    assert found.point is None
    assert re.match(says, found.words), found.words


def test_speed_and_loads_are_told_of_the_same_cache():
    points = [point(100, 20), point(200, 50), point(300, 40)]  # fewer slots can be faster, below k
    words = smallest(points, memory=1e3, tokens_per_s=500.0).words
    assert words.endswith("even the fastest cache, 1 slot in all, gives 50 (2.5 loads a token remain).")


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        (
            {"lru": 0.118, "static": 0.05, "belady": 0.099},
            "with 2 slots a cache: 11.8% misses (lru), Belady 9.9%, so the policy is not the problem",
        ),
        (
            {"lru": 0.4, "lfu": 0.3, "belady": 0.1},
            "30.0% misses (lfu), Belady 10.0%, so a better policy could avoid up to 67%",
        ),
        ({"lru": 0.002, "belady": 0.001}, "so the cache is large enough"),
        ({"lru": 0.06, "belady": 0.05}, "6.0% misses (lru), Belady 5.0%, so only cold starts remain"),
    ],
)
def test_policy_or_working_set(rates, says):
    assert says in verdict("2 slots a cache", rates, cold=0.05, working_set=5.0)


@pytest.mark.parametrize(
    ("size", "other", "key"), [(0.0, 0.0, "expert_bytes"), (0.5, 0.0, "expert_bytes"), (1.0, -1.0, "other_bytes")]
)
def test_weights_without_a_size_are_refused(size, other, key):
    with pytest.raises(StickyError, match=f"^{key}: got"):
        Weights(size, other)
