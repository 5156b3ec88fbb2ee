"""How one expert lies in a store: its tensors in the layout that the kernels read, in one of four precisions.

An expert is a feed-forward network. Its matrices are [out, in], row by row; biases and other vectors are always fp32.
Every piece begins at a multiple of 64 bytes, and an expert at a multiple of 4,096 bytes, so that one direct read
brings it into a slot.

| precision | values of a matrix | scales |
|---|---|---|
| fp32 | float32 [out, in] | none |
| bf16 | uint16 [out, in]: the upper half of the float32, rounded to nearest even | none |
| int8 | int8 [out, in] in −127…127 | float32 [out]: one for each row |
| int4 | uint8 [out, 32 · groups]: two values of −7…7 in a byte | bf16 [out, groups]: one for each 64 columns |

A difference from a base has two factors for each matrix: `up_out`·`up_in` is added to the base of `up`. The bases stay
in fast memory in fp32, outside the store's experts.

In int4, byte j of a group holds column j in its lower four bits and column j + 32 in its upper four, so that a loop
over the bytes reads two runs of x. The last group of a row may be partial; it still takes 32 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Int64, Num, UInt8, UInt16

from stickymoe.errors import ConfigError, DataError, require

Precision = Literal["fp32", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int4")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu2")
PAGE = 4096  # an expert begins at a multiple of it: direct I/O needs 512, huge pages like 4,096
ALIGNMENT = 64  # a piece of an expert begins at a multiple of it
GROUP = 64  # columns that share a scale in int4

# The fields of `ExpertLayout.spec_array`. Kernels compare the codes with indices of PRECISIONS and ACTIVATIONS;
# offsets are in bytes from the start of the expert, −1 for a piece that it does not have. numba's cache on disk does
# not see a change of a constant in this file: edit kernels.py too, or delete its __pycache__.
FIELD_PRECISION = 0
FIELD_ACTIVATION = 1
FIELD_GATED = 2  # 0 or 1
FIELD_D = 3  # length of x and of the result
FIELD_F = 4  # columns of `down`
FIELD_UP = 5
FIELD_UP_SCALES = 6
FIELD_UP_BIAS = 7
FIELD_DOWN = 8
FIELD_DOWN_SCALES = 9
FIELD_DOWN_BIAS = 10
# Of a difference from a base. Its UP and DOWN are `up_out` and `down_out`.
FIELD_RANK = 11  # 0 for a whole expert
FIELD_UP_IN = 12
FIELD_UP_IN_SCALES = 13
FIELD_DOWN_IN = 14
FIELD_DOWN_IN_SCALES = 15
FIELD_UP_BASE = 16  # addresses of the base's fp32 matrices, which the caller adds
FIELD_DOWN_BASE = 17
FIELDS = 18
_WHOLE = ("up", "down")
_DIFFERENCE = ("up_in", "up_out", "down_in", "down_out")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of one expert: a matrix [out, in], or a vector."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertSpec:
    """The tensors of one expert, and what it computes.

    tensors: in the order in which they are stored. `up` [m, d] and `down` [d, f] are always there; `up_bias` [m] and
        `down_bias` [d] may be. With a gate, m = 2·f: first the rows of the gate, then the others. A difference of
        rank r from a base has `up_in` [r, d], `up_out` [f, r], `down_in` [r, f] and `down_out` [d, r] in their place
    activation: what compiled kernels apply: "gelu" (exact), "gelu_tanh", "silu" or "relu2"; None if only the model's
        own code knows it
    gated: out = down·(activation(gate) ⊙ up); otherwise out = down·activation(up)
    """

    tensors: tuple[TensorSpec, ...]
    activation: str | None
    gated: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def rank(self) -> int:
        """Of a difference from a base; 0 for a whole expert."""
        return self.shapes.get("up_in", (0,))[0]

    @property
    def width(self) -> int:
        """Length of x and of the result."""
        return self.shapes["down_out" if self.rank else "down"][0]

    @property
    def hidden(self) -> int:
        """Columns of `down`."""
        return self.shapes["down_in" if self.rank else "down"][1]


@dataclass(frozen=True)
class Piece:
    """An array within an expert's bytes."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the array takes, without what follows to align the next piece."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: UInt8[np.ndarray, " nbytes"]) -> Num[np.ndarray, ...]:
        """The array, without a copy."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


class Pieces(NamedTuple):
    """Where a tensor lies: its values, and their scales if they are integers."""

    values: Piece
    scales: Piece | None = None


@dataclass(frozen=True)
class ExpertLayout:
    """Where each piece of an expert lies in its bytes, and how they are written and read."""

    spec: ExpertSpec
    precision: Precision

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "precision", self.precision, "fp32, bf16, int8 or int4")
        known = self.spec.activation in (*ACTIVATIONS, None)
        require(known, "activation", self.spec.activation, f"{', '.join(ACTIVATIONS)} or None")
        names = [tensor.name for tensor in self.spec.tensors]
        require(len(set(names)) == len(names), "tensors", names, "each name once")
        matrices = _DIFFERENCE if "up_in" in names else _WHOLE
        required = " and ".join(map(repr, matrices))
        require(set(matrices) <= set(names), "tensors", names, f"{required} among them")
        shapes = self.spec.shapes
        for name, shape in shapes.items():
            good = len(shape) in (1, 2) and min(shape) > 0
            require(good, name, shape, "the shape of a matrix or a vector, without a dimension of 0")
        name, expected = ("down_in", "a matrix [r, f]") if "up_in" in names else ("down", "a matrix [d, f]")
        require(len(shapes[name]) == 2, name, shapes[name], expected)
        d, f, r = self.spec.width, self.spec.hidden, self.spec.rank
        require(not (r and self.spec.gated), "gated", True, "False for a difference from a base")
        m = 2 * f if self.spec.gated else f
        factors = {"up_in": (r, d), "up_out": (f, r), "down_in": (r, f), "down_out": (d, r)} if r else {"up": (m, d)}
        for name, shape in {**factors, "up_bias": (m,), "down_bias": (d,)}.items():
            given = shapes.get(name, shape)
            require(given == shape, name, given, f"{shape} beside '{matrices[-1]}' of {shapes[matrices[-1]]}")

    @cached_property
    def pieces(self) -> dict[str, Pieces]:
        """Where each tensor lies, by name, in the order in which they are stored."""
        found, end = {}, 0
        for tensor in self.spec.tensors:
            placed = []
            for dtype, shape in _arrays(tensor.shape, self.precision):
                placed.append(Piece(end, np.dtype(dtype), shape))
                end = _round_up(end + placed[-1].nbytes, ALIGNMENT)
            found[tensor.name] = Pieces(*placed)
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the expert in the store, a multiple of `PAGE`."""
        pieces = [piece for pair in self.pieces.values() for piece in pair if piece is not None]
        return _round_up(max(piece.offset + piece.nbytes for piece in pieces), PAGE)

    @cached_property
    def content_bytes(self) -> int:
        """Bytes of the expert's values and scales, without what aligns them."""
        return sum(piece.nbytes for pair in self.pieces.values() for piece in pair if piece is not None)

    def encode(self, tensors: Sequence[Any]) -> UInt8[np.ndarray, " nbytes"]:
        """The expert's bytes; the same tensors always give the same bytes.

        tensors: numpy arrays or torch tensors of floats, in the order of the spec.
        """
        expected = self.spec.tensors
        if len(tensors) != len(expected):
            raise DataError(f"An expert has {len(expected)} tensors ({', '.join(self.pieces)}), got {len(tensors)}.")
        buffer = np.zeros(self.nbytes, np.uint8)
        for spec, tensor in zip(expected, tensors, strict=True):
            weights = _as_float32(tensor)
            if weights.shape != spec.shape:
                raise DataError(f"Tensor '{spec.name}' has shape {weights.shape}, expected {spec.shape}.")
            if self.pieces[spec.name].scales is not None and not np.isfinite(weights).all():
                line = f"Tensor '{spec.name}' has NaN or infinite weights, which {self.precision} cannot hold"
                raise DataError(f"{line}: mend the checkpoint, or store it in fp32 or bf16.")
            arrays = _encode(weights, self.precision)
            for piece, array in zip(self.pieces[spec.name], arrays, strict=False):
                if piece is not None:
                    piece.view(buffer)[...] = array
        return buffer

    def decode(self, buffer: UInt8[np.ndarray, " nbytes"]) -> list[Float32[np.ndarray, ...]]:
        """The tensors that the bytes stand for, in the order of the spec. Those stored as fp32 are views."""
        if buffer.nbytes != self.nbytes:
            raise DataError(f"An expert in {self.precision} takes {self.nbytes} bytes, got {buffer.nbytes}.")
        return [
            _decode([piece.view(buffer) for piece in self.pieces[tensor.name] if piece is not None], tensor.shape)
            for tensor in self.spec.tensors
        ]

    def spec_array(self) -> Int64[np.ndarray, " fields"]:
        """What a kernel reads of the layout: the fields `FIELD_…`."""
        if self.spec.activation is None:
            raise ConfigError(f"activation: got None, expected {' or '.join(ACTIVATIONS)} to run compiled kernels.")
        fields = np.full(FIELDS, -1, np.int64)
        fields[FIELD_PRECISION] = PRECISIONS.index(self.precision)
        fields[FIELD_ACTIVATION] = ACTIVATIONS.index(self.spec.activation)
        fields[FIELD_GATED] = self.spec.gated
        fields[FIELD_D], fields[FIELD_F], fields[FIELD_RANK] = self.spec.width, self.spec.hidden, self.spec.rank
        out = "_out" if self.spec.rank else ""
        matrices = [(f"up{out}", FIELD_UP, FIELD_UP_SCALES), (f"down{out}", FIELD_DOWN, FIELD_DOWN_SCALES)]
        if self.spec.rank:
            matrices.append(("up_in", FIELD_UP_IN, FIELD_UP_IN_SCALES))
            matrices.append(("down_in", FIELD_DOWN_IN, FIELD_DOWN_IN_SCALES))
        for name, values, scales in matrices:
            pieces = self.pieces[name]
            fields[values] = pieces.values.offset
            if pieces.scales is not None:
                fields[scales] = pieces.scales.offset
        for name, field in (("up_bias", FIELD_UP_BIAS), ("down_bias", FIELD_DOWN_BIAS)):
            if name in self.pieces:
                fields[field] = self.pieces[name].values.offset
        return fields


