"""Rows on disk: the text of tables in memory, bit for bit; every row is checked; what is counted was really read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from offloading import generate, write_run

import stickymoe.runtime.pack as pack_module
from stickymoe.errors import ConfigError, StoreError
from stickymoe.locality.cache import Cache
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.row_replay import simulate_rows
from stickymoe.runtime.checkpoints import RunCheckpoint, open_checkpoint
from stickymoe.runtime.engine import offload
from stickymoe.runtime.pack import ROW_JOURNAL, pack, uniform
from stickymoe.runtime.packing import pack_model
from stickymoe.runtime.readers import Throttle
from stickymoe.runtime.rows import BLOCK, Piece, RowGroup, RowLayout, TableRows
from stickymoe.runtime.store import EXPERTS, ROWS, Store

PROMPT = [72, 101, 108, 108, 111, 44]
KERNELS = ("torch", "compiled")
RUNS = {
    "lookup": (),
    "narrow": ("--variant.table_width", "20", "--variant.table_heads", "4", "--variant.ngrams", "[2, 4]"),
    "n-grams only": ("--variant.ngrams_only", "true", "--variant.ungated", "true"),
    "tokens only": ("--variant.ngrams", "[]", "--variant.table_layers", "0"),
    "many rows": ("--variant.table_rows", "300"),
    "wide": ("--variant.table_width", "2052", "--variant.table_heads", "1"),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The packed store of a run in RUNS. It may not be changed."""
    found = {}

    def store(name="lookup"):
        if name not in found:
            folder = tmp_path_factory.mktemp("rows")
            found[name] = packed(write_run(folder / "run", "lookup", *RUNS[name]), folder / "store")
        return found[name]

    return store


def packed(run, folder):
    source = open_checkpoint(run)
    return pack(source, folder, uniform(source, "fp32")).folder


