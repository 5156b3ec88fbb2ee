"""Experts against topics and words, run lengths, groups, and shared tensors: plain loops and cases by hand."""

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import ConfigError
from stickymoe.locality import coherence, groups
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from strategies import tables, thorough


def table_of(S, **more):
    """A table of one layer from experts [B, T, k]."""
    S = np.array(S, dtype=np.uint8)[None]
    return RouteTable(S=S, n_experts=4, mask=np.ones(S.shape[1:3], dtype=bool), **more)


def information(table, topics):
    """I(expert; topic) over the tokens with a topic."""
    known = table.mask & (topics >= 0)
    return coherence.information_by_layer(table.S[:, known], topics[known], table.n_experts)


def labels(table, data, n):
    flat = data.draw(st.lists(st.integers(-1, n), min_size=table.mask.size, max_size=table.mask.size))
    return np.array(flat, dtype=np.int64).reshape(table.mask.shape)


@thorough
@given(tables(), st.data())
def test_information_is_that_of_the_definition(table, data):
    topics = labels(table, data, 2)
    got = information(table, topics)
    for l, layer in enumerate(table.S):
        seen = [
            (int(e), topics[b, t])
            for b, t in reference.real_tokens(table.mask)
            if topics[b, t] >= 0
            for e in layer[b, t]
        ]
        if not seen:
            assert np.isnan(got[l])
            continue
        n, bits = len(seen), 0.0
        for e, c in set(seen):
            joint = seen.count((e, c)) / n
            bits += joint * log2(joint * n * n / sum(x == e for x, _ in seen) / sum(y == c for _, y in seen))
        assert got[l] == pytest.approx(bits, abs=1e-9)


def test_experts_that_follow_the_topic_tell_it_and_others_nothing():
    topics = np.array([[0, 0, 1, 1]])
    follows, ignores = table_of([[[0], [0], [1], [1]]]), table_of([[[0], [1], [0], [1]]])
    assert information(follows, topics)[0] == pytest.approx(1.0)
    assert information(ignores, topics)[0] == pytest.approx(0.0)


def test_sticky_but_blind_routing_tells_nothing_above_chance():
    """Long runs in both, parted at their own places: the plain figure is far from 0, what is above chance is not."""
    rng = np.random.default_rng(0)
    topics = np.repeat(rng.integers(0, 12, 400), rng.integers(20, 60, 400))[:8000].reshape(20, 400)
    blind = table_of(np.repeat(rng.integers(0, 4, 400), rng.integers(20, 60, 400))[:8000].reshape(20, 400, 1))
    follows = table_of((topics % 4)[..., None])
    assert information(blind, topics)[0] > 0.08
    assert abs(coherence.topic_information_above_chance_by_layer(blind, topics)[0]) < 0.04
    assert coherence.topic_information_above_chance_by_layer(follows, topics)[0] > 1.5


def test_topics_are_laid_out_as_the_rows_of_an_evaluation():
    doc, topics = np.array([0, 0, 1, 2, 2]), ("Geography", None, "Economy")
    assert coherence.topics_of_chunks(doc, topics, (2, 3)).tolist() == [[1, 1, -1], [0, 0, -1]]
    assert coherence.topics_of_chunks(doc, topics, (2, 2)).tolist() == [[1, 1], [-1, 0]], "the last is only predicted"


# Groups


@thorough
@given(tables(), st.integers(1, 3), st.integers(1, 3))
def test_group_misses_are_those_of_a_plain_cache(table, n_groups, capacity):
    n_groups = min(n_groups, table.n_experts)
    got = groups.group_misses_by_layer(table, n_groups, capacity)
    switches = groups.group_switch_rate_by_layer(table, n_groups)
    real = reference.real_tokens(table.mask)
    for l, layer in enumerate(table.S):
        of_groups = [
            [list(dict.fromkeys(e * n_groups // table.n_experts for e in request)) for request in stream]
            for stream in reference.streams(layer, table.mask, table.doc)
        ]
        misses = sum(reference.lru(stream, capacity)[1] for stream in of_groups)
        assert got[l] == pytest.approx(misses / len(real)) if real else np.isnan(got[l])
        pairs = [(b, t) for b, t in real if reference.is_pair(table.mask, table.doc, b, t)]
        changed = sum(
            layer[b, t, 0] * n_groups // table.n_experts != layer[b, t - 1, 0] * n_groups // table.n_experts
            for b, t in pairs
        )
        assert switches[l] == pytest.approx(changed / len(pairs)) if pairs else np.isnan(switches[l])


def test_one_group_is_loaded_once():
    table = table_of([[[0, 1], [2, 3], [1, 2], [3, 0]]])
    assert groups.group_misses_by_layer(table, 1, 1)[0] == pytest.approx(1 / 4)
    assert groups.group_switch_rate_by_layer(table, 1)[0] == 0.0
    with pytest.raises(ConfigError, match=r"^groups: got 5, expected a whole number in 1 … 4\.$"):
        groups.group_of(4, 5)


# Shared tensors


def test_a_shared_tensor_is_one_cache_entry_in_decode_order():
    """Four layers that all choose experts 0 and 1, three tokens."""
    S = np.broadcast_to(np.array([0, 1], dtype=np.uint8), (4, 1, 3, 2))
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 3), dtype=bool))
    for share_block, misses in ((1, 8), (2, 4), (4, 2)):
        access = Access(order="decode", pool=True, share_block=share_block)
        assert simulate(table, capacity=8, access=access).misses == misses
