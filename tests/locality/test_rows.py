"""Rows of tables: their addresses, and caches whose entries are too many for a state of each."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from stickymoe.cli import main
from stickymoe.errors import ConfigError, DataError
from stickymoe.locality.cache import Cache, SparseCache
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.plan import plan
from stickymoe.locality.policies import policy_names
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.row_kernels import find_rows
from stickymoe.locality.row_replay import rows_of, simulate_rows, tokens_of_share
from stickymoe.locality.rows import RowKey, key_fields
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable
from stickymoe.routing.lookup import NgramTable

POLICIES = policy_names(online=True)


def test_addresses_are_those_of_the_model():
    """Of a text in two documents, from a token in the middle on."""
    tokens = np.random.default_rng(0).integers(0, 4096, 40)
    position = np.concatenate([np.arange(25), np.arange(15)])
    for n in (2, 3, 5):
        torch.manual_seed(n)
        table = NgramTable(n, 1000, 8, 4)
        keys = [RowKey(1, 0, 4096, 4), *(RowKey(n, salt, 1000, 4) for salt in table.salts.tolist())]
        found = np.empty((30, 5), np.int64)
        find_rows(tokens, position, 10, key_fields(keys), found)
        assert np.array_equal(found[:, 0], tokens[10:])
        with torch.no_grad():
            weight = torch.arange(len(table.table.weight))[:, None].expand_as(table.table.weight)
            table.table.weight.copy_(weight)
        given = torch.from_numpy(tokens)[None], torch.from_numpy(position[10:] >= n - 1)[None]
        rows = table(*given)[0, :, ::2].long().numpy()  # two numbers for each head
        expected = np.where(rows == 4000, 1000, rows - 1000 * np.arange(4))
        assert np.array_equal(found[:, 1:], expected)


@pytest.mark.parametrize("capacity", [1, 2, 5, 20])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sparse_cache_decides_as_a_cache_of_all_keys(policy, capacity):
    rng = random.Random(capacity)
    plain, sparse = Cache(capacity=capacity, policy=policy), SparseCache(capacity=capacity, policy=policy)
    for _ in range(400):
        keys = rng.sample(range(30), rng.choice((1, 2, 3, 9)))
        if rng.random() < 0.3:
            assert sparse.request_union(keys) == plain.request_union(keys)
        else:
            assert sparse.request(keys) == plain.request(keys)
        assert sparse.resident == plain.resident
        assert sparse.stats == plain.stats
    assert sparse.capacity == capacity


def test_a_sparse_cache_takes_memory_for_its_slots_only():
    cache = SparseCache(capacity=3)
    for key in range(0, 1 << 40, 1 << 30):
        cache.request([key, key + 1])
    assert len(cache._key) <= 5
    assert len(cache.resident) == 3


def test_a_sparse_cache_refuses_what_it_does_not_know():
    for policy in ("belady", "router"):
        with pytest.raises(ConfigError, match=rf"policy: got '{policy}', expected one of lru, lfu, fifo, sieve"):
            SparseCache(capacity=2, policy=policy)
    with pytest.raises(ConfigError, match="expected different indices"):
        SparseCache(capacity=2).request([7, 7])


# Replay

KEYS = (RowKey(1, 0, 50, 96), RowKey(2, 3, 40, 16), RowKey(2, 9, 40, 16), RowKey(3, 5, 200, 16))


def table_of(*, phase=None, doc=None, **fields):
    """A table of random tokens, some of which are much more frequent than others."""
    rng = np.random.default_rng(1)
    tokens = np.minimum(rng.zipf(1.3, (2, 60)) - 1, 49)
    mask = np.ones((2, 60), bool)
    mask[1, 50:] = False
    return RouteTable(
        np.zeros((1, 2, 60, 1), np.uint8), 1, mask, tokens=tokens, row_keys=KEYS, phase=phase, doc=doc, **fields
    )


def test_the_replay_is_that_of_a_plain_cache():
    """Texts start cold; n-grams do not cross documents."""
    doc = np.repeat([[0, 1, 2], [3, 3, 4]], 20, axis=1)
    table = table_of(doc=doc)
    rows = rows_of(table).reshape(2, 60, -1)
    for size, classes in enumerate(([1, 2, 3], [0])):
        hits = 0
        for b in range(2):
            for document in np.unique(doc[b]):
                cache = Cache(capacity=4 * len(classes))
                for t in np.flatnonzero((doc[b] == document) & table.mask[b]):
                    hits += len(cache.request(rows[b, t, classes].tolist()).hits)
        found, stats = simulate_rows(table, tokens=4).caches[size]
        assert (found.keys, found.capacity) == (classes, 4 * len(classes))
        assert stats.hits == hits
    assert (rows[0, 20] == [table.tokens[0, 20], 50 + 40, 91 + 40, 132 + 200]).all()


@pytest.mark.parametrize("tokens", [1, 2, 5, 12, 100])
def test_no_policy_misses_less_than_belady(tokens):
    table = table_of()
    bound = simulate_rows(table, tokens=tokens, policy="belady")
    for policy in POLICIES:
        found = simulate_rows(table, tokens=tokens, policy=policy)
        assert found.misses >= bound.misses
        assert found.hits + found.misses == 110 * len(KEYS)
        assert found.bytes_per_token == sum(s.nbytes * c.misses for s, c in found.caches) / 110
        assert found.memory == sum(
            s.nbytes * min(tokens * len(s.keys), n) for (s, _), n in zip(found.caches, (283, 50), strict=True)
        )


def test_more_memory_misses_less():
    misses = [simulate_rows(table_of(), tokens=tokens).misses for tokens in (1, 2, 4, 8, 16, 32, 64)]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1]


def test_keys_survive_a_trace_folder(tmp_path):
    table = table_of(row_bytes=144)
    save_table(table, tmp_path / "trace")
    assert load_table(tmp_path / "trace").row_keys == KEYS
    recorder = Recorder(tmp_path / "recorded")
    recorder.add(replace(table, row_keys=()))
    assert recorder.finish(row_keys=KEYS, row_bytes=144).row_keys == KEYS
    header = tmp_path / "trace" / "header.json"
    header.write_text(header.read_text().replace("96", "0"))
    with pytest.raises(DataError, match=r"got row_keys .*expected lists of n, salt, rows and bytes ≥ 1"):
        load_table(tmp_path / "trace")


def test_a_table_without_keys_or_tokens_is_refused():
    for table in (replace(table_of(), tokens=None), replace(table_of(), row_keys=())):
        with pytest.raises(DataError, match="has no token ids or no row keys: record it again"):
            simulate_rows(table, tokens=3)


def test_simulate_prints_rows(tmp_path, capsys):
    save_table(table_of(), tmp_path / "trace")
    assert main(["simulate", str(tmp_path / "trace"), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "lru hits %" in out
    assert "sieve hits %" in out
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert list(entry["rows"]) == ["0.01", "0.05", "0.2"]
    lru = entry["rows"]["0.2"][0]
    table = table_of()
    expected = simulate_rows(table, tokens=tokens_of_share(table, 0.2), access=Access(warm=True))
    assert (lru["policy"], lru["hits"], lru["misses"]) == ("lru", expected.hits, expected.misses)
    assert main(["simulate", str(tmp_path / "trace"), "--policy", "belady"]) == 0
    assert "belady* hits %" in capsys.readouterr().out


def test_a_plan_counts_the_rows_that_are_read_and_the_memory_of_the_others():
    table = table_of(row_bytes=144, expert_bytes=(1000,), other_bytes=0)
    all_read = plan(table, "raspberry-pi-5").points["lru"][0]
    some = plan(table, "raspberry-pi-5", rows=5 * 144 + 1.0).points["lru"][0]
    found = simulate_rows(table, tokens=5, access=Access(warm=True))
    assert all_read.bytes_per_token - some.bytes_per_token == pytest.approx(144 - found.bytes_per_token)
    assert 0 < found.bytes_per_token < 144
    assert some.memory - all_read.memory == found.memory == 5 * 144
    assert some.ms_per_token < all_read.ms_per_token
    assert some.loads_per_token == all_read.loads_per_token


@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        ({}, "1kB", r"rows: got 1 kB, but the trace reads no rows: omit it\."),
        ({"row_bytes": 144}, "100", r"rows: got 100 B, expected 0 or at least 144 B, the rows of a token\."),
        ({"row_bytes": 144}, "much", r"--rows: got 'much', expected bytes"),
    ],
)
def test_memory_for_rows_that_cannot_be_used_is_refused(given, rows, message, tmp_path, capsys):
    save_table(table_of(expert_bytes=(1000,), **given), tmp_path / "trace")
    assert main(["plan", str(tmp_path / "trace"), "--device", "raspberry-pi-5", "--rows", rows]) == 2
    assert re.search(message, capsys.readouterr().err)
