"""Which cache is asked for what, and in which order: against plain loops, and by the laws of the two orders."""

from collections import defaultdict
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reference
from stickymoe.errors import StickyError
from stickymoe.locality import streams as streams_module
from stickymoe.locality.cache import Cache
from stickymoe.locality.metrics import cache_hit_rate_all_by_layer, cache_hit_rate_by_layer
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from strategies import costly, seeds, sticky_choices, tables


def table_of(S, n_experts, **more):
    S = np.asarray(S)
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(S.shape[1:3], bool), **more)


@st.composite
def phased_tables(draw):
    """Tables with prompts: every token in prefill or decode, or runs of both."""
    table = draw(tables())
    phase = draw(hnp.arrays(np.uint8, table.mask.shape, elements=st.integers(0, 1)))
    if draw(st.booleans()):
        phase = (np.arange(phase.shape[1]) >= draw(st.integers(0, phase.shape[1]))).astype(np.uint8)
        phase = np.broadcast_to(phase, table.mask.shape)
    return replace(table, phase=phase, share_block=draw(st.integers(1, table.n_layers)))


@st.composite
def recorded_tables(draw):
    """Tables of a runtime that prefetched: any number of experts before each token."""
    table = draw(tables() | phased_tables())
    return replace(table, predicted=draw(predictions(table, empty=st.just(True))).astype(np.uint8))


@st.composite
def predictions(draw, table, empty):
    """Different experts for each token; if `empty`, none in some places."""
    rng, shape = draw(seeds()), (*table.S.shape[:3], draw(st.integers(1, table.n_experts)))
    sets = sticky_choices(rng, shape, table.n_experts, stay=0.5)
    if draw(empty):
        sets[rng.random(shape) < draw(st.sampled_from([0.3, 1.0]))] = table.n_experts
    return sets


@st.composite
def accesses(draw, table, *, batch=False):
    L = table.n_layers
    sets = None
    kind = "none" if batch else draw(st.sampled_from(["none", "previous", "predictor"]))
    if kind == "predictor":
        sets = draw(predictions(table, st.booleans()))
    return Access(
        order=draw(st.sampled_from(["layer", "decode"])),
        pool=draw(st.booleans()),
        share_block=draw(st.sampled_from([None, "full", *range(1, L + 1)])),
        warm=draw(st.booleans()),
        top1=draw(st.booleans()),
        batch=batch,
        prefetch={"none": None, "previous": "previous", "predictor": sets}[kind],
        on_miss=draw(st.sampled_from(["load", "bypass"])),
    )


def texts(table, batch):
    """The forward passes of every text: a pass is a list of real tokens (b, t)."""
    B, T = table.mask.shape
    steps = [[(b, t) for b in range(B)] for t in range(T)] if batch else [[(b, t)] for b in range(B) for t in range(T)]
    found = []
    for step in steps:
        if all(reference.document_start(table.doc, b, t) == t for b, t in step):
            found.append([])
            in_prompt = False
        tokens = [(b, t) for b, t in step if table.mask[b, t]]
        if not tokens:
            continue
        prompt = table.phase is not None and all(table.phase[b, t] == 0 for b, t in tokens)
        if prompt and in_prompt:
            found[-1][-1] += tokens
        else:
            found[-1].append(tokens)
        in_prompt = prompt
    return found


def visits(table, access):
    """Every (text, layer, forward pass), texts one after another, in the order of the device."""
    L = table.n_layers
    for number, passes in enumerate(texts(table, access.batch)):
        if access.order == "layer":
            yield from ((number, l, tokens) for l in range(L) for tokens in passes)
        else:
            yield from ((number, l, tokens) for tokens in passes for l in range(L))


