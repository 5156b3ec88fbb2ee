"""Readers survive damaged files: a valid result or one clear line, never another exception, a warning or a long wait.

Each reader gets the same seeded damages in every run. `FUZZ_ROUNDS=5000 pytest tests/test_damaged_files.py` tries more.
"""

from __future__ import annotations

import json
import os
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fuzz
from stickymoe.data import tokenizers
from stickymoe.data.corpora import load_corpus
from stickymoe.data.tokens import load_tokens
from stickymoe.errors import DataError, RunError, StickyError
from stickymoe.locality.devices import load_device
from stickymoe.locality.foreign import read_foreign
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.table import RouteTable
from stickymoe.runs.config import DataConfig, RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord
from stickymoe.runs.settings import read_config
from stickymoe.sweeps.grid import configs, load_grid
from stickymoe.training.checkpoint import (
    Progress,
    find_checkpoint,
    load_model,
    load_optimiser,
    read_progress,
    save_checkpoint,
)

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "300"))


def refusal(read: Callable[[Path], object], path: Path, *, peak: int = 1 << 24) -> str:
    """The one line with which a file is refused, before much memory is allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(StickyError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < peak
    finally:
        tracemalloc.stop()
    fuzz.require_one_line(str(caught.value), path.name)
    return str(caught.value)


def use(table: RouteTable) -> None:
    """What a valid table allows: its values are in range and can be computed with."""
    assert table.S.size == 0 or 0 <= int(table.S.min()) <= int(table.S.max()) < table.n_experts
    assert table.mask.tobytes().strip(b"\0\1") == b""
    assert table.pairs.sum() <= table.mask.size
    assert table.weights is None or np.isfinite(table.weights).all()
    assert table.phase is None or set(np.unique(table.phase)) <= {0, 1}
    for sets in (table.predicted, table.residents):
        assert sets is None or sets.size == 0 or 0 <= int(sets.min()) <= int(sets.max()) <= table.n_experts


# Trace folders


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace folder with every array."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 8, 2)
    table = RouteTable(
        S=rng.integers(0, 300, shape, dtype=np.uint16),
        n_experts=300,
        mask=np.ones((3, 8), np.bool_),
        doc=rng.integers(0, 2, (3, 8)),
        weights=rng.random(shape, dtype=np.float32),
        phase=rng.integers(0, 2, (3, 8), dtype=np.uint8),
        tokens=rng.integers(0, 50_000, (3, 8), dtype=np.int32),
        predicted=rng.integers(0, 301, (2, 3, 8, 3), dtype=np.uint16),
        residents=rng.integers(0, 301, (2, 3, 8, 4), dtype=np.uint16),
        expert_bytes=(4096, 4096),
    )
    save_table(table, tmp_path / "trace")
    return tmp_path / "trace"


def test_trace_folders(trace: Path) -> None:
    refused = fuzz.survive(lambda folder: use(load_table(folder)), fuzz.snapshot(trace), trace, range(ROUNDS))
    assert 0.5 * ROUNDS < refused < ROUNDS


NO_HEADER = "it does not start with the header of an .npy array"


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"'fortran_order'", b"'fortran_order ", NO_HEADER),  # tokenize.TokenError
        (b"(2, 3, 8, 2)", b"(2, 3, 8, 2L", NO_HEADER),
        (b"(2, 3, 8, 2)", b"(2L,3, 8, 2)", None),  # NumPy warns, and reads it
        (b"(2, 3, 8, 2), }         ", b"(1000000000000, 1, 1, 2)}", "its header describes 4,000,000,000,1"),
        (b"(2, 3, 8, 2)", b"(2, 3,-8, 2)", "got the shape (2, 3, -8, 2), expected sizes ≥ 0"),
        (
            b"(2, 3, 8, 2), }" + b" " * 36,
            b"(0, " + b"9" * 40 + b", 2), }",
            "its header describes an array of impossible shape",
        ),
        (b"<u2", b"|O8", "got the dtype object, expected numbers, bool or text"),
        (b"<u2", b">u2", "got the dtype >u2, expected the byte order of this machine"),
        (b"<u2", b"<M8", "got the dtype datetime64, expected numbers, bool or text"),
        (b"\x93NUMPY\x01", b"\x93NUMPY\x03", NO_HEADER),
        (b"\x93NUMPY\x01\x00v\x00", b"\x93NUMPY\x02\x00\xff\xff", NO_HEADER),
    ],
)
def test_a_damaged_npy_header(trace: Path, old: bytes, new: bytes, says: str | None) -> None:
    edit(trace / "S.npy", old, new)
    if says is None:
        use(load_table(trace))
    else:
        assert f"S.npy is damaged: {says}" in refusal(load_table, trace)


def test_values_that_no_table_has(trace: Path) -> None:
    content = (trace / "mask.npy").read_bytes()
    (trace / "mask.npy").write_bytes(content[:-1] + b"\x40")
    assert "mask.npy: got values 1 … 64, expected 0 and 1." in refusal(load_table, trace)
    (trace / "mask.npy").write_bytes(content)
    content = (trace / "weights.npy").read_bytes()
    (trace / "weights.npy").write_bytes(content[:-4] + np.float32("nan").tobytes())
    assert "weights.npy: got infinite or NaN weights" in refusal(load_table, trace)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "is damaged: it is nested too deeply"),
        ('{"a": ' * 40 + "1" + "}" * 40, "is damaged: it is nested too deeply"),
        ("9" * 5000, "is damaged: Exceeds the limit"),
        ("9" * 400, "is damaged: got an integer of 1329 bits, expected at most 64"),
        ("NaN", "is damaged: got the number nan, expected a finite one"),
        ("[1e999]", "is damaged: got the number inf, expected a finite one"),
        (r'"\ud800"', "is damaged: got '\\ud800', which is half of a character"),
        ("[]", "expected format 'stickymoe-routes' version 1"),
    ],
)
def test_a_damaged_json_header(trace: Path, text: str, says: str) -> None:
    (trace / "header.json").write_text(text)
    assert says in refusal(load_table, trace)


# Traces of other tools


CSV = """\
# route_trace v1
# model=/models/a.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=4096 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
""" + "".join(
    f"{turn},{step // 2},{step},{layer},{slot},{(3 * step + layer + 4 * slot) % 8},{0.7 - 0.4 * slot:.2f},0,4096,0\n"
    for turn in range(2)
    for step in range(4)
    for layer in (1, 2)
    for slot in range(2)
)


def write_npz(path: Path, experts: Any, meta: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, experts=experts, meta=meta)
    return path


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "trace.csv").write_text(CSV)

    def read(folder: Path) -> None:
        use(read_foreign(folder / "trace.csv"))
        use(read_foreign(folder / "trace.csv", "bigmoeonedge"))

    refused = fuzz.survive(read, fuzz.snapshot(tmp_path / "in"), tmp_path / "out", range(ROUNDS))
    assert 0.5 * ROUNDS < refused < ROUNDS


def test_npz(tmp_path: Path) -> None:
    experts = np.random.default_rng(0).integers(0, 4, (2, 30, 2)).astype(np.int16)
    write_npz(tmp_path / "in" / "trace.npz", experts, json.dumps({"num_experts": 4, "top_k": 2}))

    def read(folder: Path) -> None:
        use(read_foreign(folder / "trace.npz", "cacheable-by-design"))

    refused = fuzz.survive(read, fuzz.snapshot(tmp_path / "in"), tmp_path / "out", range(ROUNDS))
    assert 0.5 * ROUNDS < refused < ROUNDS


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (",0.70,", ",1e39,", "row 1 is cut off or damaged (got the weight '1e39', expected a 32-bit number)"),
        (",0.70,", ",-inf,", "row 1 is cut off or damaged (got the weight '-inf', expected a 32-bit number)"),
        ("\n0,0,", "\n" + "9" * 400 + ",0,", "row 1 is cut off or damaged (got '99"),
        ("\n0,0,", "\n" + "9" * 5000 + ",0,", "row 1 is cut off or damaged (Exceeds the limit"),
        ("expert_bytes=4096", "expert_bytes=" + "9" * 400, "got expert_bytes '99"),
        ("n_expert=8", "n_expert=999999999", "n_experts: got 999999999, expected 1 … 65536"),
        ("\n0,0,0,1,0,", "\n0,1,0,1,0,", "one token has rows of both phases"),
        ("\n0,0,0,1,1,", "\n0,0,0,1,0,", "got slots [0, 0] for turn 0, step 0, layer 1, expected 2 (0 … 1)"),
    ],
)
def test_a_damaged_number_in_a_csv(tmp_path: Path, old: str, new: str, says: str) -> None:
    (tmp_path / "trace.csv").write_text(CSV.replace(old, new, 1))
    assert says in refusal(read_foreign, tmp_path / "trace.csv")


def test_a_csv_whose_table_would_not_fit_in_memory(tmp_path: Path) -> None:
    """A few kilobytes, in which every row has its own layer or its own step or its own turn."""
    rows = [(0, 0, n) for n in range(400)] + [(0, n, 0) for n in range(400)] + [(n, 0, 0) for n in range(400)]
    lines = [f"{turn},0,{step},{layer},0,1,0.5" for turn, step, layer in sorted(set(rows))]
    head = "# route_trace v1\n# n_expert=8 n_expert_used=1\nturn,phase,step,layer,slot,expert,weight\n"
    (tmp_path / "trace.csv").write_text(head + "\n".join(lines) + "\n")
    assert "got 1,198 rows for 400 layers, 400 turns and 400 steps" in refusal(read_foreign, tmp_path / "trace.csv")


def test_an_npz_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    head = np.lib.format
    path = tmp_path / "claims.npz"
    write_npz(path, np.zeros((1, 3, 2), np.int16), '{"num_experts": 4}')
    with zipfile.ZipFile(path) as archive:
        meta = archive.read("meta.npy")
    with (tmp_path / "experts.npy").open("wb") as file:
        head.write_array_header_1_0(file, {"descr": "<i2", "fortran_order": False, "shape": (1, 10**12, 2)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "experts.npy", "experts.npy")
        archive.writestr("meta.npy", meta)
    assert "its header describes 4,000,000,000,128 bytes, but there are 128" in refusal(read_foreign, path)


def test_an_npz_with_another_compression_or_other_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("experts.npy", b"0" * 100)
    assert "expected stored or deflated" in refusal(read_foreign, tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", other=np.zeros(3))
    with pytest.raises(DataError, match=r"b\.npz is damaged: it has no experts\.npy\.$"):
        read_foreign(tmp_path / "b.npz")


# Records, metrics and configs


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder as training leaves it, without its checkpoints."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    config = read_config(["--variant.lam", "0.5"], preset="tiny", variant="soft")
    record = RunRecord(
        run_id="0123456789abcdef",
        status="complete",
        config=config.as_dict(),
        data={"fingerprint": "f" * 64, "vocab_size": 300, "tokens": {"train": 10, "valid": 5, "test": 0}},
        environment={"python": "3.11", "packages": {"torch": "2.13"}},
        metrics={"ppl": 12.5, "best_ppl": None, "targets": 5},
        per_layer={"switch_rate": [0.5] * config.model.n_layers},
        sizes={"expert_bytes": [100] * config.model.n_layers, "other_bytes": 5},
    )
    record.write(folder.record)
    folder.write_config(config)
    for step in (10, 20):
        folder.append(folder.metrics, {"step": step, "phase": "train", "lr": 1e-4, "train": {"loss": 5.25 / step}})
        folder.append(folder.metrics, {"step": step, "valid": {"ppl": 99.5, "targets": 5, "best": None}})
    return folder


def only(file: Path) -> fuzz.Files:
    return {file.name: file.read_bytes()}


def test_records(run: RunFolder) -> None:
    def read(folder: Path) -> None:
        record = RunRecord.read(folder / "record.json")
        RunConfig.from_dict(record.config)
        record.write(folder / "again.json")
        assert RunRecord.read(folder / "again.json") == record

    refused = fuzz.survive(read, only(run.record), run.path, range(ROUNDS))
    assert 0.5 * ROUNDS < refused < ROUNDS


def test_metrics(run: RunFolder) -> None:
    def read(folder: Path) -> None:
        lines = RunFolder(folder).recent_metrics()
        assert all(line["step"] >= 0 for line in lines)
        lines = RunFolder(folder).read_metrics()
        assert all(line["step"] >= 0 for line in lines)
        RunFolder(folder).rewind(10)

    refused = fuzz.survive(read, only(run.metrics), run.path, range(ROUNDS))
    assert 0.3 * ROUNDS < refused < ROUNDS


def test_configs(run: RunFolder) -> None:
    def read(folder: Path) -> None:
        config = read_config(file=folder / "config.yaml")
        assert RunConfig.from_dict(config.as_dict()) == config

    refused = fuzz.survive(read, only(run.config), run.path, range(ROUNDS // 2))
    assert 0.2 * ROUNDS < refused < ROUNDS


GRID = """\
preset: cpu-small
data: {path: texts, vocab_size: 300}
rows:
  - variant: {name: soft, lam: 0.1}
  - variant: vanilla
    train: {steps: 2000}
  - variant:
      name: smooth+hysteresis
    model: {n_experts: 8}