@pytest.fixture
def store(stores, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(stores(), tmp_path / "store")


# The text


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", RUNS)
def test_rows_on_disk_give_the_text_of_tables_in_memory(name, kernel, stores):
    layout = Store.open(stores(name)).contents.row_layout
    texts = (PROMPT, PROMPT[:1])
    with offload(stores(name), slots=2, kernel=kernel) as engine:
        assert engine.rows is None
        expected = [generate(engine, ids, 6) for ids in texts]
    for memory in (0, 3 * layout.row_bytes, 1 << 22):
        with offload(stores(name), slots=2, kernel=kernel, rows=memory, prefetch="next_layer") as engine:
            for ids, (same, same_logits) in zip((*texts, *texts), (*expected, *expected), strict=True):
                out, logits = generate(engine, ids, 6, warm=True)
                assert out.tokens == same.tokens
                assert np.array_equal(logits, same_logits)
            assert out.stats.rows > 0
            assert (out.stats.row_hits == out.stats.rows) == (memory == 1 << 22)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_order_in_which_experts_and_rows_are_added_is_fixed(kernel, stores):
    """With one slot, the experts of a token come one after another."""
    texts = []
    for slots in (1, 3, None):
        with offload(stores(), slots=slots, kernel=kernel, rows=0) as engine:
            texts.append(generate(engine, PROMPT, 8)[1])
    assert np.array_equal(texts[0], texts[1])
    assert np.array_equal(texts[0], texts[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_texts_that_take_turns_read_rows_of_their_own(kernel, stores):
    with offload(stores(), kernel=kernel, rows="4kB") as engine:
        alone = [engine.generate(ids, max_new_tokens=6).tokens for ids in (PROMPT, PROMPT[::-1])]
        texts = [engine.begin(ids, max_new_tokens=6, warm=True) for ids in (PROMPT, PROMPT[::-1])]
        while not all(text.ended for text in texts):
            for text in texts:
                text.step()
        assert [text.tokens for text in texts] == alone
        counts = [(text.stats.rows, text.stats.row_hits) for text in texts]
        for text in texts:
            text.close()
    assert counts[0][0] == counts[1][0] > 0
    assert sum(hits for _, hits in counts) > 0


# Counts and bytes


def requested(store, out):
    """The rows of every pass by their definition: one union for the prompt, then token by token."""
    model_rows = Store.open(store).contents.rows
    tokens, n = out.table.tokens[0].tolist(), int((out.table.phase == 0).sum())

    def hashed(x):
        x = signed(x * -4658895280553007687)
        x ^= (x >> 32) & 0xFFFFFFFF
        x = signed(x * -7723592293110705685)
        return x ^ ((x >> 29) & 0x7FFFFFFFF)

    def row(group, t):
        if group.n == 1:
            return tokens[t]
        if t < group.n - 1:
            return group.rows
        key = group.salt
        for back in range(group.n):
            key = hashed(key ^ tokens[t - back])
        return key % group.rows

    per_token = [{(i, row(group, t)) for i, group in enumerate(model_rows)} for t in range(len(tokens))]
    return [set().union(*per_token[:n]), *per_token[n:]]


def signed(x):
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x


@pytest.mark.parametrize("policy", ["lru", "sieve"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
def test_hits_are_those_of_a_plain_cache(stores, tokens, policy):
    """A cache for each size of rows, with room for the rows of some tokens."""
    layout = Store.open(stores("many rows")).contents.row_layout
    with offload(stores("many rows"), slots=2, rows=tokens * layout.row_bytes, policy=policy) as engine:
        out = engine.generate(PROMPT, max_new_tokens=20)
    numbers = np.cumsum([0, *(group.key.n_rows for group in layout.groups)]).tolist()
    hits = asked = 0
    for size in {place.nbytes for place in layout.places}:
        groups = [i for i, place in enumerate(layout.places) if place.nbytes == size]
        cache = Cache(capacity=max(tokens * len(groups), 1), policy=policy)
        for j, rows in enumerate(requested(stores("many rows"), out)):
            keys = sorted(numbers[i] + row for i, row in rows if i in groups)
            asked += len(keys)
            if tokens:
                hits += len((cache.request(keys) if j else cache.request_union(keys)).hits)
    assert (out.stats.rows, out.stats.row_hits) == (asked, hits)


@pytest.mark.parametrize("policy", ["lru", "fifo", "sieve"])
@pytest.mark.parametrize("n", [1, 6])
def test_the_simulator_counts_the_row_misses_of_a_run(stores, policy, n, tmp_path):
    for tokens in (1, 4, 1000):
        memory = tokens * Store.open(stores("many rows")).contents.row_layout.row_bytes
        with offload(stores("many rows"), slots=2, rows=memory, policy=policy) as engine:
            out = engine.generate((PROMPT * 2)[:n], max_new_tokens=20)
        save_table(out.table, tmp_path / f"{tokens}")
        found = simulate_rows(load_table(tmp_path / f"{tokens}"), tokens=tokens, policy=policy)
        assert (found.hits, found.misses) == (out.stats.row_hits, out.stats.rows - out.stats.row_hits)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_bytes_are_those_of_whole_blocks(stores, io, monkeypatch):
    """One block for each row of a token; rows in the same or in adjacent blocks of a prompt are read together."""
    read = {}
    real = os.preadv

    def preadv(file, buffers, at):
        n = real(file, buffers, at)
        read[file] = read.get(file, 0) + n
        assert at % BLOCK == 0
        assert len(buffers[0]) % BLOCK == 0
        return n

    reserved = []
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(Throttle, "reserve", lambda self, n: (reserved.append(n), 0.0)[1])
    with offload(stores("many rows"), rows=0, io=io, throttle="1GB") as engine:
        groups = len(engine.rows.layout.groups)
        read.clear()
        one = engine.generate(PROMPT[:1], max_new_tokens=6).stats
        rows = read[engine.rows._file._file]
        assert one.row_bytes_read == rows == one.rows * BLOCK == 6 * groups * BLOCK
        assert sum(reserved) == one.bytes_read + one.row_bytes_read
        long = engine.generate(PROMPT * 4, max_new_tokens=1).stats
        assert long.row_bytes_read < long.rows * BLOCK
        assert long.rows < 24 * groups


def test_the_rows_of_all_layers_for_a_token_are_one_read(stores):
    contents = Store.open(stores()).contents
    tokens, *rest = contents.rows
    assert [(table.layer, table.name) for table in tokens.tables] == [
        (layer, f"blocks.{layer}.side.tokens.weight") for layer in range(4)
    ]
    assert [(group.n, group.layer, len(group.tables)) for group in rest] == [
        (n, layer, 1) for layer in (0, 1) for n in (2, 2, 3, 3)
    ]
    assert contents.row_layout.row_bytes == 4 * 32 * (4 + 2 * 2)


def test_tables_that_are_addressed_alike_share_their_rows():
    def table(layer):
        return TableRows(f"t{layer}", layer, 0, 3)

    group = RowGroup(2, 7, 50, (table(0), table(1)))
    rng = np.random.default_rng(0)
    tables = {name: rng.random((51, 3), np.float32) for name in ("t0", "t1")}
    layout = RowLayout((group,), "weights")
    assert layout.row_bytes == 24
    data = layout.encode(Piece(0, 0, 51), lambda name, first, stop: tables[name][first:stop])
    assert len(data) == layout.nbytes == BLOCK
    whole = layout.tables(iter([(Piece(0, 0, 51), layout.decode(Piece(0, 0, 51), data))]))
    assert all(np.array_equal(whole[name], tables[name]) for name in tables)
    assert data[:24].view(np.float32).tolist() == [*tables["t0"][0].tolist(), *tables["t1"][0].tolist()]


def test_tables_on_disk_take_no_memory(stores):
    layout = Store.open(stores("many rows")).contents.row_layout
    with offload(stores("many rows"), slots=2) as engine:
        in_memory = engine.resident_bytes
        out = engine.generate(PROMPT, max_new_tokens=3)
        assert (out.stats.rows, out.stats.row_bytes_read) == (0, 0)
    with offload(stores("many rows"), slots=2, rows=0) as engine:
        assert engine.resident_bytes == in_memory - layout.table_bytes + layout.row_bytes
        names = {name for name, _ in engine.host.model.named_parameters()}
        assert not names & set(layout.shapes)
    with offload(stores("many rows"), slots=2, rows=10 * layout.row_bytes + 5) as engine:
        assert engine.resident_bytes == in_memory - layout.table_bytes + 11 * layout.row_bytes
        assert engine.generate(PROMPT, max_new_tokens=3).stats.resident_bytes == engine.resident_bytes


# The store


@pytest.mark.parametrize("name", RUNS)
def test_a_store_has_the_tables_of_the_run(name, stores):
    opened, source = Store.open(stores(name)), open_checkpoint(stores(name).parent / "run")
    tables = opened.tables()
    assert tables
    for key, table in tables.items():
        assert np.array_equal(table, source.table_rows(key, 0, len(table)).numpy())
    assert (stores(name) / ROWS).stat().st_size == opened.contents.row_layout.nbytes
    assert not set(tables) & set(dict(source.dense()))


def test_packing_is_measured_with_the_tables(stores, tmp_path):
    (tmp_path / "text").write_text("A row is read where a token asks for it. " * 4)
    cost = pack_model(
        stores().parent / "run", tmp_path / "store", experts="fp32", text=tmp_path / "text", tokens=60
    ).cost
    assert cost.before == cost.after


@pytest.mark.parametrize("n", [0, 1, 7])
def test_a_packing_that_was_interrupted_in_its_rows_is_resumed(stores, tmp_path, monkeypatch, n):
    run, real, read = stores().parent / "run", RunCheckpoint.table_rows, []

    def table_rows(*args):
        read.append(args)
        if len(read) == n + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "table_rows", table_rows)
        with pytest.raises(
            StoreError, match=r"store cannot be written \(No space left on device\). Make room and pack"
        ):
            packed(run, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    before = (tmp_path / ".store.packing" / ROW_JOURNAL).read_text()
    experts, written = pack_module._write_expert, []
    monkeypatch.setattr(pack_module, "_write_expert", lambda *args: (written.append(args), experts(*args))[1])
    packed(run, tmp_path / "store")
    assert not written
    assert len(before.splitlines()) - 1 == max((n - 4) // 2 + 1, 0)  # the piece of tokens reads four tables
    for path in stores().iterdir():
        assert (tmp_path / "store" / path.name).read_bytes() == path.read_bytes()


def test_a_disk_without_room_for_rows_is_noticed_before_writing(stores, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    needed = Store.open(stores()).nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed + 5000))
    with pytest.raises(StoreError, match=r"but the experts and rows need .* Choose another folder"):
        packed(stores().parent / "run", tmp_path / "store")


def test_a_store_of_an_earlier_version_opens_with_tables_in_memory(stores, tmp_path):
    source = open_checkpoint(stores().parent / "run")
    source.rows, source._tables = (), set()
    earlier = pack(source, tmp_path / "earlier", uniform(source, "fp32")).folder
    assert '"schema": 1' in (earlier / "store.json").read_text()
    assert '"rows"' not in (earlier / "store.json").read_text()
    with offload(stores()) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=8).tokens
    with offload(earlier) as engine:
        assert engine.generate(PROMPT, max_new_tokens=8).tokens == expected
    with pytest.raises(
        ConfigError, match=r"rows: got 0, but .*earlier has no rows on disk: omit it, or pack the model"
    ):
        offload(earlier, rows=0)
    with pytest.raises(ConfigError, match="earlier is a store of another model or precision"):
        offload(stores().parent / "run", store=earlier)


# Faults


def damage(store, group, row):
    """Flip a bit of a row."""
    place = Store.open(store).contents.row_layout.places[group]
    unit, inner = divmod(row, place.per_unit)
    with (store / ROWS).open("r+b") as f:
        f.seek(place.offset + unit * place.unit + inner * place.stride + 5)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("memory", [0, "1MB"])
def test_no_token_comes_from_a_damaged_row(store, kernel, memory):
    with offload(store, kernel=kernel) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=8).tokens
    first = next(i for i, token in enumerate(expected) if token not in PROMPT)
    damage(store, 0, expected[first])
    seen = []
    engine = offload(store, kernel=kernel, rows=memory)
    message = (
        rf"rows.bin: the row of token {expected[first]} cannot be used: its checksum differs. Pack the model again"
    )
    with pytest.raises(StoreError, match=message):
        engine.generate(PROMPT, max_new_tokens=8, on_token=seen.append)
    assert seen == expected[: first + 1]
    assert engine.closed
    with pytest.raises(StoreError, match=r"rows.bin is damaged: its checksum differs"):
        offload(store, kernel=kernel)


def test_a_damaged_row_of_an_n_gram_is_named(store):
    damage(store, 5, 11)  # that of texts with one token
    with pytest.raises(StoreError, match=r"row 11 of the 2-grams of layer 1 cannot be used: its checksum differs"):
        offload(store, rows=0).generate(PROMPT, max_new_tokens=2)


def test_rows_of_another_place_or_model_are_noticed(store, tmp_path):
    content = (store / ROWS).read_bytes()
    (store / ROWS).write_bytes(content[BLOCK : 2 * BLOCK] + content[BLOCK:])
    with pytest.raises(StoreError, match=r"the row of token 3 cannot be used: its checksum differs"):
        offload(store, rows=0).generate([3], max_new_tokens=2)
    other = packed(write_run(tmp_path / "run", "lookup", "--seed", "5"), tmp_path / "other")
    shutil.copyfile(other / ROWS, store / ROWS)
    with pytest.raises(StoreError, match=r"the row of token 72 cannot be used: its checksum differs"):
        offload(store, rows=0).generate(PROMPT[:1], max_new_tokens=2)


def test_a_file_of_rows_that_is_cut_is_noticed(store):
    engine = offload(store, rows=0)
    os.truncate(store / ROWS, BLOCK)
    with pytest.raises(StoreError, match=r"cannot be used: the file ends before it"):
        engine.generate(PROMPT, max_new_tokens=2)
    with pytest.raises(
        StoreError, match=r"rows.bin is damaged: got 4,096 bytes, expected [0-9,]+\. Pack the model again"
    ):
        offload(store, rows=0)
    (store / ROWS).unlink()
    with pytest.raises(StoreError, match=r"rows.bin cannot be read \(No such file or directory\)"):
        offload(store)


def test_a_file_system_without_direct_reads_reads_rows_buffered(stores, monkeypatch):
    real = os.preadv

    def preadv(file, buffers, at):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, buffers, at)

    with offload(stores(), rows=0) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).tokens
    with offload(stores(), rows=0) as engine:
        monkeypatch.setattr(os, "preadv", preadv)
        assert engine.generate(PROMPT, max_new_tokens=5).tokens == expected
        assert engine.rows._file.io == engine.io == "buffered"


def test_short_reads_of_rows_are_continued(stores, monkeypatch):
    real = os.preadv
    with offload(stores("wide"), rows=0) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).tokens
        monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:512]], at))
        assert engine.generate(PROMPT, max_new_tokens=5).tokens == expected


