"""Which cache is asked for what, and in which order: against plain loops, and by the laws of the two orders."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality import streams as streams_module
from stickymoe.locality.cache import INFORMED, ONLINE, POLICIES, Cache
from stickymoe.locality.metrics import cache_hit_rate, cache_hit_rate_all
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from strategies import costly, seeds, sticky_choices, tables


def table_of(S, n_experts, **more):
    S = np.asarray(S)
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(S.shape[1:3], bool), **more)


@st.composite
def accesses(draw, table):
    L = table.n_layers
    sets = None
    kind = draw(st.sampled_from(["none", "previous", "predictor"]))
    if kind == "predictor":
        shape = (*table.S.shape[:3], draw(st.integers(1, table.n_experts)))
        sets = sticky_choices(draw(seeds()), shape, table.n_experts, stay=0.5)
    return Access(
        order=draw(st.sampled_from(["layer", "decode"])),
        pool=draw(st.booleans()),
        share_block=draw(st.none() | st.integers(1, L)),
        warm=draw(st.booleans()),
        top1=draw(st.booleans()),
        prefetch={"none": None, "previous": "previous", "predictor": sets}[kind],
    )


def visits(table, access):
    """Every (document, layer, b, t), documents one after another, in the order of the device."""
    L, B, T, _ = table.S.shape
    units = []
    for b in range(B):
        for t in range(T):
            if reference.document_start(table.doc, b, t) == t:
                units.append([])
            units[-1].append((b, t))
    for unit, tokens in enumerate(units):
        if access.order == "layer":
            yield from ((unit, l, b, t) for l in range(L) for b, t in tokens)
        else:
            yield from ((unit, l, b, t) for b, t in tokens for l in range(L))


def plain(table, access, policy, C):
    """(misses, prefetched, wasted) of each cache, with cache objects and no cleverness."""
    L, _, _, k = table.S.shape
    k = 1 if access.top1 else k
    share = L if access.share_block is None else access.share_block
    asked = defaultdict(lambda: defaultdict(list))  # cache -> unit -> [(expected, request)]
    for unit, l, b, t in visits(table, access):
        if not table.mask[b, t]:
            continue
        first = l // share * table.n_experts

        expected = None
        if isinstance(access.prefetch, np.ndarray):
            expected = [first + int(e) for e in access.prefetch[l, b, t]]
        elif access.prefetch == "previous" and reference.is_pair(table.mask, table.doc, b, t):
            expected = [first + int(e) for e in table.S[l, b, t - 1, :k]]
        cache = 0 if access.pool else l // share
        asked[cache][0 if access.warm else unit].append((expected, [first + int(e) for e in table.S[l, b, t, :k]]))
    n_caches = 1 if access.pool else -(-L // share)
    results = []
    for i in range(n_caches):
        everything = [request for unit in asked[i].values() for _, request in unit]
        total = [0, 0, 0]
        for unit in asked[i].values():
            known = everything if policy == "static" else [request for _, request in unit]
            cache = Cache(policy=INFORMED[policy](known) if policy in INFORMED else ONLINE[policy](), capacity=C)
            unused = set()
            for expected, request in unit:
                if expected is not None:
                    fetched = cache.prefetch(expected)
                    total[1] += len(fetched.loads)
                    total[2] += len(unused & set(fetched.evictions))
                    unused = (unused - set(fetched.evictions)) | set(fetched.loads)
                before = cache.resident
                outcome = cache.request(request)
                total[0] += len(outcome.loads)
                used_at_once = set(request) & before if len(request) <= C else set(outcome.hits)
                unused -= used_at_once
                total[2] += len(unused & set(outcome.evictions))
                unused -= set(outcome.evictions)
            total[2] += len(unused)
        results.append(tuple(total))
    return results


@pytest.mark.parametrize("policy", POLICIES)
@costly
@given(data=st.data(), C=st.integers(1, 9))
def test_simulation_equals_caches_asked_in_order(policy, data, C):
    table = data.draw(tables())
    access = data.draw(accesses(table))
    if policy == "belady" and access.prefetch is not None:
        with pytest.raises(StickyError, match="belady bounds policies that load on demand"):
            simulate(table, policy=policy, capacity=C, access=access)
        return
    result = simulate(table, policy=policy, capacity=C, access=access)
    assert [(c.misses, c.prefetched, c.wasted) for c in result.caches] == plain(table, access, policy, C)
    assert result.tokens == table.mask.sum()
    k = 1 if access.top1 else table.top_k
    assert result.hits + result.misses == table.mask.sum() * table.n_layers * k


@costly
@given(data=st.data(), C=st.integers(1, 5), policy=st.sampled_from(POLICIES))
def test_the_size_of_blocks_makes_no_difference(data, C, policy):
    table = data.draw(tables())
    access = data.draw(accesses(table))
    if policy == "belady" and access.prefetch is not None:
        policy = "lru"
    whole = simulate(table, policy=policy, capacity=C, access=access)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams_module, "BLOCK", 1)
        assert simulate(table, policy=policy, capacity=C, access=access) == whole


# By law


@costly
@given(tables(), st.integers(1, 5))
def test_the_papers_hit_rate_comes_out_of_the_general_machinery(table, C):
    for top1, metric in ((True, cache_hit_rate), (False, cache_hit_rate_all)):
        result = simulate(table, capacity=C, access=Access(top1=top1, order="decode"))
        assert 1 - result.miss_rate == pytest.approx(metric(table, C), nan_ok=True)


@costly
@given(tables(), st.integers(1, 5), st.sampled_from(POLICIES))
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
    shared = simulate(table, capacity=C, access=Access(order="decode", share_block=None))
    pooled = simulate(table, capacity=C, access=Access(order="decode", share_block=None, pool=True))
    assert shared == pooled
    assert len(shared.caches) == 1


def test_shared_weights_make_layers_hit_for_each_other():
    """All layers choose expert t: unshared, every layer loads it; in blocks of two, one of each block does."""
    S = np.broadcast_to(np.arange(3)[:, None], (4, 1, 3, 1))
    for share, misses in ((1, 12), (2, 6), (3, 6), (4, 3), (None, 3)):
        access = Access(order="decode", share_block=share)
        assert simulate(table_of(S, 3), capacity=1, access=access).misses == misses
    alone = Access(order="layer", share_block=None)
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
        ({"order": "random"}, r"^order: got 'random', expected layer or decode\.$"),
        ({"share_block": 0}, r"^share_block: got 0, expected a whole number of layers ≥ 1"),
        ({"share_block": 3}, r"^share_block: got 3, expected at most the 2 layers of the trace\.$"),
        ({"prefetch": "next"}, r"^prefetch: got 'next', expected previous, or a predictor's sets\.$"),
        (
            {"prefetch": np.zeros((2, 1, 3, 1), int)},
            r"^prefetch: got sets of shape \(2, 1, 3, 1\), expected \[2, 1, 4, …\]",
        ),
        ({"prefetch": np.full((2, 1, 4, 1), 9)}, r"^prefetch: got experts \(9, 9\), expected 0 … 3\.$"),
    ],
)
def test_access_is_refused_in_one_line(access, says):
    with pytest.raises(StickyError, match=says):
        simulate(table_of(np.zeros((2, 1, 4, 1), int), 4), capacity=2, access=Access(**access))


def test_slots_per_cache_must_be_as_many_as_caches():
    table = table_of(np.zeros((2, 1, 4, 1), int), 4)
    assert simulate(table, capacity=[1, 2]).slots == 3
    with pytest.raises(StickyError, match=r"^capacity: got 3 numbers, expected one, or one for each of 2 caches\.$"):
        simulate(table, capacity=[1, 2, 3])
