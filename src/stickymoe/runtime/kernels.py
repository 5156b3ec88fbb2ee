"""Compiled loops that compute an expert for one token, straight from its bytes in a slot.

`slot` is the expert's bytes (uint8, contiguous) and `spec` its `ExpertLayout.spec_array`; x, hidden and out are
contiguous float32 vectors: x and out of d numbers, hidden of at least m for what is in between. All of them release the
interpreter lock, so that threads that read from disk run meanwhile. Sums are in fp32. Lengths are not checked.

An expert may be a difference from a base: base·x + out·(in·x) takes the place of each product. `inner` is in·x, empty
for a whole expert; `spec` has the addresses of the base.

numba promotes small integers to 64 bits, which would make the loops over int8 and int4 ten times slower: hence the
casts to int32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from stickymoe.runtime.formats import (
    ACTIVATIONS,
    FIELD_ACTIVATION,
    FIELD_D,
    FIELD_DOWN,
    FIELD_DOWN_BASE,
    FIELD_DOWN_BIAS,
    FIELD_DOWN_IN,
    FIELD_DOWN_IN_SCALES,
    FIELD_DOWN_SCALES,
    FIELD_F,
    FIELD_GATED,
    FIELD_PRECISION,
    FIELD_RANK,
    FIELD_UP,
    FIELD_UP_BASE,
    FIELD_UP_BIAS,
    FIELD_UP_IN,
    FIELD_UP_IN_SCALES,
    FIELD_UP_SCALES,
    GROUP,
    PRECISIONS,
)

FP32, BF16, _INT8 = (PRECISIONS.index(name) for name in ("fp32", "bf16", "int8"))
_GELU, _GELU_TANH, _SILU = (ACTIVATIONS.index(name) for name in ("gelu", "gelu_tanh", "silu"))
_HALF = GROUP // 2
BLOCKS = 16  # of rows, shared among the threads; code that asks how many threads there are cannot be cached

_F, _I, _U = np.float32, np.int32, np.uint32
_ROOT_HALF = _F(math.sqrt(0.5))
_TANH_SLOPE, _TANH_CUBE = _F(2 * math.sqrt(2 / math.pi)), _F(0.044715)

# Sums may be reordered, which vectors need; NaN and infinity keep their meaning, so that a broken expert shows.
_REORDER = {"reassoc", "contract", "nsz"}


@intrinsic
def _at(typing_context: Any, address: Any) -> Any:
    """A pointer to the bytes at an address."""

    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.int64), cast  # type: ignore[no-untyped-call]


@njit(nogil=True)
def bytes_at(address: Any, n: Any) -> Any:
    """The n bytes at an address."""
    return carray(_at(address), (n,))  # type: ignore[call-arg]


@njit(nogil=True)
def row_at(address: Any, width: Any) -> Any:
    """The fp32 numbers at an address."""
    return bytes_at(address, 4 * width).view(np.float32)


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _rows_fp32(values: Any, x: Any, first: int, last: int, out: Any) -> None:
    n = len(x)
    for i in range(first, last):
        row = values[i * n : (i + 1) * n]
        total = _F(0)
        for j in range(n):
            total += row[j] * x[j]
        out[i] = total


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _rows_bf16(values: Any, x: Any, first: int, last: int, out: Any) -> None:
    n = len(x)
    for i in range(first, last):
        row = values[i * n : (i + 1) * n]
        total = _F(0)
        for j in range(n):
            total += from_bf16(row[j]) * x[j]
        out[i] = total


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _rows_int8(values: Any, scales: Any, x: Any, first: int, last: int, out: Any) -> None:
    n = len(x)
    for i in range(first, last):
        row = values[i * n : (i + 1) * n]
        total = _F(0)
        for j in range(n):
            total += _F(_I(row[j])) * x[j]
        out[i] = total * scales[i]


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _rows_int4(values: Any, scales: Any, x: Any, first: int, last: int, out: Any) -> None:
    groups, full = (len(x) + GROUP - 1) // GROUP, len(x) // GROUP
    for i in range(first, last):
        row = values[i * groups * _HALF : (i + 1) * groups * _HALF]
        total = _F(0)
        for g in range(full):
            part = _F(0)
            for j in range(_HALF):
                two = _I(row[g * _HALF + j])
                part += _low(two) * x[g * GROUP + j] + _high(two) * x[g * GROUP + _HALF + j]
            total += part * from_bf16(scales[i * groups + g])
        out[i] = total


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _add_last_group(values: Any, scales: Any, x: Any, first: int, last: int, out: Any) -> None:
    """Add to `_rows_int4` the last group if it is partial: a second pass, because the first is faster without it."""
    groups, full = (len(x) + GROUP - 1) // GROUP, len(x) // GROUP
    rest = x[full * GROUP :]
    for i in range(first, last):
        row = values[((i + 1) * groups - 1) * _HALF : (i + 1) * groups * _HALF]
        part = _F(0)
        for j in range(min(len(rest), _HALF)):
            part += _low(_I(row[j])) * rest[j]
        for j in range(len(rest) - _HALF):
            part += _high(_I(row[j])) * rest[_HALF + j]
        out[i] += part * from_bf16(scales[i * groups + full])


@njit(cache=True, nogil=True, forceinline=True)
def from_bf16(bits: Any) -> Any:
    return _U(_U(bits) << _U(16)).view(_F)


@njit(cache=True, nogil=True, forceinline=True)
def _low(two: Any) -> Any:
    """The signed value in the lower four bits."""
    return _F(_I(_I(two << _I(28)) >> _I(28)))


@njit(cache=True, nogil=True, forceinline=True)
def _high(two: Any) -> Any:
    """The signed value in the upper four bits of eight."""
    return _F(_I(two >> _I(4)))


@njit(cache=True, nogil=True)
def rows(
    slot: Any, precision: int, values: int, scales: int, bias: int, x: Any, first: int, last: int, out: Any
) -> None:
    """out[i] = row i of a matrix · x + bias, for the rows from `first` to `last`; the pieces are given as offsets.

    A row's sum does not depend on the other rows, so any division of the rows gives the same bits.
    """
    n = len(x)
    if precision == FP32:
        _rows_fp32(slot[values : values + last * n * 4].view(np.float32), x, first, last, out)
    elif precision == BF16:
        _rows_bf16(slot[values : values + last * n * 2].view(np.uint16), x, first, last, out)
    elif precision == _INT8:
        step = slot[scales : scales + last * 4].view(np.float32)
        _rows_int8(slot[values : values + last * n].view(np.int8), step, x, first, last, out)
    else:
        groups = (n + GROUP - 1) // GROUP
        steps = slot[scales : scales + last * groups * 2].view(np.uint16)
        pairs = slot[values : values + last * groups * _HALF].view(np.int8)
        _rows_int4(pairs, steps, x, first, last, out)
        if n % GROUP > 0:
            _add_last_group(pairs, steps, x, first, last, out)
    if bias >= 0:
        shift = slot[bias : bias + last * 4].view(np.float32)
        for i in range(first, last):
            out[i] += shift[i]


@njit(cache=True, nogil=True, forceinline=True, error_model="numpy")
def _erf(x: Any) -> Any:
    """erf within 5e-7, with Eigen's coefficients: a loop over the C library's erf is not vectorised."""
    x = _F(-4) if x < _F(-4) else (_F(4) if x > _F(4) else x)
    s = x * x
    p = _F(-2.72614225801306e-10)
    p = p * s + _F(2.77068142495902e-08)
    p = p * s + _F(-2.10102402082508e-06)
    p = p * s + _F(-5.69250639462346e-05)
    p = p * s + _F(-7.34990630326855e-04)
    p = p * s + _F(-2.95459980854025e-03)
    p = p * s + _F(-1.60960333262415e-02)
    q = _F(-1.45660718464996e-05)
    q = q * s + _F(-2.13374055278905e-04)
    q = q * s + _F(-1.68282697438203e-03)
    q = q * s + _F(-7.37332916720468e-03)
    q = q * s + _F(-1.42647390514189e-02)
    return x * p / q


@njit(cache=True, nogil=True, forceinline=True)
def _exp(x: Any) -> Any:
    """exp within 1e-7 of its value, for x cut to −87…88: 2ⁿ·exp(r) with |r| ≤ ln 2 / 2 and Cephes' coefficients."""
    x = _F(-87) if x < _F(-87) else (_F(88) if x > _F(88) else x)
    shifted = _F(x * _F(1.4426950408889634) + _F(12582912))  # + 1.5·2²³ rounds to an integer, n, in the lowest bits
    n = shifted - _F(12582912)
    r = x - n * _F(0.693359375) + n * _F(2.12194440e-4)  # ln 2 in two parts, of which the first is exact
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * r * r + r + _F(1)
    return p * _I(_I(_F(shifted).view(_I) << _I(23)) + _I(0x3F800000)).view(_F)


