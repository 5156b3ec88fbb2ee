"""Slots under any interleaving of requests, prefetches and slow reads: every expert comes with its own bytes."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from experts import expert_spec

from stickymoe.locality.cache import Cache
from stickymoe.locality.policies import policy_names
from stickymoe.runtime import readers as readers_module
from stickymoe.runtime.memory import Region
from stickymoe.runtime.readers import ExpertTicket, Readers, Throttle
from stickymoe.runtime.slots import COUNTS, SCRATCH_SLOTS, Pool, Waits
from stickymoe.runtime.store import EXPERTS, Contents, Entry, Store, checksum

POOLS, N, BYTES = 2, 6, 4096


def content(pool: int, expert: int) -> bytes:
    return bytes([16 * pool + expert + 1]) * BYTES


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store of small experts, each full of a number of its own."""
    folder: Path = tmp_path_factory.mktemp("slots")
    with (folder / EXPERTS).open("wb") as f:
        f.writelines(content(pool, e) for pool in range(POOLS) for e in range(N))
    entries = tuple(
        tuple(Entry("fp32", (pool * N + e) * BYTES, BYTES, checksum(content(pool, e))) for e in range(N))
        for pool in range(POOLS)
    )
    contents = Contents("run", "slots", "-", expert_spec(4, 4), POOLS, N, 2)
    return Store(folder, contents, entries, 0, "")


