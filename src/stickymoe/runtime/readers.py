"""Read experts and rows from a store into memory, in the background: two threads, demand before prefetch.

A read goes around the page cache (direct I/O) where the file system allows it, so that the memory of a process is its
slots and nothing else. Everything is compared with its checksum after every read.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stickymoe.errors import StoreError
from stickymoe.reading import reason
from stickymoe.runtime.memory import Region
from stickymoe.runtime.store import EXPERTS, Store, checksum

IO = Literal["direct", "buffered"]
THREADS = 2  # more bring nothing: flash saturates at two


class Throttle:
    """Slow memory of a given speed: a read takes at least its bytes divided by `rate`, one read after another."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, n_bytes: int) -> float:
        """Reserve time for a read before it begins; returns when it may end."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + n_bytes / self.rate
            return self._free_at


class StoreFile:
    """A file of a store. It is read buffered where the file system has no direct reads."""

    def __init__(self, path: Path, io: IO) -> None:
        self.path = path
        self.io, self._file = _open(path, io)
        self._files = [self._file]
        self._lock = threading.Lock()

    def read(self, target: memoryview, at: int) -> bool:
        """Fill `target` with the bytes from `at` on; false if the file ends before."""
        while target:
            file = self._file
            try:
                n = os.preadv(file, [target], at)
            except OSError as e:
                if e.errno == errno.EINVAL and self._leaves_direct(file):
                    continue
                raise
            if n == 0:
                return False
            target, at = target[n:], at + n
        return True

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _leaves_direct(self, file: int) -> bool:
        """Read buffered from now on, if `file` is read directly: some file systems take the flag, but not the read."""
        with self._lock:
            if self.io == "direct":
                self.io, self._file = _open(self.path, "buffered")
                self._files.append(self._file)  # the other thread may still read the first one
            return file != self._file


class Ticket(ABC):
    """Something to read. It is queued, running, done, failed or cancelled."""

    __slots__ = ("done", "error", "prefetch", "running")

    def __init__(self, *, prefetch: bool = False) -> None:
        self.prefetch = prefetch
        self.running = False
        self.done = False
        self.error: StoreError | None = None

    @abstractmethod
    def read(self, readers: Readers) -> None:
        """Read it, in a thread of the readers."""

    @abstractmethod
    def failed(self, why: str) -> StoreError:
        """The error of a read that failed."""


class ExpertTicket(Ticket):
    """A read of one expert into one place."""

    __slots__ = ("entry", "expert", "pool", "store", "target")

    def __init__(self, store: Store, pool: int, expert: int, target: memoryview, *, prefetch: bool = False) -> None:
        super().__init__(prefetch=prefetch)
        self.store, self.pool, self.expert = store, pool, expert
        self.entry = store.entries[pool][expert]
        self.target = target[: self.entry.nbytes]

    def read(self, readers: Readers) -> None:
        may_end = readers.reserve(self.entry.nbytes)
        if not readers.experts.read(self.target, self.entry.offset):
            raise self.failed("the file ends before it")
        if checksum(self.target) != self.entry.checksum:
            raise self.failed("its checksum differs")
        readers.count(self.entry.nbytes)
        readers.wait_until(may_end)

    def failed(self, why: str) -> StoreError:
        return self.store.damaged(self.pool, self.expert, why)


class Readers:
    """The threads that read a store. `bytes_read` counts the bytes of experts that were really read."""

    def __init__(self, store: Store, *, io: IO = "direct", throttle: Throttle | None = None) -> None:
        self.store = store
        self.throttle = throttle
        self.bytes_read = 0
        self.experts = StoreFile(store.folder / EXPERTS, io)
        self._files = [self.experts]
        self._scratch = threading.local()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._demands: deque[Ticket] = deque()
        self._prefetches: deque[Ticket] = deque()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name="expert reader", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    @property
    def io(self) -> IO:
        """How experts are read."""
        return self.experts.io

    def open(self, name: str) -> StoreFile:
        """Another file of the store, read as its experts are. It is closed with the readers."""
        self._files.append(StoreFile(self.store.folder / name, self.io))
        return self._files[-1]

    def submit(self, *tickets: Ticket) -> None:
        with self._changed:
            for ticket in tickets:
                (self._prefetches if ticket.prefetch else self._demands).append(ticket)
            self._changed.notify_all()

    def promote(self, ticket: Ticket) -> None:
        """A prefetched expert is needed now: read it before other prefetches."""
        with self._changed:
            if ticket in self._prefetches:
                self._prefetches.remove(ticket)
                self._demands.append(ticket)
                self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Take back a read. One that runs is waited for, since it writes to its place until it ends."""
        with self._changed:
            if not ticket.running and not ticket.done:
                (self._prefetches if ticket in self._prefetches else self._demands).remove(ticket)
                ticket.done = True
                return
            while not ticket.done:
                self._changed.wait()

    def wait_any(self, tickets: Sequence[Ticket]) -> Ticket:
        """The first ticket that is done; raises its error if it failed."""
        with self._changed:
            while True:
                for ticket in tickets:
                    if ticket.done:
                        if ticket.error is not None:
                            raise ticket.error
                        return ticket
                if self._closed:
                    raise StoreError(f"{self.store.folder}: the engine was closed while an expert was loaded.")
                self._changed.wait()

    def close(self) -> None:
        """End the threads. Reads that run are finished, queued ones are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ended.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        while self._files:
            self._files.pop().close()

    # For tickets, in a thread of the readers

    def reserve(self, n_bytes: int) -> float:
        """Before a read: when it may end."""
        return 0.0 if self.throttle is None else self.throttle.reserve(n_bytes)

    def wait_until(self, may_end: float) -> None:
        wait = may_end - time.perf_counter()
        if wait > 0:
            self._ended.wait(wait)

    def count(self, n_bytes: int) -> None:
        """Bytes of an expert were read."""
        with self._changed:
            self.bytes_read += n_bytes

    def scratch(self, n_bytes: int) -> memoryview:
        """Memory of this thread for a direct read."""
        region: Region | None = getattr(self._scratch, "region", None)
        if region is None or region.nbytes < n_bytes:
            region = self._scratch.region = Region(1, n_bytes)
        return region.view(0)

    def _next(self) -> Ticket | None:
        with self._changed:
            while not self._closed:
                queue = self._demands or self._prefetches
                if queue:
                    ticket = queue.popleft()
                    ticket.running = True
                    return ticket
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            error: StoreError | None = None
            try:
                ticket.read(self)
            except StoreError as e:
                error = e
            except Exception as e:  # a reader must never die silently: its waiter would wait for ever
                error = ticket.failed(reason(e))
            with self._changed:
                ticket.error = error
                ticket.done = True
                self._changed.notify_all()


def _open(path: Path, io: IO) -> tuple[IO, int]:
    """Open for direct reads, or for buffered ones where the file system has none."""
    try:
        if io == "direct" and hasattr(os, "O_DIRECT"):
            try:
                return "direct", os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
        return "buffered", os.open(path, os.O_RDONLY)
    except OSError as e:
        raise StoreError(f"{path} cannot be read ({reason(e)}).") from e