@pytest.mark.parametrize("memory", [0, "1MB"])
def test_ctrl_c_while_a_pass_waits_for_rows(stores, memory, monkeypatch):
    engine = offload(stores(), rows=memory)
    expected = engine.generate(PROMPT, max_new_tokens=8).tokens
    wait, calls = engine.rows.wait, []

    def interrupted(layer):
        calls.append(layer)
        if len(calls) == 12:
            raise KeyboardInterrupt
        wait(layer)

    monkeypatch.setattr(engine.rows, "wait", interrupted)
    out = engine.generate(PROMPT, max_new_tokens=8)
    assert out.interrupted
    assert out.tokens == expected[: len(out.tokens)]
    assert 0 < len(out.tokens) < 8
    assert not [thread for thread in threading.enumerate() if thread.name == "expert reader"]


def test_a_pass_that_was_not_completed_is_abandoned(stores):
    """Its reads may still be in flight when the next one begins."""
    with offload(stores(), rows="1MB") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=8)
        rows, tokens = engine.rows, np.array([9, 8, 7, 6])
        rows.begin(tokens, np.arange(4), 0)
        rows.begin(tokens, np.arange(4), 3)
        assert not any(hot.cache.stats.hits for hot in rows._hot)  # what was not completed is not kept
        again = engine.generate(PROMPT, max_new_tokens=8, warm=True)
    assert again.tokens == expected.tokens


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": "1kB"}, r"rows: got 1 kB, expected all, 0, or at least 1.02 kB: the rows of one token"),
        ({"rows": "many"}, r"rows: got 'many'"),
        ({"rows": -1}, r"rows: got -1"),
    ],
)
def test_wrong_settings_are_refused(stores, settings, message):
    with pytest.raises(ConfigError, match=message):
        offload(stores(), **settings)


