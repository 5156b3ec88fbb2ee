"""Damage, missing files and failing reads: one clear error, no token from a damaged expert, no thread left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading

import pytest
from offloading import generate, write_run

from stickymoe.errors import ConfigError, RunError, StoreError
from stickymoe.locality.policies import policy_names
from stickymoe.runtime.checkpoints import open_checkpoint
from stickymoe.runtime.engine import offload
from stickymoe.runtime.pack import pack, uniform
from stickymoe.runtime.store import DENSE, EXPERTS, INDEX, Store

PROMPT = [72, 101, 108, 108, 111, 44]


def readers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "expert reader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not readers_alive()


@pytest.fixture
def store(store_of, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(store_of(), tmp_path / "store")


def flip(file, offset):
    with file.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)
        f.seek(offset)
        f.write(bytes([byte[0] ^ 16]))


def entry(store, layer, expert):
    return Store.open(store).entries[layer][expert]


def first_use(store, layer):
    """An expert of a layer that the prompt does not use, and the tokens that are written before a token asks for it."""
    with offload(store) as engine:
        out = engine.generate(PROMPT[:1], max_new_tokens=12)
    first, *rest = out.table.S[layer, 0].tolist()
    return next((e, out.tokens[:n]) for n, experts in enumerate(rest, 1) for e in experts if e not in first)


def failing_read(*args):
    raise OSError(errno.EIO, "Input/output error")


# Experts


@pytest.mark.parametrize("prefetch", ["none", "previous", "next_layer"])
@pytest.mark.parametrize("slots", [1, 2, None])
def test_no_token_comes_from_a_damaged_expert(store, slots, prefetch):
    expert, expected = first_use(store, 2)
    flip(store / EXPERTS, entry(store, 2, expert).offset + 100)
    seen = []
    engine = offload(store, slots=slots, prefetch=prefetch)
    with pytest.raises(
        StoreError, match=rf"experts.bin: expert {expert} of layer 2 cannot be used: its checksum differs"
    ):
        engine.generate(PROMPT[:1], max_new_tokens=12, on_token=seen.append)
    assert seen == expected
    assert not readers_alive()
    with pytest.raises(StoreError, match="The engine is closed"):
        engine.generate(PROMPT, max_new_tokens=8)


def test_a_failed_prefetch_is_given_up(store, monkeypatch):
    """Only a demand reports an error: a prefetch that nobody uses may fail."""
    with offload(store, slots=2) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=8).tokens
    with offload(store, slots=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing_read)
            for pool in engine.layers.pools:
                pool.prefetch([0, 3])
                tickets = list(pool._prefetches.values())
                while not all(ticket.done for ticket in tickets):
                    threading.Event().wait(0.001)
                assert all("Input/output error" in str(ticket.error) for ticket in tickets)
        out = engine.generate(PROMPT, max_new_tokens=8, warm=True)
    assert out.tokens == expected


def test_a_failed_prefetch_that_is_needed_is_reported(store, monkeypatch):
    with offload(store, slots=2) as engine:
        pool = engine.layers.pools[1]
        monkeypatch.setattr(os, "preadv", failing_read)
        pool.prefetch([0, 3])
        with pytest.raises(StoreError, match=r"expert 3 of layer 1 cannot be used: Input/output error"):
            list(pool.bring([3]))


def test_a_file_that_is_cut_is_noticed_when_it_is_opened(store):
    os.truncate(store / EXPERTS, 4096)
    with pytest.raises(
        StoreError, match=r"experts.bin is damaged: got 4,096 bytes, expected [0-9,]+\. Pack the model again"
    ):
        offload(store)


def test_a_file_that_is_cut_later_is_noticed_when_it_is_read(store):
    engine = offload(store, slots=1)
    os.truncate(store / EXPERTS, 4096)
    with pytest.raises(
        StoreError, match=r"expert \d of layer 0 cannot be used: (the file ends before it|its checksum)"
    ):
        engine.generate(PROMPT, max_new_tokens=8)


def test_experts_of_another_model_are_noticed(store, tmp_path):
    other = open_checkpoint(write_run(tmp_path / "other", "vanilla", "--seed", "5"))
    pack(other, tmp_path / "packed", uniform(other, "fp32"))
    shutil.copyfile(tmp_path / "packed" / EXPERTS, store / EXPERTS)
    with pytest.raises(StoreError, match=r"expert \d of layer 0 cannot be used: its checksum differs"):
        offload(store).generate(PROMPT, max_new_tokens=8)


def test_a_file_that_is_removed_while_text_is_written_is_still_read(store):
    with offload(store, slots=1) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=8).tokens
        out = engine.generate(PROMPT, max_new_tokens=8, on_token=lambda _: (store / EXPERTS).unlink(missing_ok=True))
    assert out.tokens == expected
    with pytest.raises(
        StoreError, match=r"experts.bin cannot be read \(No such file or directory\). Pack the model again"
    ):
        offload(store)


def test_a_read_error_ends_the_text_and_the_readers(store, monkeypatch):
    real = os.preadv
    seen = []

    def preadv(file, buffers, offset):
        if len(seen) >= 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    engine = offload(store, slots=1)
    with pytest.raises(StoreError, match=r"expert \d of layer \d cannot be used: Input/output error"):
        engine.generate(PROMPT, max_new_tokens=20, on_token=seen.append)
    assert len(seen) == 3
    assert not readers_alive()


def test_short_reads_are_continued(store, monkeypatch):
    real = os.preadv
    with offload(store, slots=1) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).tokens
        monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:4096]], at))
        assert engine.generate(PROMPT, max_new_tokens=5).tokens == expected


# Direct reads


def test_a_file_system_without_direct_reads_is_read_buffered(store, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **others):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **others)

    with offload(store, slots=1, io="buffered") as engine:
        assert engine.io == "buffered"
        expected = engine.generate(PROMPT, max_new_tokens=5).tokens
    monkeypatch.setattr(os, "open", refuse)
    with offload(store, slots=1) as engine:
        assert engine.io == "buffered"
        assert engine.generate(PROMPT, max_new_tokens=5).tokens == expected


@pytest.mark.parametrize("slots", [1, 5])
def test_a_file_system_that_takes_the_flag_only_is_read_buffered(store, slots, monkeypatch):
    """Both readers notice it at once."""
    real, refused = os.preadv, threading.Barrier(2)
    first: dict[str, int] = {}

    def preadv(file, buffers, offset):
        if first.setdefault("direct", file) == file:
            if slots > 1 and not refused.broken:
                refused.wait(5)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, buffers, offset)

    with offload(store, slots=slots, io="buffered") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).tokens
    monkeypatch.setattr(os, "preadv", preadv)
    with offload(store, slots=slots) as engine:
        assert engine.io == "direct"
        out = engine.generate(PROMPT, max_new_tokens=5)
        assert out.tokens == expected
        assert engine.io == "buffered"
        assert out.stats.bytes_read == out.stats.misses * engine.expert_bytes


def test_another_error_of_a_buffered_read_is_reported(store, monkeypatch):
    def preadv(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match="cannot be used: Invalid argument"):
        offload(store).generate(PROMPT, max_new_tokens=8)


# The other files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], r"store.json is damaged"),
        (lambda text: text.replace('"top_k": 2', '"top_k": 3'), r"store.json is damaged: its checksum differs"),
        (
            lambda text: text.replace('"schema": 1', '"schema": 9'),
            r"got schema 9, expected 1 or 2. Pack the model again",
        ),
        (lambda text: "[]", r"got schema None, expected 1"),
        (lambda text: "", r"store.json is damaged"),
    ],
    ids=["cut", "changed", "schema", "list", "empty"],
)
def test_a_damaged_index_is_refused(store, change, message):
    text = (store / INDEX).read_text()
    (store / INDEX).write_text(change(text))
    with pytest.raises(StoreError, match=message):
        offload(store)


def test_any_flipped_bit_of_the_index_is_noticed(store):
    for offset in range(0, (store / INDEX).stat().st_size, 97):
        flip(store / INDEX, offset)
        with pytest.raises(StoreError, match=r"store.json"):
            Store.open(store)
        flip(store / INDEX, offset)
    assert json.loads((store / INDEX).read_text())["schema"] == 1


def test_a_damaged_dense_part_is_refused(store):
    flip(store / DENSE, (store / DENSE).stat().st_size - 9)
    with pytest.raises(StoreError, match=r"dense.safetensors is damaged: its checksum differs. Pack the model again"):
        offload(store)
    os.truncate(store / DENSE, 100)
    with pytest.raises(StoreError, match=r"dense.safetensors is damaged: got 100 bytes"):
        offload(store)


def test_a_missing_tokenizer_is_named(store):
    (store / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer.json is missing or damaged"):
        offload(store)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, r"slots: got 0, expected a whole number ≥ 1"),
        ({"slots": 2.5}, r"slots: got 2.5, expected a whole number ≥ 1"),
        ({"slots": 1, "memory": "1MB"}, r"slots and memory: got both"),
        ({"memory": "1kB"}, r"memory: got 1 kB, expected at least 81.9 kB: one expert of 20.5 kB for each of 4 layers"),
        ({"memory": 81_919}, r"expected at least"),
        ({"memory": "1kB", "on_miss": "bypass"}, r"expected at least .* and 2 to pass through"),
        ({"memory": float("inf")}, r"memory: got inf"),
        ({"memory": "much"}, r"memory: got 'much'"),
        ({"throttle": "abc"}, r"throttle: got 'abc'"),
        ({"throttle": 0}, r"throttle: got 0, expected bytes > 0"),
        ({"policy": "lrru"}, r"Unknown policy 'lrru'. Did you mean 'lru'"),
        ({"policy": "belady"}, rf"policy: got 'belady', expected one of {', '.join(policy_names(online=True))}"),
        ({"prefetch": "next"}, r"prefetch: got 'next', expected one of none, previous, next_layer"),
        ({"on_miss": "skip"}, r"on_miss: got 'skip', expected one of load, bypass"),
        ({"kernel": "cuda"}, r"kernel: got 'cuda', expected one of torch, compiled"),
        ({"io": "mapped"}, r"io: got 'mapped', expected one of direct, buffered"),
        ({"threads": 0}, r"threads: got 0"),
        ({"experts": "int8"}, r"experts: got int8, but .* is packed in fp32; omit it"),
    ],
)
def test_wrong_settings_are_refused(store, settings, message):
    with pytest.raises(ConfigError, match=message):
        offload(store, **settings)


def test_a_byte_budget_is_filled(store):
    with offload(store, memory=81_920) as engine:
        assert engine.slots == 1
    with offload(store, memory=4 * 2 * 20_480 + 100) as engine:
        assert engine.slots == 2
    with offload(store, memory=(4 + 2) * 20_480, on_miss="bypass") as engine:
        assert engine.slots == 1
        assert engine.resident_bytes - engine.host.dense_bytes == 6 * 20_480
    with offload(store, memory="1GB") as engine:
        assert engine.slots == 5


def test_a_model_that_does_not_exist_is_refused(tmp_path, run_of):
    with pytest.raises(ConfigError, match="does not exist: expected a packed store, a run folder or a folder"):
        offload(tmp_path / "missing")
    with pytest.raises(ConfigError, match="experts: got 'mixed', expected one of fp32, bf16, int8, int4"):
        offload(run_of("vanilla"), experts="mixed")


# Ctrl-C


@pytest.mark.parametrize("prefetch", ["none", "previous", "next_layer"])
def test_ctrl_c_ends_the_text_and_keeps_it(store, prefetch):
    with offload(store, slots=2) as engine:
        expected, _ = generate(engine, PROMPT, 8)
    seen = []

    def on_token(token):
        seen.append(token)
        if len(seen) == 3:
            raise KeyboardInterrupt

    engine = offload(store, slots=2, prefetch=prefetch)
    out = engine.generate(PROMPT, max_new_tokens=8, on_token=on_token)
    assert out.interrupted
    assert out.tokens == expected.tokens[:3] == seen
    assert out.table.tokens.tolist() == [PROMPT + seen[:2]]
    assert out.stats.tokens == 3
    assert not readers_alive()
    with pytest.raises(StoreError, match="The engine is closed"):
        engine.generate(PROMPT, max_new_tokens=8)


def test_ctrl_c_in_a_forward_pass_leaves_out_its_token(store, monkeypatch):
    engine = offload(store, slots=2)
    pool, calls = engine.layers.pools[2], []
    bring = pool.bring_all  # of a decoded token

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return bring(*args, **kwargs)

    monkeypatch.setattr(pool, "bring_all", interrupted)
    out = engine.generate(PROMPT, max_new_tokens=8)
    assert out.interrupted
    assert len(out.tokens) == 3
    assert out.table.tokens.tolist() == [PROMPT + out.tokens[:2]]


def test_ctrl_c_in_the_prompt_gives_no_table(store, monkeypatch):
    engine = offload(store, slots=2)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.layers.pools[1], "bring", interrupted)
    out = engine.generate(PROMPT, max_new_tokens=8)
    assert (out.tokens, out.table, out.interrupted) == ([], None, True)
