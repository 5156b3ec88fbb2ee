"""The policy `router`: against plain loops, and by its law. A cache loads no more than the router swaps."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import ConfigError
from stickymoe.locality.cache import Cache
from stickymoe.locality.plan import plan
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.replay import miss_curve, replay, simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.study import default_policies, study
from stickymoe.locality.table import RouteTable
from strategies import costly, documents, masks, seeds, sticky_choices, thorough


@st.composite
def routed_tables(draw, *, phases=True):
    """Routers that swap residents at random, any number at a time, and tokens that choose among them."""
    L, B, T, N = (draw(st.integers(1, high)) for high in (3, 2, 12, 7))
    C = draw(st.integers(1, N))
    k = draw(st.integers(1, C))
    rng, often = draw(seeds()), draw(st.sampled_from([0.1, 0.4, 1.0]))
    residents = np.empty((L, B, T, C), np.uint8)
    S = np.empty((L, B, T, k), np.uint8)
    for at in np.ndindex(L, B):
        kept = rng.permutation(N)[:C]
        for t in range(T):
            if rng.random() < often and C < N:
                place = rng.integers(C)
                kept[place] = rng.choice(np.setdiff1d(np.arange(N), kept))
            residents[*at, t] = kept
            S[*at, t] = rng.permutation(kept)[:k]
    phase = (np.arange(T) >= draw(st.integers(0, T))).astype(np.uint8)
    return RouteTable(
        S=S,
        n_experts=N,
        mask=draw(masks(B, T)),
        doc=draw(st.none() | documents(B, T)),
        phase=np.broadcast_to(phase, (B, T)) if phases and draw(st.booleans()) else None,
        residents=residents,
        share_block=draw(st.integers(1, L)),
    )


class Plain:
    """The policy in plain words: what is held, the oldest use first; one set for each layer."""

    def __init__(self, capacity):
        self.capacity, self.held, self.kept = capacity, [], {}
        self.hits = self.misses = self.evictions = self.prefetched = 0

    def serve(self, experts, asked=True):
        self.hits += asked * sum(e in self.held for e in experts)
        for e in experts:
            if e in self.held:
                continue
            if len(self.held) == self.capacity:
                kept = set().union(*self.kept.values())
                free = [x for x in self.held if x not in experts]
                self.held.remove(next((x for x in free if x not in kept), free[0]))
                self.evictions += 1
            self.held.append(e)
            self.misses += asked
            self.prefetched += not asked
        for e in reversed(experts):
            self.held.remove(e)
            self.held.append(e)

    def request(self, experts):
        if len(experts) <= self.capacity:
            self.serve(experts)
        else:
            for e in experts:
                self.serve([e])

    def union(self, experts):
        experts = sorted(experts)
        if len(experts) <= self.capacity:
            return self.serve(experts)
        kept = set().union(*self.kept.values())
        self.serve([e for e in experts if e in self.held])
        rest = [e for e in experts if e not in self.held]
        rest.sort(key=lambda e: e in kept)
        for i in range(0, len(rest), self.capacity):
            self.serve(rest[i : i + self.capacity])
        return None


def passes_of(table):
    """Texts of forward passes, each a list of tokens."""
    for b in range(table.mask.shape[0]):
        text, in_prompt = [], False
        for t in range(table.mask.shape[1]):
            if table.starts[b, t] and text:
                yield text
                text, in_prompt = [], False
            if table.starts[b, t]:
                in_prompt = False
            if not table.mask[b, t]:
                continue
            prompt = table.phase is not None and table.phase[b, t] == 0
            if prompt and in_prompt:
                text[-1].append((b, t))
            else:
                text.append([(b, t)])
            in_prompt = prompt
        if text:
            yield text


def plain(table, access, C):
    """The counts of each cache in decode order, by `Plain`."""
    L, N = table.n_layers, table.n_experts
    share = table.share_block
    per_cache = L if access.pool else share
    total = np.zeros((-(-L // per_cache), 4), int)
    caches = {}
    for text in passes_of(table):
        if not access.warm or not caches:
            for i, cache in caches.items():
                total[i] += cache.hits, cache.misses, cache.evictions, cache.prefetched
            caches = {i: Plain(min(C, N * -(-per_cache // share))) for i in range(len(total))}
        for before, tokens in zip([None, *text], text, strict=False):
            for layer in range(L):
                cache, first = caches[layer // per_cache], layer % per_cache // share * N
                b, t = tokens[-1]
                decoded = table.phase is None or table.phase[b, t] == 1
                if access.prefetch and decoded and before and before[-1] == (b, t - 1):
                    cache.serve([first + int(e) for e in table.S[layer, b, t - 1]][: cache.capacity], asked=False)
                cache.kept[layer] = {first + int(e) for e in table.residents[layer, b, t] if e < N}
                if len(tokens) == 1:
                    cache.request([first + int(e) for e in table.S[layer, b, t]])
                else:
                    cache.union({first + int(e) for b, t in tokens for e in table.S[layer, b, t]})
    for i, cache in caches.items():
        total[i] += cache.hits, cache.misses, cache.evictions, cache.prefetched
    return total.tolist()


def counts(found):
    return [[c.hits, c.misses, c.evictions, c.prefetched] for c in found.caches]


@costly
@given(table=routed_tables(), C=st.integers(1, 9), data=st.data())
def test_the_replay_counts_what_plain_loops_count(table, C, data):
    if data.draw(st.booleans()):  # some routers keep fewer
        rng = data.draw(seeds())
        table = replace(
            table, residents=np.where(rng.random(table.residents.shape) < 0.3, table.n_experts, table.residents)
        )
    access = Access(
        order="decode",
        pool=data.draw(st.booleans()),
        warm=data.draw(st.booleans()),
        prefetch=data.draw(st.sampled_from([None, "previous"])),
    )
    assert counts(simulate(table, policy="router", capacity=C, access=access)) == plain(table, access, C)


@thorough
@given(table=routed_tables(phases=False), more=st.integers(0, 2))
def test_a_cache_loads_no_more_than_the_router_swaps(table, more):
    """With a slot for every resident: the first fill, and one load for each expert that becomes resident."""
    table = replace(table, share_block=1)
    C = table.residents.shape[3]
    allowed = []
    for layer in table.residents:
        swaps = 0
        for text in passes_of(table):
            sets = [set(layer[b, t].tolist()) for ((b, t),) in text]
            swaps += C + sum(len(now - before) for before, now in pairwise(sets))
        allowed.append(swaps)
    found = simulate(table, policy="router", capacity=C + more)
    assert all(c.misses <= most for c, most in zip(found.caches, allowed, strict=True))


@costly
@given(table=routed_tables(phases=False), C=st.integers(1, 7))
def test_cache_objects_serve_the_same(table, C):
    table = replace(table, share_block=1)
    found = simulate(table, policy="router", capacity=C)
    for layer in range(table.n_layers):
        hits = misses = evictions = 0
        for text in passes_of(table):
            cache = Cache(policy="router", capacity=C)
            for ((b, t),) in text:
                cache.set_residents(table.residents[layer, b, t].tolist())
                cache.request(table.S[layer, b, t].tolist())
            hits, misses = hits + cache.stats.hits, misses + cache.stats.misses
            evictions += cache.stats.evictions
        stats = found.caches[layer]
        assert (stats.hits, stats.misses, stats.evictions) == (hits, misses, evictions)


def test_an_expert_that_the_router_keeps_stays():
    cache = Cache(policy="router", capacity=2)
    cache.set_residents([0, 1])
    cache.request([0])
    cache.request([1])
    cache.set_residents([0, 2])
    assert cache.request([2]).evictions == (1,), "LRU would evict 0"
    cache.set_residents([0, 2, 3], layer=1)
    cache.set_residents([], layer=0)
    assert cache.request([9]).evictions == (0,), "all are kept by the other layer: the least recently used leaves"
    with pytest.raises(ConfigError, match=r"^residents: got experts \[-1\], expected indices ≥ 0\.$"):
        cache.set_residents([-1])


def test_other_policies_ignore_resident_sets():
    cache = Cache(policy="lru", capacity=1)
    cache.set_residents([0])
    cache.request([0])
    assert cache.request([1]).evictions == (0,)


def test_it_is_offered_only_where_there_are_resident_sets():
    says = (
        r"^policy: got router, but the trace has no resident sets \(residents\.npy\): choose another policy, or record"
    )
    S = sticky_choices(np.random.default_rng(0), (2, 1, 20, 2), 4, stay=0.5)
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 20), bool))
    assert "router" not in policy_names()
    assert "router" in policy_names(online=True, routed=True)
    assert find_policy("router").online
    assert "router" not in study(table).results
    for run in (
        lambda: simulate(table, policy="router", capacity=2),
        lambda: miss_curve(table, policy="router"),
        lambda: study(table, policies=["router"]),
        lambda: replay([[0, 1]], policy="router", capacity=1, n_experts=2),
    ):
        with pytest.raises(ConfigError, match=says):
            run()
    routed = replace(table, residents=np.array(table.S))
    assert list(study(routed).results) == ["lru", "lfu", "fifo", "sieve", "router", "static", "belady"]
    for access in (Access(batch=True), Access(on_miss="bypass")):
        assert "router" not in default_policies(access, routed)
    with pytest.raises(ConfigError, match=r"^policy: router is not supported for a batch in lockstep; omit batch"):
        simulate(routed, policy="router", capacity=2, access=Access(batch=True))
    with pytest.raises(ConfigError, match=r"^router admits every load"):
        simulate(routed, policy="router", capacity=2, access=Access(on_miss="bypass"))
    points = plan(routed, "raspberry-pi-5", policies=["router"], expert_bytes=1000.0, other_bytes=0.0).points
    assert list(points) == ["router"]
