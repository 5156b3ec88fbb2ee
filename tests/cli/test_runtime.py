"""`generate` and `pack` as a user meets them: text, one closing line, and one line for every mistake."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints import write_checkpoint
from stickymoe.cli import main
from stickymoe.cli.runtime import _Printer
from stickymoe.locality.formats import load_table
from stickymoe.runtime import engine as engine_module
from stickymoe.runtime.readers import Readers
from tests.runtime.offloading import write_run

CLOSING = (
    r"\d+ tokens, \S+ tokens/s · \d+ hits, \d+ misses \(\S+% hits\) · .* read · stalled .* s · .* resident \(.*\)\n"
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    write_run(folder / "run")
    write_run(folder / "dense", "dense")
    write_checkpoint(folder / "mixtral")
    assert main(["pack", str(folder / "run"), str(folder / "store")]) == 0
    assert main(["pack", str(folder / "mixtral"), str(folder / "mixtral store")]) == 0
    return folder


@pytest.fixture
def store(folders) -> Path:
    return folders / "store"


@pytest.fixture
def refused(capsys):
    """`refused(*args, match=…)`: the command fails in one line that matches."""

    def check(*args, match):
        capsys.readouterr()
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert code == 2, f"{code}: {out}{err}"
        assert re.fullmatch("stickymoe: [^\n]+\n", err), err
        assert re.search(match, err), err
        assert out == ""

    return check


def run(capsys, *args) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", *map(str, args)]) == 0
    return tuple(capsys.readouterr())


def test_text_goes_to_one_stream_and_the_cost_to_the_other(store, capsys, tmp_path):
    stats = tmp_path / "stats.json"
    out, err = run(capsys, store, "--prompt", "Hello", "--max_new_tokens", 9, "--slots", 2, "--stats", stats)
    assert re.fullmatch(CLOSING, err), err
    found = json.loads(stats.read_text())
    assert out == found["text"] + "\n"
    assert len(found["tokens"]) == found["n_tokens"] == 9
    assert found["prompt_tokens"] == 5
    assert found["bytes_read"] == found["misses"] * found["expert_bytes"]
    assert found["slots"] == 2
    assert found["io"] in ("direct", "buffered")
    assert found["interrupted"] is False
    assert f"{found['hits']} hits, {found['misses']} misses" in err


def test_every_model_gives_its_text(folders, capsys):
    args = ("--prompt", "Hello", "--max_new_tokens", 6)
    text, _ = run(capsys, folders / "run", *args)
    assert run(capsys, folders / "store", *args, "--memory", "200kB")[0] == text
    assert run(capsys, folders / "store", *args, "--slots", 1, "--prefetch", "previous", "--policy", "lfu")[0] == text
    foreign, _ = run(capsys, folders / "mixtral", *args)
    assert run(capsys, folders / "mixtral store", *args, "--slots", 2, "--on_miss", "bypass")[0] == foreign
    dense, closing = run(capsys, folders / "dense", *args)
    assert dense
    assert re.fullmatch(r"6 tokens, \S+ tokens/s · \S+ kB resident\n", closing)


def test_one_token_has_no_speed(store, capsys):
    _, err = run(capsys, store, "--prompt", "a", "--max_new_tokens", 1)
    assert err.startswith("1 tokens, – tokens/s · ")


def test_a_seed_samples(store, capsys):
    args = (store, "--prompt", "Hello", "--max_new_tokens", 12)
    greedy = run(capsys, *args)[0]
    sampled = [run(capsys, *args, "--seed", seed)[0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run(capsys, *args, "--top_k", 1)[0] == greedy


def test_a_trace_is_simulated_to_the_same_counts(store, capsys, tmp_path):
    trace, stats = tmp_path / "trace", tmp_path / "stats.json"
    args = ("--prompt", "Hello", "--max_new_tokens", 12, "--slots", 2, "--trace", trace, "--stats", stats)
    _, err = run(capsys, store, *args, "--prefetch", "next_layer")
    assert err.endswith(f"{trace}: next, stickymoe simulate {trace}\n")
    found = json.loads(stats.read_text())
    table = load_table(trace)
    assert table.tokens.shape == (1, 16)
    assert table.phase.tolist() == [[0] * 5 + [1] * 11]
    assert table.weights is not None
    assert np.unique(table.S).max() < 5
    json_file = tmp_path / "simulated.json"
    simulate = ("--capacity", "2", "--policy", "lru", "--order", "decode", "--prefetch", "recorded")
    assert main(["simulate", str(trace), *simulate, "--json", str(json_file)]) == 0
    simulated = json.loads(json_file.read_text())[0]["policies"]["lru"]["2"]
    assert sum(simulated["misses"]) == found["misses"]
    assert simulated["wasted"] == found["wasted"]


def test_a_prompt_from_standard_input(store, capsys, monkeypatch):
    text, _ = run(capsys, store, "--prompt", "Hello", "--max_new_tokens", 4)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert run(capsys, store, "--prompt", "-", "--max_new_tokens", 4)[0] == text


def test_a_prompt_that_is_no_text_is_refused(store, refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    refused("generate", store, "--prompt", "-", match="--prompt: expected text in UTF-8")
    refused("generate", store, "--prompt", "\udcff", match="--prompt: expected text in UTF-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    refused("generate", store, "--prompt", "-", match="--prompt is empty")


def test_a_chat_needs_a_template(folders, refused, capsys, tmp_path):
    args = ("--prompt", "Hi", "--max_new_tokens", "3", "--chat")
    refused("generate", folders / "store", *args, match="--chat: a run of stickymoe has no chat template")
    refused("generate", folders / "mixtral store", *args, match="--chat: .* has no chat template; omit --chat")
    write_checkpoint(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}:")
    stats = tmp_path / "stats.json"
    run(capsys, tmp_path / "chat", *args, "--store", tmp_path / "packed", "--stats", stats)
    assert json.loads(stats.read_text())["prompt_tokens"] == len("<Hi>:")


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((), "--prompt is missing: pass a text, or -"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "a", "--slots", "1", "--memory", "1MB"), "slots and memory: got both"),
        (("--prompt", "a", "--memory", "1kB"), "memory: got 1 kB, expected at least 81.9 kB"),
        (("--prompt", "a", "--slots", "0"), "slots: got 0"),
        (("--prompt", "a", "--slots", "many"), "slots"),
        (("--prompt", "a", "--throttle", "abc"), "throttle: got 'abc'"),
        (("--prompt", "a", "--temperature", "0"), "temperature: got 0.0, expected a number > 0"),
        (("--prompt", "a", "--policy", "belady"), "policy: got 'belady'"),
        (("--prompt", "a", "--kernel", "cuda"), "kernel: got 'cuda'"),
        (("--prompt", "a", "--max_new_tokens", "500"), "generate at most 32 tokens"),
        (("--prompt", "a" * 40), "shorten the prompt"),
        (("--prompt", "a", "--experts", "int8"), "is packed in fp32; omit it"),
        (("--prompt", "a", "--unknown"), "--unknown"),
    ],
)
def test_mistakes_are_one_line(store, refused, args, match):
    refused("generate", store, *args, match=match)


def test_models_that_cannot_be_used_are_one_line(folders, refused, tmp_path):
    refused("generate", tmp_path / "missing", "--prompt", "a", match="missing does not exist: expected a packed store")
    refused("generate", tmp_path, "--prompt", "a", match=r"has neither config.yaml nor config.json")
    file = tmp_path / "file"
    file.write_text("")
    refused("generate", file, "--prompt", "a", match=r"has neither config.yaml nor config.json")
    refused("generate", folders / "store", "--prompt", "a", "--trace", tmp_path, match="exists already")
    trace = ("--trace", tmp_path / "trace", "--max_new_tokens", 2)
    refused("generate", folders / "dense", "--prompt", "a", *trace, match="--trace: .*dense has no experts; omit")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "store.json").write_text("{")
    refused("generate", tmp_path / "damaged", "--prompt", "a", match=r"store.json is damaged")


# Ctrl-C


def test_ctrl_c_ends_with_the_closing_line(store, capsys, monkeypatch, tmp_path):
    def printer(self, token):
        seen.append(token)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    seen: list[int] = []
    monkeypatch.setattr(_Printer, "__call__", printer)
    stats = tmp_path / "stats.json"
    args = ["generate", str(store), "--prompt", "Hello", "--max_new_tokens", "9", "--stats", str(stats)]
    assert main(args) == 130
    assert re.fullmatch(CLOSING, capsys.readouterr().err)
    found = json.loads(stats.read_text())
    assert found["interrupted"] is True
    assert found["tokens"] == seen


WAITING = """
import sys
from pathlib import Path
from stickymoe.cli import main
from stickymoe.runtime.readers import ExpertTicket

