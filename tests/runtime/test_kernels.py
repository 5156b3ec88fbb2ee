"""Compiled experts against the plain computation from decoded tensors."""

import threading

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from alone import alone
from stickymoe.runtime import kernels
from stickymoe.runtime.formats import ACTIVATIONS, PRECISIONS, ExpertLayout
from tests.runtime.experts import PLAIN_ACTIVATIONS, expert_spec, plain_expert, random_tensors, specs
from tests.strategies import costly, seeds, thorough

precisions = pytest.mark.parametrize("precision", PRECISIONS)


class Case:
    """An expert's bytes and a token."""

    def __init__(self, spec, precision, rng, scale=1.0):
        self.layout = ExpertLayout(spec, precision)
        self.slot = self.layout.encode(random_tensors(spec, rng, scale))
        self.spec = self.layout.spec_array()
        up, down = (tensor.shape for tensor in spec.tensors if tensor.name in ("up", "down"))
        self.x = rng.standard_normal(down[0]).astype(np.float32)
        self.hidden = np.full(up[0], np.nan, np.float32)

    def run(self, kernel=kernels.expert, x=None):
        out = np.full(len(self.x), np.nan, np.float32)
        kernel(self.slot, self.spec, self.x if x is None else x, self.hidden, out)
        return out

    def assert_plain(self):
        """The result is the plain one, but for rounding in fp32."""
        expected, size = plain_expert(self.layout, self.slot, self.x)
        assert (np.abs(self.run() - expected) <= 2e-6 * size).all()


@precisions
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_expert_is_the_plain_one(precision, activation, gated, biases):
    spec = expert_spec(150, 77, activation=activation, gated=gated, biases=biases)
    case = Case(spec, precision, np.random.default_rng(0))
    case.assert_plain()


@precisions
@thorough
@given(spec=specs(), rng=seeds(), scale=st.sampled_from([1.0, 30.0, 1e-3, 0.0]))
def test_experts_of_any_shape_are_the_plain_ones(precision, spec, rng, scale):
    case = Case(spec, precision, rng, scale)
    case.assert_plain()


@precisions
def test_threads_do_not_change_a_bit(precision):
    alone(check_threads)(precision)


@costly
@given(spec=specs(), rng=seeds(), threads=st.integers(1, numba.config.NUMBA_NUM_THREADS))
def check_threads(precision, spec, rng, threads):
    case = Case(spec, precision, rng)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        parallel = case.run(kernels.expert_parallel)
    finally:
        numba.set_num_threads(before)
    assert np.array_equal(case.run(), parallel)


@precisions
def test_the_sum_over_experts_is_added_in_order(precision):
    alone(check_sum)(precision)


@costly
@given(spec=specs(), rng=seeds())
def check_sum(precision, spec, rng):
    cases = [Case(spec, precision, rng) for _ in range(4)]
    which = rng.permutation(4)[:3]
    w = rng.random(3).astype(np.float32)
    x = cases[0].x
    expected = np.zeros(len(x), np.float32)
    for i, weight in zip(which, w, strict=True):
        expected += weight * cases[i].run(x=x)
    slots = np.stack([case.slot for case in cases])
    fields = np.stack([cases[i].spec for i in which])
    out = np.full(len(x), np.nan, np.float32)
    kernels.experts(slots, fields, which, x, w, cases[0].hidden, out)
    assert np.array_equal(out, expected)
    kernels.experts_parallel(slots, fields, which, x, w, out)
    assert np.array_equal(out, expected)


def test_experts_of_one_sum_may_differ_in_precision():
    spec = expert_spec(70, 9)
    rng = np.random.default_rng(1)
    cases = [Case(spec, precision, rng) for precision in PRECISIONS]
    slots = np.zeros((4, max(len(case.slot) for case in cases)), np.uint8)
    for slot, case in zip(slots, cases, strict=True):
        slot[: len(case.slot)] = case.slot
    x, w, out = cases[0].x, np.full(4, 0.25, np.float32), np.empty(70, np.float32)
    kernels.experts(slots, np.stack([case.spec for case in cases]), np.arange(4), x, w, cases[0].hidden, out)
    assert np.array_equal(out, sum(np.float32(0.25) * case.run(x=x) for case in cases))


@precisions
def test_scratch_may_be_longer_than_needed(precision):
    case = Case(expert_spec(40, 33, gated=True), precision, np.random.default_rng(2))
    expected = case.run()
    case.hidden = np.full(100, np.nan, np.float32)
    assert np.array_equal(case.run(), expected)
    assert np.isnan(case.hidden[66:]).all()


@precisions
def test_a_slot_within_a_larger_region_may_be_read_only(precision):
    """A read-only slot has code of its own, compiled apart, so its sums may be in another order."""
    case = Case(expert_spec(40, 33), precision, np.random.default_rng(3))
    region = np.full(3 * len(case.slot), 255, np.uint8)
    region[len(case.slot) : 2 * len(case.slot)] = case.slot
    region.flags.writeable = False
    case.slot = region[len(case.slot) : 2 * len(case.slot)]
    case.assert_plain()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_as_near_as_those_of_torch(activation):
    h = np.linspace(-20, 20, 400_001, dtype=np.float32)
    plain = PLAIN_ACTIVATIONS[activation]
    expected = plain(torch.tensor(h, dtype=torch.float64)).numpy()
    given = h.copy()
    kernels.activate(ACTIVATIONS.index(activation), given)
    error, of_torch = (np.abs(y - expected).max() for y in (given, plain(torch.tensor(h)).numpy()))
    assert error <= 2 * of_torch + 1e-7


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("extreme", [1e4, -1e4, 0.0])
def test_activations_far_out_do_not_overflow(activation, extreme):
    spec = expert_spec(1, 1, activation=activation, biases=False)
    case = Case(spec, "fp32", np.random.default_rng(4))
    case.slot = case.layout.encode([np.ones((1, 1)), np.ones((1, 1))])
    case.x = np.array([extreme], np.float32)
    case.assert_plain()


@precisions
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_token_that_is_not_a_number_shows(precision, activation):
    case = Case(expert_spec(70, 9, activation=activation), precision, np.random.default_rng(5))
    case.x[-1] = np.nan
    assert np.isnan(case.run()).all()


def test_other_compiled_code_may_call_the_kernels():
    @njit
    def twice(slot, spec, x, hidden, out):
        kernels.expert(slot, spec, x, hidden, out)
        kernels.add_weighted(np.float32(1), out.copy(), out)

    case = Case(expert_spec(40, 33), "int8", np.random.default_rng(6))
    assert np.array_equal(case.run(twice), 2 * case.run())


def test_other_threads_run_while_an_expert_is_computed():
    """The interpreter lock is free meanwhile, and threads with their own scratch do not disturb each other."""
    assert kernels.expert.targetoptions["nogil"]
    cases = [Case(expert_spec(70, 33), precision, np.random.default_rng(7)) for precision in PRECISIONS]
    expected = [case.run() for case in cases]
    same = []

    def many(case, result):
        same.append(all(np.array_equal(case.run(), result) for _ in range(50)))

    threads = [threading.Thread(target=many, args=pair) for pair in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 4
