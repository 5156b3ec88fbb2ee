"""The bytes of an expert: where its pieces lie, and how near the stored weights are to the given ones."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import ConfigError, DataError
from stickymoe.runtime import formats
from stickymoe.runtime.formats import ALIGNMENT, GROUP, PAGE, PRECISIONS, ExpertLayout, ExpertSpec, TensorSpec
from tests.runtime.experts import expert_spec, random_tensors, specs, weights
from tests.strategies import thorough

precisions = pytest.mark.parametrize("precision", PRECISIONS)
quantised = pytest.mark.parametrize("precision", ["int8", "int4"])


def pieces_of(layout):
    return [piece for pair in layout.pieces.values() for piece in pair if piece is not None]


# Where things lie


@precisions
@thorough
@given(spec=specs())
def test_pieces_are_aligned_and_do_not_overlap(precision, spec):
    layout = ExpertLayout(spec, precision)
    pieces = pieces_of(layout)
    assert all(piece.offset % ALIGNMENT == 0 for piece in pieces)
    ends = [piece.offset + piece.nbytes for piece in pieces]
    assert all(end <= after.offset < end + ALIGNMENT for end, after in zip(ends, pieces[1:], strict=False))
    assert pieces[0].offset == 0
    assert layout.nbytes % PAGE == 0
    assert ends[-1] <= layout.nbytes < ends[-1] + PAGE


def test_the_size_of_an_expert():
    """Mixtral's shape at an eighth: 2 · 1792 rows of 512 and 512 rows of 1792."""
    spec = expert_spec(512, 1792, activation="silu", gated=True, biases=False)
    n = 3 * 512 * 1792
    sizes = {precision: ExpertLayout(spec, precision).nbytes for precision in PRECISIONS}
    rows = 2 * 1792 + 512
    assert sizes == {"fp32": 4 * n, "bf16": 2 * n, "int8": n + 4 * rows, "int4": n // 2 + 2 * n // GROUP}


@precisions
@thorough
@given(spec=specs())
def test_kernels_are_given_the_offsets_of_the_pieces(precision, spec):
    layout = ExpertLayout(spec, precision)
    fields, pieces = layout.spec_array(), layout.pieces
    assert fields.dtype == np.int64
    assert len(fields) == formats.FIELDS
    assert PRECISIONS[fields[formats.FIELD_PRECISION]] == precision
    assert formats.ACTIVATIONS[fields[formats.FIELD_ACTIVATION]] == spec.activation
    assert fields[formats.FIELD_GATED] == spec.gated
    assert (fields[formats.FIELD_D], fields[formats.FIELD_F]) == {tensor.name: tensor.shape for tensor in spec.tensors}[
        "down"
    ]
    for name in ("up", "down"):
        values, scales = pieces[name]
        assert fields[getattr(formats, f"FIELD_{name.upper()}")] == values.offset
        assert fields[getattr(formats, f"FIELD_{name.upper()}_SCALES")] == (-1 if scales is None else scales.offset)
        bias = pieces[f"{name}_bias"].values.offset if f"{name}_bias" in pieces else -1
        assert fields[getattr(formats, f"FIELD_{name.upper()}_BIAS")] == bias


def test_the_fields_are_distinct():
    names = [name for name in vars(formats) if name.startswith("FIELD_")]
    assert sorted(getattr(formats, name) for name in names) == list(range(formats.FIELDS))


# What comes back


def tensors_and_steps(layout, buffer):
    """Each tensor's decoded weights and, for integers, the step between two values at each entry."""
    for spec, decoded in zip(layout.spec.tensors, layout.decode(buffer), strict=True):
        scales = layout.pieces[spec.name].scales
        step = None
        if scales is not None:
            step = scales.view(buffer)
            if layout.precision == "int8":
                step = np.broadcast_to(step[:, None], spec.shape)
            else:
                step = (step.astype(np.uint32) << 16).view(np.float32).repeat(GROUP, axis=1)[:, : spec.shape[1]]
        yield spec, decoded, step


@thorough
@given(expert=weights())
def test_fp32_is_exact_and_without_a_copy(expert):
    spec, tensors = expert
    layout = ExpertLayout(spec, "fp32")
    buffer = layout.encode(tensors)
    for tensor, decoded in zip(tensors, layout.decode(buffer), strict=True):
        assert np.array_equal(tensor, decoded)
        assert np.shares_memory(decoded, buffer)


@thorough
@given(expert=weights())
def test_bf16_rounds_as_torch_does(expert):
    spec, tensors = expert
    layout = ExpertLayout(spec, "bf16")
    for tensor, decoded in zip(tensors, layout.decode(layout.encode(tensors)), strict=True):
        expected = torch.tensor(tensor).bfloat16().float().numpy() if tensor.ndim == 2 else tensor
        assert np.array_equal(decoded, expected)
        normal = np.abs(tensor) >= np.finfo(np.float32).tiny
        assert (np.abs(decoded - tensor) <= 2.0**-8 * np.abs(tensor))[normal].all()


def test_bf16_keeps_what_is_not_finite():
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    up = bits.view(np.float32).reshape(1, 6)
    layout = ExpertLayout(expert_spec(6, 1, biases=False), "bf16")
    decoded, _ = layout.decode(layout.encode([up, np.zeros((6, 1))]))
    assert np.array_equal(decoded, up, equal_nan=True)


@quantised
@thorough
@given(expert=weights())
def test_integers_are_at_most_half_a_step_off(precision, expert):
    spec, tensors = expert
    layout = ExpertLayout(spec, precision)
    buffer = layout.encode(tensors)
    for tensor, (_, decoded, step) in zip(tensors, tensors_and_steps(layout, buffer), strict=True):
        assert decoded.dtype == np.float32
        assert decoded.shape == tensor.shape
        if step is None:
            assert np.array_equal(decoded, tensor)
            continue
        # The quotient and the product are rounded too.
        rounding = 2.0**-22 * np.abs(tensor.astype(np.float64))
        assert (np.abs(decoded.astype(np.float64) - tensor) <= step.astype(np.float64) / 2 + rounding).all()
        assert (decoded[tensor == 0] == 0).all()


@quantised
def test_a_step_is_no_larger_than_needed(precision):
    spec = expert_spec(130, 7)
    layout = ExpertLayout(spec, precision)
    tensors = random_tensors(spec, np.random.default_rng(0))
    rows = dict(zip((t.name for t in spec.tensors), tensors, strict=True))
    for tensor, _, step in tensors_and_steps(layout, layout.encode(tensors)):
        if step is None:
            continue
        for row, steps in zip(rows[tensor.name], step, strict=True):
            width = GROUP if precision == "int4" else len(row)
            for start in range(0, len(row), width):
                largest = np.abs(row[start : start + width]).max()
                # A scale in bf16 is rounded up by 2⁻⁷ at most.
                most, slack = (7, 1 + 2.0**-7) if precision == "int4" else (127, 1 + 2.0**-23)
                assert largest / most * (1 - 2.0**-23) <= steps[start] <= largest / most * slack


@precisions
def test_zeros_stay_zeros(precision):
    spec = expert_spec(65, 3)
    layout = ExpertLayout(spec, precision)
    buffer = layout.encode([np.zeros(t.shape) for t in spec.tensors])
    assert not buffer.any()
    assert all(not tensor.any() for tensor in layout.decode(buffer))


@precisions
def test_stored_values_stay_as_they_are_if_stored_again(precision):
    spec = expert_spec(130, 67)
    layout = ExpertLayout(spec, precision)
    first = layout.decode(layout.encode(random_tensors(spec, np.random.default_rng(1))))
    again = layout.decode(layout.encode(first))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-22, atol=0)


