"""Packing: complete or absent, resumed after any interruption, and honest about what a precision costs."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from offloading import plain_model, write_run
from torch.nn import functional as F

from stickymoe.errors import ConfigError, RunError, StoreError
from stickymoe.runtime import pack as pack_module
from stickymoe.runtime.checkpoints import RunCheckpoint, open_checkpoint
from stickymoe.runtime.engine import offload
from stickymoe.runtime.pack import JOURNAL, default_precision, pack, planned_bytes, uniform
from stickymoe.runtime.packing import LEVELS, Cost, mixed, pack_model
from stickymoe.runtime.store import EXPERTS, Store
from tests.huggingface.tiny import tiny

EXPERTS_OF_RUN = 20


@pytest.fixture(scope="session")
def run(run_of):
    return run_of("vanilla")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def packed(run: Path, folder: Path, precision: str = "fp32") -> Store:
    source = open_checkpoint(run)
    return pack(source, folder, uniform(source, precision))


@pytest.fixture(scope="session")
def whole(run, tmp_path_factory):
    """The files of a packing that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    packed(run, folder)
    return contents(folder)


def interrupted(run: Path, folder: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pack `n` experts and fail; returns the folder of what is left."""
    real, read = RunCheckpoint.expert, []

    def expert(self, layer, e):
        read.append((layer, e))
        if len(read) > n:
            raise KeyboardInterrupt
        return real(self, layer, e)

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "expert", expert)
        with pytest.raises(KeyboardInterrupt):
            packed(run, folder)
    assert not folder.exists()
    return folder.with_name(f".{folder.name}.packing")


def written(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pack to the end; returns how many experts were written."""
    real, read = RunCheckpoint.expert, []
    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "expert", lambda *args: (read.append(args), real(*args))[1])
        packed(run, folder)
    return len(read)


def test_a_store_has_the_experts_of_the_run(run, tmp_path):
    source = open_checkpoint(run)
    store = packed(run, tmp_path / "deep" / "store")
    assert {p.name for p in tmp_path.joinpath("deep").iterdir()} == {"store"}
    assert {p.name for p in store.folder.iterdir()} == {
        *("store.json", "experts.bin", "dense.safetensors", "config.yaml", "tokenizer.json"),
    }
    for pool in range(4):
        for e in range(5):
            for a, b in zip(store.read(pool, e), source.expert(pool, e), strict=True):
                assert np.array_equal(a, b.numpy())
    assert store.nbytes == planned_bytes(source, uniform(source, "fp32"))
    assert all(entry.offset % 4096 == 0 for pool in store.entries for entry in pool)


