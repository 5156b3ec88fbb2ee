"""Sweeps on a Ray cluster of two nodes: what a local sweep gives, also where a node is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from stickymoe.cli import main
from stickymoe.data.tokens import load_tokens
from stickymoe.runs.record import RunRecord
from stickymoe.sweeps.engine import sweep
from tests.sweeps.conftest import SHORT, cells_of, wait_for

LONG = {**SHORT, "steps": 60, "eval_every": 30, "checkpoint_every": 5}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster(token_cache):
    """Two nodes with one CPU each. Ray does not close the logs of its daemons."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        from ray.cluster_utils import Cluster

        niceness = {"worker_niceness": 0}  # as the other processes of the tests
        head = {**NODE, "include_dashboard": False, "_system_config": niceness}
        started = Cluster(initialize_head=True, head_node_args=head)
        started.add_node(**NODE)
        yield started
        started.shutdown()


@contextmanager
def sweep_on(cluster, grid, out, *, train):
    """A sweep over vanilla and soft in a process of its own; it is stopped at the end."""
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**grid, "train": train, "rows": [{"variant": "vanilla"}, {"variant": "soft"}]}))
    command = [sys.executable, "-m", "stickymoe.cli", "sweep", str(file), "--out", str(out)]
    command += ["--engine", "ray", "--address", cluster.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


def trainings(out, below=None):
    """The processes that train a run in `out`, below a process."""
    found = []
    for process in psutil.process_iter() if below is None else psutil.Process(below).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if "train" in command and any(word.startswith(f"{out}{os.sep}") for word in command):
                found.append(process)
    return found


def suspended(out):
    """The processes of both cells, each suspended after its first checkpoint, so that neither can end too early."""
    found = trainings(out)
    saved = [process for process in found if list(folder_of(process).glob("checkpoints/step-*/"))]
    for process in saved:
        process.suspend()
    return len(saved) == 2 and saved


def folder_of(process):
    command = process.cmdline()
    return Path(command[command.index("--out") + 1])


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_sweep_whose_node_is_killed_equals_a_local_sweep(cluster, grid, tmp_path):
    out = tmp_path / "cluster"
    with sweep_on(cluster, grid, out, train=LONG) as process:
        both = wait_for(lambda: suspended(out), 300)
        (node,) = cluster.worker_nodes
        (raylet,) = node.all_processes["raylet"]
        (lost,) = trainings(out, below=raylet.process.pid)
        (other,) = set(both) - {lost}
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: has_ended(lost), 300)
        other.resume()
        printed, messages = process.communicate(timeout=300)
    cluster.add_node(**NODE)
    assert process.returncode == 0, messages
    assert "waiting: its node died" in messages
    assert "raylet" not in printed + messages
    cells = sweep(cells_of(grid, tmp_path / "local", "vanilla", "soft", train=LONG))
    for cell in cells:
        there = out / cell.folder.path.name
        steps = [json.loads(line)["step"] for line in (there / "timings.jsonl").read_text().splitlines()]
        assert steps.count(1) == 1, "it resumed from a checkpoint"
        assert (there / "metrics.jsonl").read_bytes() == cell.folder.metrics.read_bytes()
        assert (there / "record.json").read_bytes() == cell.folder.record.read_bytes()  # the nodes are one machine
        for file in cell.folder.routes.iterdir():
            assert (there / "routes" / file.name).read_bytes() == file.read_bytes()


