"""Memory for slots: one private region, in huge pages where the system gives them, aligned for direct reads."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from jaxtyping import UInt8

_HUGE = 2 << 20


class Region:
    """`n` slots of `slot_bytes`, allocated and touched once. Slot i is `slots[i]`."""

    def __init__(self, n: int, slot_bytes: int) -> None:
        size = n * slot_bytes
        # Private: shared anonymous memory, the default of Python, gets no huge pages.
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE)
        self.slots: UInt8[np.ndarray, "n bytes"] = np.frombuffer(self._map, np.uint8, size).reshape(n, slot_bytes)
        self.slots[:, :: mmap.PAGESIZE] = 0
        self._views: list[Any] = [memoryview(self._map)[i * slot_bytes : (i + 1) * slot_bytes] for i in range(n)]

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, for a read."""
        view: memoryview = self._views[slot]
        return view

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:  # the kernel has no huge pages; small ones work too
            return