"""


def test_grids(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        grid = load_grid(str(folder / "grid.yaml"), {})
        for config in configs(grid, seeds=[1], flags=[], source="grid.yaml"):
            assert RunConfig.from_dict(config.as_dict()) == config

    refused = fuzz.survive(read, {"grid.yaml": GRID.encode()}, tmp_path / "out", range(ROUNDS // 2))
    assert 0.2 * ROUNDS < refused < ROUNDS


DEVICE = """\
name: a device
fast_memory: 8GB
load_bandwidth: 500MB
load_latency_ms: 0.1
compute_bandwidth: 17000000000
sources: [load_bandwidth was measured, the others were read]
"""


def test_devices(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        device = load_device(str(folder / "device.yaml"))
        assert np.isfinite([device.load_ms(1e9), device.compute_ms(1e9), device.fast_memory]).all()

    refused = fuzz.survive(read, {"device.yaml": DEVICE.encode()}, tmp_path / "out", range(ROUNDS))
    assert 0.3 * ROUNDS < refused < ROUNDS


YAML = [
    ("[" * 5000, "is not YAML: it is nested too deeply"),
    ("a: &a [*a]", "is not YAML: its aliases expand to more than 100,000 values"),
    ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), "its aliases expand"),
    ("a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)), "aliases"),
    ("seed: 0x" + "f" * 6000, "is not usable: got an integer of 24000 bits, expected at most 64"),
    ("seed: " + "9" * 5000, "is not YAML: Exceeds the limit"),
    ("seed: 2026-02-31", "is not YAML: day is out of range for month"),
    ("seed: 2026-02-01", "is not usable: got datetime.date(2026, 2, 1), expected a number or text"),
    ("on: 5", "is not usable: got the key True, expected text; put it into quotes"),
    ('data: {path: "\\ud800"}', "which is half of a character"),
    ("data: !!python/object/apply:os.system [ls]", "is not YAML: could not determine a constructor"),
    ("#" * 2_000_000, "is too long: got 2,000,000 characters, expected at most 1,048,576"),
]


def test_a_long_value_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: x" + "9" * 5000 + "}")
    assert "train.steps: got '" in refusal(lambda path: read_config(file=path), tmp_path / "config.yaml")


@pytest.mark.parametrize(("text", "says"), YAML, ids=range(len(YAML)))
def test_yaml_that_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert says in refusal(lambda path: read_config(file=path), tmp_path / "config.yaml")
    for read in (lambda path: load_grid(path, {}), load_device):
        with pytest.raises(StickyError, match=re.escape(says)):
            read(str(tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (["metrics", "ppl"], 10**400, "got an integer of 1329 bits"),
        (["metrics", "ppl"], "12.5", "metrics.ppl: got '12.5', expected a number"),
        (["status"], "done", "status: got 'done', expected one of running, interrupted, failed, complete"),
        (["data", "tokens", "train"], 0, "data.tokens.train: got 0, expected an integer ≥ 1"),
        (["data", "fingerprint"], 5, "data.fingerprint: got 5, expected text"),
        (["per_layer", "switch_rate"], [0.5], "per_layer.switch_rate: got [0.5], expected 2 numbers"),
        (["config", "model", "n_layers"], "4", "model.n_layers: got '4', expected int"),
        (["config", "train"], None, "train: got None, expected settings"),
        (["config", "variant", "name"], 3, "variant.name: got 3, expected the name of a variant"),
        (["config", "variant", "lam"], [0.1], "variant.lam: got (0.1,), expected float"),
        (["sizes", "expert_bytes"], [-1], "sizes.expert_bytes: got [-1], expected bytes"),
        (["failure"], 5, "failure: got 5, expected text or null"),
    ],
)
def test_a_record_with_a_wrong_value(run: RunFolder, keys: list[str], value: Any, says: str) -> None:
    values = json.loads(run.record.read_text())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    run.record.write_text(json.dumps(values))
    assert f"record.json is damaged: {says}" in refusal(RunRecord.read, run.record)


@pytest.mark.parametrize("line", ["5", "{}", '{"step": "5"}', '{"step": -1}', '{"step": 1, "valid": 3}', "", "NaN"])
def test_a_line_of_metrics_with_a_wrong_value(run: RunFolder, line: str) -> None:
    run.metrics.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is damaged: [^\n]+\.$"):
        run.read_metrics()
    assert [line["step"] for line in run.recent_metrics()] == [1, 2]


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a small network after one update."""
    model, optimiser = network()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    return save_checkpoint(tmp_path / "checkpoints", Progress(6, best_ppl=9.5, best_step=2), model, optimiser)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def load_all(checkpoint: Path) -> None:
    model, optimiser = network()
    load_model(checkpoint, model)
    load_optimiser(checkpoint, model, optimiser)
    assert read_progress(checkpoint) == Progress(6, best_ppl=9.5, best_step=2)