def test_models_without_rows_refuse_the_option(store_of, run_of):
    with pytest.raises(ConfigError, match=r"rows: got '1MB', but .* has no rows on disk: omit it"):
        offload(store_of(), rows="1MB")
    offload(store_of(), rows="all").close()
    with pytest.raises(ConfigError, match=r"rows: got '1MB', expected all: a model without experts keeps its tables"):
        offload(run_of("dense"), rows="1MB")


def test_tables_stay_in_memory_if_they_fit_beside_all_experts(stores):
    opened = Store.open(stores("many rows"))
    needed = opened.nbytes + opened.contents.row_layout.table_bytes
    with offload(stores("many rows"), memory=needed) as engine:
        assert engine.rows is None
        assert engine.slots == 5
    with offload(stores("many rows"), memory=needed - 1) as engine:
        assert engine.rows is not None
    with offload(stores("many rows"), memory=needed - 1, rows="all") as engine:
        assert engine.rows is None


def test_a_policy_of_routers_keeps_rows_by_their_use(stores):
    """Rows are no experts of a router."""
    with offload(stores(), rows="1MB") as engine:
        engine.rows.configure("router")
        assert engine.generate(PROMPT, max_new_tokens=4).stats.row_hits > 0


def test_the_file_of_experts_has_no_rows(stores):
    assert (stores() / EXPERTS).stat().st_size == Store.open(stores()).nbytes
    assert torch.is_tensor(open_checkpoint(stores().parent / "run").table_rows("blocks.0.side.tokens.weight", 0, 1))
