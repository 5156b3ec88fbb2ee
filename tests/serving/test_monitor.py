"""What `stickymoe monitor` reads of run folders that change while it reads."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.records import a_run, write
from stickymoe.cli import main
from stickymoe.serving.monitor import Monitor


def line(step, loss=1.0):
    return json.dumps({"step": step, "lr": 0.1, "train": {"loss": loss}}) + "\n"


@pytest.fixture
def runs(tmp_path) -> Path:
    write(a_run("vanilla", ppl=100.0, cache_hit_rate=0.5), tmp_path / "runs")
    return tmp_path / "runs"


def metrics_of(runs) -> Path:
    (record,) = runs.rglob("record.json")
    return record.parent / "metrics.jsonl"


def losses(data):
    return [tuple(p) for run in data["runs"] for p in run["points"].get("train.loss", [])]


@given(cuts=st.lists(st.integers(0, 400), max_size=12), n=st.integers(0, 8))
def test_every_line_is_sent_once_however_the_file_grows(cuts, n, tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    write(a_run("vanilla", ppl=100.0, cache_hit_rate=0.5), folder)
    file = metrics_of(folder)
    content = "".join(line(step, 1 / step) for step in range(1, n + 1)).encode()
    monitor, cursor, found = Monitor(folder), "", []
    places = [0, *sorted(min(c, len(content)) for c in cuts), len(content)]
    file.write_bytes(b"")
    for begin, end in itertools.pairwise(places):
        with file.open("ab") as f:
            f.write(content[begin:end])
        data = monitor.data(cursor)
        cursor = data["cursor"]
        found += losses(data)
    assert found == [(step, 1 / step) for step in range(1, n + 1)]
    assert losses(monitor.data()) == found  # a page that opens later gets all of it
    assert losses(monitor.data("another server-3")) == found
    shutil.rmtree(folder)


def test_a_file_that_starts_again_replaces_what_was_sent(runs):
    file, monitor = metrics_of(runs), Monitor(runs)
    file.write_text(line(1, 5.0) + line(2, 4.0))
    first = monitor.data()
    file.write_text(line(1, 9.0))
    again = monitor.data(first["cursor"])
    assert again["runs"][0]["reset"]
    assert losses(again) == [(1, 9.0)]


def test_damage_and_failures_are_shown_and_nothing_stops(runs):
    file, monitor = metrics_of(runs), Monitor(runs)
    file.write_text(line(1) + "not json\n" + line(2))
    data = monitor.data()
    assert losses(data) == [(1, 1.0), (2, 1.0)]
    assert "1 unreadable lines" in data["runs"][0]["message"]
    record = file.parent / "record.json"
    fields = json.loads(record.read_text())
    record.write_text(json.dumps(fields | {"status": "failed", "failure": "the loss is nan"}))
    (run,) = monitor.data()["runs"]
    assert (run["status"], run["message"]) == ("failed", "the loss is nan")
    record.write_text("{")
    assert monitor.data()["runs"][0]["status"] == "damaged"
    shutil.rmtree(file.parent)
    assert monitor.data()["runs"][0]["status"] == "deleted"
    shutil.rmtree(runs)
    assert "was deleted" in monitor.data()["message"]


def test_runs_that_appear_are_found(tmp_path):
    monitor = Monitor(tmp_path)
    assert "Waiting for runs" in monitor.data()["message"]
    write(a_run("vanilla", ppl=100.0, cache_hit_rate=0.5), tmp_path / "sweep")
    data = monitor.data()
    assert data["message"] is None
    assert [run["label"] for run in data["runs"]] == ["vanilla"]
    assert data["runs"][0]["status"] == "complete"


def test_it_needs_no_torch():
    code = "import sys, stickymoe.serving.monitor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    def refused(*args, match):
        capsys.readouterr()
        assert main(["monitor", *map(str, args)]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch("stickymoe: [^\n]+\n", err), err
        assert re.search(match, err), err

    refused(tmp_path / "none", match="none does not exist")
    refused(tmp_path / "file", match="file is not a folder")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(tmp_path, "--port", port, match=f"port {port} is in use")
