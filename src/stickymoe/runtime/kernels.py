"""Compiled loops over experts as they lie in slots: a stand-in in fp32 for the kernels of every precision.

A row of the specification: where `up`, `up_bias`, `down` and `down_bias` begin, in bytes, then the width f.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def experts(slots: Any, spec_rows: Any, which: Any, x: Any, w: Any, hidden: Any, out: Any) -> None:
    """Σ w_i · expert_i(x), written to `out`; `hidden` [f] is scratch."""
    d = len(x)
    out[:] = 0.0
    for j in range(len(which)):
        numbers = slots[which[j]].view(np.float32)
        up, up_bias, down, down_bias = spec_rows[j, 0] // 4, spec_rows[j, 1] // 4, spec_rows[j, 2] // 4, spec_rows[j, 3] // 4
        f = spec_rows[j, 4]
        for r in range(f):
            total = np.float32(0.0)
            for i in range(d):
                total += numbers[up + r * d + i] * x[i]
            a = total + numbers[up_bias + r]
            hidden[r] = np.float32(0.5) * a * (np.float32(1.0) + math.erf(a * np.float32(0.7071067811865476)))
        for r in range(d):
            total = np.float32(0.0)
            for i in range(f):
                total += numbers[down + r * f + i] * hidden[i]
            out[r] += w[j] * (total + numbers[down_bias + r])
