"""Keep freed memory in the process: set glibc so that it does not return large blocks to the system.

By default glibc maps every large tensor again and unmaps it when it is freed, so the kernel zeroes every page again.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_freed_memory() -> bool:
    """Keep freed memory in the process from now on; returns False if the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
