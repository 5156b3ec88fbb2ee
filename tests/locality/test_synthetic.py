"""Synthetic traces are what was asked for: their shape, their stickiness, their skew, the same for the same seed."""

import numpy as np
import pytest

from stickymoe.errors import StickyError
from stickymoe.locality import synthetic
from stickymoe.locality.figures import reuse_by_lag
from stickymoe.locality.formats import load_table
from stickymoe.locality.kernels import _draw_free, seed
from stickymoe.locality.metrics import utilisation_by_layer
from stickymoe.locality.synthetic import Synthetic, make_trace


def make(folder, **settings):
    make_trace(folder, Synthetic(**{"n_layers": 2, "sequences": 2, "length": 3000, **settings}))
    return load_table(folder)


@pytest.mark.parametrize(("n_experts", "top_k"), [(64, 8), (128, 8), (300, 1), (4, 4)])
def test_shape_and_distinct_experts(tmp_path, n_experts, top_k):
    table = make(tmp_path, n_experts=n_experts, top_k=top_k, length=50)
    assert table.S.shape == (2, 2, 50, top_k)
    assert table.mask.all()
    assert (np.diff(np.sort(table.S, axis=-1).astype(int), axis=-1) > 0).all()


def test_stickiness_is_the_chance_that_a_slot_is_not_drawn_anew(tmp_path):
    for stickiness in (0.0, 0.7, 1.0):
        table = make(tmp_path, n_experts=64, top_k=1, stickiness=stickiness, skew=0.0)
        stay = stickiness + (1 - stickiness) / 64
        assert reuse_by_lag(table, [1]).mean() == pytest.approx(stay, abs=0.02)


@pytest.mark.parametrize("skew", [12.0, 99.0])
def test_the_steepest_skew_still_gives_distinct_experts(tmp_path, skew):
    table = make(tmp_path, n_experts=64, top_k=8, length=50, skew=skew)
    assert (np.diff(np.sort(table.S, axis=-1).astype(int), axis=-1) > 0).all()


def test_a_draw_outside_what_is_held_follows_popularity():
    popularity = np.array([8.0, 4.0, 2.0, 1.0])
    seed(0)
    drawn = [_draw_free(np.array([0, -1]), np.arange(4), popularity) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, [0, 4 / 7, 2 / 7, 1 / 7], atol=0.03)


def test_skew_makes_experts_popular_and_layers_differ_in_which(tmp_path):
    flat = utilisation_by_layer(make(tmp_path / "flat", n_experts=16, top_k=1, stickiness=0.0, skew=0.0))
    steep = utilisation_by_layer(make(tmp_path / "steep", n_experts=16, top_k=1, stickiness=0.0, skew=1.0))
    assert flat.max() < 0.09
    weight = 1 / np.arange(1, 17)
    np.testing.assert_allclose(np.sort(steep)[:, ::-1], [weight / weight.sum()] * 2, atol=0.02)
    assert steep[0].argmax() != steep[1].argmax()


def test_the_same_seed_gives_the_same_trace_whatever_the_blocks(tmp_path, monkeypatch):
    first = np.array(make(tmp_path / "a", length=100).S)
    monkeypatch.setattr(synthetic, "BLOCK", 64)
    np.testing.assert_array_equal(make(tmp_path / "b", length=100).S, first)
    assert (first != make(tmp_path / "c", length=100, seed=1).S).any()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_experts": 0}, r"^n_experts: got 0, expected a whole number ≥ 1"),
        ({"top_k": 65}, r"^top_k: got 65, expected at most n_experts=64"),
        ({"stickiness": 1.5}, r"^stickiness: got 1\.5, expected a probability in \[0, 1\]"),
        ({"skew": -1.0}, r"^skew: got -1\.0"),
        ({"length": 0}, r"^length: got 0"),
        ({"seed": -1}, r"^seed: got -1"),
    ],
)
def test_refused(settings, says):
    with pytest.raises(StickyError, match=says):
        Synthetic(**settings)