def _arrays(shape: tuple[int, ...], precision: Precision) -> list[tuple[Any, tuple[int, ...]]]:
    """The dtype and the shape of each array that a tensor is stored as."""
    if precision == "fp32" or len(shape) == 1:
        return [(np.float32, shape)]
    rows, columns = shape
    if precision == "bf16":
        return [(np.uint16, shape)]
    if precision == "int8":
        return [(np.int8, shape), (np.float32, (rows,))]
    groups = -(-columns // GROUP)
    return [(np.uint8, (rows, groups * GROUP // 2)), (np.uint16, (rows, groups))]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _as_float32(tensor: Any) -> Float32[np.ndarray, ...]:
    """An array of a numpy array or a torch tensor; torch is not imported for that."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):  # becomes infinite, and integers refuse that
        return np.asarray(tensor).astype(np.float32, copy=False)


def _encode(weights: Float32[np.ndarray, ...], precision: Precision) -> list[Num[np.ndarray, ...]]:
    """The arrays that a tensor is stored as."""
    if precision == "fp32" or weights.ndim == 1:
        return [weights]
    if precision == "bf16":
        return [_to_bf16(weights)]
    if precision == "int8":
        scales = _scales(np.abs(weights).max(1), 127)
        return [_quantise(weights, scales[:, None]), scales]
    rows, columns = weights.shape
    groups = -(-columns // GROUP)
    grouped = np.zeros((rows, groups * GROUP), np.float32)
    grouped[:, :columns] = weights
    grouped = grouped.reshape(rows, groups, GROUP)
    # Rounded up to bf16, so that the largest value still gets at most 7. Two bytes less a group make the expert 6 %
    # smaller; fp16 would take as much, but lacks the range of fp32.
    scales_bf16 = ((_scales(np.abs(grouped).max(2), 7).view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    low, high = np.split(_quantise(grouped, _from_bf16(scales_bf16)[:, :, None]).view(np.uint8), 2, axis=2)
    return [((low & 15) | (high << 4)).reshape(rows, -1), scales_bf16]


def _decode(arrays: list[Num[np.ndarray, ...]], shape: tuple[int, ...]) -> Float32[np.ndarray, ...]:
    """The tensor that is stored as these arrays; their dtypes tell the precision."""
    values = arrays[0]
    if values.dtype == np.float32:
        return values
    if values.dtype == np.uint16:
        return _from_bf16(values)
    decoded: Float32[np.ndarray, ...]
    if values.dtype == np.int8:
        decoded = values * arrays[1][:, None]
        return decoded
    rows, columns = shape
    signed = values.view(np.int8).reshape(rows, -1, GROUP // 2)
    quantised = np.concatenate([(signed << 4) >> 4, signed >> 4], axis=2)  # a shift to the right keeps the sign
    decoded = (quantised * _from_bf16(arrays[1])[:, :, None]).reshape(rows, -1)
    return decoded[:, :columns]


def _scales(largest: Float32[np.ndarray, ...], steps: int) -> Float32[np.ndarray, ...]:
    """The step between two values; normal numbers, because some processors flush others to 0."""
    scales = np.maximum(largest / np.float32(steps), np.finfo(np.float32).tiny)
    return np.where(largest > 0, scales, np.float32(0))


def _quantise(weights: Float32[np.ndarray, ...], scales: Float32[np.ndarray, ...]) -> Int8[np.ndarray, ...]:
    """The nearest multiples of the scales. Where a scale is 0, all weights are."""
    return np.rint(weights / np.where(scales > 0, scales, np.float32(1))).astype(np.int8)


def _to_bf16(weights: Float32[np.ndarray, ...]) -> UInt16[np.ndarray, ...]:
    """Rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    odd = (bits >> 16) & 1
    # Rounding would carry a NaN over into infinity or zero.
    rounded = np.where(np.isnan(weights), bits | 0x400000, bits + (np.uint32(0x7FFF) + odd))
    return (rounded >> 16).astype(np.uint16)


def _from_bf16(bits: UInt16[np.ndarray, ...]) -> Float32[np.ndarray, ...]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
