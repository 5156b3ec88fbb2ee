"""The lab: traces opened by any of their names, never mixed, and a run chosen from a budget."""

from __future__ import annotations

import numpy as np
import pytest

from stickymoe.errors import StickyError
from stickymoe.experiments import lab
from stickymoe.locality.devices import Device
from stickymoe.locality.formats import save_table
from stickymoe.locality.latency import Answer, Point
from stickymoe.locality.streams import Access, streams
from stickymoe.locality.table import RouteTable
from strategies import sticky_choices

DEVICE = Device("d", fast_memory=1e9, load_bandwidth=1e3, load_latency_ms=1.0, compute_bandwidth=1e6)


def table(n_experts=6, shape=(2, 2, 40, 2), seed=0, stay=0.6, tokens=None):
    S = sticky_choices(np.random.default_rng(seed), shape, n_experts, stay=stay).astype(np.uint8)
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(shape[1:3], bool), tokens=tokens, expert_bytes=10)


def trace(tmp_path, name, ppl=None, **settings):
    save_table(table(**settings), tmp_path / name)
    (opened,) = lab.open_traces([tmp_path / name])
    return lab.Trace(opened.path, name, opened.table, ppl, opened.expert_bytes)


def test_a_run_folder_its_routes_and_a_bare_folder_are_the_same_trace(tmp_path):
    save_table(table(), tmp_path / "run" / "routes")
    a, b = lab.open_traces([tmp_path / "run", tmp_path / "run" / "routes"])
    np.testing.assert_array_equal(a.table.S, b.table.S)
    assert a.expert_bytes == 10


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"n_experts": 7}, "experts 6 there, 7 here"),
        ({"shape": (3, 2, 40, 2)}, "layers 2 there, 3 here"),
        ({"shape": (2, 2, 40, 1)}, "experts a token 2 there, 1 here"),
        ({"shape": (2, 2, 41, 2)}, r"sequences and tokens \(2, 40\) there, \(2, 41\) here"),
        ({"tokens": np.ones((2, 40), np.int32)}, "they are traces of different texts"),
    ],
)
def test_mixed_traces_are_refused(tmp_path, other, says):
    save_table(table(tokens=np.zeros((2, 40), np.int32)), tmp_path / "a")
    save_table(table(**other), tmp_path / "b")
    with pytest.raises(StickyError, match=rf"^\S+a and \S+b cannot be compared: {says}\.$"):
        lab.open_traces([tmp_path / "a", tmp_path / "b"])


def test_the_report_says_what_a_larger_cache_than_there_are_experts_does(tmp_path):
    report = lab.study(trace(tmp_path, "a"), policies=["lru", "belady"], capacities=[3, 9], access=Access())
    assert lab.capacity_note(report) == "9 slots are more than the 6 entries of a cache: as good as 6, only cold misses"
    assert report.words.startswith("with 3 slots a cache: ")
    whole = lab.study(report.trace, policies=["lru"], capacities=[6], access=Access())
    assert lab.capacity_note(whole) is None
    assert "add belady" in whole.words
    assert report.results["lru"][9].misses == whole.results["lru"][6].misses


@pytest.mark.parametrize(
    ("n_experts", "k", "access", "expected"),
    [
        (4, 2, {}, [1, 2, 3, 4]),
        (64, 8, {}, [8, 12, 16, 24, 32, 48, 64]),
        (64, 8, {"pool": True}, [16, 24, 32, 48, 64, 96, 128]),
        (20, 8, {"share_block": None}, [10, 16, 20]),
        (20, 12, {"share_block": None}, [10, 12, 18, 20]),
    ],
)
def test_default_capacities(n_experts, k, access, expected):
    found = streams(table(n_experts=n_experts, shape=(2, 1, 3, k)), Access(**access))
    assert lab.default_capacities(found[0]) == expected


def point(memory):
    return Point("lru", (1,), memory, 0.1, 1.0, 10.0)


def test_the_run_with_the_lowest_perplexity_that_fits(tmp_path):
    traces = [trace(tmp_path, name, ppl) for name, ppl in (("a", 30.0), ("b", 32.0), ("c", 31.0))]
    yes, no = Answer(point(1.0), "yes"), Answer(None, "no")
    assert lab.choose_run(traces, [no, yes, yes]) == 2
    assert lab.choose_run(traces, [yes, yes, yes]) == 0
    assert lab.choose_run(traces, [no, no, no]) is None
    with pytest.raises(StickyError, match="has no perplexity"):
        lab.choose_run([*traces, trace(tmp_path, "d")], [yes] * 4)


def test_a_stickier_run_is_chosen_where_the_budget_is_small(tmp_path):
    """λ from a byte budget: the sticky run has the worse perplexity, and is the one that is fast in little memory."""
    traces = [trace(tmp_path, "loose", 30.0, stay=0.0), trace(tmp_path, "sticky", 33.0, stay=0.95)]

    def chosen(memory, speed):
        answers = []
        for t in traces:
            points = lab.plan_points(
                t, DEVICE, lab.weights_of(t, None, 0.0), policies=["lru", "belady"], access=Access()
            )
            answers.append(lab.answer(points, lab.Budget(memory, speed)))
        return lab.choose_run(traces, answers)

    assert chosen(60.0, 100.0) == 1
    assert chosen(1e6, 1.0) == 0
    assert chosen(1e6, 1e9) is None


def test_the_answer_never_rests_on_clairvoyance(tmp_path):
    t = trace(tmp_path, "a")
    points = lab.plan_points(t, DEVICE, lab.weights_of(t, 20.0, 0.0), policies=["lru", "belady"], access=Access())
    assert lab.answer(points, lab.Budget(1e6)).point.policy == "lru"


def test_an_unknown_size_of_experts_is_asked_for(tmp_path):
    t = trace(tmp_path, "a")
    nameless = lab.Trace(t.path, "a", t.table)
    with pytest.raises(StickyError, match=r"does not say how large an expert is: add --expert_bytes"):
        lab.weights_of(nameless, None, 0.0)


def test_figures_and_json(tmp_path):
    t = trace(tmp_path, "a", tokens=np.zeros((2, 40), np.int32))
    found = lab.locality_figures(t.table)
    assert all(len(values) == 2 for values in found.values())
    assert {"SR", "SRP 16", "token peak"} <= set(found)
    report = lab.study(t, policies=["lru", "belady"], capacities=[2, 3], access=Access())
    lab.write_json(tmp_path / "out.json", [report], [found])
    text = (tmp_path / "out.json").read_text()
    assert '"words"' in text
    assert '"figures"' in text
    with pytest.raises(StickyError, match=r"cannot be written"):
        lab.write_json(tmp_path / "no" / "out.json", [report], [])


def test_the_curves_of_a_page_come_with_their_bound(tmp_path):
    t = trace(tmp_path, "a")
    found = lab.curves(t, policies=["lru", "sieve"], access=Access())
    assert list(found) == ["lru", "sieve", "belady"]
    for curve in found.values():
        assert curve.capacities.tolist() == [1, 2, 3, 4, 5, 6]
        assert (curve.rates >= found["belady"].rates).all()
    assert "belady" not in lab.curves(t, policies=["lru"], access=Access(prefetch="previous"))
