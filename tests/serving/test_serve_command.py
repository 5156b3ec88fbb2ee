"""`stickymoe serve` as a user meets it: one line for every mistake, and a clean end."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from stickymoe.cli import main


@pytest.fixture
def refused(capsys):
    """`refused(*args, match=…)`: the command fails in one line that matches."""

    def check(*args, match):
        capsys.readouterr()
        code = main(["serve", *(str(a) for a in args)])
        out, err = capsys.readouterr()
        assert code == 2, f"{code}: {out}{err}"
        shown = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("pack "))
        assert re.fullmatch("stickymoe: [^\n]+\n", shown), err
        assert re.search(match, err), err

    return check


def test_mistakes_are_one_line(refused, models, tmp_path):
    model = models["vanilla"]
    refused(tmp_path / "missing", "--port", 0, match="missing does not exist")
    refused(match="MODEL")
    refused(model, model, match=r"Two models have the name 'vanilla'.*NAME=FOLDER")
    refused("=x", match="expected a folder or NAME=FOLDER")
    refused(model, "--port", 70000, match="port: got 70000")
    refused(model, "--host", "no.such.host.invalid", match="not an address")
    refused(model, "--host", "203.0.113.1", "--port", 0, match=r"203.0.113.1 port 0 cannot be served")
    refused(model, "--max_tokens", 0, match="--max_tokens: got 0")
    refused(model, "--time_limit", 0, match="--time_limit: got 0")
    refused(model, "--max_body", "huge", match="--max_body")
    refused(model, "--api_key", "", match="--api_key: got an empty key or other characters, expected printable")
    refused(model, "--memory", "1kB", "--port", 0, match="memory: got 1 kB")
    refused(model, models["sticky"], "--store", tmp_path / "s", match="one folder for several models")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(model, "--port", port, match=f"port {port} is in use.*--port")


def test_a_model_without_a_tokenizer_is_refused_at_the_start(refused, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models["mixtral"], folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, "--store", tmp_path / "store", "--port", 0, match="has no tokenizer")


@contextmanager
def started(models, *options):
    """The command in a process, its address, and what it showed at its start."""
    command = [sys.executable, "-m", "stickymoe.cli", "serve", *map(str, models), "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    shown = ""
    try:
        for line in process.stderr:
            shown += line
            if "Serving on" in line:
                break
        yield process, re.search(r"Serving on (http://\S+)/ ", shown)[1], shown
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_ends_its_answers_with_an_event(sig, models):
    folders = [f"first={models['vanilla']}", models["sticky"]]
    with started(folders, "--slots", 1, "--throttle", "60kB") as (process, url, shown):
        assert "first: 1 of 5 experts per layer in memory" in shown
        body = {"model": "first", "prompt": "ab", "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            process.send_signal(sig)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "The server is shutting down."
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_a_client_that_stops_sending_does_not_delay_the_end(models):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    )
    with started([models["vanilla"]]) as (process, url, _):
        address, port = url.removeprefix("http://").split(":")
        with socket.create_connection((address, int(port)), timeout=60) as client:
            client.sendall(head + b'\r\n{"model"')
            assert httpx.get(f"{url}/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            answer = client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 503")
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_the_key_may_come_from_the_environment(models, monkeypatch):
    monkeypatch.setenv("STICKYMOE_API_KEY", "from the environment")
    with started([models["vanilla"]]) as (process, url, _):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer from the environment"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
