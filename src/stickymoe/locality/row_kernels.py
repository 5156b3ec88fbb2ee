"""Compiled loops that find the rows of tokens; the addresses are described in `rows`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def mix(x: Any) -> Any:
    """An invertible hash of 64-bit numbers: odd factors and shifts."""
    x = x * np.int64(-4658895280553007687)
    x = x ^ ((x >> 32) & np.int64(0xFFFFFFFF))
    x = x * np.int64(-7723592293110705685)
    return x ^ ((x >> 29) & np.int64(0x7FFFFFFFF))


@njit(cache=True, nogil=True)
def find_rows(tokens: Any, position: Any, first: int, fields: Any, out: Any) -> None:
    """The rows [T, keys] of T tokens from `first` on. `position` is that in the document; `fields` are `key_fields`."""
    for i in range(out.shape[0]):
        t = first + i
        for key in range(out.shape[1]):
            n, rows = fields[key, 0], fields[key, 2]
            if n == 1:
                out[i, key] = tokens[t]
            elif position[t] < n - 1:
                out[i, key] = rows
            else:
                x = fields[key, 1]
                for back in range(n):
                    x = mix(x ^ tokens[t - back])
                out[i, key] = x % rows