# The bytes


@precisions
@thorough
@given(expert=weights(), noise=st.integers(1, 255))
def test_the_same_weights_give_the_same_bytes(precision, expert, noise):
    """Whatever was in memory before: bytes between the pieces are zero."""
    spec, tensors = expert
    layout = ExpertLayout(spec, precision)
    np.full(layout.nbytes, noise, np.uint8)  # freed at once, for the allocator to hand out again
    buffer = layout.encode(tensors)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (layout.nbytes,)
    covered = np.zeros(layout.nbytes, bool)
    for piece in pieces_of(layout):
        covered[piece.offset : piece.offset + piece.nbytes] = True
    assert not buffer[~covered].any()
    assert np.array_equal(buffer, layout.encode([tensor.copy(order="F") for tensor in tensors]))


def test_the_bytes_of_int4():
    """Column j in the lower four bits, column j + 32 in the upper four; columns that do not exist are zero."""
    up = np.zeros((1, 70), np.float32)
    up[0, [0, 1, 32, 64, 69]] = [7, -7, -3, 1.75, -0.5]
    layout = ExpertLayout(expert_spec(70, 1, biases=False), "int4")
    buffer = layout.encode([up, np.zeros((70, 1))])
    values, scales = (piece.view(buffer) for piece in layout.pieces["up"])
    assert values.shape == (1, 64)
    expected = np.zeros(64, np.uint8)
    expected[[0, 1, 32, 37]] = [0xD7, 0x09, 0x07, 0x0E]
    assert np.array_equal(values[0], expected)
    assert scales.tolist() == [[0x3F80, 0x3E80]]  # 1 and 0.25