class Uneven(Throttle):
    """Reads of different length, so that they land in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__(1.0)
        self._random = random.Random(seed)

    def reserve(self, n_bytes: int) -> float:
        return time.perf_counter() + self._random.choice((0, 0, 0.0005, 0.002))


@pytest.mark.parametrize("on_miss", ["load", "bypass"])
@pytest.mark.parametrize("capacity", range(1, N + 1))
def test_every_expert_has_its_own_bytes(store, capacity, on_miss):
    """Requests up to all experts, whatever was prefetched; a cache without slots counts the same."""
    for seed, policy in enumerate(policy_names(online=True)):
        rng = random.Random(100 * capacity + seed)
        readers = Readers(store, throttle=Uneven(seed))
        scratch = Region(SCRATCH_SLOTS, BYTES) if on_miss == "bypass" else None
        waits = Waits()
        pools = [
            Pool(i, readers, waits, capacity=capacity, policy=policy, on_miss=on_miss, scratch=scratch)
            for i in range(POOLS)
        ]
        plain = [Cache(capacity=capacity, policy=policy, on_miss=on_miss) for _ in range(POOLS)]
        try:
            for _ in range(60):
                number = rng.randrange(POOLS)
                experts = rng.sample(range(N), rng.choice((1, 2, 2, 3, N)))
                kind = rng.choice(("request", "request", "union", "prefetch"))
                if kind == "prefetch":
                    pools[number].prefetch(experts)
                    plain[number].prefetch(experts)
                    continue
                union = kind == "union"
                (plain[number].request_union if union else plain[number].request)(experts)
                seen = []
                for found in pools[number].bring(experts, union=union):
                    seen.append(found.expert)
                    assert found.data[:BYTES].tobytes() == content(number, found.expert)
                    if rng.random() < 0.3:  # computing takes time, and another pool prefetches meanwhile
                        pools[1 - number].prefetch(experts)
                        plain[1 - number].prefetch(experts)
                        time.sleep(0.0005)
                        assert found.data[:BYTES].tobytes() == content(number, found.expert)
                assert sorted(seen) == sorted(experts)
        finally:
            readers.close()
        for pool, cache in zip(pools, plain, strict=True):
            assert pool.cache.stats == cache.stats
            assert pool.cache.resident == cache.resident


def test_experts_that_fit_stay_until_all_have_come(store):
    """A kernel computes them all at once, after the last has landed."""
    readers = Readers(store, throttle=Uneven(3))
    pool = Pool(0, readers, Waits(), capacity=3, policy="lru", on_miss="load", scratch=None)
    rng = random.Random(4)
    try:
        for _ in range(80):
            pool.prefetch(rng.sample(range(N), 2))
            slots = {found.expert: found.slot for found in pool.bring(rng.sample(range(N), 3))}
            for expert, slot in slots.items():
                assert pool.region.slots[slot].tobytes() == content(0, expert)
    finally:
        readers.close()


def test_a_prefetch_in_flight_is_waited_for_and_counted_apart(store):
    release = threading.Event()

    class Held(Throttle):
        def reserve(self, n_bytes: int) -> float:
            release.wait()
            return 0.0

    waits = Waits()
    readers = Readers(store, throttle=Held(1.0))
    pool = Pool(0, readers, waits, capacity=2, policy="lru", on_miss="load", scratch=None)
    pool.prefetch([1, 2])
    timer = threading.Timer(0.02, release.set)
    timer.start()
    found = {f.expert: f.data.tobytes() for f in pool.bring([1, 2])}
    timer.join()
    readers.close()
    assert found == {1: content(0, 1), 2: content(0, 2)}
    counts = dict(zip(COUNTS, pool.counts, strict=True))
    assert (counts["hits"], counts["misses"], counts["prefetched"]) == (2, 0, 2)
    assert waits.late_s > 0
    assert waits.stall_s == 0


def test_demands_are_read_before_prefetches(store, monkeypatch):
    order = []
    started, release = threading.Event(), threading.Event()

    class Held(Throttle):
        def reserve(self, n_bytes: int) -> float:
            started.set()
            release.wait()
            return 0.0

    monkeypatch.setattr(readers_module, "THREADS", 1)
    readers = Readers(store, throttle=Held(1.0))
    read = ExpertTicket.read
    monkeypatch.setattr(ExpertTicket, "read", lambda self, by: (order.append(self.expert), read(self, by)))
    pool = Pool(0, readers, Waits(), capacity=6, policy="lru", on_miss="load", scratch=None)
    pool.prefetch([0, 1, 2])
    started.wait()
    timer = threading.Timer(0.05, release.set)  # when the request waits
    timer.start()
    assert {f.expert for f in pool.bring([4, 2])} == {2, 4}
    timer.join()
    list(pool.bring([1]))
    readers.close()
    assert order == [0, 2, 4, 1]


def test_a_throttled_read_ends_when_its_bytes_have_passed(monkeypatch):
    now = 10.0
    monkeypatch.setattr(readers_module.time, "perf_counter", lambda: now)
    throttle = Throttle(1000.0)
    assert throttle.reserve(500) == 10.5
    assert throttle.reserve(1000) == 11.5  # after the one before
    now = 20.0
    assert throttle.reserve(100) == 20.1


def test_reads_take_at_least_their_bytes_at_the_rate(store, monkeypatch):
    """By accounting: the waits that the readers asked for."""
    waited = []
    readers = Readers(store, throttle=Throttle(1e9))
    monkeypatch.setattr(readers._ended, "wait", waited.append)
    readers.throttle = Throttle(BYTES / 100)  # 100 s for each expert
    pool = Pool(0, readers, Waits(), capacity=6, policy="lru", on_miss="load", scratch=None)
    list(pool.bring([0, 1, 2]))
    readers.close()
    assert len(waited) == 3
    for wait, expected in zip(sorted(waited), (100, 200, 300), strict=True):
        assert expected - 90 < wait <= expected
    assert readers.bytes_read == 3 * BYTES


def test_closing_ends_throttled_reads_at_once(store):
    readers = Readers(store, throttle=Throttle(1.0))  # more than an hour for an expert
    pool = Pool(0, readers, Waits(), capacity=2, policy="lru", on_miss="load", scratch=None)
    pool.prefetch([0, 1])
    readers.close()
    assert not any(thread.is_alive() for thread in readers._threads)


def test_slots_are_aligned_for_direct_reads():
    region = Region(3, 4096)
    for slot in region.slots:
        assert slot.ctypes.data % 4096 == 0
    assert region.nbytes == 3 * 4096
    assert np.count_nonzero(region.slots) == 0
