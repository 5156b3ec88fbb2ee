"""Traces opened by any of their names, compared only if they are of the same text and shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reports.records import a_run, write
from stickymoe.cli import main
from stickymoe.errors import StickyError
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.plan import plan
from stickymoe.locality.table import RouteTable
from stickymoe.runs.config import RunConfig
from stickymoe.runs.record import RunRecord
from stickymoe.runs.settings import config_from
from stickymoe.runs.traces import Trace, expert_bytes, open_traces, parse_sharing
from stickymoe.training.build import build_model
from strategies import sticky_choices


def table(n_experts=6, shape=(2, 2, 40, 2), **more):
    S = sticky_choices(np.random.default_rng(0), shape, n_experts, stay=0.6).astype(np.uint8)
    fields = {"S": S, "n_experts": n_experts, "mask": np.ones(shape[1:3], bool), "expert_bytes": (10,) * shape[0]}
    return RouteTable(**{**fields, **more})


def run(tmp_path, name="vanilla", seed=42, **model):
    return write(a_run(name, seed=seed, settings={"model": model}), tmp_path, words=("one", "two"))


def test_a_run_folder_its_routes_and_a_bare_folder_are_the_same_trace(tmp_path):
    save_table(table(), tmp_path / "run" / "routes")
    a, b = open_traces([tmp_path / "run", tmp_path / "run" / "routes"])
    np.testing.assert_array_equal(a.table.S, b.table.S)
    assert a.table.expert_bytes == (10, 10)
    assert a.description == "run: 2 layers, 6 experts, top-2, 2 × 40 tokens"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"n_experts": 7}, "experts are 6 in the first, 7 in the other"),
        ({"shape": (3, 2, 40, 2)}, "layers are 2 in the first, 3 in the other"),
        ({"shape": (2, 2, 40, 1)}, "experts per token are 2 in the first, 1 in the other"),
        ({"shape": (2, 2, 41, 2)}, r"sequences and tokens are \(2, 40\) in the first, \(2, 41\) in the other"),
        ({"tokens": np.ones((2, 40), np.int32)}, "they are traces of different texts"),
        ({"expert_bytes": (10, 11)}, r"bytes of an expert are \(10, 10\) in the first, \(10, 11\) in the other"),
        ({"mask": np.arange(80).reshape(2, 40) > 0}, "their padding differs"),
        ({"doc": np.ones((2, 40), np.int32)}, "their documents differ"),
        ({"doc": None}, "only one of them has documents"),
    ],
)
def test_mixed_traces_are_refused(tmp_path, other, says):
    zeros = np.zeros((2, 40), np.int32)
    save_table(table(tokens=zeros, doc=zeros), tmp_path / "a")
    save_table(table(**{"doc": None if "shape" in other else zeros, **other}), tmp_path / "b")
    with pytest.raises(StickyError, match=rf"^\S+a and \S+b cannot be compared: {says}\.$"):
        open_traces([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(("model", "expected"), [({}, 1), ({"share_block": 2}, 2), ({"share_block": 4}, 4)])
def test_a_run_brings_its_own_sharing(tmp_path, model, expected):
    traces = open_traces([run(tmp_path, **model)])
    assert traces[0].table.share_block == expected
    assert parse_sharing(None, traces) is None
    assert parse_sharing(str(expected), traces) == expected
    with pytest.raises(StickyError, match=rf"^--share_block: got 3, but \S+ is a run with share_block={expected}; "):
        parse_sharing("3", traces)
    if expected == 4:
        assert parse_sharing("full", traces) == "full"


def test_a_bare_trace_is_shared_as_asked(tmp_path):
    bare = [Trace(tmp_path, "a", table())]
    assert [parse_sharing(asked, bare) for asked in (None, "2", "full", "universal")] == [None, 2, "full", "full"]
    with pytest.raises(StickyError, match=r"^--share_block: got '²', expected a whole number of layers"):
        parse_sharing("²", bare)


@pytest.mark.parametrize("model", [{}, {"share_block": 2}, {"universal": True}])
def test_bytes_of_an_old_run_are_those_of_its_model(model):
    """A run of version 0.1 has no measured sizes: those from the config equal what the model measures."""
    config = config_from({"preset": "tiny", "model": model}, [])
    assert set(build_model(config, 300).expert_bytes()) == {expert_bytes(config.model)}


def test_the_bytes_of_a_trained_run_are_measured_and_planned_with(corpus, tmp_path):
    """The recommended router has three gates for each layer: an account of one gate counts too little."""
    folder = tmp_path / "run"
    sizes = ["--model.d_model", "16", "--model.d_ff", "16", "--model.seq_len", "16", "--data.vocab_size", "300"]
    steps = ["--train.steps", "2", "--train.eval_every", "2", "--data.path", str(corpus)]
    assert main(["train", "--preset", "tiny", "--recommended", "--quiet", *sizes, *steps, "--out", str(folder)]) == 0
    record = RunRecord.read(folder / "record.json")
    config = RunConfig.from_dict(record.config)
    model = build_model(config, record.data["vocab_size"])
    parameters = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    other = sum(parameters.values()) - experts
    one_gate = build_model(replace(config, variant=config_from({"variant": "vanilla"}).variant), 300).other_bytes()
    assert other > one_gate
    assert record.sizes["other_bytes"] == other
    assert sum(record.sizes["expert_bytes"]) * config.model.pool_size == experts
    (trace,) = open_traces([folder])
    assert trace.table.other_bytes == load_table(folder / "routes").other_bytes == other
    assert list(trace.table.expert_bytes) == record.sizes["expert_bytes"]
    one_slot = plan(trace.table, "raspberry-pi-5", policies=["lru"]).points["lru"][0]
    assert one_slot.memory == other + sum(record.sizes["expert_bytes"])


def test_an_old_run_knows_its_experts_and_not_the_rest(tmp_path):
    folder = run(tmp_path)
    assert load_table(folder / "routes").expert_bytes is None
    (old,) = open_traces([folder])
    assert set(old.table.expert_bytes) == {expert_bytes(a_run("vanilla").config.model)}
    assert old.table.other_bytes is None


def test_a_record_beside_a_trace_is_not_the_traces(tmp_path):
    folder = run(tmp_path)
    save_table(table(), folder / "elsewhere")
    (other,) = open_traces([folder / "elsewhere"])
    assert (other.label, other.ppl, other.is_run) == ("elsewhere", None, False)
    (routes,) = open_traces([folder / "routes"])
    assert (routes.label, routes.ppl, routes.is_run) == ("vanilla", 100.0, True)


def test_runs_of_one_label_get_different_labels(tmp_path):
    folders = [run(tmp_path, seed=seed) for seed in (1, 2)]
    labels = [t.label for t in open_traces([*folders, run(tmp_path, name="hysteresis")])]
    assert labels[:2] == [f"vanilla ({folder.name})" for folder in folders]
    assert "(" not in labels[2]