@pytest.mark.parametrize("n", [0, 1, 7, EXPERTS_OF_RUN - 1])
def test_a_packing_that_was_interrupted_is_resumed(run, whole, tmp_path, monkeypatch, n):
    partial = interrupted(run, tmp_path / "store", n, monkeypatch)
    assert partial.is_dir()
    with pytest.raises(StoreError, match=r"is not a packed store: it has no store.json"):
        Store.open(partial)
    assert written(run, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN - n
    assert contents(tmp_path / "store") == whole
    assert not partial.exists()


def test_a_packing_can_be_interrupted_again_and_again(run, whole, tmp_path, monkeypatch):
    for _ in range(3):
        partial = interrupted(run, tmp_path / "store", 5, monkeypatch)
        journal = partial / JOURNAL
        journal.write_bytes(journal.read_bytes()[:-10])  # the last line is cut
    assert written(run, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN - 12
    assert contents(tmp_path / "store") == whole


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda p: (p / JOURNAL).write_text(""), 0),
        (lambda p: (p / JOURNAL).write_text("[1, 2]\n"), 0),
        (lambda p: (p / JOURNAL).write_bytes(b"\xff" * 30), 0),
        (lambda p: (p / JOURNAL).write_text((p / JOURNAL).read_text() + "5\n"), 6),
        (lambda p: (p / JOURNAL).write_text((p / JOURNAL).read_text() + '["fp32", 0, "x", 3]\n'), 6),
        (lambda p: (p / JOURNAL).unlink(), 0),
        (lambda p: (p / EXPERTS).unlink(), 0),
        (lambda p: os.truncate(p / EXPERTS, 2 * 20_480 + 5), 2),
        (lambda p: (p / EXPERTS).write_bytes((p / EXPERTS).read_bytes() + b"rest"), 6),
        (lambda p: (p / EXPERTS).write_bytes(b"\0" * (p / EXPERTS).stat().st_size), 0),
    ],
    ids=["empty", "other", "bytes", "number", "types", "no journal", "no experts", "cut", "longer", "zeros"],
)
def test_only_whole_experts_are_kept(run, whole, tmp_path, monkeypatch, damage, kept):
    damage(interrupted(run, tmp_path / "store", 6, monkeypatch))
    assert written(run, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN - kept
    assert contents(tmp_path / "store") == whole


def test_a_killed_packing_is_resumed(run, whole, tmp_path, monkeypatch):
    """SIGKILL, in a process of its own."""
    program = f"""
import os, signal
from pathlib import Path
from stickymoe.runtime.checkpoints import RunCheckpoint, open_checkpoint
from stickymoe.runtime.pack import pack, uniform
real, read = RunCheckpoint.expert, []
def expert(self, layer, e):
    read.append(e)
    if len(read) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, layer, e)
RunCheckpoint.expert = expert
source = open_checkpoint(Path({str(run)!r}))
pack(source, Path({str(tmp_path / "store")!r}), uniform(source, "fp32"))
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "store").exists()
    assert written(run, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN - 8
    assert contents(tmp_path / "store") == whole


def test_another_model_starts_anew(run, tmp_path, monkeypatch):
    """Nothing of the first remains, neither experts nor config."""
    interrupted(run, tmp_path / "store", 6, monkeypatch)
    tiny("mixtral").save_pretrained(tmp_path / "mixtral")
    packed(tmp_path / "mixtral", tmp_path / "store")
    assert not (tmp_path / "store" / "config.yaml").exists()
    packed(tmp_path / "mixtral", tmp_path / "direct")
    assert contents(tmp_path / "store") == contents(tmp_path / "direct")


def test_changed_weights_or_another_precision_start_anew(run, tmp_path, monkeypatch):
    interrupted(run, tmp_path / "store", 6, monkeypatch)
    other = write_run(tmp_path / "run", "vanilla", "--seed", "5")
    assert written(other, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN
    interrupted(run, tmp_path / "int8", 6, monkeypatch)
    assert packed(run, tmp_path / "int8", "int8").precision == "int8"
    packed(run, tmp_path / "direct", "int8")
    assert contents(tmp_path / "int8") == contents(tmp_path / "direct")


def test_an_existing_folder_is_refused(run, tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError, match="store exists already, expected a new folder"):
        packed(run, tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(StoreError, match="link exists already"):
        packed(run, tmp_path / "link")
    # Another process finishes between the check and the lock.
    real = FileLock.acquire

    def acquire(self, *args, **kwargs):
        (tmp_path / "new").mkdir()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(StoreError, match="new exists already"):
        packed(run, tmp_path / "new")


def test_two_packings_of_one_folder_are_refused(run, tmp_path):
    with (
        FileLock(tmp_path / ".store.lock"),
        pytest.raises(StoreError, match="store is being packed by another process; wait for it"),
    ):
        packed(run, tmp_path / "store")
    packed(run, tmp_path / "store")


# A full disk


def test_a_disk_without_room_is_noticed_before_writing(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(
        StoreError, match=r"has 100 kB free, but the experts need 410 kB. Choose another folder, or fewer bits"
    ):
        packed(run, tmp_path / "store")


def test_a_disk_that_becomes_full_is_one_line_and_resumable(run, whole, tmp_path, monkeypatch):
    real, n = pack_module._write_expert, []

    def full(*args):
        n.append(args)
        if len(n) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "_write_expert", full)
        with pytest.raises(
            StoreError,
            match=r"store cannot be written \(No space left on device\). Make room and pack again, which resumes",
        ) as error:
            packed(run, tmp_path / "store")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store").exists()
    assert written(run, tmp_path / "store", monkeypatch) == EXPERTS_OF_RUN - 4
    assert contents(tmp_path / "store") == whole


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/store cannot be written \((Not a directory|File exists)\)"):
        packed(run, tmp_path / "file" / "store")


# Precision


@pytest.mark.parametrize("form", [{}, {"save_original_format": False}], ids=["per expert", "fused"])
def test_both_forms_of_a_checkpoint_give_the_same_experts(tmp_path, form):
    model = tiny("mixtral")
    model.save_pretrained(tmp_path / "saved", **form)
    store = packed(tmp_path / "saved", tmp_path / "store")
    stacks = [layer.mlp.experts for layer in model.model.layers]
    for layer, stack in enumerate(stacks):
        for e in range(store.contents.n_experts):
            up, down = store.read(layer, e)
            assert np.array_equal(up, stack.gate_up_proj[e].detach().numpy())
            assert np.array_equal(down, stack.down_proj[e].detach().numpy())


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")]
)
def test_the_default_precision_loses_nothing(tmp_path, dtype, expected):
    tiny("mixtral").to(dtype).save_pretrained(tmp_path / "saved")
    source = open_checkpoint(tmp_path / "saved")
    assert default_precision(source) == expected
    done = pack_model(tmp_path / "saved", tmp_path / "store")
    assert done.cost is None
    assert done.store.precision == expected
    for a, b in zip(done.store.read(0, 0), source.expert(0, 0), strict=True):
        assert np.array_equal(a, b.float().numpy())


def test_a_mixed_precision_spends_its_budget_on_what_matters(run):
    source = open_checkpoint(run)
    least, most = (planned_bytes(source, uniform(source, level)) for level in (LEVELS[0], LEVELS[-1]))
    rng = np.random.default_rng(0)
    used = []
    for budget in np.linspace(least, most * 1.1, 23).tolist():
        importance = rng.random((4, 5))
        plan = mixed(source, importance, budget)
        used.append(planned_bytes(source, plan))
        assert used[-1] <= budget
        bits = np.array([[LEVELS.index(precision) for precision in pool] for pool in plan]).reshape(-1)
        by_importance = bits[np.argsort(-importance, axis=None, kind="stable")]
        assert (np.diff(by_importance) <= 0).all()
    assert used == sorted(used)
    assert (used[0], used[-1]) == (least, most)


def test_a_mixed_precision_of_experts_that_take_one_page(tmp_path):
    """Where more bits take no more bytes, all experts get them."""
    source = open_checkpoint(write_run(tmp_path / "run", "vanilla", "--model.d_ff", "4", "--model.d_model", "8"))
    assert len({planned_bytes(source, uniform(source, level)) for level in LEVELS}) == 1
    plan = mixed(source, np.ones((4, 5)), float(planned_bytes(source, uniform(source, "int4"))))
    assert plan == uniform(source, "bf16")


TEXT = "The cache holds three experts. A token asks for two of them, and the next one asks for others. " * 3


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_a_mixed_store_stays_inside_its_budget(run, tmp_path, text):
    done = pack_model(run, tmp_path / "store", experts="mixed", budget="150kB", text=text, tokens=100)
    assert done.store.precision == "mixed"
    assert done.store.nbytes <= 150_000
    assert {entry.precision for pool in done.store.entries for entry in pool} == {"int4", "int8"}
    assert done.cost is not None
    assert done.cost.tokens == 96  # rows of 32, the context of the model
    with offload(done.store.folder, slots=2) as engine:
        assert engine.expert_bytes == max(entry.nbytes for pool in done.store.entries for entry in pool)
        out = engine.generate([5, 6, 7], max_new_tokens=4)
    assert out.stats.bytes_read <= out.stats.misses * engine.expert_bytes


@torch.no_grad()
def test_the_cost_is_the_perplexity_before_and_after(run, tmp_path, text):
    done = pack_model(run, tmp_path / "store", experts="int4", text=text, tokens=90)
    model = plain_model(run)
    ids = list(done_tokens(done.store.folder))[:90]
    nats = n = 0
    for first in range(0, 89, 32):  # the context of the model
        row = ids[first : first + 32]
        logits = model(torch.tensor([row])).logits[0, :-1]
        nats += float(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
        n += len(row) - 1
    cost = done.cost
    assert cost.tokens == n
    assert cost.before == pytest.approx(math.exp(nats / n), rel=1e-4)
    assert cost.after != cost.before
    again = pack_model(run, tmp_path / "same", experts="fp32", text=text, tokens=90).cost
    assert again.before == again.after == pytest.approx(cost.before, rel=1e-9)


def done_tokens(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids


def test_the_message_of_a_cost():
    assert Cost(20.0, 21.0, 4095).message == "perplexity on 4,095 tokens: 20.00 as saved, 21.00 packed (+5.00%)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": "int3"}, "experts: got 'int3', expected one of fp32, bf16, int8, int4, mixed"),
        ({"experts": "mixed"}, "budget: got None, expected bytes with experts=mixed"),
        ({"experts": "int8", "budget": "1MB"}, "budget: got '1MB', expected bytes with experts=mixed, only with it"),
        ({"experts": "mixed", "budget": "10kB"}, "--budget: got 10 kB, expected at least 81.9 kB: all experts in int4"),
        ({"experts": "mixed", "budget": "abc"}, "budget: got 'abc'"),
        ({"tokens": 1}, "tokens: got 1"),
    ],
)
def test_wrong_settings_are_refused(run, tmp_path, text, settings, message):
    with pytest.raises(ConfigError, match=message):
        pack_model(run, tmp_path / "store", text=text, **settings)
    assert not (tmp_path / "store").exists()


def test_a_dense_run_cannot_be_packed(run_of, tmp_path):
    with pytest.raises(RunError, match="has no experts: its variant is dense"):
        pack_model(run_of("dense"), tmp_path / "store")


def test_the_index_is_plain_json(run, tmp_path):
    values = json.loads((packed(run, tmp_path / "store").folder / "store.json").read_text())
    assert values["contents"]["n_experts"] == 5
    assert len(values["experts"]) == 4