# Python's division checks for zero, which keeps a loop from being vectorised; hence numpy's error model. Nothing is
# reordered or fused here, so a number's result does not depend on its place in a vector.
@njit(cache=True, nogil=True, error_model="numpy")
def activate(activation: int, hidden: Any) -> None:
    """Apply the activation in place."""
    if activation == _GELU:
        for i in range(len(hidden)):
            h = hidden[i]
            hidden[i] = _F(0.5) * h * (_F(1) + _erf(h * _ROOT_HALF))
    elif activation == _GELU_TANH:
        for i in range(len(hidden)):  # (1 + tanh u) / 2 = 1 / (1 + exp −2u)
            h = hidden[i]
            hidden[i] = h / (_F(1) + _exp(-_TANH_SLOPE * (h + _TANH_CUBE * h * h * h)))
    elif activation == _SILU:
        for i in range(len(hidden)):
            h = hidden[i]
            hidden[i] = h / (_F(1) + _exp(-h))
    else:
        for i in range(len(hidden)):
            h = hidden[i]
            hidden[i] = _F(0) if h < _F(0) else h * h


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _add_base(address: int, x: Any, first: int, last: int, out: Any) -> None:
    """out[i] += row i of a base · x, for the rows from `first` to `last`."""
    n = len(x)
    values = row_at(address, last * n)
    for i in range(first, last):
        row = values[i * n : (i + 1) * n]
        total = _F(0)
        for j in range(n):
            total += row[j] * x[j]
        out[i] += total