flag, read = Path(sys.argv.pop(1)), ExpertTicket.read

def reported(self, readers):
    flag.touch()
    read(self, readers)

ExpertTicket.read = reported
sys.exit(main())
"""


def test_ctrl_c_in_a_process_that_waits_for_its_disk(store, tmp_path):
    """A real signal while an expert is read, which would take hours."""
    flag = tmp_path / "reads"
    args = (store, "--prompt", "Hello", "--slots", "1", "--throttle", "1", "--max_new_tokens", "20")
    command = [sys.executable, "-c", WAITING, flag, "generate", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not flag.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == "\n"
    assert re.fullmatch(r"0 tokens, – tokens/s · .*resident.*\n", err), err


# Streaming


class _Host:
    """Tokens are bytes, or pieces of text in brackets."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "pieces",
    [
        [bytes([b]) for b in "naïve – 漢字 🙂 end".encode()],
        [bytes([b]) for b in b"a\xff\xfeb\xe2\x82c\xf0\x9f\x99"],
        [b"", b"a", b"", "é".encode(), b" ", b""],
        ["漢".encode()[:2], "漢".encode()[2:] + "字".encode()[:1], "字".encode()[1:]],
    ],
    ids=["characters", "invalid bytes", "empty tokens", "borders inside"],
)
def test_streamed_text_is_the_text_of_all_tokens(pieces, capsys):
    host = _Host(pieces)
    printer = _Printer(type("Engine", (), {"host": host})())
    shown = ""
    for token in range(len(pieces)):
        printer(token)
        shown += capsys.readouterr().out
        assert host.decode(list(range(len(pieces)))).startswith(shown)
    printer.end()
    assert shown + capsys.readouterr().out == host.decode(list(range(len(pieces)))) + "\n"


