"""simulate, plan, device and trace as a user meets them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from reports.records import a_run, write
from stickymoe.cli import main
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.measure import measure
from stickymoe.locality.replay import allocate, miss_curve, simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.study import default_policies
from stickymoe.locality.table import RouteTable

RUNS = ((0.1, 33.0), (0.2, 31.0), (0.5, 32.0))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "trace"
    sizes = ["--n_experts", "8", "--top_k", "2", "--n_layers", "2", "--sequences", "2", "--length", "60"]
    assert main(["trace", "make", str(folder), *sizes, "--stickiness", "0.8"]) == 0
    table = load_table(folder)
    predicted = np.array(table.S)
    predicted[0] = table.n_experts  # nothing is prefetched for the first layer
    save_table(replace(table, predicted=predicted), folder)
    return folder


def said(capsys, *argv):
    capsys.readouterr()
    assert main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


def test_simulate_prints_and_writes_what_the_simulator_counts(made, capsys, tmp_path):
    out = said(capsys, "simulate", made, "--policy", "lru,belady", "--capacity", "3", "--json", tmp_path / "a.json")
    result = simulate(load_table(made), capacity=3)
    assert f"{100 * result.miss_rate:.2f}" in out
    assert "with 3 slots per cache: " in out
    (entry,) = json.loads((tmp_path / "a.json").read_text())
    assert entry["policies"]["lru"]["3"]["misses"] == [c.misses for c in result.caches]


@pytest.mark.parametrize(
    ("flags", "capacity", "access"),
    [
        (["--top1", "--warm"], 3, {"top1": True, "warm": True}),
        (["--order", "decode", "--pool"], 8, {"order": "decode", "pool": True}),
        (["--share_block", "full", "--order", "decode"], 4, {"share_block": 2, "order": "decode"}),
        (["--share_block", "2"], 4, {"share_block": 2}),
        (["--batch"], 3, {"batch": True}),
        (["--prefetch", "previous"], 3, {"prefetch": "previous"}),
        (["--prefetch", "TRACE"], 3, {"prefetch": "TRACE"}),
        (["--prefetch", "recorded"], 3, {"prefetch": "recorded"}),
        (["--on_miss", "bypass"], 3, {"on_miss": "bypass"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_simulate_takes_every_way_through_a_trace(made, capsys, flags, capacity, access):
    table = load_table(made)
    if access.get("prefetch") == "TRACE":
        access = {"prefetch": table.S}
    out = said(capsys, "simulate", made, "--capacity", capacity, *(made if f == "TRACE" else f for f in flags))
    policies = default_policies(Access(**access))
    found = [simulate(table, policy=p, capacity=capacity, access=Access(**access)) for p in policies]
    expected = [str(capacity)]
    for result in found:
        expected.append(f"{100 * result.miss_rate:.2f}")
        if "prefetch" in access:
            expected.append(f"{result.wasted / result.tokens:.3f}")
    assert expected in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize("flag", ["--allocated", "--chosen"])
def test_simulate_divides_slots_by_the_miss_curves(flag, made, capsys, tmp_path):
    said(capsys, "simulate", made, "--capacity", "3", flag, "--policy", "lru", "--json", tmp_path / "a.json")
    (entry,) = json.loads((tmp_path / "a.json").read_text())
    table = load_table(made)
    slots = allocate(miss_curve(table), 6)
    assert entry["policies"]["lru"]["3"]["slots"] == slots
    assert entry["policies"]["lru"]["3"]["misses"] == [c.misses for c in simulate(table, capacity=slots).caches]


def test_simulate_shows_the_figures_of_measure(made, capsys, tmp_path):
    out = said(
        capsys, "simulate", made, "--policy", "lru", "--capacity", "3", "--figures", "--json", tmp_path / "a.json"
    )
    measured = measure(load_table(made))
    assert f"{measured['reuse_8']:.3f}" in out
    (entry,) = json.loads((tmp_path / "a.json").read_text())
    assert entry["figures"].keys() == measured.per_layer.keys()
    assert entry["figures"]["switch_rate"] == measured.per_layer["switch_rate"].tolist()


def test_simulate_says_what_more_slots_than_experts_do(made, capsys):
    assert "only cold misses" in said(capsys, "simulate", made, "--capacity", "9")


def test_simulate_takes_all_capacities_and_spaces_in_lists(made, capsys, tmp_path):
    said(capsys, "simulate", made, "--capacity", "all", "--policy", "lru, belady", "--json", tmp_path / "a.json")
    (entry,) = json.loads((tmp_path / "a.json").read_text())
    for policy in ("lru", "belady"):
        misses = miss_curve(load_table(made), policy=policy).misses
        assert [by["misses"] for by in entry["policies"][policy].values()] == misses.T.tolist()


def test_plan_answers_a_budget(made, capsys):
    budget = ["--expert_bytes", "1MB", "--device", "raspberry-pi-5"]
    out = said(capsys, "plan", made, *budget, "--memory", "6MB")
    assert "lru with 3 slots per cache (6 MB)" in out
    assert "only experts are counted" in out
    assert "lru with 3 slots per cache (7 MB)" in said(
        capsys, "plan", made, *budget, "--memory", "7MB", "--other_bytes", "1000KB"
    )
    assert "No cache fits 1 MB" in said(capsys, "plan", made, *budget, "--memory", "1MB")
    assert "No cache reaches 1e+06 tokens/s" in said(capsys, "plan", made, *budget, "--tokens_per_s", "1e6")
    assert "◂" in said(capsys, "plan", made, *budget, "--allocated", "--warm")


def test_plan_chooses_a_run_by_memory_alone(capsys, tmp_path):
    runs = [write(a_run({"name": "soft", "lam": lam}, ppl=ppl), tmp_path, words=("one",)) for lam, ppl in RUNS]
    out = said(capsys, "plan", *runs, "--device", "raspberry-pi-5")
    assert "soft λ=0.2 has the lowest perplexity of the runs whose smallest useful cache fits 8 GB." in out
    out = said(capsys, "plan", *runs, "--device", "raspberry-pi-5", "--memory", "1MB")
    assert "No run meets the budget." in out
    for lam, _ in RUNS:
        assert f"soft λ={lam}: No cache fits 1 MB: the smallest, 2 slots per cache, needs" in out


def test_a_run_that_shares_its_experts_is_replayed_so(capsys, tmp_path):
    run = write(a_run("vanilla", settings={"model": {"share_block": 2}}), tmp_path, words=("one",))
    rate = simulate(load_table(run / "routes"), capacity=3, access=Access(share_block=2)).miss_rate
    assert f"{100 * rate:.2f}" in said(capsys, "simulate", run, "--policy", "lru", "--capacity", "3")
    assert main(["simulate", str(run), "--share_block", "1"]) == 2
    assert "is a run with share_block=2" in capsys.readouterr().err


def test_device_shows_lists_and_measures(capsys, tmp_path):
    assert "compute_bandwidth" in said(capsys, "device", "rtx-4090")
    assert "raspberry-pi-5" in said(capsys, "device", "--list")
    said(capsys, "device", "--megabytes", "1", "--folder", tmp_path, "--out", tmp_path / "me.yaml")
    assert "this machine" in said(capsys, "device", tmp_path / "me.yaml")


def test_convert_writes_a_folder_that_simulate_takes(capsys, tmp_path):
    meta = json.dumps({"num_experts": 4})
    np.savez(tmp_path / "a.npz", experts=np.zeros((1, 5, 1), np.int16), meta=meta)
    out = said(capsys, "trace", "convert", tmp_path / "a.npz", tmp_path / "out")
    assert "1 layers, 1 × 5 tokens (5 real), 4 experts, top-1" in out
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
        (["simulate", "TRACE", "OTHER"], r"cannot be compared: experts are 8 in the first, 4 in the other"),
        (["simulate", "nowhere"], r"nowhere is not a folder: expected a run folder"),
        (["simulate", "TEXT"], r"has no known trace format\. Known: .*bigmoeonedge, cacheable-by-design"),
        (["simulate"], r"TRACE"),
        (["plan", "TRACE", "--expert_bytes", "1MB"], r"--device"),
        (["plan", "TRACE", "--device", "rtx-4090"], r"has no expert size"),
        (["plan", "TRACE", "--device", "rtx-409"], r"Unknown device 'rtx-409'. Did you mean 'rtx-4090'"),
        (["plan", "TRACE", "--device", "BROKEN"], r"load_bandwidth is missing"),
        (["plan", "TRACE", "--device", "rtx-4090", "--memory", "lots"], r"--memory: got 'lots'"),
        (["plan", "TRACE", "--device", "rtx-4090", "--tokens_per_s", "-1"], r"tokens_per_s: got -1.0"),
        (["plan", "TRACE", "--device", "rtx-4090", "--memory", ""], r"--memory: got ''"),
        (
            ["plan", "TRACE", "--device", "rtx-4090", "--expert_bytes", "0.5"],
            r"expert_bytes: got 0.5, expected a number ≥ 1",
        ),
        (
            ["plan", "TRACE", "TRACE", "--device", "rtx-4090"],
            r"has no perplexity: to choose among several traces, pass run folders",
        ),
        (["trace", "covert"], r"Unknown trace command 'covert'. Did you mean 'convert'"),
        (["trace", "convert", "TEXT", "OUT"], r"has no known trace format"),
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


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trace", "make", "TRACE"], r"trace already has a trace\. Choose another folder"),
        (["trace", "make", "RUN/routes"], r"already has a trace"),
        (["trace", "make", "RUN"], r"already has a run"),
        (["trace", "make", "RUN/new"], r"already has a run"),
        (["trace", "convert", "TRACE/S.npy", "TRACE"], r"already has a trace"),
        (["simulate", "TRACE", "--json", "RUN/record.json"], r"record\.json would be written into a run folder"),
        (["device", "rtx-4090", "--out", "RUN/config.yaml"], r"config\.yaml would be written into a run folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_that_is_there_is_overwritten(argv, says, made, capsys, tmp_path):
    run = write(a_run("soft"), tmp_path, words=("one",))
    before = {file: file.read_bytes() for folder in (made, run) for file in folder.rglob("*") if file.is_file()}
    assert main([a.replace("TRACE", str(made)).replace("RUN", str(run)) for a in argv]) == 2
    assert re.search(says, capsys.readouterr().err)
    after = {file: file.read_bytes() for folder in (made, run) for file in folder.rglob("*") if file.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (a_run("dense"), r"a dense model has no experts, so it has no routes"),
        (a_run("soft", status="interrupted"), r"the run is interrupted.*stickymoe train --resume --out \S+ resumes it"),
    ],
)
def test_a_run_without_routes_says_why(run, says, capsys, tmp_path):
    assert main(["simulate", str(write(run, tmp_path))]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_plan_shows_the_loads_that_a_speed_leaves_time_for(made, capsys, tmp_path):
    device = tmp_path / "slow.yaml"
    device.write_text("name: slow\nfast_memory: 1GB\nload_bandwidth: 1GB\nload_latency_ms: 1\ncompute_bandwidth: 1GB\n")
    asked = ["plan", made, "--device", device, "--expert_bytes", "1MB"]
    note = "an expert has 1 MB and loads in 2 ms; computing a token takes 4 ms"  # 2 layers, 2 experts a token
    assert f"{note}\n" in said(capsys, *asked)
    assert f"{note}; at 100 tokens/s there is time for 1.5 loads per token and layer\n" in said(
        capsys, *asked, "--tokens_per_s", 100
    )
    assert f"{note}; at 1,000 tokens/s there is no time for loads\n" in said(capsys, *asked, "--tokens_per_s", 1000)


def test_a_truncated_trace_is_refused(made, capsys, tmp_path):
    broken = tmp_path / "broken"
    save_table(load_table(made), broken)
    (broken / "S.npy").write_bytes((broken / "S.npy").read_bytes()[:-1])
    assert main(["simulate", str(broken)]) == 2
    assert "S.npy is damaged: its header describes" in capsys.readouterr().err
