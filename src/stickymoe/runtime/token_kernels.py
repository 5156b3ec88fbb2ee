"""Compiled loops that every decoder of one token shares: matrices at an address, attention, and experts in slots.

`threads` is None for one thread. numba compiles that case by itself, without the code that starts threads.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, prange

from stickymoe.runtime import kernels
from stickymoe.runtime.kernels import bytes_at

SUMS = {"reassoc", "contract", "nsz"}  # sums in any order, as vector instructions need it


def checksum(*modules: Any) -> int:
    """Of the source of modules. Functions that call theirs enclose it: numba's cache on disk sees one file only."""
    return zlib.crc32(b"".join(Path(module.__file__).read_bytes() for module in modules))


@njit(nogil=True)
def _part(addresses: Any, rows: Any, precision: int, x: Any, block: int, blocks: int, out: Any) -> None:
    begin = 0
    for i in range(len(addresses)):
        n = rows[i]
        matrix = bytes_at(addresses[i], n * len(x) * (4 if precision == kernels.FP32 else 2))
        first, last = block * n // blocks, (block + 1) * n // blocks
        kernels.rows(matrix, precision, 0, -1, -1, x, first, last, out[begin : begin + n])
        begin += n


@njit(nogil=True, parallel=True)
def _linear_in_threads(addresses: Any, rows: Any, precision: int, x: Any, out: Any) -> None:
    for block in prange(kernels.BLOCKS):
        _part(addresses, rows, precision, x, block, kernels.BLOCKS, out)


@njit(nogil=True)
def linear(threads: Any, addresses: Any, rows: Any, precision: int, x: Any, out: Any) -> None:
    """The products of some matrices with x, one behind the other. Matrix i has `rows[i]` rows, in fp32 or bf16."""
    if threads is None:
        _part(addresses, rows, precision, x, 0, 1, out)
    else:
        _linear_in_threads(addresses, rows, precision, x, out)


@njit(nogil=True, fastmath=SUMS)
def attention(q: Any, keys: Any, values: Any, first: int, last: int, scores: Any, out: Any) -> None:
    """One head over the tokens from `first` to `last`; keys and values are [dh, T]."""
    dh, n = len(q), last - first
    scale = np.float32(1.0 / math.sqrt(dh))
    for t in range(n):
        scores[t] = 0.0
    for i in range(dh):
        a = q[i] * scale
        row = keys[i][first:last]
        for t in range(n):
            scores[t] += a * row[t]
    most = scores[0]
    for t in range(1, n):
        most = max(most, scores[t])
    total = np.float32(0.0)
    for t in range(n):
        scores[t] = np.exp(scores[t] - most)
        total += scores[t]
    for i in range(dh):
        row = values[i][first:last]
        mean = np.float32(0.0)
        for t in range(n):
            mean += scores[t] * row[t]
        out[i] = mean / total


@njit(nogil=True)
def add_experts(
    threads: Any, slots: Any, spec_rows: Any, which: Any, h: Any, w: Any, hidden: Any, y: Any, x: Any
) -> None:
    """x += Σ w·expert(h) of the experts in slots `which`; those at −1 are skipped. hidden and y are scratch."""
    used = 0
    for i in which:
        used += i >= 0
    if used < len(which):
        some_rows, some = np.empty((used, spec_rows.shape[1]), np.int64), np.empty(used, np.int64)
        used = 0
        for j in range(len(which)):
            if which[j] >= 0:
                some[used], w[used] = which[j], w[j]
                for field in range(spec_rows.shape[1]):
                    some_rows[used, field] = spec_rows[j, field]
                used += 1
        spec_rows, which, w = some_rows, some, w[:used]
    if threads is None:
        kernels.experts(slots, spec_rows, which, h, w, hidden, y)
    else:
        kernels.experts_parallel(slots, spec_rows, which, h, w, y)
    for i in range(len(x)):
        x[i] += y[i]
