"""Rows of tables: their addresses, and caches whose entries are too many for a state of each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stickymoe.errors import ConfigError
from stickymoe.locality.cache import Cache, SparseCache
from stickymoe.locality.policies import policy_names
from stickymoe.locality.rows import RowKey, find_rows, key_fields
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
