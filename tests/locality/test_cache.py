"""The slots of a cache under any sequence of requests, prefetches, commits and cancels, and policies from outside."""

import contextlib
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import StickyError
from stickymoe.locality import policies as p
from stickymoe.locality.cache import Cache, Load
from stickymoe.locality.policies import append, policy_names, register_policy, unlink
from stickymoe.locality.replay import miss_curve, replay, simulate
from stickymoe.locality.study import study
from stickymoe.locality.table import RouteTable
from strategies import sticky_choices, thorough

N = 12  # more than a new state has room for, so that it grows


class Slots:
    """A plain account of which expert is in which slot, from the loads that a cache reports."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.held = {}  # slot -> expert
        self.in_flight = set()

    @property
    def resident(self):
        return set(self.held.values())

    def load(self, load):
        if load.slot is None:
            assert load.evicted is None
            assert len(self.held) == self.capacity, "an expert was bypassed while a slot was free"
            return
        assert 0 <= load.slot < self.capacity
        assert load.expert not in self.resident
        assert self.held.get(load.slot) == load.evicted
        assert load.evicted is not None or load.slot not in self.held
        if load.evicted is not None:
            assert len(self.held) == self.capacity, "an expert was evicted while a slot was free"
        self.held[load.slot] = load.expert
        self.in_flight.discard(load.evicted)

    def cancel(self, expert):
        self.held = {slot: e for slot, e in self.held.items() if e != expert}
        self.in_flight.remove(expert)

    def agrees(self, cache):
        assert cache.resident == self.resident
        assert cache.in_flight == self.in_flight
        for expert in range(N):
            slots = [slot for slot, e in self.held.items() if e == expert]
            assert cache.slot_of(expert) == (slots[0] if slots else None)


experts = st.lists(st.integers(0, N - 1), max_size=5, unique=True)
actions = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "union", "prefetch", "commit", "cancel"]), experts, st.integers(0, 9)
    ),
    max_size=30,
)


@pytest.mark.parametrize(
    ("policy", "on_miss"),
    [*((name, "load") for name in policy_names()), *((name, "bypass") for name in policy_names(online=True))],
)
@thorough
@given(actions, st.integers(1, 6))
def test_slots_stay_consistent(policy, on_miss, actions, capacity):
    known = [wanted for action, wanted, _ in actions if action in ("request", "union")]
    known = None if p.find_policy(policy).online else known
    cache = Cache(policy=policy, capacity=capacity, on_miss=on_miss, requests=known)
    slots = Slots(capacity)
    for action, wanted, which in actions:
        if action in ("commit", "cancel"):
            if slots.in_flight:
                expert = sorted(slots.in_flight)[which % len(slots.in_flight)]
                getattr(cache, action)(expert)
                slots.cancel(expert) if action == "cancel" else slots.in_flight.remove(expert)
        elif action != "prefetch" or policy != "belady":
            serve(cache, slots, action, wanted)
        slots.agrees(cache)


def serve(cache, slots, action, wanted):
    before, in_flight = set(slots.resident), set(slots.in_flight)
    ask = {"request": cache.request, "union": cache.request_union, "prefetch": cache.prefetch}[action]
    outcome = ask(wanted)
    for load in outcome.loads:
        slots.load(load)
    loaded = [load.expert for load in outcome.loads]
    served = wanted[: slots.capacity] if action == "prefetch" else wanted
    assert sorted([*outcome.hits, *loaded]) == sorted(served)
    assert outcome.evictions == tuple(load.evicted for load in outcome.loads if load.evicted is not None)
    assert set(outcome.late) == set(outcome.hits) & in_flight
    if len(served) <= slots.capacity:
        assert set(outcome.hits) == before & set(served)
        assert set(served) - set(outcome.bypassed) <= slots.resident
    if action == "union":
        assert set(outcome.hits) == before & set(served)
    if action == "prefetch":
        slots.in_flight |= set(loaded)


def test_a_freed_slot_is_used_before_anything_is_evicted():
    cache = Cache(capacity=3)
    cache.request([0])
    cache.prefetch([1])
    cache.request([2])
    cache.cancel(1)
    assert cache.slot_of(1) is None
    assert cache.request([3]).loads == (Load(expert=3, slot=1, evicted=None),)
    assert cache.request([4]).loads == (Load(expert=4, slot=0, evicted=0),)


def test_an_expert_in_flight_is_resident_and_its_hit_is_late():
    cache = Cache(capacity=2)
    assert [load.expert for load in cache.prefetch([5, 6, 7]).loads] == [5, 6]
    assert cache.in_flight == cache.resident == {5, 6}
    assert cache.request([5]).late == (5,)
    cache.commit(5)
    assert cache.request([5]).late == ()
    assert cache.request([1, 2]).evictions == (6, 5)
    assert cache.in_flight == frozenset()  # 6 was evicted before its load was complete
    for end in (cache.commit, cache.cancel):
        with pytest.raises(StickyError, match=r"^Expert 6 is not in flight: expected one of \[\]\.$"):
            end(6)


def test_an_expert_that_is_evicted_by_its_own_request_is_not_late():
    cache = Cache(capacity=1)
    cache.prefetch([3])
    outcome = cache.request([2, 3])  # one after another: 2 evicts 3, then 3 is loaded again
    assert (outcome.hits, outcome.late, [load.expert for load in outcome.loads]) == ((), (), [2, 3])


def test_growing_keeps_the_state_of_a_policy():
    """LFU evicts the one used longest ago of equal values, also when higher indices came in between."""
    for first in (0, 7, 40):
        cache = Cache(policy="lfu", capacity=3)
        cache.request([first])
        cache.request([first + 1])
        cache.request([first + 60])
        assert cache.request([first + 2]).evictions == (first,)
        assert cache.request([first + 200]).evictions == (first + 1,)


def test_belady_is_not_prefetched():
    with pytest.raises(StickyError, match=r"^belady bounds policies that load on demand: choose another policy"):
        Cache(policy="belady", capacity=2, requests=[[0]]).prefetch([0])


@pytest.mark.parametrize("wanted", [[1, 1], [-1], [0, -2]])
@pytest.mark.parametrize("action", ["request", "prefetch"])
def test_a_request_that_names_no_expert_or_one_twice_is_refused(action, wanted):
    cache = Cache(capacity=2)
    with pytest.raises(StickyError, match=r"^request: got experts \[.*\], expected different indices ≥ 0\.$"):
        getattr(cache, action)(wanted)
    assert cache.resident == frozenset()


def test_an_empty_request_does_nothing():
    cache = Cache(capacity=2)
    assert cache.request([]) == cache.request_union([]) == cache.prefetch([]) == ((), (), (), ())
    assert cache.resident == frozenset()


# A policy from outside


@contextlib.contextmanager
def registered(name, cls, **options):
    register_policy(name, **options)(cls)
    try:
        yield
    finally:
        del p._POLICIES[name]


class MRU:
    """Evicts the entry that was used last."""

    @staticmethod
    def used(s, e, new):
        if not new:
            unlink(s, e)
        append(s, e)

    @staticmethod
    def victim(s):
        e = s[p.OLDER, s.shape[1] - 1]
        while s[p.PINNED, e]:
            e = s[p.OLDER, e]
        return e

    @staticmethod
    def forget(s, e):
        unlink(s, e)


def mru_misses(requests, capacity):
    """A list with the newest expert last."""
    order, misses = [], 0
    for request in requests if len(requests[0]) <= capacity else [[e] for r in requests for e in r]:
        for e in [e for e in request if e not in order]:
            misses += 1
            if len(order) == capacity:
                order.remove(next(x for x in reversed(order) if x not in request))
            order.insert(0, e)
        for e in reversed(request):
            order.remove(e)
            order.append(e)
    return misses


def a_table(k=2, **more):
    S = sticky_choices(np.random.default_rng(3), (2, 2, 40, k), 6, stay=0.3).astype(np.uint8)
    return RouteTable(S=S, n_experts=6, mask=np.ones((2, 40), bool), **more)


def test_a_policy_from_outside_works_everywhere():
    table = a_table()
    with registered("mru", MRU):
        assert policy_names()[-1] == "mru"
        assert p.find_policy("mru").description == "Evicts the entry that was used last."
        for C in range(1, 7):
            expected = [[mru_misses(rows.tolist(), C) for rows in layer] for layer in table.S]
            result = simulate(table, policy="mru", capacity=C)
            assert [c.misses for c in result.caches] == [sum(layer) for layer in expected]
            cache = Cache(policy="mru", capacity=C)
            assert sum(len(cache.request(r).loads) for r in table.S[0, 0].tolist()) == expected[0][0]
        curve = miss_curve(table, policy="mru")
        found = study(table, policies=["lru", "mru", "belady"], capacities=[3])
        assert found.results["mru"][3].misses == curve.misses[:, 2].sum()
        assert (curve.misses.sum(0) >= miss_curve(table, policy="belady").misses.sum(0)).all()
        assert "mru" in study(table, capacities=[3]).results
    with pytest.raises(StickyError, match=r"^Unknown policy 'mru'"):
        simulate(table, policy="mru", capacity=2)


def test_a_policy_without_its_functions_or_with_a_taken_name_is_refused():
    with pytest.raises(StickyError, match=r"^Policy 'lru' is registered twice; choose another name\.$"):
        register_policy("lru")(MRU)
    for missing in ("used", "victim"):
        without = type("Half", (), {name: f for name, f in vars(MRU).items() if name in {"used", "victim"} - {missing}})
        with pytest.raises(StickyError, match=rf"^Policy 'half': Half has no function '{missing}'\.$"):
            register_policy("half")(without)
    assert "half" not in policy_names()


def test_an_offline_policy_from_outside_knows_the_next_use():
    """Evicts the entry that is needed soonest: the worst there is."""

    class Soonest:
        @staticmethod
        def used(s, e, new):
            s[p.SCORE, s[p.SLOT, e]] = s[p.HINT, e]

        @staticmethod
        def victim(s):
            return p.lowest(s, False)

    S = np.array([[0, 1, 2] * 6])
    with registered("soonest", Soonest, knows="next_use"):
        worst = replay(S, capacity=2, n_experts=3, policy="soonest").misses
        assert worst >= replay(S, capacity=2, n_experts=3, policy="lru").misses
        assert "soonest" not in policy_names(online=True)
        cache = Cache(policy="soonest", capacity=2, requests=[[int(e)] for e in S[0]])
        assert sum(len(cache.request([int(e)]).loads) for e in S[0]) == worst


INTERACTIVE = """
    from stickymoe.locality.policies import append, oldest, register_policy, unlink

    @register_policy("typed")
    class Typed:
        "FIFO, typed at a prompt."
        @staticmethod
        def used(s, e, new):
            if new:
                append(s, e)
        @staticmethod
        def victim(s):
            return oldest(s)
        @staticmethod
        def forget(s, e):
            unlink(s, e)
