"""From misses to milliseconds: the equation, the knee, and the smallest cache that does it or why none does."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import StickyError
from stickymoe.locality.devices import Device
from stickymoe.locality.plan import Answer, Budget, Plan, Point, Sizes, cache_points, choose_run, knee, plan, smallest
from stickymoe.locality.replay import allocate, miss_curve, simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from strategies import costly, seeds, sticky_choices, tables

DEVICE = Device("d", fast_memory=1e3, load_bandwidth=1e3, load_latency_ms=2.0, compute_bandwidth=4e3)


def point(memory, ms, slots=(1,)):
    return Point("lru", slots, float(memory), 0.5, ms / 8, ms / 4, float(ms))


def table(n_experts=6, shape=(2, 2, 40, 2), seed=0, stay=0.6, **more):
    S = sticky_choices(np.random.default_rng(seed), shape, n_experts, stay=stay).astype(np.uint8)
    return RouteTable(
        **{"S": S, "n_experts": n_experts, "mask": np.ones(shape[1:3], bool), "expert_bytes": (10,) * shape[0], **more}
    )


@costly
@given(tables())
def test_a_token_costs_its_compute_and_its_loads(table):
    if not table.mask.any():
        with pytest.raises(StickyError, match=r"^The trace has no tokens, so there is nothing to plan for\.$"):
            plan(table, DEVICE, expert_bytes=50.0)
        return
    found = plan(table, DEVICE, expert_bytes=50.0, other_bytes=8.0, policies=["lru"])
    for C, p in enumerate(found.points["lru"], start=1):
        misses = simulate(table, capacity=C).misses
        active = table.n_layers * table.top_k * 50 + 8
        expected = 1000 * active / 4000 + misses / table.mask.sum() * (2 + 1000 * 50 / 1000)
        assert p.ms_per_token == pytest.approx(expected)
        assert p.bytes_per_token == pytest.approx(misses * 50 / table.mask.sum())
        assert p.memory == C * table.n_layers * 50 + 8
        assert p.tokens_per_s == pytest.approx(1000 / expected)
    assert found.compute_ms == pytest.approx(1000 * active / 4000)


@pytest.mark.parametrize("overlap", [0.1, 1.0])
def test_overlap_hides_loads_up_to_a_fraction_of_the_compute(overlap):
    serial, faster = (plan(table(), d, policies=["lru"]) for d in (DEVICE, replace(DEVICE, overlap=overlap)))
    for s, f in zip(serial.points["lru"], faster.points["lru"], strict=True):
        hidden = min(s.ms_per_token - serial.compute_ms, overlap * serial.compute_ms)
        assert f.ms_per_token == pytest.approx(s.ms_per_token - hidden)
        assert f.loads_per_token == s.loads_per_token


@costly
@given(tables())
def test_allocated_slots_never_miss_more_than_equal_ones_in_the_same_memory(table):
    if table.mask.any():
        equal, allocated = (
            plan(table, DEVICE, expert_bytes=1.0, policies=["lru"], allocated=a).points["lru"] for a in (False, True)
        )
        for e, a in zip(equal, allocated, strict=True):
            assert a.loads_per_token <= e.loads_per_token
            assert a.memory <= e.memory


# Bytes per layer


@costly
@given(st.data())
def test_every_layer_has_its_own_bytes(data):
    """Memory, bytes and milliseconds by hand, where caches serve one layer, shared layers or all."""
    L = data.draw(st.integers(1, 5))
    sizes = tuple(data.draw(st.lists(st.integers(1, 99), min_size=L, max_size=L)))
    S = sticky_choices(data.draw(seeds()), (L, 1, 12, 2), 4, stay=0.5)
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 12), bool), expert_bytes=sizes, other_bytes=7)
    share = data.draw(st.integers(1, L))
    access = Access(order="decode", share_block=share, pool=data.draw(st.booleans()))
    per_cache = L if access.pool else share
    slot_bytes = [max(sizes[first : first + per_cache]) for first in range(0, L, per_cache)]
    found = plan(table, DEVICE, access=access, policies=["lru"])
    for C, p in enumerate(found.points["lru"], start=1):
        misses = [c.misses for c in simulate(table, capacity=C, access=access).caches]
        assert p.memory == sum(C * size for size in slot_bytes) + 7
        assert p.bytes_per_token == pytest.approx(sum(n * s for n, s in zip(misses, slot_bytes, strict=True)) / 12)
        load_ms = sum(n * (2 + s) for n, s in zip(misses, slot_bytes, strict=True))
        assert p.ms_per_token == pytest.approx(1000 * (2 * sum(sizes) + 7) / 4000 + load_ms / 12)


def test_bytes_are_those_given_or_those_of_the_table():
    known = table(expert_bytes=(10, 30), other_bytes=5)
    assert Sizes.of(known) == Sizes((10.0, 30.0), 5.0)
    assert Sizes.of(known, expert=4.0, other=2.0) == Sizes((4.0, 4.0), 2.0)
    assert Sizes.of(table()).other == 0.0
    says = r"^The trace has no expert size: pass expert_bytes, such as 14MB\.$"
    with pytest.raises(StickyError, match=says):
        plan(table(expert_bytes=None), DEVICE)


def test_the_knee_is_where_the_curve_bends():
    points = [point(1, 100), point(2, 20), point(3, 15), point(4, 10)]
    assert knee(points) is points[1]
    assert knee(points[:1]) is points[0]
    assert knee([point(1, 5), point(2, 5)]).memory == 1


def test_the_smallest_cache_that_is_fast_enough():
    points = [point(100, 100, (1, 1)), point(200, 50, (2, 2)), point(300, 10, (3, 3))]
    assert smallest(points, Budget(1e3, 20.0)).point is points[1]
    assert smallest(points, Budget(250.0)).point is points[1]
    assert (
        smallest(points, Budget(250.0)).message
        == "In 250 B: lru with 2 slots per cache (200 B) reaches 20 tokens/s at 50.0% misses."
    )


@pytest.mark.parametrize(
    ("memory", "speed", "says"),
    [
        (50.0, None, r"^No cache fits 50 B: the smallest, 1 slot per cache, needs 100 B\.$"),
        (
            250.0,
            90.0,
            r"^No cache reaches 90 tokens/s in 250 B: it needs 300 B \(3 slots per cache\); this budget "
            r"reaches at most 20\.$",
        ),
        (
            1e3,
            500.0,
            r"^No cache reaches 500 tokens/s in 1 kB: even the fastest cache, 3 slots per cache, reaches 100 "
            r"\(1.25 loads per token remain\)\.$",
        ),
    ],
)
def test_none_does_it_and_why(memory, speed, says):
    points = [point(100, 100, (1, 1)), point(200, 50, (2, 2)), point(300, 10, (3, 3))]
    found = smallest(points, Budget(memory, speed))
    assert found.point is None
    assert re.match(says, found.message), found.message


def test_speed_and_loads_are_those_of_the_same_cache():
    points = [point(100, 20), point(200, 50), point(300, 40)]  # fewer slots can be faster, below k
    message = smallest(points, Budget(1e3, 500.0)).message
    assert message.endswith("even the fastest cache, 1 slot in total, reaches 50 (2.5 loads per token remain).")


@pytest.mark.parametrize(
    ("size", "other", "key"), [(0.0, 0.0, "expert_bytes"), (0.5, 0.0, "expert_bytes"), (1.0, -1.0, "other_bytes")]
)
def test_impossible_sizes_are_refused(size, other, key):
    with pytest.raises(StickyError, match=f"^{key}: got"):
        Sizes((size,), other)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_speed_is_refused(speed):
    with pytest.raises(StickyError, match=r"^tokens_per_s: got .*, expected a finite number > 0\.$"):
        plan(table(), DEVICE, tokens_per_s=speed)


# The answer


def a_plan(answer):
    return Plan(DEVICE, Sizes((1.0,)), Budget(1.0), {}, 1.0, answer)


def test_the_run_with_the_lowest_perplexity_that_fits():
    yes, no = a_plan(Answer(point(1, 1), "yes")), a_plan(Answer(None, "no"))
    assert choose_run([30.0, 32.0, 31.0], [no, yes, yes]) == 2
    assert choose_run([30.0, 32.0, 31.0], [yes, yes, yes]) == 0
    assert choose_run([30.0, 32.0, 31.0], [no, no, no]) is None


def test_a_stickier_run_is_chosen_where_the_budget_is_small():
    """λ from a byte budget: the sticky run has the worse perplexity, and is the one that is fast in little memory."""
    device = Device("d", fast_memory=1e9, load_bandwidth=1e3, load_latency_ms=1.0, compute_bandwidth=1e6)
    tables = [table(stay=0.0), table(stay=0.95)]

    def chosen(memory, speed):
        plans = [plan(t, device, memory=memory, tokens_per_s=speed, access=Access()) for t in tables]
        return choose_run([30.0, 33.0], plans)

    assert chosen(60.0, 100.0) == 1
    assert chosen(1e6, 1.0) == 0
    assert chosen(1e6, 1e9) is None


def test_the_answer_never_rests_on_knowledge_of_the_trace():
    def answer(*policies):
        return plan(table(), DEVICE, memory=1e6, policies=policies, expert_bytes=20.0).answer

    assert answer("lru", "belady").point.policy == "lru"
    bound = answer("static", "belady")
    assert bound.point.policy == "static"
    assert bound.message.startswith("A bound, since static knows the trace. In 1 MB: static with ")
    none = answer("belady")
    assert none.point is None
    expected = "No device can run belady, which knows the trace: add one of lru, lfu, fifo, sieve."
    assert none.message == expected


def test_a_plan_answers_from_every_capacity():
    """7 slots of 64 experts, fewer than a token asks for, fit 28 bytes."""
    found = plan(table(n_experts=64, shape=(4, 1, 40, 8)), DEVICE, memory=28.0, policies=["lru"], expert_bytes=1.0)
    assert [p.slots for p in found.points["lru"]] == [(C,) * 4 for C in range(1, 65)]
    assert found.answer.point.memory <= 28


def test_a_device_is_found_by_its_name_and_its_memory_is_the_budget():
    found = plan(table(), "raspberry-pi-5")
    assert found.budget.memory == found.device.fast_memory == 8e9
    assert found.answer.point.memory <= 8e9


def test_useful_leaves_out_caches_that_cannot_hold_a_token():
    full, useful = (plan(table(), DEVICE, useful=u).points["lru"] for u in (False, True))
    assert useful == full[1:]
    pool = Access(order="decode", pool=True)
    assert plan(table(), DEVICE, access=pool, useful=True).points["lru"][0].slots == (3,)


def test_allocated_points_have_the_slots_of_allocate():
    uneven = table(shape=(3, 2, 40, 2))
    curve = miss_curve(uneven, access=Access(order="decode"))
    points = cache_points(uneven, curve, DEVICE, Sizes.of(uneven), access=Access(order="decode"), allocated=True)
    assert [list(p.slots) for p in points] == [allocate(curve, 3 * C) for C in range(1, 7)]
