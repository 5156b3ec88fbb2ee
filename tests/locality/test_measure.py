"""`measure`: every name is the function of its definition, per layer and averaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stickymoe
from reference import lru_request
from stickymoe.locality import coherence, figures, metrics
from stickymoe.locality.measure import COLD_TOKENS, loads_per_token, measure
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from stickymoe.training import evaluate
from strategies import costly, seeds, sticky_choices, tables


def by_definition(table, capacities, topics):
    """Every metric per layer, from the function that defines it."""
    k = table.top_k
    by_layer = {
        "switch_rate": metrics.switch_rate_by_layer(table),
        "set_switch_rate": metrics.set_switch_rate_by_layer(table),
        "cache_hit_rate": metrics.cache_hit_rate_by_layer(table, 2),
        "utilisation_entropy": metrics.utilisation_entropy_by_layer(table),
        "effective_experts": 2 ** metrics.utilisation_entropy_by_layer(table),
        "run_length": figures.mean_run_length_by_layer(table),
        "segment_routing_16": figures.segment_routing_by_layer(table, 16),
        "segment_cache_16": figures.segment_cache_by_layer(table, 16, min(2 * k, table.n_experts)),
    }
    by_layer |= {f"cache_hit_rate_all_c{C}": metrics.cache_hit_rate_all_by_layer(table, C) for C in capacities}
    by_layer |= {f"reuse_{lag}": figures.reuse_by_lag(table, [lag])[:, 0] for lag in (1, 8)}
    by_layer |= {f"working_set_{n}": figures.working_set(table, [n])[:, 0] for n in (16, 64)}
    if table.doc is not None:
        shares = figures.domain_specialisation(table)
        by_layer["document_specialisation"] = figures.peak_specialisation_by_layer(shares, k)
    if table.tokens is not None:
        shares = figures.vocabulary_specialisation(table)[1]
        by_layer["word_specialisation"] = figures.peak_specialisation_by_layer(shares, k)
    if topics is not None:
        by_layer["topic_information"] = coherence.topic_information_above_chance_by_layer(table, topics)
    return by_layer


@st.composite
def measured_tables(draw):
    table, rng = draw(tables()), draw(seeds())
    known = draw(st.booleans())
    tokens = rng.integers(0, 3, table.mask.shape) if known else None
    topics = rng.integers(-1, 2, table.mask.shape) if draw(st.booleans()) else None
    fields = {"S": table.S, "n_experts": table.n_experts, "mask": table.mask, "doc": table.doc, "tokens": tokens}
    return RouteTable(**fields), topics


@costly
@given(measured_tables(), st.sets(st.integers(1, 4), max_size=2))
def test_every_name_is_its_definition(case, capacities):
    table, topics = case
    measured = measure(table, capacities=sorted(capacities), topics=topics)
    expected = by_definition(table, capacities, topics)
    shares = metrics.utilisation_by_layer(table)
    for name, layers in expected.items():
        np.testing.assert_allclose(measured.per_layer[name], layers, rtol=1e-12)
        assert measured[name] == pytest.approx(float(np.mean(layers)), nan_ok=True)
    for i in range(table.n_experts):
        np.testing.assert_array_equal(measured.per_layer[f"utilisation_{i}"], shares[:, i])
    assert set(measured.per_layer) == set(expected) | {f"utilisation_{i}" for i in range(table.n_experts)}
    for C in capacities:
        pool = Access(order="decode", pool=True)
        result = simulate(table, capacity=C * table.n_layers, access=pool)
        assert measured[f"pool_hit_rate_c{C}"] == pytest.approx(1 - result.miss_rate, nan_ok=True)
        for name, loads in zip(("cold", "warm"), loads_per_token(table, C), strict=True):
            assert measured[f"{name}_loads_c{C}"] == pytest.approx(loads, nan_ok=True)
    assert measured["neglected_experts"] == metrics.neglected_experts(table)
    names = ("pool_hit_rate", "cold_loads", "warm_loads")
    alone = {"neglected_experts", *(f"{name}_c{C}" for C in capacities for name in names)}
    assert set(measured.values) == set(expected) | alone


@pytest.mark.parametrize("real", [1.0, 0.8])
def test_loads_of_a_warm_stream_are_those_of_a_plain_loop(real):
    """Slots keep their experts from one sequence and document to the next; the first tokens are counted apart."""
    rng = np.random.default_rng(1)
    S = sticky_choices(rng, (2, 9, 400, 2), 6, stay=0.5)
    table = RouteTable(S=S, n_experts=6, mask=rng.random((9, 400)) < real, doc=np.arange(9)[:, None].repeat(400, 1))
    loads = np.zeros(2)
    for layer in S[:, table.mask]:  # [tokens, k]
        cache: list[int] = []
        for t, request in enumerate(layer.tolist()):
            loads[int(t >= COLD_TOKENS)] += sum(expert not in cache for expert in request)
            lru_request(cache, request, 3)
    tokens = table.mask.sum()
    assert loads_per_token(table, 3) == pytest.approx((loads[0] / COLD_TOKENS, loads[1] / (tokens - COLD_TOKENS)))


def test_a_short_stream_has_no_warm_part():
    S = sticky_choices(np.random.default_rng(0), (2, 1, COLD_TOKENS, 2), 4, stay=0.5)
    cold, warm = loads_per_token(RouteTable(S=S, n_experts=4, mask=np.ones((1, COLD_TOKENS), bool)), 3)
    assert cold > 0
    assert np.isnan(warm)


def test_what_cannot_be_measured_is_nan():
    S = sticky_choices(np.random.default_rng(0), (2, 1, 3, 2), 4, stay=0.5)
    short = measure(RouteTable(S=S, n_experts=4, mask=np.ones((1, 3), bool)))
    assert np.isnan(short.per_layer["working_set_16"]).all()
    assert np.isnan(short["segment_routing_16"])
    assert np.isnan(short["reuse_8"])
    assert short["cache_hit_rate"] >= 0
    nothing = measure(RouteTable(S=S, n_experts=4, mask=np.zeros((1, 3), bool)))
    assert nothing["neglected_experts"] == 0
    assert all(np.isnan(value) for name, value in nothing.values.items() if name != "neglected_experts")


def test_it_is_the_public_name_and_what_evaluation_calls():
    assert stickymoe.measure is evaluate.measure is measure