def test_checkpoints(checkpoint: Path) -> None:
    def read(folder: Path) -> None:
        found = find_checkpoint(folder.parent)
        assert found == folder
        load_all(found)

    with torch.random.fork_rng():
        refused = fuzz.survive(read, fuzz.snapshot(checkpoint), checkpoint, range(ROUNDS))
    assert refused > 0.9 * ROUNDS


def test_weights_that_were_not_checked_before(checkpoint: Path) -> None:
    with torch.random.fork_rng():
        fuzz.survive(load_all, fuzz.snapshot(checkpoint), checkpoint, range(ROUNDS))


def test_a_random_state_that_is_none(checkpoint: Path) -> None:
    file = checkpoint / "optimiser.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "rng": torch.zeros_like(tensors["rng"])}, file)
    assert "has no random state (Invalid mt19937 state)" in refusal(load_all, checkpoint)
    save_file({**tensors, "exp_avg/weight": torch.zeros(7)}, file)
    assert "does not fit the optimiser (exp_avg/weight)" in refusal(load_all, checkpoint)


def test_a_folder_that_is_named_like_a_checkpoint(checkpoint: Path) -> None:
    (checkpoint.parent / "step-²").mkdir()
    assert find_checkpoint(checkpoint.parent) == checkpoint


def test_a_state_that_is_nested_too_deeply(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("[" * 100_000)
    assert "state.json is damaged: it is nested too deeply" in refusal(find_checkpoint, checkpoint.parent)


# Corpora, token caches and tokenizers


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    rows = [f"The lobster number {n} walks to the sea, “naïve” 蟹 .\n" for n in range(12)]
    fuzz.restore({f"{split}.txt": "".join(rows).encode() for split in ("train", "valid", "test")}, folder)
    return folder


def test_corpora(texts: Path) -> None:
    def read(folder: Path) -> None:
        corpus = load_corpus(DataConfig(path=str(folder)))
        assert corpus.train
        assert corpus.valid
        load_corpus(DataConfig(path=str(folder / "train.txt")))

    refused = fuzz.survive(read, fuzz.snapshot(texts), texts, range(ROUNDS))
    assert 0.1 * ROUNDS < refused < 0.9 * ROUNDS


def test_damaged_texts_as_tokens(texts: Path, tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        data = load_tokens(DataConfig(path=str(folder), vocab_size=300, cache_dir=str(tmp_path / "cache")))
        assert len(data.valid.tokens) > 0

    fuzz.survive(read, fuzz.snapshot(texts), texts, range(ROUNDS // 15))


def test_token_caches(texts: Path, tmp_path: Path) -> None:
    """A damaged entry is rebuilt, so nothing is ever refused."""
    config = DataConfig(path=str(texts), vocab_size=300, cache_dir=str(tmp_path / "cache"))
    expected = load_tokens(config)

    def read(folder: Path) -> None:
        data = load_tokens(config)
        assert data.fingerprint == expected.fingerprint
        assert np.array_equal(data.train.boundary, expected.train.boundary)

    cache = tmp_path / "cache"
    assert fuzz.survive(read, fuzz.snapshot(cache), cache, range(ROUNDS // 15)) == 0


def test_a_path_that_no_system_has(tmp_path: Path) -> None:
    for path in ("a\0b", "x" * 5000):
        with pytest.raises(DataError, match=r"^data\.path: '[^\n]*$"):
            load_corpus(DataConfig(path=path))


def test_tokenizer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the files of GPT-2's tokenizer."""
    monkeypatch.setattr(tokenizers, "package_folder", lambda *_: tmp_path)
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "abc"])}
    files = {"encoder.json": json.dumps(vocab).encode(), "vocab.bpe": b"#version: 0.2\na b\nab c\n"}

    def read(folder: Path) -> None:
        tokenizer = tokenizers.gpt2_tokenizer()
        assert len(tokenizers.token_bytes(tokenizer)) == tokenizer.get_vocab_size()

    refused = fuzz.survive(read, files, tmp_path / "data", range(ROUNDS))
    assert 0.3 * ROUNDS < refused < ROUNDS