def predicted(table, access, l, tokens, k):
    """The experts to prefetch before a pass: of decoded tokens only."""
    (b, t), *others = tokens
    if others or (table.phase is not None and table.phase[b, t] == 0):
        return None
    sets = access.prefetch
    if isinstance(sets, str) and sets == "recorded":
        sets = table.predicted
    if isinstance(sets, np.ndarray):
        return [int(e) for e in sets[l, b, t] if e != table.n_experts] or None
    if sets == "previous" and reference.is_pair(table.mask, table.doc, b, t):
        return [int(e) for e in table.S[l, b, t - 1, :k]]
    return None


def asked_of_caches(table, access):
    """For each cache and text the (expected, request) in order; a request of several tokens is a union, a set."""
    L, k = table.n_layers, 1 if access.top1 else table.top_k
    share = {None: table.share_block, "full": L}.get(access.share_block, access.share_block)
    n_caches = 1 if access.pool else -(-L // share)
    asked = [defaultdict(list) for _ in range(n_caches)]
    for text, l, tokens in visits(table, access):
        first = l // share * table.n_experts
        expected = predicted(table, access, l, tokens, k)
        experts = [first + int(e) for b, t in tokens for e in table.S[l, b, t, :k]]
        request = experts if len(tokens) == 1 else set(experts)
        cache = asked[0 if access.pool else l // share]
        cache[0 if access.warm else text].append((expected and [first + e for e in expected], request))
    return asked


def plain(table, access, policy, C):
    """The counts of each cache, with cache objects and no cleverness."""
    results = []
    for asked in asked_of_caches(table, access):
        everything = [sorted(request) for text in asked.values() for _, request in text]
        total, stats = [0, 0, 0, 0, 0, 0], []
        for text in asked.values():
            requests = [list(request) for _, request in text]
            known = {"rank": everything, "next_use": requests, None: None}[find_policy(policy).knows]
            cache = Cache(policy=policy, capacity=C, on_miss=access.on_miss, requests=known)
            unused = set()
            for expected, request in text:
                if expected is not None:
                    fetched = cache.prefetch(expected)
                    total[2] += len(fetched.loads)
                    total[3] += len(unused & set(fetched.evictions))
                    total[4] += len(fetched.evictions)
                    assert not fetched.bypassed
                    unused = (unused - set(fetched.evictions)) | {load.expert for load in fetched.loads}
                outcome = cache.request_union(request) if isinstance(request, set) else cache.request(request)
                assert set(outcome.hits) | {load.expert for load in outcome.loads} == set(request)
                total[0] += len(request)
                total[1] += len(outcome.loads)
                unused -= set(outcome.hits)
                total[3] += len(unused & set(outcome.evictions))
                unused -= set(outcome.evictions)
                total[4] += len(outcome.evictions)
                total[5] += len(outcome.bypassed)
            total[3] += len(unused)
            stats.append(counts_of(cache.stats))
        assert total == [sum(values) for values in zip(*stats, strict=True)] or not stats
        results.append(tuple(total))
    return results


def counts_of(stats):
    return stats.accesses, stats.misses, stats.prefetched, stats.wasted, stats.evictions, stats.bypassed


def allowed(policy, access):
    """The access without what a policy that knows the trace refuses."""
    if find_policy(policy).online:
        return access
    return replace(access, on_miss="load", prefetch=None if policy == "belady" else access.prefetch)


def counts(result):
    return [counts_of(stats) for stats in result.caches]


@pytest.mark.parametrize("policy", policy_names())
@costly
@given(data=st.data(), C=st.integers(1, 9))
def test_prompts_are_one_union_per_layer(policy, data, C):
    table = data.draw(phased_tables())
    access = allowed(policy, data.draw(accesses(table, batch=False)))
    result = simulate(table, policy=policy, capacity=C, access=access)
    assert counts(result) == plain(table, access, policy, C)
    assert result.tokens == table.mask.sum()


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "belady"])
@costly
@given(data=st.data(), C=st.integers(1, 9))
def test_recorded_prefetches_are_replayed(policy, data, C):
    table = data.draw(recorded_tables())
    access = allowed(policy, replace(data.draw(accesses(table)), prefetch="recorded"))
    result = simulate(table, policy=policy, capacity=C, access=access)
    assert counts(result) == plain(table, access, policy, C)
    given = replace(access, prefetch=np.array(table.predicted, np.int64))
    assert simulate(replace(table, predicted=None), policy=policy, capacity=C, access=given) == result