"""


def test_a_policy_without_a_source_file_is_compiled_and_not_kept_on_disk():
    """Code on disk is found by its file: another definition of the same name would be served the old one."""
    try:
        exec(textwrap.dedent(INTERACTIVE), {"__name__": "__main__"})
        policy = p.find_policy("typed")
        assert policy.source == ""
        assert not any(loop.stats.cache_path for loop in policy.loops)
        table = a_table()
        typed = simulate(table, policy="typed", capacity=3)
        assert [c.misses for c in typed.caches] == [c.misses for c in simulate(table, policy="fifo", capacity=3).caches]
    finally:
        p._POLICIES.pop("typed", None)
    assert p.find_policy("fifo").source != ""
    assert all(loop.stats.cache_path for loop in p.find_policy("fifo").loops)


def test_compiled_loops_are_kept_for_one_version_of_the_code(tmp_path, monkeypatch):
    """Another text of the policy's file, or of the functions it is built from, is another version."""
    file = tmp_path / "mine.py"
    seen = set()
    for text in ("append(s, e)", "append(s, e)  # edited"):
        file.write_text(f"def used(s, e, new):\n    {text}\n")
        scope = {}
        exec(compile(file.read_text(), file, "exec"), scope)
        seen.add(p._digest([scope["used"]]))
    (tmp_path / "policies.py").write_text("edited")
    monkeypatch.setattr(p, "__file__", str(tmp_path / "policies.py"))
    seen.add(p._digest([scope["used"]]))
    assert len(seen) == 3
