"""simulate, plan, device and trace as a user meets them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from stickymoe.cli import main
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.replay import simulate
from stickymoe.locality.table import RouteTable


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "trace"
    sizes = ["--n_experts", "8", "--top_k", "2", "--n_layers", "2", "--sequences", "2", "--length", "60"]
    assert main(["trace", "make", str(folder), *sizes, "--stickiness", "0.8"]) == 0
    return folder


def said(capsys, *argv):
    capsys.readouterr()
    assert main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


def test_simulate_prints_and_writes_what_the_simulator_counts(made, capsys, tmp_path):
    out = said(capsys, "simulate", made, "--policy", "lru,belady", "--capacity", "3", "--json", tmp_path / "a.json")
    result = simulate(load_table(made), capacity=3)
    assert f"{100 * result.miss_rate:.2f}" in out
    assert "with 3 slots a cache: " in out
    (entry,) = json.loads((tmp_path / "a.json").read_text())
    assert entry["policies"]["lru"]["3"]["misses"] == [c.misses for c in result.caches]


def test_simulate_takes_every_way_through_a_trace(made, capsys):
    for flags in (
        ["--top1", "--warm"],
        ["--order", "decode", "--pool", "--policy", "lru", "--capacity", "4,16"],
        ["--share_block", "full", "--order", "decode", "--capacity", "4"],
        ["--share_block", "2", "--capacity", "4", "--chosen"],
        ["--prefetch", "previous", "--capacity", "3"],
        ["--prefetch", str(made), "--capacity", "3"],
        ["--figures", "--capacity", "9"],
    ):
        assert "slots" in said(capsys, "simulate", made, *flags), flags
    assert "only cold misses" in said(capsys, "simulate", made, "--capacity", "9")


def test_plan_answers_a_budget(made, capsys):
    budget = ["--expert_bytes", "1MB", "--device", "raspberry-pi-5"]
    assert "lru with 3 slots a cache (6 MB)" in said(capsys, "plan", made, *budget, "--memory", "6MB")
    assert "No cache fits 1 MB" in said(capsys, "plan", made, *budget, "--memory", "1MB")
    assert "No cache reaches 1e+06 tokens/s" in said(capsys, "plan", made, *budget, "--tokens_per_s", "1e6")
    assert "◂" in said(capsys, "plan", made, *budget, "--chosen", "--warm")


def test_device_shows_lists_and_measures(capsys, tmp_path):
    assert "compute_bandwidth" in said(capsys, "device", "rtx-4090")
    assert "raspberry-pi-5" in said(capsys, "device", "--list")
    said(capsys, "device", "--megabytes", "1", "--folder", tmp_path, "--out", tmp_path / "me.yaml")
    assert "this machine" in said(capsys, "device", tmp_path / "me.yaml")


def test_convert_writes_a_folder_that_simulate_takes(capsys, tmp_path):
    meta = json.dumps({"num_experts": 4})
    np.savez(tmp_path / "a.npz", experts=np.zeros((1, 5, 1), np.int16), meta=meta)
    out = said(capsys, "trace", "convert", tmp_path / "a.npz", tmp_path / "out")
    assert "1 layers, 1 × 5 tokens (5 whole), 4 experts, top-1" in out
    assert said(capsys, "simulate", tmp_path / "out", "--capacity", "1") == said(
        capsys, "simulate", tmp_path / "a.npz", "--capacity", "1"
    ).replace("a.npz", "out")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["simulate", "TRACE", "--capacity", "0"], r"capacity: got 0, expected a whole number of slots ≥ 1"),
        (["simulate", "TRACE", "--capacity", "two"], r"got 'two', expected whole numbers such as 2,3"),
        (["simulate", "TRACE", "--policy", "lruu"], r"Unknown policy 'lruu'. Did you mean 'lru'"),
        (["simulate", "TRACE", "--share_block", "some"], r"--share_block: got 'some'"),
        (["simulate", "TRACE", "--share_block", "9"], r"share_block: got 9, expected at most the 2 layers"),
        (["simulate", "TRACE", "--prefetch", "previous", "--policy", "belady"], r"belady bounds policies"),
        (["simulate", "TRACE", "OTHER"], r"cannot be compared: experts 8 there, 4 here"),
        (["simulate", "nowhere"], r"nowhere holds no route table"),
        (["simulate", "TEXT"], r"is of no known trace format\. Known: .*bigmoeonedge, cacheable-by-design"),
        (["simulate"], r"TRACE"),
        (["plan", "TRACE", "--expert_bytes", "1MB"], r"--device"),
        (["plan", "TRACE", "--device", "rtx-4090"], r"does not say how large an expert is"),
        (["plan", "TRACE", "--device", "rtx-409"], r"Unknown device 'rtx-409'. Did you mean 'rtx-4090'"),
        (["plan", "TRACE", "--device", "BROKEN"], r"load_bandwidth is missing"),
        (["plan", "TRACE", "--device", "rtx-4090", "--memory", "lots"], r"--memory: got 'lots'"),
        (["plan", "TRACE", "--device", "rtx-4090", "--tokens_per_s", "-1"], r"--tokens_per_s: got -1.0"),
        (["plan", "TRACE", "TRACE", "--device", "rtx-4090"], r"add --tokens_per_s"),
        (["trace", "covert"], r"Unknown trace command 'covert'. Did you mean 'convert'"),
        (["trace", "convert", "TEXT", "OUT"], r"is of no known trace format"),
        (["trace", "convert", "TEXT", "OUT", "--format", "vllm"], r"Unknown trace format 'vllm'. Known: bigmoeonedge"),
        (["trace", "make", "OUT", "--top_k", "99"], r"top_k: got 99, expected at most n_experts=64"),
        (["trace", "make", "TEXT"], r"cannot be written"),
        (["device", "BROKEN"], r"load_bandwidth is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_in_one_line(argv, says, made, capsys, tmp_path):
    save_table(
        RouteTable(S=np.zeros((2, 2, 60, 2), np.uint8), n_experts=4, mask=np.ones((2, 60), bool)), tmp_path / "b"
    )
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "broken.yaml").write_text("fast_memory: 1GB\n")
    places = {"TRACE": made, "OTHER": tmp_path / "b", "TEXT": tmp_path / "text", "OUT": tmp_path / "out"}
    places["BROKEN"] = tmp_path / "broken.yaml"
    capsys.readouterr()
    assert main([str(places.get(a, a)) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("stickymoe: ")
    assert err.count("\n") == 1, err
    assert re.search(says, err), err
    assert "Traceback" not in out + err


def test_a_truncated_trace_is_refused(made, capsys, tmp_path):
    broken = tmp_path / "broken"
    save_table(load_table(made), broken)
    (broken / "S.npy").write_bytes((broken / "S.npy").read_bytes()[:-1])
    assert main(["simulate", str(broken)]) == 2
    assert "S.npy is missing or damaged" in capsys.readouterr().err
