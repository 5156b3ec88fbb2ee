"""Figures of locality against plain loops, and by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import StickyError
from stickymoe.locality import figures
from stickymoe.locality.metrics import switch_rate_by_layer
from stickymoe.locality.replay import miss_curve
from stickymoe.locality.table import RouteTable
from strategies import costly, tables


def stretches(table):
    """Lists of adjacent real (b, t) inside one document."""
    found = []
    for b, t in reference.real_tokens(table.mask):
        if not reference.is_pair(table.mask, table.doc, b, t):
            found.append([])
        found[-1].append((b, t))
    return found


def sets(table, layer, tokens):
    return [[int(e) for e in table.S[layer, b, t]] for b, t in tokens]


def segments(table, layer, window):
    for tokens in stretches(table):
        chosen = sets(table, layer, tokens)
        for start in range(len(chosen) - window + 1):
            yield chosen[start : start + window]


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@costly
@given(tables(), st.integers(1, 4))
def test_reuse_by_lag(table, lag):
    expected = []
    for layer in table.S:
        shares = [
            len({*map(int, layer[b, t])} & {*map(int, layer[b, t - lag])}) / table.top_k
            for b, t in reference.real_tokens(table.mask)
            if t >= lag
            and table.mask[b, t - lag]
            and reference.document_start(table.doc, b, t) == reference.document_start(table.doc, b, t - lag)
        ]
        expected.append(np.mean(shares) if shares else np.nan)
    same(figures.reuse_by_lag(table, [lag])[:, 0], expected)


@costly
@given(tables(), st.integers(1, 5))
def test_working_set(table, window):
    expected = []
    for layer in range(table.n_layers):
        sizes = [len({e for s in segment for e in s}) for segment in segments(table, layer, window)]
        expected.append(np.mean(sizes) if sizes else np.nan)
    same(figures.working_set(table, [window])[:, 0], expected)


@costly
@given(tables())
def test_run_lengths(table):
    counts = figures.run_lengths(table)
    for layer in range(table.n_layers):
        runs = Counter()
        for tokens in stretches(table):
            length = 0
            for i, chosen in enumerate(sets(table, layer, tokens)):
                if i and chosen[0] != sets(table, layer, tokens)[i - 1][0]:
                    runs[length] += 1
                    length = 0
                length += 1
            runs[length] += 1
        assert {n: c for n, c in enumerate(counts[layer].tolist()) if c} == dict(runs)
    assert (counts @ np.arange(counts.shape[1]) == table.mask.sum()).all()


@costly
@given(tables(), st.integers(1, 5))
def test_segment_routing(table, window):
    expected = []
    for layer in range(table.n_layers):
        found = [Counter(e for s in segment for e in s) for segment in segments(table, layer, window)]
        chosen = sum(c.total() for c in found)
        scores = []
        for least in range(window + 1):
            kept = [c[e] for c in found for e in range(table.n_experts) if c[e] >= least]
            scores.append(2 * sum(kept) / (window * len(kept) + chosen) if found else np.nan)
        expected.append(max(scores))
    same(figures.segment_routing_by_layer(table, window), expected)


@costly
@given(tables(), st.integers(1, 6), st.integers(0, 2))
def test_segment_cache(table, window, spare):
    capacity = min(table.top_k + spare, table.n_experts)
    expected = []
    for layer in range(table.n_layers):
        hits = accesses = 0
        units = {}
        for b in range(table.mask.shape[0]):
            for t in range(table.mask.shape[1]):
                units.setdefault((b, reference.document_start(table.doc, b, t)), []).append((b, t))
        for tokens in units.values():
            cache, last, clock = set(), {}, 0
            for i, (b, t) in enumerate(tokens):
                if not table.mask[b, t]:
                    continue
                request = [int(e) for e in table.S[layer, b, t]]
                ahead = Counter(
                    int(e) for x, y in tokens[i + 1 : i + window] if table.mask[x, y] for e in table.S[layer, x, y]
                )
                hits += len(cache & set(request))
                accesses += len(request)
                for e in [e for e in request if e not in cache]:
                    if len(cache) == capacity:
                        cache.remove(min(cache - set(request), key=lambda x: (ahead[x], last[x])))
                    cache.add(e)
                for e in reversed(request):
                    clock += 1
                    last[e] = clock
        expected.append(reference.ratio(hits, accesses))
    same(figures.segment_cache_by_layer(table, window, capacity), expected)


@costly
@given(tables(), st.integers(1, 6))
def test_a_glimpse_of_the_future_never_beats_knowing_it_all(table, window):
    capacity = min(table.top_k + 1, table.n_experts)
    if table.mask.any():
        best = 1 - miss_curve(table, policy="belady", capacities=[capacity]).rate(capacity)
        assert figures.segment_cache_by_layer(table, window, capacity).mean() <= best + 1e-9


def test_runs_and_switches_tell_the_same_story():
    S = np.array([0, 0, 0, 1, 1, 2]).reshape(1, 1, 6, 1)
    table = RouteTable(S=S, n_experts=3, mask=np.ones((1, 6), bool))
    assert figures.mean_run_length_by_layer(table).tolist() == [2.0]
    assert switch_rate_by_layer(table).tolist() == [2 / 5]
    assert figures.run_lengths(table)[0].tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_specialisation_by_hand():
    """Document 0 uses expert 0 always, document 1 experts 1 and 2 in turn; token 7 always meets expert 1."""
    S = np.array([0, 0, 0, 0, 1, 2, 1, 2]).reshape(1, 1, 8, 1)
    doc = np.array([[5, 5, 5, 5, 9, 9, 9, 9]])
    tokens = np.array([[1, 1, 1, 3, 7, 3, 7, 3]])
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 8), bool), doc=doc, tokens=tokens)
    by_document = figures.domain_specialisation(table)
    assert by_document.tolist() == [[[1, 0, 0, 0], [0, 0.5, 0.5, 0]]]
    assert figures.peak_specialisation_by_layer(by_document, 1).tolist() == [4 * 0.75]
    ids, shares = figures.vocabulary_specialisation(table, least=2)
    assert ids.tolist() == [1, 3, 7]
    assert shares[0].tolist() == [[1, 0, 0, 0], [1 / 3, 0, 2 / 3, 0], [0, 1, 0, 0]]
    one = figures.domain_specialisation(table, np.zeros((1, 8), int))
    assert one.tolist() == [[[0.5, 0.25, 0.25, 0]]]
    assert figures.vocabulary_specialisation(table, least=4)[0].tolist() == []


def test_a_figure_for_each_document_alone():
    S = np.array([0, 0, 0, 0, 1, 2, 1, 2]).reshape(1, 1, 8, 1)
    doc = np.array([[5, 5, 5, 5, 9, 9, 9, 9]])
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 8), bool), doc=doc)
    found = figures.by_domain(switch_rate_by_layer, table)
    assert {d: v.tolist() for d, v in found.items()} == {5: [0.0], 9: [1.0]}
    halves = figures.by_domain(figures.mean_run_length_by_layer, table, np.array([[0, 0, 1, 1, 1, 1, 1, 1]]))
    assert {d: v.tolist() for d, v in halves.items()} == {0: [2.0], 1: [6 / 5]}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda t: figures.domain_specialisation(t), r"^The trace has no documents"),
        (lambda t: figures.vocabulary_specialisation(t), r"^The trace has no token ids"),
        (lambda t: figures.reuse_by_lag(t, [0]), r"^lag: got 0"),
        (lambda t: figures.working_set(t, [0]), r"^window: got 0"),
        (lambda t: figures.segment_cache_by_layer(t, 4, 0), r"^capacity: got 0, expected at least the 1 experts"),
    ],
)
def test_refused(ask, says):
    table = RouteTable(S=np.zeros((1, 1, 3, 1), int), n_experts=2, mask=np.ones((1, 3), bool))
    with pytest.raises(StickyError, match=says):
        ask(table)