@precisions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_tensors_give_the_bytes_of_their_arrays(precision, dtype):
    spec = expert_spec(9, 5)
    tensors = [torch.tensor(t, dtype=dtype, requires_grad=True) for t in random_tensors(spec, np.random.default_rng(2))]
    layout = ExpertLayout(spec, precision)
    arrays = [tensor.detach().float().numpy() for tensor in tensors]
    assert np.array_equal(layout.encode(tensors), layout.encode(arrays))


# Refusals


@quantised
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_integers_refuse_weights_that_are_not_finite(precision, bad):
    spec = expert_spec(4, 3)
    tensors = random_tensors(spec, np.random.default_rng(3))
    tensors[2][1, 2] = bad
    line = f"Tensor 'down' has NaN or infinite weights, which {precision} cannot hold: "
    with pytest.raises(DataError, match=f"^{line}mend the checkpoint, or store it in fp32 or bf16\\.$"):
        ExpertLayout(spec, precision).encode(tensors)


def test_tensors_that_do_not_fit_are_refused():
    spec = expert_spec(4, 3)
    layout, tensors = ExpertLayout(spec, "fp32"), random_tensors(spec, np.random.default_rng(4))
    with pytest.raises(DataError, match=r"^An expert has 4 tensors \(up, up_bias, down, down_bias\), got 3\.$"):
        layout.encode(tensors[:3])
    tensors[0] = tensors[0].T
    with pytest.raises(DataError, match=r"^Tensor 'up' has shape \(4, 3\), expected \(3, 4\)\.$"):
        layout.encode(tensors)
    with pytest.raises(DataError, match=r"^An expert in fp32 takes 4096 bytes, got 512\.$"):
        layout.decode(np.zeros(512, np.uint8))


UP, DOWN = TensorSpec("up", (3, 4)), TensorSpec("down", (4, 3))
UP_IN, UP_OUT = TensorSpec("up_in", (2, 4)), TensorSpec("up_out", (3, 2))
DOWN_IN, DOWN_OUT = TensorSpec("down_in", (2, 3)), TensorSpec("down_out", (4, 2))
DIFFERENCE = (UP_IN, UP_OUT, DOWN_IN, DOWN_OUT)
OTHER, VECTOR = TensorSpec("down_in", (3, 3)), TensorSpec("down_in", (2,))


@pytest.mark.parametrize(
    ("tensors", "activation", "gated", "line"),
    [
        ((UP, DOWN), "tanh", False, "activation: got 'tanh', expected gelu, gelu_tanh, silu, relu2 or None."),
        ((UP, DOWN), "silu", True, "up: got (3, 4), expected (6, 4) beside 'down' of (4, 3)."),
        ((UP,), "silu", False, "tensors: got ['up'], expected 'up' and 'down' among them."),
        ((UP, DOWN, UP), "silu", False, "tensors: got ['up', 'down', 'up'], expected each name once."),
        ((UP, TensorSpec("down", (4,))), "silu", False, "down: got (4,), expected a matrix [d, f]."),
        ((UP, TensorSpec("down", (4, 0))), "silu", False, "down: got (4, 0), expected the shape of a matrix or"),
        ((UP, DOWN, TensorSpec("down_bias", (3,))), "silu", False, "down_bias: got (3,), expected (4,) beside"),
        (DIFFERENCE, "silu", True, "gated: got True, expected False for a difference from a base."),
        (DIFFERENCE[:2], "silu", False, "tensors: got ['up_in', 'up_out'], expected 'up_in' and 'up_out' and"),
        ((*DIFFERENCE[:2], OTHER, DOWN_OUT), "silu", False, "down_in: got (3, 3), expected (2, 3) beside 'down_out'"),
        ((*DIFFERENCE[:2], VECTOR, DOWN_OUT), "silu", False, "down_in: got (2,), expected a matrix [r, f]."),
    ],
)
def test_specs_that_do_not_fit_are_refused(tensors, activation, gated, line):
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        ExpertLayout(ExpertSpec(tensors, activation, gated), "fp32")


def test_an_unknown_precision_is_refused():
    layout = object.__new__(ExpertLayout)  # in tests the constructor checks types first
    vars(layout).update(spec=expert_spec(4, 3), precision="int5")
    with pytest.raises(ConfigError, match=r"^precision: got 'int5', expected fp32, bf16, int8 or int4\.$"):
        layout.__post_init__()


def test_an_activation_of_the_models_own_has_no_kernel():
    layout = ExpertLayout(ExpertSpec((UP, DOWN), None, False), "int8")
    assert layout.nbytes == PAGE
    line = "activation: got None, expected gelu or gelu_tanh or silu or relu2 to run compiled kernels."
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        layout.spec_array()
