"""The lab: traces opened by any of their names, never mixed, and a run chosen from a budget."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from reports.records import a_run, write
from stickymoe.errors import StickyError
from stickymoe.locality import metrics
from stickymoe.locality.devices import Device
from stickymoe.locality.formats import save_table
from stickymoe.locality.latency import Answer, Point, knee
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access, streams
from stickymoe.locality.table import RouteTable
from stickymoe.reports import lab
from stickymoe.runs.settings import config_from
from stickymoe.training.build import build_model
from strategies import sticky_choices

DEVICE = Device("d", fast_memory=1e9, load_bandwidth=1e3, load_latency_ms=1.0, compute_bandwidth=1e6)


def table(n_experts=6, shape=(2, 2, 40, 2), seed=0, stay=0.6, **more):
    S = sticky_choices(np.random.default_rng(seed), shape, n_experts, stay=stay).astype(np.uint8)
    return RouteTable(**{"S": S, "n_experts": n_experts, "mask": np.ones(shape[1:3], bool), "expert_bytes": 10, **more})


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
        ({"expert_bytes": 11}, "bytes of an expert 10 there, 11 here"),
        ({"mask": np.arange(80).reshape(2, 40) > 0}, "other tokens are real"),
        ({"doc": np.ones((2, 40), np.int32)}, "their documents differ"),
        ({"doc": None}, "only one of them knows its documents"),
    ],
)
def test_mixed_traces_are_refused(tmp_path, other, says):
    zeros = np.zeros((2, 40), np.int32)
    save_table(table(tokens=zeros, doc=zeros), tmp_path / "a")
    save_table(table(**{"doc": None if "shape" in other else zeros, **other}), tmp_path / "b")
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
    assert lab.choice_words(traces, [no, no, no], None, lab.Budget(1.0))[1:] == ["a: no", "b: no", "c: no"]
    with pytest.raises(StickyError, match="has no perplexity"):
        lab.require_perplexities([*traces, trace(tmp_path, "d")])


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
    points = lab.plan_points(t, DEVICE, lab.weights_of(t, 20.0, 0.0), policies=["static", "belady"], access=Access())
    bound = lab.answer(points, lab.Budget(1e6))
    assert bound.point.policy == "static"
    assert bound.words.startswith("A bound, static knows the trace. In 1 MB: static with ")
    assert lab.answer({"belady": points["belady"]}, lab.Budget(1e6)).point is None


def test_an_unknown_size_of_experts_is_asked_for(tmp_path):
    t = trace(tmp_path, "a")
    nameless = lab.Trace(t.path, "a", t.table)
    with pytest.raises(StickyError, match=r"does not say how large an expert is: add --expert_bytes"):
        lab.weights_of(nameless, None, 0.0)


def test_figures_and_json(tmp_path):
    t = trace(tmp_path, "a", tokens=np.zeros((2, 40), np.int32))
    found = lab.locality_figures(t.table)
    np.testing.assert_array_equal(found["SR"], metrics.switch_rate_by_layer(t.table))
    np.testing.assert_array_equal(found["set 64"], [np.nan] * 2)
    access = Access(order="decode", warm=True)
    report = lab.study(t, policies=["lru", "belady"], capacities=[2, 3], access=access)
    lab.write_json(tmp_path / "out.json", [report], [found])
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert entry["path"] == str(t.path)
    assert entry["access"] == {
        "order": "decode",
        "pool": False,
        "share_block": 1,
        "warm": True,
        "top1": False,
        "prefetch": None,
        "chosen": False,
    }
    assert entry["words"] == report.words
    assert entry["figures"]["SR"] == found["SR"]
    assert entry["figures"]["set 64"] == [None, None]
    for policy, C in itertools.product(("lru", "belady"), (2, 3)):
        expected = simulate(t.table, policy=policy, capacity=C, access=access)
        assert entry["policies"][policy][str(C)]["misses"] == [c.misses for c in expected.caches]
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


def test_a_plan_answers_from_every_capacity(tmp_path):
    """7 slots of 64 experts, fewer than a token asks for, fit 28 bytes; so do 31 an odd budget."""
    t = trace(tmp_path, "a", n_experts=64, shape=(4, 1, 40, 8))
    points = lab.plan_points(t, DEVICE, lab.weights_of(t, 1.0, 0.0), policies=["lru"], access=Access())
    assert [p.slots for p in points["lru"]] == [(C,) * 4 for C in range(1, 65)]
    found = lab.answer(points, lab.Budget(28.0)).point
    assert found.memory <= 28
    rows = lab.plan_table(points, [8, 64], found)
    bend = knee(points["lru"])
    assert len(rows.rows) == len({8, 64, found.slots[0], bend.slots[0]})


def run(tmp_path, name="vanilla", seed=42, **model):
    return write(a_run(name, seed=seed, settings={"model": model}), tmp_path, words=("one", "two"))


@pytest.mark.parametrize(("model", "expected"), [({}, 1), ({"share_block": 2}, 2), ({"share_block": 4}, 4)])
def test_a_run_brings_its_own_sharing(tmp_path, model, expected):
    (opened,) = lab.open_traces([run(tmp_path, **model)])
    assert lab.sharing(opened, None) == lab.sharing(opened, str(expected)) == expected
    with pytest.raises(StickyError, match=rf"^--share_block: got 3, but \S+ is a run with share_block={expected}\.$"):
        lab.sharing(opened, "3")
    if expected == 4:
        assert lab.sharing(opened, "full") == 4


def test_a_bare_trace_is_shared_as_asked(tmp_path):
    t = trace(tmp_path, "a")
    assert [lab.sharing(t, asked) for asked in (None, "2", "full", "universal")] == [1, 2, 2, 2]
    with pytest.raises(StickyError, match=r"^--share_block: got '²'"):
        lab.sharing(t, "²")


@pytest.mark.parametrize("model", [{}, {"share_block": 2}, {"universal": True}])
def test_bytes_are_those_of_the_model(model):
    config = config_from({"preset": "tiny", "model": model}, [])
    sizes = {name: 4 * p.numel() for name, p in build_model(config, 300).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    c = config.model
    n_experts = c.pool_size * c.n_layers // c.layers_per_pool
    assert experts == n_experts * lab.expert_bytes(c)
    assert sum(sizes.values()) - experts == lab.other_bytes(c, 300)


def test_what_the_memory_counts_is_said(tmp_path):
    (known,) = lab.open_traces([run(tmp_path)])
    bare = trace(tmp_path, "a")
    assert lab.weights_of(known, None, None).other == known.other_bytes > 0
    assert lab.weights_of(known, None, 5.0).other == 5.0
    assert "beside the experts" in lab.weights_note(known, lab.weights_of(known, None, None), None)
    assert "experts alone counted" in lab.weights_note(bare, lab.weights_of(bare, None, None), None)


def test_a_record_beside_a_trace_is_not_the_traces(tmp_path):
    folder = run(tmp_path)
    save_table(table(), folder / "elsewhere")
    (other,) = lab.open_traces([folder / "elsewhere"])
    assert (other.label, other.ppl, other.share_block) == ("elsewhere", None, None)
    (routes,) = lab.open_traces([folder / "routes"])
    assert (routes.label, routes.ppl) == ("vanilla", 100.0)


def test_runs_of_one_label_are_told_apart(tmp_path):
    folders = [run(tmp_path, seed=seed) for seed in (1, 2)]
    labels = [t.label for t in lab.open_traces([*folders, run(tmp_path, name="hysteresis")])]
    assert labels[:2] == [f"vanilla ({folder.name})" for folder in folders]
    assert "(" not in labels[2]


def test_policies_are_judged_where_they_can_differ(tmp_path):
    t = trace(tmp_path, "a")  # 2 layers, top-2
    pool = Access(order="decode", pool=True)
    assert lab.tied(t.table, Access()) == 2
    assert lab.tied(trace(tmp_path, "deep", shape=(4, 1, 40, 2)).table, pool) == 6
    both = ["lru", "belady"]
    words = lab.study(t, policies=both, capacities=[1, 2, 4, 5], access=Access()).words
    assert words.startswith("with 4 slots a cache: ")
    tied = lab.study(t, policies=both, capacities=[1, 2], access=Access()).words
    assert tied == "up to 2 slots do not tell policies apart: add a larger capacity"
    informed = lab.study(t, policies=["static", "belady"], capacities=[4], access=Access()).words
    assert informed.startswith("add a policy that a device can run")
    assert "only cold starts remain" in lab.study(t, policies=both, capacities=[6], access=Access()).words


def test_every_capacity_is_what_simulate_counts(tmp_path):
    t = trace(tmp_path, "a")
    report = lab.study(t, policies=["lru", "fifo"], capacities=None, access=Access(), whole=True)
    for policy, by in report.results.items():
        assert by == {C: simulate(t.table, policy=policy, capacity=C) for C in range(1, 7)}