def test_a_local_sweep_waits_for_the_runs_of_a_cluster(cluster, grid, tmp_path):
    out = tmp_path / "out"
    with sweep_on(cluster, grid, out, train=LONG) as process:
        both = wait_for(lambda: suspended(out), 300)
        command = [sys.executable, "-m", "stickymoe.cli", "sweep", str(out.with_suffix(".yaml")), "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as local:
            wait_for(lambda: "running" in local.stderr.readline(), 300)
            for cell in both:
                cell.resume()
            assert local.wait(300) == 0
        process.communicate(timeout=300)
    assert process.returncode == 0
    for timings in out.glob("*/timings.jsonl"):
        steps = [json.loads(line)["step"] for line in timings.read_text().splitlines()]
        assert steps == sorted(set(steps)), "one of the two trained it"


def test_ctrl_c_saves_the_cells_and_leaves_no_process(cluster, grid, tmp_path):
    out = tmp_path / "out"
    with sweep_on(cluster, grid, out, train={**LONG, "steps": 100_000}) as process:
        for cell in wait_for(lambda: suspended(out), 300):
            cell.resume()
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=300)
    assert process.returncode == 130
    assert messages.splitlines()[-1] == "Sweep stopped; its runs are saved. The same command resumes it."
    assert trainings(out) == []
    for record in out.glob("*/record.json"):
        assert RunRecord.read(record).status == "interrupted"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1 ([Errno 111] Connection refused)"),
        ("127.0.0.1:99999", "No Ray cluster answers at 127.0.0.1:99999"),
        ("ray://head:10001", "expected HOST:PORT"),
        ("head", "expected HOST:PORT"),
        ("local", "expected HOST:PORT"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_one_line(address, message, grid, tmp_path, capsys):
    assert main([*arguments(grid, tmp_path), "--address", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_cluster_without_cpus_is_one_line(grid, tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("ray.init", lambda *address, **options: None)
        monkeypatch.setattr("ray.cluster_resources", lambda: {"memory": 1.0})
        assert main([*arguments(grid, tmp_path), "--address", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"The Ray cluster at {address} has no CPUs" in line


def test_without_ray_the_line_names_the_extra(grid, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "stickymoe.sweeps.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(arguments(grid, tmp_path)) == 2
    assert (
        capsys.readouterr().err == 'stickymoe: sweep needs ray, which is not installed: pip install "stickymoe[ray]".\n'
    )


def test_a_dry_run_needs_no_cluster(grid, tmp_path, capsys):
    assert main([*arguments(grid, tmp_path), "--address", "127.0.0.1:1", "--dry_run"]) == 0
    assert "vanilla" in capsys.readouterr().out


def arguments(grid, folder):
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({**grid, "rows": [{"variant": "vanilla"}]}))
    return ["sweep", str(file), "--out", str(folder / "out"), "--engine", "ray"]


@pytest.fixture
def job(grid, tmp_path):
    """What a node gets for a cell of one short run, and the cell."""
    from stickymoe.sweeps.ray import Job

    (cell,) = cells_of(grid, tmp_path, "vanilla")
    return Job(cell.prepare(), cell.folder.path, Path.cwd(), cell.config.data, cell.data["fingerprint"]), cell


def test_a_node_that_cannot_see_the_run_folder_says_so(job, tmp_path):
    from stickymoe.sweeps.ray import train_on_node

    job[1].folder.path.rename(tmp_path / "elsewhere")
    ended = train_on_node(job[0])
    assert ended.code == 2
    assert "--out must be on a file system that all nodes share. (on node " in ended.message


def test_a_node_with_other_data_says_so(job, grid, tmp_path):
    from stickymoe.sweeps.ray import train_on_node

    other = replace(job[0].data, fraction=0.5)
    assert load_tokens(other).fingerprint != job[0].fingerprint
    ended = train_on_node(replace(job[0], data=other))
    assert "all nodes must read the same files. (on node " in ended.message
    missing = replace(job[0], data=replace(other, path=str(tmp_path / "missing")))
    assert "missing' does not exist" in train_on_node(missing).message
    assert not job[1].folder.record.exists()


def test_a_process_dies_with_its_parent(tmp_path):
    """As the training process of a Ray worker that was killed."""
    pid = tmp_path / "pid"
    sleep = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    tied = "[sys.executable, '-m', 'stickymoe.sweeps.tied', str(os.getpid()), '-c', sys.argv[1]]"
    parent = subprocess.Popen([sys.executable, "-c", f"import os, subprocess, sys; subprocess.run({tied})", sleep])
    wait_for(lambda: pid.exists() and pid.read_text())
    child = psutil.Process(int(pid.read_text()))
    parent.kill()
    parent.wait()
    wait_for(lambda: has_ended(child))


def test_a_process_whose_parent_has_died_does_not_start():
    command = [sys.executable, "-m", "stickymoe.sweeps.tied", "1", "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
