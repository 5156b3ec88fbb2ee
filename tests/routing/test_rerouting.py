"""Rules that look at a cache: against plain loops, and what they promise."""

import numpy as np
import pytest
import torch
from cases import choose, router_input, steps
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality.cache import Cache
from stickymoe.locality.policies import VAR
from stickymoe.locality.replay import simulate
from stickymoe.routing.rerouting import CachePrior, DropCold, ExpertCache, MaxRank, TauReroute
from stickymoe.routing.rules import RouterState, RoutingRule
from stickymoe.routing.trace import RoutingTrace
from stickymoe.variants import Site, variant
from strategies import documents, seeds

METHODS = {
    "prior": lambda cache, kept, strength: CachePrior(cache=cache, kept=kept, lam=strength),
    "rank": lambda cache, kept, strength: MaxRank(cache=cache, kept=kept, rank=int(10 * strength)),
    "tau": lambda cache, kept, strength: TauReroute(cache=cache, kept=kept, tau=strength),
}


@pytest.mark.parametrize("method", METHODS)
@given(rng=seeds(), T=st.integers(1, 12), k=st.integers(1, 3), data=st.data())
def test_the_choice_is_that_of_the_loops(method, rng, T, k, data):
    N = 5
    doc = data.draw(st.one_of(st.none(), documents(1, T).map(torch.from_numpy)))
    capacity, kept = data.draw(st.integers(k, N)), data.draw(st.integers(0, k))
    strength = data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.9]))
    logits = torch.tensor(rng.standard_normal((1, T, N)))
    x = router_input(rng, 1, T, doc)
    rule = METHODS[method](ExpertCache(capacity=capacity), kept, strength)
    g, S, _ = choose(rule, logits, k, x)
    expected = reference.cache_aware(
        logits[0].tolist(),
        g[0].tolist(),
        k,
        capacity,
        kept,
        method,
        10 * strength if method == "rank" else strength,
        None if doc is None else doc[0].tolist(),
    )
    assert S[0].tolist() == expected


@pytest.mark.parametrize("method", METHODS)
def test_without_strength_or_with_all_kept_nothing_changes(method):
    rng = np.random.default_rng(0)
    logits, x = torch.tensor(rng.standard_normal((2, 30, 6))), router_input(rng, 2, 30)
    plain = RoutingRule(2)(logits, x).S
    for rule in (METHODS[method](ExpertCache(capacity=3), 0, 0.0), METHODS[method](ExpertCache(capacity=3), 2, 0.9)):
        assert torch.equal(choose(rule, logits, 2, x)[1], plain)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "sieve"])
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_of_the_trace_finds_the_loads_of_the_rule_s_own_cache(method, policy):
    """The rule's cache and the simulator are one: what it saw as resident is what a device would have."""
    rng = np.random.default_rng(1)
    logits, x = torch.tensor(rng.standard_normal((1, 60, 6))), router_input(rng, 1, 60)
    rule = METHODS[method](ExpertCache(capacity=3, policy=policy), 1, 0.5)
    _, S, state = choose(rule, logits, 2, x)
    cache = Cache(capacity=3, policy=policy)
    for experts in S[0].tolist():
        cache.request(experts)
    held = state.values["cache"].view(VAR + 1, -1)[0, :6]
    assert set(torch.nonzero(held >= 0).flatten().tolist()) == cache.resident


def test_more_strength_means_fewer_misses():
    rng = np.random.default_rng(2)
    logits, x = torch.tensor(rng.standard_normal((1, 400, 8))), router_input(rng, 1, 400)
    for method, strengths in (("prior", (0.0, 0.3, 1.0)), ("rank", (0.0, 0.4, 0.8)), ("tau", (0.0, 0.4, 0.8))):
        misses = []
        for strength in strengths:
            g, S, _ = choose(METHODS[method](ExpertCache(capacity=3), 1, strength), logits, 2, x)
            misses.append(
                simulate(RoutingTrace.from_choice(g[None], S[None], g.gather(-1, S)[None]).table(), capacity=3).misses
            )
        assert misses[0] > misses[1] > misses[2], method


@given(rng=seeds(), T=st.integers(1, 12), k=st.integers(1, 3), share=st.sampled_from([0.0, 0.5, 1.0, 5.0]))
def test_drop_cold_skips_light_misses_only(rng, T, k, share):
    N = 5
    logits, x = torch.tensor(rng.standard_normal((1, T, N))), router_input(rng, 1, T)
    plain = RoutingRule(k)(logits, x)
    routing = RoutingRule(k, skip=DropCold(cache=ExpertCache(capacity=3), share=share))(logits, x)
    assert torch.equal(routing.S, plain.S)
    cache = Cache(capacity=3)
    for t in range(T):
        experts, before, after = plain.S[0, t].tolist(), plain.w[0, t].tolist(), routing.w[0, t].tolist()
        pairs = zip(experts, before, strict=True)
        kept = [j == 0 or e in cache.resident or w >= share * sum(before) / k for j, (e, w) in enumerate(pairs)]
        assert [w > 0 for w in after] == kept
        assert sum(after) == pytest.approx(sum(before))
        cache.request([e for e, keep in zip(experts, kept, strict=True) if keep])


def test_a_skipped_expert_is_no_access():
    rng = np.random.default_rng(3)
    logits, x = torch.tensor(rng.standard_normal((1, 50, 6))), router_input(rng, 1, 50)
    routing = RoutingRule(2, skip=DropCold(cache=ExpertCache(capacity=2), share=2.0))(logits, x)
    table = RoutingTrace.from_choice(routing.g[None], routing.S[None], routing.w[None]).table()
    assert table.skips
    found = simulate(table, capacity=2)
    used = int((routing.w > 0).sum())
    assert found.hits + found.misses == used < 100
    assert table.used_slots == used


def test_decoding_continues_the_cache():
    rng = np.random.default_rng(4)
    logits, x = torch.tensor(rng.standard_normal((2, 20, 6))), router_input(rng, 2, 20)
    for name in ("cache_prior", "max_rank", "tau_reroute", "drop_cold"):
        rule = variant(name, capacity=3).parts(Site(0, 6, 6, 2, 50)).rule
        whole, state = rule(logits, x), RouterState()
        for t in range(20):
            part = rule(logits[:, t : t + 1], steps(x, t, t + 1), state)
            state = part.state
            assert torch.equal(part.S, whole.S[:, t : t + 1])
            torch.testing.assert_close(part.w, whole.w[:, t : t + 1])


def test_bad_settings_are_refused():
    with pytest.raises(StickyError, match="a policy that a device can run"):
        ExpertCache(capacity=2, policy="belady")
    with pytest.raises(StickyError, match=r"variant\.policy: got 'opt', expected a cache policy"):
        variant("cache_prior", policy="opt")
    with pytest.raises(StickyError, match="keep a cache of their own"):
        variant("cache_prior+drop_cold")