def test_the_last_token_of_a_prompt_is_the_previous_one_of_the_first_that_is_decoded():
    """With one slot, the union of the prompt leaves its highest expert; the prefetch replaces it."""
    table = RouteTable(
        S=np.array([[[[2], [1], [1], [0]]]]),
        n_experts=3,
        mask=np.ones((1, 4), bool),
        phase=np.array([[0, 0, 1, 1]]),
    )
    (stats,) = simulate(table, capacity=1, access=Access(prefetch="previous")).caches
    assert (stats.misses, stats.prefetched, stats.wasted, stats.evictions) == (2 + 0 + 1, 1, 0, 1 + 1 + 1)


@pytest.mark.parametrize("policy", policy_names())
@costly
@given(data=st.data(), C=st.integers(1, 9))
def test_a_batch_is_one_union_per_step_and_layer(policy, data, C):
    table = data.draw(tables() | phased_tables())
    access = allowed(policy, data.draw(accesses(table, batch=True)))
    assert counts(simulate(table, policy=policy, capacity=C, access=access)) == plain(table, access, policy, C)


@costly
@given(data=st.data(), C=st.integers(1, 5), policy=st.sampled_from(policy_names()))
def test_a_batch_of_one_sequence_is_that_sequence(data, C, policy):
    table = data.draw(tables() | phased_tables())
    table = replace(
        table,
        S=table.S[:, :1],
        mask=table.mask[:1],
        doc=None if table.doc is None else table.doc[:1],
        phase=None if table.phase is None else table.phase[:1],
    )
    access = allowed(policy, data.draw(accesses(table, batch=True)))
    alone = simulate(table, policy=policy, capacity=C, access=replace(access, batch=False))
    assert simulate(table, policy=policy, capacity=C, access=access) == alone


@costly
@given(data=st.data(), C=st.integers(1, 5), policy=st.sampled_from(policy_names()))
def test_a_trace_of_decoded_tokens_only_needs_no_phase(data, C, policy):
    table = data.draw(tables())
    access = allowed(policy, data.draw(accesses(table)))
    decoded = replace(table, phase=np.ones(table.mask.shape, np.uint8))
    without = simulate(table, policy=policy, capacity=C, access=access)
    assert simulate(decoded, policy=policy, capacity=C, access=access) == without


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "belady"])
@costly
@given(data=st.data())
def test_no_policy_beats_belady_where_unions_fit_into_the_cache(policy, data):
    table = data.draw(phased_tables())
    access = replace(data.draw(accesses(table, batch=data.draw(st.booleans()))), prefetch=None, on_miss="load")
    asked = [request for cache in asked_of_caches(table, access) for text in cache.values() for _, request in text]
    C = data.draw(st.integers(max(map(len, asked), default=1), table.n_experts * table.n_layers))
    bound = simulate(table, policy="belady", capacity=C, access=access)
    assert simulate(table, policy=policy, capacity=C, access=access).misses >= bound.misses


def test_a_prompt_of_one_text_asks_once_for_each_expert():
    """Three prompt tokens use experts 0, 1, 0; then 0 is decoded. Padding asks for nothing; a text ends a prompt."""
    table = RouteTable(
        S=np.array([[[[0], [1], [0], [0], [2]], [[0], [1], [0], [1], [1]]]]),
        n_experts=3,
        mask=np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool),
        phase=np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]),
        doc=np.array([[0, 0, 0, 0, 0], [1, 1, 2, 2, 2]]),
    )
    (stats,) = simulate(table, capacity=3).caches
    assert (stats.accesses, stats.misses) == (3 + (2 + 2 + 1), 2 + (2 + 2))
    (stats,) = simulate(table, capacity=1).caches
    assert stats.misses == 2 + 1 + (2 + 2) + 0  # 1 is resident after each union