# Reads


def test_a_file_system_without_direct_reads_is_reported(store, capsys, monkeypatch):
    class Buffered(Readers):
        def __init__(self, *args, **settings):
            super().__init__(*args, **{**settings, "io": "buffered"})

    monkeypatch.setattr(engine_module, "Readers", Buffered)
    _, err = run(capsys, store, "--prompt", "Hello", "--max_new_tokens", 2)
    assert err.startswith("stickymoe: this file system has no direct I/O; reads are buffered\n")


# Packing


def test_pack_prints_what_it_wrote(folders, capsys, tmp_path):
    assert main(["pack", str(folders / "run"), str(tmp_path / "store")]) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path / 'store'}: 4 × 5 experts in fp32, 20.5 kB each, 410 kB together; dense part 113 kB\n"
    (tmp_path / "text.txt").write_text("The cache holds three experts. " * 9)
    options = ("--experts", "mixed", "--budget", "150kB", "--text", tmp_path / "text.txt", "--tokens", "64")
    assert main(["pack", str(folders / "run"), str(tmp_path / "mixed"), *map(str, options)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "experts in mixed" in first
    assert re.fullmatch(r"perplexity on 62 tokens: \S+ as saved, \S+ packed \(\S+%\)", second)


def test_mistakes_of_pack_are_one_line(folders, refused, tmp_path):
    refused("pack", folders / "run", folders / "store", match="exists already, expected a new folder")
    refused("pack", folders / "dense", tmp_path / "store", match="has no experts: its variant is dense")
    refused("pack", tmp_path / "missing", tmp_path / "store", match=r"neither config.yaml nor config.json")
    refused("pack", folders / "run", tmp_path / "s", "--experts", "int3", match="experts: got 'int3'")
    refused("pack", folders / "run", tmp_path / "s", "--budget", "1MB", match="budget: got '1MB'")
    refused(
        "pack", folders / "run", tmp_path / "s", "--text", tmp_path / "none", "--experts", "int8", match="none cannot"
    )
    refused("pack", folders / "run", match="STORE|store")