@njit(cache=True, nogil=True)
def _inner(slot: Any, spec: Any, values: int, scales: int, x: Any) -> Any:
    """in·x of a difference, whose first factor the fields `values` and `scales` describe."""
    r = spec[FIELD_RANK]
    inner = np.empty(r, np.float32)
    if r > 0:
        rows(slot, spec[FIELD_PRECISION], spec[values], spec[scales], -1, x, 0, r, inner)
    return inner


@njit(cache=True, nogil=True)
def _up_part(slot: Any, spec: Any, x: Any, inner: Any, first: int, last: int, hidden: Any) -> None:
    """hidden[first:last] of the input of `down`."""
    f = spec[FIELD_F]
    precision, values, scales, bias = spec[FIELD_PRECISION], spec[FIELD_UP], spec[FIELD_UP_SCALES], spec[FIELD_UP_BIAS]
    if len(inner) > 0:
        rows(slot, precision, values, scales, bias, inner, first, last, hidden)
        _add_base(spec[FIELD_UP_BASE], x, first, last, hidden)
    else:
        rows(slot, precision, values, scales, bias, x, first, last, hidden)
    activate(spec[FIELD_ACTIVATION], hidden[first:last])
    if spec[FIELD_GATED] != 0:
        rows(slot, precision, values, scales, bias, x, f + first, f + last, hidden)
        for i in range(first, last):
            hidden[i] *= hidden[f + i]


@njit(cache=True, nogil=True)
def _down_part(slot: Any, spec: Any, hidden: Any, inner: Any, first: int, last: int, out: Any) -> None:
    """out[first:last] of the expert's result."""
    values, scales, bias = spec[FIELD_DOWN], spec[FIELD_DOWN_SCALES], spec[FIELD_DOWN_BIAS]
    z = hidden[: spec[FIELD_F]]
    if len(inner) > 0:
        rows(slot, spec[FIELD_PRECISION], values, scales, bias, inner, first, last, out)
        _add_base(spec[FIELD_DOWN_BASE], z, first, last, out)
    else:
        rows(slot, spec[FIELD_PRECISION], values, scales, bias, z, first, last, out)


