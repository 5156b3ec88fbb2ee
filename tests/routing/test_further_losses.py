"""The losses past the paper against plain loops, by value and by gradient in g; the same numbers, so kinks agree."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_losses import one_hot

import reference
from stickymoe.errors import ConfigError
from stickymoe.routing import losses
from stickymoe.routing.trace import RoutingTrace
from strategies import costly, gates

# Each loss of a trace and a drawn whole number, and the same by the reference.
LOSSES = {
    "cross layer": (
        lambda trace, n: losses.cross_layer_loss(trace),
        lambda trace, n: reference.cross_layer_loss(trace.g, trace.mask),
    ),
    "cross layer within blocks": (
        lambda trace, n: losses.cross_layer_loss(trace, share_block=n),
        lambda trace, n: reference.cross_layer_loss(trace.g, trace.mask, n),
    ),
    "boundary": (
        lambda trace, n: losses.boundary_by_layer(trace, across=(n - 1) / 4).mean(),
        lambda trace, n: reference.boundary_loss(trace.g, trace.mask, trace.doc, trace.boundary, (n - 1) / 4),
    ),
    "grouped": (
        lambda trace, n: losses.grouped_by_layer(trace, groups=groups(trace, n), inside=0.25).mean(),
        lambda trace, n: reference.grouped_loss(trace.g, trace.mask, trace.doc, groups(trace, n), 0.25),
    ),
    "balance of slots": (
        lambda trace, n: losses.slot_balance_by_layer(trace, capacity=n).mean(),
        lambda trace, n: reference.slot_balance_loss(trace.g, trace.S.tolist(), trace.mask, n),
    ),
    "balance within slots": (
        lambda trace, n: losses.slot_balance_by_layer(trace, capacity=n, within=True).mean(),
        lambda trace, n: reference.slot_balance_loss(trace.g, trace.S.tolist(), trace.mask, n, within=True),
    ),
    "dot": (
        lambda trace, n: losses.dot_by_layer(trace).mean(),
        lambda trace, n: reference.dot_loss(trace.g, trace.mask, trace.doc),
    ),
    "replacement": (
        lambda trace, n: losses.replacement_by_layer(trace).mean(),
        lambda trace, n: reference.replacement_loss(trace.g, trace.S.tolist(), trace.mask, trace.doc),
    ),
    "adjacent entropy": (
        lambda trace, n: losses.adjacent_entropy_by_layer(trace).mean(),
        lambda trace, n: reference.adjacent_entropy_loss(trace.g, trace.mask, trace.doc, trace.g.detach()),
    ),
    "chunk": (
        lambda trace, n: losses.chunk_by_layer(trace, window=n).mean(),
        lambda trace, n: reference.chunk_loss(trace.g, trace.S.shape[-1], trace.mask, trace.doc, n),
    ),
    "reuse": (
        lambda trace, n: losses.reuse_by_layer(trace).mean(),
        lambda trace, n: reference.reuse_loss(trace.g, trace.S.tolist(), trace.mask, trace.doc),
    ),
    "lagged divergence": (
        lambda trace, n: losses.lagged_divergence_by_layer(trace, lags=(1, n)).mean(),
        lambda trace, n: reference.lagged_divergence(trace.g, trace.mask, trace.doc, (1, n)),
    ),
    "windowed entropy": (
        lambda trace, n: losses.windowed_entropy_by_layer(trace, window=n).mean(),
        lambda trace, n: reference.windowed_entropy(trace.g, trace.mask, trace.doc, n),
    ),
    "reference divergence": (
        lambda trace, n: losses.reference_divergence_by_layer(trace, replace(trace, g=trace.g.roll(n, -1))).mean(),
        lambda trace, n: reference.reference_divergence(trace.g, trace.g.detach().roll(n, -1), trace.mask),
    ),
    "expected misses": (
        lambda trace, n: losses.expected_misses_by_layer(trace, capacity=trace.S.shape[-1] + n - 1).mean(),
        lambda trace, n: reference.expected_misses(
            trace.g, trace.S.shape[-1], trace.mask, trace.doc, trace.S.shape[-1] + n - 1
        ),
    ),
}


def groups(trace, n):
    return min(n, trace.g.shape[-1])


@pytest.mark.parametrize(("loss", "expected"), LOSSES.values(), ids=LOSSES.keys())
@costly
@given(case=gates(max_T=6), n=st.integers(1, 4), data=st.data())
def test_value_and_gradient_are_those_of_the_loops(loss, expected, case, n, data):
    flags = data.draw(st.lists(st.booleans(), min_size=case.mask.numel(), max_size=case.mask.numel()))
    # Gates of 0 and 1 have no logarithm.
    g = 0.99 * case.logits.double().softmax(-1) + 0.005 / case.logits.shape[-1]
    trace = RoutingTrace(
        g=g.requires_grad_(),
        S=case.trace().S,
        w=case.trace().w.double(),
        mask=case.mask,
        doc=case.doc,
        boundary=torch.tensor(flags).view_as(case.mask),
    )
    value, by_hand = loss(trace, n), torch.as_tensor(expected(trace, n), dtype=torch.float64)
    torch.testing.assert_close(value, by_hand, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(value, g)
    paper = torch.autograd.grad(by_hand, g)[0] if by_hand.requires_grad else torch.zeros_like(g)
    torch.testing.assert_close(gradient, paper, rtol=1e-7, atol=1e-10)


# By hand


def trace_of(*experts, top_k=1, **more):
    return replace(RoutingTrace.from_logits(one_hot(*experts, n_experts=4), top_k), **more)


def test_a_switch_inside_a_group_costs_less():
    inside = losses.grouped_by_layer(trace_of(0, 1), groups=2, inside=0.25)
    between = losses.grouped_by_layer(trace_of(1, 2), groups=2, inside=0.25)
    assert (inside.item(), between.item()) == (pytest.approx(0.5), pytest.approx(2.0))


def test_pairs_inside_gain_the_weight_that_pairs_across_an_end_lose():
    ends = torch.tensor([[False, False, True, False]])
    switch_at_end = trace_of(0, 0, 1, 1, boundary=ends)
    switch_inside = trace_of(0, 1, 1, 1, boundary=ends)
    assert losses.boundary_by_layer(switch_at_end, across=0.0).item() == 0.0
    assert losses.boundary_by_layer(switch_inside, across=0.0).item() == pytest.approx(2 / 2)
    assert losses.boundary_by_layer(switch_inside, across=1.0).item() == pytest.approx(2 / 3)


def test_without_flags_a_boundary_is_nowhere():
    trace = trace_of(0, 1, 1, 2)
    assert torch.equal(losses.boundary_by_layer(trace, across=0.0), losses.consistency_by_layer(trace))


def test_one_hot_gates_miss_as_in_an_lru_cache():
    """Experts 0 and 1 are loaded, then 0 is a hit, then 2 is loaded into a full cache."""
    trace = trace_of(0, 1, 0, 2)
    assert losses.expected_misses_by_layer(trace, capacity=2).item() == pytest.approx(3 / 4)
    assert losses.expected_misses_by_layer(trace, capacity=4).item() == pytest.approx(3 / 4)
    assert losses.expected_misses_by_layer(trace_of(0, 1, 0, 1), capacity=1).item() == pytest.approx(4 / 4)


def test_the_chunk_loss_is_the_fraction_of_experts_in_use():
    assert losses.chunk_by_layer(trace_of(0, 1, 0, 0), window=2).item() == pytest.approx((2 / 4 + 1 / 4) / 2, abs=1e-5)


def test_replacement_counts_only_where_the_set_changed():
    assert losses.replacement_by_layer(trace_of(0, 0, 0)).item() == 0.0
    assert losses.replacement_by_layer(trace_of(0, 1)).item() == pytest.approx(2.0)


def test_settings_that_do_not_fit_the_trace_are_refused():
    trace = trace_of(0, 1, top_k=2)
    with pytest.raises(ConfigError, match=r"^variant.slots: got 1, expected at least the 2 experts of a token\.$"):
        losses.expected_misses_by_layer(trace, capacity=1)
    with pytest.raises(ConfigError, match=r"^variant.groups: got 5, expected at most the 4 experts\.$"):
        losses.grouped_by_layer(trace, groups=5, inside=0.5)
