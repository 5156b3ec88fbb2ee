"""Tokens that use fewer than k experts: an index of n_experts in S marks a slot without one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import StickyError
from stickymoe.locality.cache import Cache
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.measure import measure
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.replay import miss_curve, simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from stickymoe.routing.trace import RoutingTrace
from strategies import seeds

N, K = 5, 3


def random_table(rng, B=2, T=9, skip=0.4):
    """Different experts for each token; some slots use none. The last token may skip all of them."""
    S = np.argsort(rng.random((2, B, T, N)), axis=-1)[..., :K].astype(np.uint8)
    S[rng.random(S.shape) < skip] = N
    mask = np.ones((B, T), np.bool_)
    mask[0, -2:] = False
    return RouteTable(S=S, n_experts=N, mask=mask, skips=True)


def used(row):
    return [int(e) for e in row if e != N]


@given(rng=seeds(), policy=st.sampled_from(["lru", "lfu", "fifo", "sieve"]), capacity=st.integers(1, N))
def test_skipped_slots_are_no_requests(rng, policy, capacity):
    table = random_table(rng)
    hits = misses = 0
    for layer in table.S:
        for b in range(len(layer)):
            cache = Cache(capacity=capacity, policy=policy)
            for t in np.flatnonzero(table.mask[b]):
                outcome = cache.request(used(layer[b, t]))
                hits, misses = hits + len(outcome.hits), misses + len(outcome.loads)
    found = simulate(table, capacity=capacity, policy=policy)
    assert (found.hits, found.misses) == (hits, misses)
    assert found.hits + found.misses == table.used_slots


@given(rng=seeds())
def test_a_curve_has_the_misses_of_each_size(rng):
    table = random_table(rng)
    for policy in ("lru", "belady", "lfu"):
        curve = miss_curve(table, policy=policy)
        for capacity, misses in zip(curve.capacities, curve.misses.sum(0), strict=True):
            assert misses == simulate(table, capacity=int(capacity), policy=policy).misses


@given(rng=seeds())
def test_prompts_and_batches_skip_too(rng):
    table = random_table(rng)
    phase = np.ones(table.mask.shape, np.uint8)
    phase[:, :4] = 0
    prompts = simulate(replace(table, phase=phase), capacity=2)
    unions = sum(len({e for t in range(4) for e in used(layer[b, t])}) for layer in table.S for b in range(2))
    after = [(b, t) for b, t in np.argwhere(table.mask) if t > 3]
    rest = sum(len(used(layer[b, t])) for layer in table.S for b, t in after)
    assert prompts.hits + prompts.misses == unions + rest
    assert simulate(table, capacity=2, access=Access(batch=True)).misses <= table.used_slots


@given(rng=seeds())
def test_a_table_without_skipped_slots_measures_the_same_with_the_flag(rng):
    plain = replace(random_table(rng, skip=0.0), skips=False, tokens=rng.integers(0, 3, (2, 9)))
    for name, value in measure(plain).values.items():
        assert measure(replace(plain, skips=True))[name] == pytest.approx(value, nan_ok=True), name


def test_shares_and_reuse_count_used_slots_only():
    S = np.array([[[[0, 1], [0, 4], [4, 4], [0, 4]]]], np.uint8)
    table = RouteTable(S=S, n_experts=4, mask=np.ones((1, 4), np.bool_), skips=True)
    found = measure(table, capacities=(2,))
    assert [found.per_layer[f"utilisation_{i}"][0] for i in range(4)] == [0.75, 0.25, 0.0, 0.0]
    assert found["reuse_1"] == pytest.approx(1 / 2)  # of 0 at the second token and 0 at the last, the first was reused
    assert found["cache_hit_rate_all_c2"] == pytest.approx(2 / 4)
    assert table.used_slots == 4


def test_files_and_recorder_keep_the_flag(tmp_path):
    table = random_table(np.random.default_rng(0))
    save_table(table, tmp_path / "one")
    again = load_table(tmp_path / "one")
    assert again.skips
    assert np.array_equal(again.S, table.S)
    for folder in (None, tmp_path / "two"):
        recorder = Recorder(folder)
        recorder.add(replace(random_table(np.random.default_rng(1), skip=0.0), skips=False))
        recorder.add(table)
        assert recorder.finish().skips
    header = json.loads((tmp_path / "one" / "header.json").read_text())
    for wrong, message in (("yes", "expected true or false"), (False, "names expert 5")):
        (tmp_path / "one" / "header.json").write_text(json.dumps(header | {"skips": wrong}))
        with pytest.raises(StickyError, match=message):
            load_table(tmp_path / "one")


def test_null_classes_and_weights_of_zero_load_nothing():
    g = torch.full((1, 1, 3, 5), 0.2)
    S = torch.tensor([[[[0, 1], [2, 4], [3, 1]]]])
    w = torch.tensor([[[[0.6, 0.4], [0.5, 0.5], [1.0, 0.0]]]])
    table = RoutingTrace.from_choice(g, S, w, n_null=1).table()
    assert table.n_experts == 4
    assert table.S[0, 0].tolist() == [[0, 1], [2, 4], [3, 4]]
    assert table.skips
    assert simulate(table, capacity=4).misses == 4
