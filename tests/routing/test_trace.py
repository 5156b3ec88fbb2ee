"""`RoutingTrace`: how it is made, what it refuses, and the table it becomes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import ConfigError
from stickymoe.routing.trace import RoutingTrace, document_positions
from strategies import documents, gates, thorough

# From logits


@thorough
@given(gates())
def test_from_logits_is_softmax_and_top_k(case):
    trace = case.trace()
    L, B, T, _ = case.logits.shape
    for l, b, t in np.ndindex(L, B, T):
        expected = reference.softmax(case.logits[l, b, t].tolist())
        np.testing.assert_allclose(trace.g[l, b, t].numpy(), expected, rtol=1e-5, atol=1e-7)
        assert trace.S[l, b, t].tolist() == reference.top_k(trace.g[l, b, t].tolist(), case.top_k)
    assert torch.equal(trace.mask, case.mask)
    assert trace.doc is case.doc


@pytest.mark.parametrize("top_k", [-1, 0, 5])
def test_from_logits_refuses_a_top_k_that_cannot_be(top_k):
    with pytest.raises(ConfigError, match=rf"^top_k: got {top_k}, expected 1 … 4 \(the number of experts\)\.$"):
        RoutingTrace.from_logits(torch.zeros(1, 1, 2, 4), top_k)


@pytest.mark.parametrize("top_k", [1, 4])
def test_from_logits_takes_one_expert_or_all(top_k):
    assert RoutingTrace.from_logits(torch.zeros(2, 3, 2, 4), top_k).S.shape == (2, 3, 2, top_k)


def test_without_a_mask_every_token_is_real():
    trace = RoutingTrace.from_logits(torch.zeros(2, 3, 5, 4), 2)
    assert trace.mask.shape == (3, 5)
    assert trace.mask.all()
    assert trace.doc is None


def test_gates_are_fp32_from_bf16_logits_and_carry_gradient():
    logits = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    trace = RoutingTrace.from_logits(logits, 2)
    assert trace.g.dtype == torch.float32
    torch.testing.assert_close(trace.g, logits.detach().float().softmax(-1), rtol=0, atol=0)
    trace.g[..., 0].sum().backward()
    assert logits.grad.abs().min() > 0


# Pairs and positions


@thorough
@given(gates())
def test_pairs_are_those_of_the_reference(case):
    trace = case.trace()
    B, T = case.mask.shape
    doc = None if case.doc is None else case.doc.tolist()
    mask = case.mask.tolist()
    expected = [[bool(reference.is_pair(mask, doc, b, t)) for t in range(1, T)] for b in range(B)]
    assert trace.pairs.tolist() == expected
    assert trace.table().pairs.tolist() == expected


@thorough
@given(st.integers(1, 3), st.integers(1, 12), st.data())
def test_positions_count_from_the_start_of_the_document(B, T, data):
    doc = data.draw(documents(B, T))
    expected = [[t - reference.document_start(doc, b, t) for t in range(T)] for b in range(B)]
    assert document_positions(torch.tensor(doc), B, T).tolist() == expected


def test_positions_without_documents_count_from_the_start_of_the_row():
    assert document_positions(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2


# Entropy


@thorough
@given(gates())
def test_gate_entropy_is_that_of_the_reference(case):
    trace = case.trace()
    g, _, mask, _ = case.reference()
    expected = [reference.gate_entropy(g[l : l + 1], mask) for l in range(len(g))]
    np.testing.assert_allclose(trace.gate_entropy_by_layer().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_gate_entropy_of_gates_that_decide_and_of_those_that_do_not():
    g = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]], [[[0.25, 0.25, 0.25, 0.25]]]])
    trace = RoutingTrace(g=g, S=torch.zeros(2, 1, 1, 1, dtype=torch.long), mask=torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(trace.gate_entropy_by_layer(), torch.tensor([0.0, 2.0]))


# Table


@thorough
@given(gates())
def test_table_holds_the_same_decisions(case):
    trace = case.trace(case.logits.clone().requires_grad_())
    table = trace.table()
    assert table.n_experts == case.logits.shape[-1]
    assert table.S.dtype == np.uint8
    np.testing.assert_array_equal(table.S, trace.S.numpy())
    np.testing.assert_array_equal(table.mask, case.mask.numpy())
    if case.doc is None:
        assert table.doc is None
    else:
        np.testing.assert_array_equal(table.doc, case.doc.numpy())
    chosen = np.take_along_axis(trace.g.detach().double().numpy(), trace.S.numpy(), axis=-1)
    np.testing.assert_allclose(table.weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)
    assert (table.n_layers, table.top_k) == (trace.S.shape[0], case.top_k)


@pytest.mark.parametrize(("n_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_table_takes_the_smallest_type_that_holds_every_expert(n_experts, dtype):
    logits = torch.arange(n_experts, dtype=torch.float32).view(1, 1, 1, n_experts)
    table = RoutingTrace.from_logits(logits, 2).table()
    assert table.S.dtype == dtype
    assert table.S.flatten().tolist() == [n_experts - 1, n_experts - 2]


def test_nan_at_padding_reaches_no_gradient():
    """Left padding with nothing to attend to gives NaN in some models."""
    from stickymoe import anchor_loss, balance_loss, consistency_loss

    logits = torch.randn(2, 1, 5, 3)
    logits[:, :, 0] = float("nan")
    logits.requires_grad_()
    mask = torch.tensor([[False, True, True, True, True]])
    trace = RoutingTrace.from_logits(logits, 2, mask=mask)
    (consistency_loss(trace) + anchor_loss(trace, window=2) + balance_loss(trace)).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, :, 0] == 0).all()
    assert (logits.grad[:, :, 2] != 0).any()