def test_a_union_larger_than_the_cache_serves_its_hits_first():
    cache = Cache(capacity=2)
    cache.request([3, 1])
    outcome = cache.request_union([0, 1, 2, 3, 4, 1])
    assert outcome.hits == (1, 3)
    assert [load.expert for load in outcome.loads] == [0, 2, 4]
    assert cache.resident == {0, 4}  # 0 and 2 together, then 4 in place of 2, which was used first


@pytest.mark.parametrize("policy", policy_names())
@costly
@given(data=st.data(), C=st.integers(1, 9))
def test_simulation_equals_caches_asked_in_order(policy, data, C):
    table = data.draw(tables())
    access = data.draw(accesses(table))
    if policy == "belady" and access.prefetch is not None:
        with pytest.raises(StickyError, match="belady bounds policies that load on demand"):
            simulate(table, policy=policy, capacity=C, access=access)
        return
    access = allowed(policy, access)
    result = simulate(table, policy=policy, capacity=C, access=access)
    assert counts(result) == plain(table, access, policy, C)
    assert result.tokens == table.mask.sum()
    k = 1 if access.top1 else table.top_k
    assert result.hits + result.misses == table.mask.sum() * table.n_layers * k


@costly
@given(data=st.data(), C=st.integers(1, 5), policy=st.sampled_from(policy_names()))
def test_the_size_of_blocks_makes_no_difference(data, C, policy):
    table = data.draw(tables() | phased_tables())
    access = data.draw(accesses(table, batch=data.draw(st.booleans())))
    access = allowed(policy, access)
    whole = simulate(table, policy=policy, capacity=C, access=access)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams_module, "BLOCK", 1)
        assert simulate(table, policy=policy, capacity=C, access=access) == whole


# By law


@costly
@given(tables(), st.integers(1, 5))
def test_the_papers_hit_rate_comes_out_of_the_general_machinery(table, C):
    for top1, metric in ((True, cache_hit_rate_by_layer), (False, cache_hit_rate_all_by_layer)):
        result = simulate(table, capacity=C, access=Access(top1=top1, order="decode"))
        assert 1 - result.miss_rate == pytest.approx(metric(table, C).mean(), nan_ok=True)


@costly
@given(tables(), st.integers(1, 5), st.sampled_from(policy_names()))
def test_with_slots_of_their_own_layers_do_not_feel_the_order(table, C, policy):
    by_order = [simulate(table, policy=policy, capacity=C, access=Access(order=order)) for order in ("layer", "decode")]
    assert by_order[0] == by_order[1]


@costly
@given(st.data())
def test_a_pool_below_one_round_of_the_layers_never_hits_in_decode_order(data):
    """Unshared weights: before a layer is asked again, the others have asked for (L−1)·k entries."""
    L, k = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    S = sticky_choices(data.draw(seeds()), (L, 2, 12, k), 5, stay=0.8)
    C = data.draw(st.integers(1, (L - 1) * k))
    pool = Access(order="decode", pool=True)
    assert simulate(table_of(S, 5), capacity=C, access=pool).hits == 0
    roomy = simulate(table_of(np.broadcast_to(S[:, :, :1], S.shape), 5), capacity=L * k, access=pool)
    assert roomy.misses == 2 * L * k  # one entry more a layer, and what stays is there


@costly
@given(tables(), st.integers(1, 5))
def test_full_sharing_is_one_cache_for_all_layers(table, C):
    """With every layer using the same tensors, sharing and a pool are the same thing."""
    shared = simulate(table, capacity=C, access=Access(order="decode", share_block="full"))
    pooled = simulate(table, capacity=C, access=Access(order="decode", share_block="full", pool=True))
    assert shared == pooled
    assert len(shared.caches) == 1


