"""Compiled loops over experts as they lie in slots: a stand-in in fp32 for the kernels of every precision.

A row of the specification: where `up`, `up_bias`, `down` and `down_bias` begin, in bytes, then the width f.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_SUMS = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, fastmath=_SUMS)
def _dot(a: Any, x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += a[i] * x[i]
    return total


@njit(cache=True, nogil=True)
def experts(slots: Any, spec_rows: Any, which: Any, x: Any, w: Any, hidden: Any, out: Any) -> None:
    """Σ w_i · expert_i(x), written to `out`; `hidden` is scratch."""
    d = len(x)
    out[:] = 0.0
    for j in range(len(which)):
        numbers = slots[which[j]].view(np.float32)
        f = spec_rows[j, 4]
        up, up_bias = numbers[spec_rows[j, 0] // 4 :], numbers[spec_rows[j, 1] // 4 :]
        down, down_bias = numbers[spec_rows[j, 2] // 4 :], numbers[spec_rows[j, 3] // 4 :]
        z = hidden[:f]
        for r in range(f):
            a = _dot(up[r * d : r * d + d], x) + up_bias[r]
            z[r] = np.float32(0.5) * a * (np.float32(1.0) + math.erf(a * np.float32(0.7071067811865476)))
        for r in range(d):
            out[r] += w[j] * (_dot(down[r * f : r * f + f], z) + down_bias[r])