@njit(cache=True, nogil=True)
def expert(slot: Any, spec: Any, x: Any, hidden: Any, out: Any) -> None:
    """out = down·act(up·x + up_bias) + down_bias, or with a gate down·(act(gate) ⊙ up) + down_bias."""
    inner = _inner(slot, spec, FIELD_UP_IN, FIELD_UP_IN_SCALES, x)
    _up_part(slot, spec, x, inner, 0, spec[FIELD_F], hidden)
    inner = _inner(slot, spec, FIELD_DOWN_IN, FIELD_DOWN_IN_SCALES, hidden[: spec[FIELD_F]])
    _down_part(slot, spec, hidden, inner, 0, spec[FIELD_D], out)


@njit(cache=True, nogil=True, parallel=True)
def expert_parallel(slot: Any, spec: Any, x: Any, hidden: Any, out: Any) -> None:
    """`expert` on numba's threads, with the same bits.

    It helps on idle cores only. Set OMP_WAIT_POLICY=passive before the first call: GNU OpenMP otherwise spins at the
    end of each loop, and if other processes hold the cores, a call takes tens of milliseconds. Only one thread at a
    time may call it (numba's `workqueue` layer aborts otherwise), and no forked child of a process that has called it
    (GNU OpenMP aborts).
    """
    f, d = spec[FIELD_F], spec[FIELD_D]
    by_up = _inner(slot, spec, FIELD_UP_IN, FIELD_UP_IN_SCALES, x)
    for b in prange(BLOCKS):
        _up_part(slot, spec, x, by_up, b * f // BLOCKS, (b + 1) * f // BLOCKS, hidden)
    by_down = _inner(slot, spec, FIELD_DOWN_IN, FIELD_DOWN_IN_SCALES, hidden[:f])
    for b in prange(BLOCKS):
        _down_part(slot, spec, hidden, by_down, b * d // BLOCKS, (b + 1) * d // BLOCKS, out)


@njit(cache=True, nogil=True)
def add_weighted(w: Any, y: Any, out: Any) -> None:
    """out += w·y, rounded twice, as `experts` adds the result of each."""
    for i in range(len(out)):
        out[i] += w * y[i]


@njit(cache=True, nogil=True)
def experts(slots: Any, specs: Any, which: Any, x: Any, w: Any, hidden: Any, out: Any) -> None:
    """out = Σ w_i · expert_i(x), added in the order given.

    slots: [C, bytes]. which [k]: the slot of each expert. specs [k, fields] and w [k]: the spec and weight of each
    """
    y = np.empty(len(out), np.float32)
    out[:] = 0
    for i in range(len(which)):
        expert(slots[which[i]], specs[i], x, hidden, y)
        add_weighted(w[i], y, out)


@njit(cache=True, nogil=True, parallel=True)
def experts_parallel(slots: Any, specs: Any, which: Any, x: Any, w: Any, out: Any) -> None:
    """`experts` on numba's threads, with the same bits; see `expert_parallel`."""
    k = len(which)
    longest = 0
    for i in range(k):
        longest = max(longest, specs[i, FIELD_F] * (2 if specs[i, FIELD_GATED] != 0 else 1))
    hidden, y = np.empty((k, longest), np.float32), np.empty((k, len(out)), np.float32)
    rank = specs[0, FIELD_RANK] if k > 0 else 0  # the same for all experts of a model
    inner = np.empty((k, rank), np.float32)
    for i in range(k):
        inner[i] = _inner(slots[which[i]], specs[i], FIELD_UP_IN, FIELD_UP_IN_SCALES, x)
    for b in prange(k * BLOCKS):
        i, block, f = b // BLOCKS, b % BLOCKS, specs[b // BLOCKS, FIELD_F]
        _up_part(slots[which[i]], specs[i], x, inner[i], block * f // BLOCKS, (block + 1) * f // BLOCKS, hidden[i])
    for i in range(k):
        z = hidden[i, : specs[i, FIELD_F]]
        inner[i] = _inner(slots[which[i]], specs[i], FIELD_DOWN_IN, FIELD_DOWN_IN_SCALES, z)
    for b in prange(k * BLOCKS):
        i, block, d = b // BLOCKS, b % BLOCKS, specs[b // BLOCKS, FIELD_D]
        _down_part(slots[which[i]], specs[i], hidden[i], inner[i], block * d // BLOCKS, (block + 1) * d // BLOCKS, y[i])
    out[:] = 0
    for i in range(k):
        add_weighted(w[i], y[i], out)
