"""The locality metrics against the paper's definitions as loops, by hand, and by law."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe import RouteTable
from stickymoe.errors import StickyError
from stickymoe.locality import metrics
from strategies import sticky_choices, tables, thorough

capacities = st.integers(1, 7)

PLAIN = ["switch_rate", "set_switch_rate", "utilisation_entropy"]
CACHED = ["cache_hit_rate", "cache_hit_rate_all"]


def route(*rows, n_experts=4, mask=None, doc=None):
    """A table of one layer from rows of tokens, each an expert or a tuple of experts."""
    S = np.array([[[np.atleast_1d(e) for e in row] for row in rows]], dtype=np.uint8)
    return RouteTable(
        S=S,
        n_experts=n_experts,
        mask=np.ones(S.shape[1:3], dtype=bool) if mask is None else np.array(mask, dtype=bool),
        doc=None if doc is None else np.array(doc),
    )


def mean(name, table, **arguments):
    """A metric averaged over layers."""
    return float(getattr(metrics, f"{name}_by_layer")(table, **arguments).mean())


def layer(table, l):
    return dataclasses.replace(table, S=table.S[l : l + 1])


# Against the reference


@thorough
@given(tables())
@pytest.mark.parametrize("name", [*PLAIN, "effective_experts"])
def test_metric_is_that_of_the_paper(name, table):
    expected = getattr(reference, name)(table)
    assert mean(name, table) == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@thorough
@given(tables(), capacities)
@pytest.mark.parametrize("name", CACHED)
def test_hit_rate_is_that_of_the_paper(name, table, C):
    expected = getattr(reference, name)(table, C)
    assert mean(name, table, capacity=C) == pytest.approx(expected, rel=1e-9, nan_ok=True)


@thorough
@given(tables())
@pytest.mark.parametrize("name", PLAIN)
def test_metric_by_layer_is_that_of_each_layer(name, table):
    by_layer = getattr(metrics, f"{name}_by_layer")(table)
    assert by_layer.dtype == np.float64
    expected = [getattr(reference, name)(layer(table, l)) for l in range(table.n_layers)]
    np.testing.assert_allclose(by_layer, expected, rtol=1e-9, atol=1e-12)


@thorough
@given(tables(), capacities)
@pytest.mark.parametrize("name", CACHED)
def test_hit_rate_by_layer_is_that_of_each_layer(name, table, C):
    by_layer = getattr(metrics, f"{name}_by_layer")(table, capacity=C)
    assert by_layer.dtype == np.float64
    expected = [getattr(reference, name)(layer(table, l), C) for l in range(table.n_layers)]
    np.testing.assert_allclose(by_layer, expected, rtol=1e-9)


@thorough
@given(tables().filter(lambda table: table.mask.any()))
def test_neglected_experts_are_counted_over_layers(table):
    assert metrics.neglected_experts(table) == reference.neglected_experts(table)


@thorough
@given(tables())
def test_the_scalars_are_means_over_layers(table):
    for name in ("switch_rate", "utilisation_entropy"):
        assert getattr(metrics, name)(table) == pytest.approx(mean(name, table), nan_ok=True)
    assert metrics.cache_hit_rate_all(table, 2) == pytest.approx(
        mean("cache_hit_rate_all", table, capacity=2), nan_ok=True
    )


# By hand


def test_switch_rate_by_hand():
    assert metrics.switch_rate(route([0, 0, 1, 0, 2])) == pytest.approx(3 / 4)
    assert metrics.switch_rate(route([0, 0, 1, 0], mask=[[1, 1, 0, 1]])) == 0.0
    assert metrics.switch_rate(route([0, 0, 1, 1], doc=[[5, 5, 3, 3]])) == 0.0


def test_switch_rate_pools_pairs_over_sequences():
    table = route([0, 1, 0, 1], [0, 0, 0, 0], mask=[[1, 1, 1, 1], [1, 1, 0, 0]])
    assert metrics.switch_rate(table) == pytest.approx(3 / 4)


def test_set_switch_rate_ignores_order_and_switch_rate_sees_it():
    table = route([(0, 1), (1, 0), (1, 2)])
    assert mean("set_switch_rate", table) == pytest.approx(1 / 2)
    assert metrics.switch_rate(table) == pytest.approx(1 / 2)
    assert mean("set_switch_rate", route([(0, 1), (1, 0)])) == 0.0
    assert metrics.switch_rate(route([(0, 1), (1, 0)])) == 1.0


def test_cache_hit_rate_by_hand():
    # 0 miss, 0 hit, 1 miss, 0 hit, 2 miss (1 goes), 0 hit, 1 miss (2 goes)
    assert mean("cache_hit_rate", route([0, 0, 1, 0, 2, 0, 1])) == pytest.approx(3 / 7)


def test_cache_hit_rate_reads_only_the_heaviest_expert():
    assert mean("cache_hit_rate", route([(0, 3), (1, 0), (0, 1), (2, 0), (0, 2)])) == pytest.approx(2 / 5)


def test_every_sequence_and_document_starts_cold():
    assert mean("cache_hit_rate", route([0, 0], [0, 0])) == pytest.approx(2 / 4)
    assert mean("cache_hit_rate", route([0, 0, 0, 0], doc=[[0, 0, 1, 1]])) == pytest.approx(2 / 4)
    assert mean("cache_hit_rate", route([0, 0, 0], doc=[[0, 1, 0]])) == 0.0


def test_masked_token_makes_no_access_and_forgets_nothing():
    # Were the masked 1 and 2 accesses, they would push 0 out.
    assert mean("cache_hit_rate", route([0, 1, 2, 0], mask=[[1, 0, 0, 1]])) == pytest.approx(1 / 2)


def test_utilisation_of_known_shares():
    # Shares 1/2, 1/4, 1/4, 0: 1.5 bits
    table = route([(0, 1), (0, 2)])
    assert metrics.utilisation_entropy(table) == pytest.approx(1.5)
    assert mean("effective_experts", table) == pytest.approx(2**1.5)
    assert metrics.neglected_experts(table) == 1


def test_effective_experts_average_layers_after_the_power():
    S = np.array([[[[0], [0]]], [[[0], [1]]]], dtype=np.uint8)  # 0 bits and 1 bit
    table = RouteTable(S=S, n_experts=2, mask=np.ones((1, 2), dtype=bool))
    assert metrics.utilisation_entropy(table) == pytest.approx(0.5)
    assert mean("effective_experts", table) == pytest.approx(1.5)


@pytest.mark.parametrize("n_experts", [2, 3, 4, 6, 7, 8, 16, 60, 64])
def test_a_tenth_of_the_uniform_share_is_not_neglected(n_experts):
    """Expert 1 has exactly 10 % of 1/N: it is not below; with one slot more elsewhere it is."""
    at_limit = [0] * (10 * n_experts - 1) + [1]
    unused = n_experts - 2
    assert metrics.neglected_experts(route(at_limit, n_experts=n_experts)) == unused
    assert metrics.neglected_experts(route([0, *at_limit], n_experts=n_experts)) == unused + 1


# By law


@pytest.mark.parametrize("name", [*PLAIN, *CACHED, "effective_experts"])
def test_nothing_to_measure_is_nan_not_zero(name):
    table = route([(0, 1), (1, 2)], mask=[[0, 0]])
    arguments = {"capacity": 2} if name in CACHED else {}
    assert math.isnan(mean(name, table, **arguments))


@pytest.mark.parametrize("name", ["switch_rate", "set_switch_rate"])
def test_a_rate_over_no_pair_is_nan_not_zero(name):
    assert math.isnan(mean(name, route([(0, 1)])))
    assert math.isnan(mean(name, route([(0, 1), (0, 1)], doc=[[0, 1]])))


@pytest.mark.parametrize(("capacity", "expected"), [(2, 0.50), (3, 0.75)])
def test_uniform_random_routing(capacity, expected):
    """N = 4, k = 2: each chosen expert is resident with probability C/N, whatever came before."""
    S = sticky_choices(np.random.default_rng(0), (4, 2, 20_000, 2), 4, stay=0.0)
    table = RouteTable(S=S.astype(np.uint8), n_experts=4, mask=np.ones((2, 20_000), dtype=bool))
    assert metrics.cache_hit_rate_all(table, capacity=capacity) == pytest.approx(expected, abs=0.003)


@thorough
@given(tables(), capacities)
def test_one_slot_makes_both_hit_rates_the_same(table, C):
    top1 = dataclasses.replace(table, S=table.S[..., :1])
    both = mean("cache_hit_rate", table, capacity=C), metrics.cache_hit_rate_all(top1, capacity=C)
    assert both[0] == pytest.approx(both[1], nan_ok=True)


@thorough
@given(tables())
def test_one_slot_of_cache_misses_at_starts_and_switches(table):
    full = dataclasses.replace(table, mask=np.ones_like(table.mask))
    B, T = full.mask.shape
    pairs = int(full.pairs.sum())
    starts = B * T - pairs
    switches = metrics.switch_rate(full) * pairs if pairs else 0.0
    assert mean("cache_hit_rate", full, capacity=1) == pytest.approx(1 - (starts + switches) / (B * T))


@thorough
@given(tables(), st.randoms())
def test_the_names_of_experts_do_not_matter(table, random):
    names = list(range(table.n_experts))
    random.shuffle(names)
    renamed = dataclasses.replace(table, S=np.array(names, dtype=table.S.dtype)[table.S])
    for name in PLAIN:
        measure = partial(mean, name)
        assert measure(renamed) == pytest.approx(measure(table), nan_ok=True)
    for name in CACHED:
        measure = partial(mean, name)
        assert measure(renamed, capacity=2) == pytest.approx(measure(table, capacity=2), nan_ok=True)


@thorough
@given(tables().filter(lambda table: table.doc is None), st.integers(0, 9))
def test_packing_documents_into_one_row_changes_nothing(table, cut):
    L, B, T, k = table.S.shape
    cut = min(cut, T)
    doc = np.where(np.arange(T) < cut, 0, 1)[None].repeat(B, axis=0)
    packed = dataclasses.replace(table, doc=doc)

    S, mask = np.zeros((L, 2 * B, T, k), dtype=table.S.dtype), np.zeros((2 * B, T), dtype=bool)
    S[:, :B, :cut], mask[:B, :cut] = table.S[:, :, :cut], table.mask[:, :cut]
    S[:, B:, : T - cut], mask[B:, : T - cut] = table.S[:, :, cut:], table.mask[:, cut:]
    apart = dataclasses.replace(table, S=S, mask=mask)

    for name in PLAIN:
        measure = partial(mean, name)
        assert measure(packed) == pytest.approx(measure(apart), nan_ok=True)
    for name in CACHED:
        measure = partial(mean, name)
        assert measure(packed, capacity=2) == pytest.approx(measure(apart, capacity=2), nan_ok=True)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_without_a_slot_is_refused(name, capacity):
    with pytest.raises(StickyError, match=rf"\A[^\n]*capacity[^\n]*{capacity}\b[^\n]*\Z"):
        mean(name, route([0, 1]), capacity=capacity)