def test_shared_weights_make_layers_hit_for_each_other():
    """All layers choose expert t: unshared, every layer loads it; in blocks of two, one of each block does."""
    S = np.broadcast_to(np.arange(3)[:, None], (4, 1, 3, 1))
    for share, misses in ((1, 12), (2, 6), (3, 6), (4, 3), ("full", 3)):
        access = Access(order="decode", share_block=share)
        assert simulate(table_of(S, 3), capacity=1, access=access).misses == misses
    alone = Access(order="layer", share_block="full")
    assert simulate(table_of(S, 3), capacity=1, access=alone).misses == 12  # the next layer comes too late
    assert simulate(table_of(S, 3), capacity=3, access=alone).misses == 3


@costly
@given(tables(), st.integers(0, 3))
def test_the_previous_set_is_there_already_in_a_cache_of_ones_own(table, spare):
    C = table.top_k + spare
    result = simulate(table, capacity=C, access=Access(prefetch="previous"))
    assert result.loads == result.misses == simulate(table, capacity=C).misses


@costly
@given(tables(), st.integers(0, 3))
def test_a_perfect_predictor_leaves_no_miss_and_wastes_nothing(table, spare):
    access = Access(prefetch=np.array(table.S))
    result = simulate(table, capacity=table.top_k + spare, access=access)
    assert (result.misses, result.wasted) == (0, 0)
    assert result.loads == simulate(table, capacity=table.top_k + spare).misses


def test_a_wrong_predictor_only_wastes():
    S = np.zeros((1, 1, 4, 1), int)
    wrong = np.array([1, 2, 3, 1]).reshape(1, 1, 4, 1)
    result = simulate(table_of(S, 4), capacity=2, access=Access(prefetch=wrong))
    assert (result.misses, result.loads, result.wasted) == (1, 5, 4)


# Refused


@pytest.mark.parametrize(
    ("access", "says"),
    [
        (
            {"batch": True, "prefetch": "previous"},
            r"^prefetch: not supported for a batch in lockstep; omit batch or prefetch\.$",
        ),
        ({"on_miss": "drop"}, r"^on_miss: got 'drop', expected load or bypass\.$"),
        ({"order": "random"}, r"^order: got 'random', expected layer or decode\.$"),
        ({"share_block": 0}, r"^share_block: got 0, expected a whole number of layers ≥ 1"),
        ({"share_block": 3}, r"^share_block: got 3, expected at most the 2 layers of the trace\.$"),
        ({"prefetch": "next"}, r"^prefetch: got 'next', expected previous, recorded, or predicted sets\.$"),
        (
            {"prefetch": "recorded"},
            r"^prefetch: got recorded, but the trace has no prefetches \(predicted\.npy\); omit prefetch\.$",
        ),
        (
            {"prefetch": np.zeros((2, 1, 3, 1), int)},
            r"^prefetch: got sets of shape \(2, 1, 3, 1\), expected \[2, 1, 4, …\]",
        ),
        (
            {"prefetch": np.full((2, 1, 4, 1), 9)},
            r"^prefetch: got experts \(9, 9\), expected 0 … 3, or 4 for an empty place\.$",
        ),
    ],
)
def test_access_is_refused_in_one_line(access, says, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets, who checks no types
    with pytest.raises(StickyError, match=says):
        simulate(table_of(np.zeros((2, 1, 4, 1), int), 4), capacity=2, access=Access(**access))


def test_slots_per_cache_must_be_as_many_as_caches():
    table = table_of(np.zeros((2, 1, 4, 1), int), 4)
    assert simulate(table, capacity=[1, 2]).slots == 3
    with pytest.raises(StickyError, match=r"^capacity: got 3 numbers, expected one, or one for each of 2 caches\.$"):
        simulate(table, capacity=[1, 2, 3])
