"""Slots: the experts of one pool that are in memory, and what brings the others in.

Every decision is made by `locality.cache.Cache`, the code that the simulator replays, so a trace predicts the loads of
a run exactly. Reads run in the background: experts that are resident are computed while the others land.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8

from stickymoe.errors import StoreError
from stickymoe.locality.cache import Cache, Outcome
from stickymoe.runtime.memory import Region
from stickymoe.runtime.readers import ExpertTicket, Readers, Ticket

OnMiss = Literal["load", "bypass"]
COUNTS = ("hits", "misses", "evictions", "prefetched", "wasted", "bypassed")
SCRATCH_SLOTS = 2  # one is computed while the other is read


class Resident(NamedTuple):
    """An expert that is in memory, and its bytes."""

    expert: int
    slot: int
    data: UInt8[np.ndarray, " bytes"]


class Change(NamedTuple):
    """An expert that was loaded into a slot. A slot < 0 is a scratch slot, through which it passes."""

    slot: int
    expert: int
    evicted: int | None
    prefetch: bool


class Waits:
    """Seconds that the model waited: for experts on demand, for prefetches that were still in flight, and for rows."""

    def __init__(self) -> None:
        self.stall_s = self.late_s = self.row_stall_s = 0.0


class Pool:
    """`capacity` slots for the experts of one pool.

    `scratch`, shared by all pools, holds experts that pass through without being admitted (`on_miss="bypass"`); its
    slots have negative numbers. While `changes` is a list, loads are appended to it.
    """

    def __init__(
        self,
        number: int,
        readers: Readers,
        waits: Waits,
        *,
        capacity: int,
        policy: str,
        on_miss: OnMiss,
        scratch: Region | None,
    ) -> None:
        self.number = number
        self.bypasses = on_miss == "bypass"
        self._new_cache = partial(Cache, capacity=capacity, policy=policy, on_miss=on_miss)
        self.cache = self._new_cache()
        self.changes: list[Change] | None = None
        self.region = Region(capacity, readers.store.slot_bytes)
        self._readers = readers
        self._waits = waits
        self._scratch = scratch
        self._slot: dict[int, int] = {}  # expert → slot, as the loads so far left it
        self._prefetches: dict[int, Ticket] = {}  # expert → its read, until it is committed
        self._last: dict[int, Ticket] = {}  # slot → the last read into it

    def bring(self, experts: Sequence[int], *, union: bool = False) -> Iterator[Resident]:
        """Every requested expert once, as soon as it is in memory.

        When the caller asks for the next one, it is done with the one before: its slot may be overwritten then. This
        happens where a request is larger than the cache.
        """
        self._commit()
        outcome = self.cache.request_union(experts) if union else self.cache.request(experts)
        return self._serve(outcome)

    def set_residents(self, layer: int, experts: Sequence[int]) -> None:
        """What the router of a layer keeps resident, before the request of that layer."""
        self.cache.set_residents(experts, layer=layer)

    def bring_all(self, experts: Sequence[int]) -> dict[int, int] | Iterator[Resident]:
        """`bring` experts that fit together: their slots if all of them are in memory already."""
        self._commit()
        outcome = self.cache.request(experts)
        if outcome.loads or outcome.late:
            return self._serve(outcome)
        return {e: self._slot[e] for e in experts}

    def prefetch(self, experts: Sequence[int]) -> None:
        """Reserve slots for the experts that are expected next, and read them while nothing else is read."""
        self._commit()
        for load in self.cache.prefetch(experts).loads:
            assert load.slot is not None
            ticket = self._submit(load.expert, load.slot, load.evicted, prefetch=True)
            self._prefetches[load.expert] = ticket

    def empty(self) -> None:
        """Empty the slots, and count from 0."""
        for ticket in self._last.values():
            self._readers.cancel(ticket)
        for held in (self._slot, self._prefetches, self._last):
            held.clear()
        self.cache = self._new_cache()

    @property
    def counts(self) -> list[int]:
        """What the cache has counted, in the order of COUNTS."""
        stats = self.cache.stats
        return [getattr(stats, name) for name in COUNTS]

    @property
    def contents(self) -> list[int | None]:
        """The expert of each slot."""
        held: list[int | None] = [None] * self.cache.capacity
        for expert, slot in self._slot.items():
            held[slot] = expert
        return held

    def _serve(self, outcome: Outcome) -> Iterator[Resident]:
        loads = deque(outcome.loads)
        busy: set[int] = set()  # slots of experts that this request has not computed yet
        landing: dict[Ticket, tuple[int, int]] = {}
        ready: list[tuple[int, int]] = []
        late: set[Ticket] = set()
        for expert in outcome.hits:
            slot = self._slot[expert]
            busy.add(slot)
            ticket = self._prefetches.get(expert) if expert in outcome.late else None
            if ticket is None:
                ready.append((expert, slot))
            else:
                self._readers.promote(ticket)
                landing[ticket] = expert, slot
                late.add(ticket)
        bypassed = 0

        def issue() -> None:
            """Begin every load whose slot is free: no expert in it waits to be computed."""
            nonlocal bypassed
            while loads:
                load = loads[0]
                slot = -1 - bypassed % SCRATCH_SLOTS if load.slot is None else load.slot
                if slot in busy:
                    return
                loads.popleft()
                bypassed += load.slot is None
                busy.add(slot)
                landing[self._submit(load.expert, slot, load.evicted)] = load.expert, slot

        issue()
        for expert, slot in ready:
            yield Resident(expert, slot, self._data(slot))
            busy.discard(slot)
            issue()
        while landing:
            ticket = self._wait(list(landing), late)
            expert, slot = landing.pop(ticket)
            yield Resident(expert, slot, self._data(slot))
            busy.discard(slot)
            issue()

    def _submit(self, expert: int, slot: int, evicted: int | None, *, prefetch: bool = False) -> Ticket:
        """Queue the read of an expert into a slot."""
        if evicted is not None:
            self._slot.pop(evicted, None)
            self._prefetches.pop(evicted, None)
        before = self._last.get(slot)
        if before is not None and not before.done:  # a prefetch that was evicted in flight
            self._readers.cancel(before)
        ticket = ExpertTicket(self._readers.store, self.number, expert, self._view(slot), prefetch=prefetch)
        if slot >= 0:
            self._slot[expert] = slot
            self._last[slot] = ticket
        self._readers.submit(ticket)
        if self.changes is not None:
            self.changes.append(Change(slot, expert, evicted, prefetch))
        return ticket

    def _wait(self, tickets: Sequence[Ticket], late: set[Ticket]) -> Ticket:
        start = time.perf_counter()
        ticket = self._readers.wait_any(tickets)
        seconds = time.perf_counter() - start
        if ticket in late:
            self._waits.late_s += seconds
        else:
            self._waits.stall_s += seconds
        return ticket

    def _commit(self) -> None:
        """Tell the cache which prefetches have landed. One that failed is given up: a demand will report it."""
        for expert, ticket in list(self._prefetches.items()):
            if ticket.done:
                del self._prefetches[expert]
                if ticket.error is None:
                    self.cache.commit(expert)
                else:
                    self.cache.cancel(expert)
                    del self._slot[expert]

    def _data(self, slot: int) -> UInt8[np.ndarray, " bytes"]:
        data: UInt8[np.ndarray, " bytes"] = self._of(slot).slots[slot if slot >= 0 else -1 - slot]
        return data

    def _view(self, slot: int) -> memoryview:
        return self._of(slot).view(slot if slot >= 0 else -1 - slot)

    def _of(self, slot: int) -> Region:
        if slot >= 0:
            return self.region
        if self._scratch is None:
            raise StoreError("An expert was to be bypassed, but there is no scratch slot.")
        return self._scratch
