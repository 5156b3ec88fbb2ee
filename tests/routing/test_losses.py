"""The losses against the paper's equations as loops, and the laws that hold for every trace."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe import RoutingTrace, anchor_loss, balance_loss, consistency_loss
from stickymoe.routing import losses
from strategies import Gates, costly, gates, thorough

windows = st.integers(1, 5)

# Each loss of a trace, and the same by the reference; anchors fixed, as by default.
LOSSES = {
    "balance": (
        lambda trace, W: balance_loss(trace),
        lambda g, S, mask, doc, W: reference.balance_loss(g, S, mask, doc),
    ),
    "consistency": (
        lambda trace, W: consistency_loss(trace),
        lambda g, S, mask, doc, W: reference.consistency_loss(g, mask, doc),
    ),
    "anchor": (
        lambda trace, W: anchor_loss(trace, window=W),
        lambda g, S, mask, doc, W: reference.anchor_loss(g, mask, doc, W, anchors=g.detach()),
    ),
    "anchor with gradient": (
        lambda trace, W: anchor_loss(trace, window=W, anchor_gradient=True),
        lambda g, S, mask, doc, W: reference.anchor_loss(g, mask, doc, W),
    ),
}
# Past the paper: held to loops in test_further_losses, to the laws here.
FURTHER = {
    "cross layer": lambda trace, W: losses.cross_layer_loss(trace),
    "boundary": lambda trace, W: losses.boundary_by_layer(flagged(trace), across=0.25).mean(),
    "grouped": lambda trace, W: losses.grouped_by_layer(trace, groups=1, inside=0.5).mean(),
    "dot": lambda trace, W: losses.dot_by_layer(trace).mean(),
    "replacement": lambda trace, W: losses.replacement_by_layer(trace).mean(),
    "adjacent entropy": lambda trace, W: losses.adjacent_entropy_by_layer(trace).mean(),
    "chunk": lambda trace, W: losses.chunk_by_layer(trace, window=W).mean(),
    "expected misses": lambda trace, W: losses.expected_misses_by_layer(trace, capacity=trace.S.shape[-1]).mean(),
}
EVERY = {name: loss for name, (loss, _) in LOSSES.items()} | FURTHER
each_loss = pytest.mark.parametrize(("loss", "expected"), LOSSES.values(), ids=LOSSES.keys())
every_loss = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY.keys())
NOT_OF_PAIRS = {"balance", "cross layer", "chunk", "expected misses"}
PAIR_LOSSES = {name: loss for name, loss in EVERY.items() if name not in NOT_OF_PAIRS}
each_pair_loss = pytest.mark.parametrize("loss", PAIR_LOSSES.values(), ids=PAIR_LOSSES.keys())


def flagged(trace):
    """The trace with sentences of three tokens."""
    return replace(trace, boundary=trace.positions % 3 == 0)


def gradient(case, loss, W, logits=None):
    """Gradient of a loss in the logits."""
    leaf = (case.logits if logits is None else logits).clone().requires_grad_()
    value = loss(case.trace(leaf), W)
    assert value.requires_grad, "a loss must stay in the graph even where no pair counts"
    value.backward()
    return leaf.grad


def one_hot(*experts, n_experts=3):
    """Logits [1,1,T,N] whose gates are one-hot to machine precision."""
    logits = torch.full((1, 1, len(experts), n_experts), -200.0)
    for t, e in enumerate(experts):
        logits[0, 0, t, e] = 200.0
    return logits


# Against the reference


@thorough
@given(gates(), windows)
@each_loss
def test_value_is_that_of_the_paper(loss, expected, case, W):
    g, S, mask, doc = case.reference()
    paper = float(expected(torch.from_numpy(g), S, mask, doc, W))
    assert loss(case.trace(), W).item() == pytest.approx(paper, rel=1e-4, abs=1e-6)


@costly
@given(gates(max_T=5), windows)
@each_loss
def test_gradient_is_that_of_the_paper_in_float64(loss, expected, case, W):
    leaf = case.logits.double().requires_grad_()
    _, S, mask, doc = case.reference()
    paper = expected(leaf.softmax(-1), S, mask, doc, W)
    if isinstance(paper, torch.Tensor) and paper.requires_grad:
        paper.backward()
    paper_grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(gradient(case, loss, W).double(), paper_grad, rtol=1e-3, atol=1e-6)


@costly
@given(gates(), windows)
def test_loss_by_layer_is_that_of_each_layer(case, W):
    g, S, mask, doc = case.reference()
    trace = case.trace()
    for l in range(len(g)):
        layer = slice(l, l + 1)
        by_layer = [
            (losses.balance_by_layer(trace)[l], reference.balance_loss(g[layer], S[layer], mask, doc)),
            (losses.consistency_by_layer(trace)[l], reference.consistency_loss(g[layer], mask, doc)),
            (losses.anchor_by_layer(trace, window=W)[l], reference.anchor_loss(g[layer], mask, doc, W)),
        ]
        for value, paper in by_layer:
            assert value.item() == pytest.approx(paper, rel=1e-4, abs=1e-6)


@thorough
@given(gates())
def test_selected_experts_are_the_top_k_and_ties_go_to_the_lowest_index(case):
    trace = case.trace()
    rows = trace.g.flatten(0, 2).tolist()
    assert trace.S.flatten(0, 2).tolist() == [reference.top_k(row, case.top_k) for row in rows]


@thorough
@given(gates().filter(lambda case: case.mask.any()))
def test_gate_entropy_is_in_bits(case):
    g, _, mask, _ = case.reference()
    expected = [reference.gate_entropy(g[l : l + 1], mask) for l in range(len(g))]
    assert case.trace().gate_entropy_by_layer().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


# By hand


def test_balance_of_a_collapsed_router_is_the_number_of_experts():
    assert balance_loss(RoutingTrace.from_logits(one_hot(1, 1, 1, 1), top_k=1)).item() == pytest.approx(3.0)


def test_balance_counts_all_slots():
    # p = (1, 0, 0); of two equal experts the lower takes the second slot: f = (1/2, 1/2, 0), N Σ f p = 3/2.
    assert balance_loss(RoutingTrace.from_logits(one_hot(0, 0), top_k=2)).item() == pytest.approx(1.5)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_of_uniform_gates_is_one(top_k):
    trace = RoutingTrace.from_logits(torch.zeros(2, 3, 5, 4), top_k)
    assert balance_loss(trace).item() == pytest.approx(1.0)


def test_balance_is_averaged_over_layers_not_pooled():
    # Each layer collapses onto another expert: pooled over layers this would look balanced.
    logits = torch.cat([one_hot(0, 0), one_hot(1, 1), one_hot(2, 2)])
    assert balance_loss(RoutingTrace.from_logits(logits, top_k=1)).item() == pytest.approx(3.0)


def test_consistency_reaches_its_bounds():
    always = RoutingTrace.from_logits(one_hot(0, 1, 0, 2), top_k=1)
    never = RoutingTrace.from_logits(one_hot(1, 1, 1, 1), top_k=1)
    assert consistency_loss(always).item() == pytest.approx(2.0)
    assert consistency_loss(never).item() == 0.0


@thorough
@given(gates())
def test_consistency_lies_between_zero_and_two(case):
    assert 0.0 <= consistency_loss(case.trace()).item() <= 2.0 + 1e-5


def test_consistency_pools_pairs_over_the_batch():
    # Three switches in the first row, none in the one pair of the second: 3 · 2 / 4, not the mean of 2 and 0.
    logits = torch.cat([one_hot(0, 1, 0, 1), one_hot(0, 0, 2, 2)], dim=1)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert consistency_loss(RoutingTrace.from_logits(logits, 1, mask)).item() == pytest.approx(1.5)


def test_anchor_ramps_inside_its_window():
    # W = 3: tokens 1 and 2 leave anchor 0, ramps 1/3 and 2/3; token 4 anchor 3, ramp 1/3; each by 2.
    trace = RoutingTrace.from_logits(one_hot(0, 1, 2, 1, 0), top_k=1)
    assert anchor_loss(trace, window=3).item() == pytest.approx(2 * (1 / 3 + 2 / 3 + 1 / 3) / 5)


def test_anchor_counts_positions_from_the_start_of_the_document():
    # The second document starts at token 1: its windows are (1, 2), (3); the row's would be (0, 1), (2, 3).
    doc = torch.tensor([[0, 1, 1, 1]])
    trace = RoutingTrace.from_logits(one_hot(0, 1, 0, 0), top_k=1, doc=doc)
    assert anchor_loss(trace, window=2).item() == pytest.approx(2 * (1 / 2) / 4)


def test_anchor_of_a_window_of_one_is_zero():
    assert anchor_loss(RoutingTrace.from_logits(one_hot(0, 1, 2), top_k=1), window=1).item() == 0.0


def test_windows_start_at_the_first_real_token():
    mask = torch.tensor([[False, True, True, True]])
    padded = RoutingTrace.from_logits(one_hot(0, 1, 2, 1), top_k=1, mask=mask)
    alone = RoutingTrace.from_logits(one_hot(1, 2, 1), top_k=1)
    assert anchor_loss(padded, window=2).item() == anchor_loss(alone, window=2).item() == pytest.approx(1 / 3)


# Where gradient goes


def test_anchor_is_fixed_unless_asked():
    case = Gates(torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]), 1, torch.ones(1, 2, dtype=torch.bool), None)
    fixed = gradient(case, LOSSES["anchor"][0], 2)[0, 0]
    assert fixed[0].tolist() == [0.0, 0.0]
    assert fixed[1].abs().min() > 0
    by_layer = gradient(case, lambda trace, W: losses.anchor_by_layer(trace, window=W).mean(), 2)[0, 0]
    assert torch.equal(by_layer, fixed)
    free = gradient(case, LOSSES["anchor with gradient"][0], 2)[0, 0]
    assert free[0].abs().min() > 0
    assert torch.equal(free[1], fixed[1])


@costly
@given(gates(), windows)
@every_loss
def test_masked_tokens_get_no_gradient(loss, case, W):
    assert (gradient(case, loss, W)[:, ~case.mask] == 0).all()


@costly
@given(gates(), windows)
@every_loss
def test_masked_tokens_do_not_change_the_loss(loss, case, W):
    noise = case.logits.flip(-1) + 1
    other = torch.where(case.mask[..., None], case.logits, noise)
    assert torch.equal(loss(case.trace(other), W), loss(case.trace(), W))


@thorough
@given(gates())
def test_tokens_in_no_pair_get_no_gradient_from_consistency(case):
    _, _, mask, doc = case.reference()
    alone = torch.ones_like(case.mask)
    for b, t in reference.real_tokens(mask):
        if reference.is_pair(mask, doc, b, t):
            alone[b, t - 1 : t + 1] = False
    assert (gradient(case, LOSSES["consistency"][0], 1)[:, alone] == 0).all()


@costly
@given(st.data(), windows)
@each_pair_loss
def test_one_document_does_not_steer_another(loss, data, W):
    case = data.draw(gates().filter(lambda c: c.doc is not None))
    _, _, _, doc = case.reference()
    B, T = doc.shape
    b, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, T - 1))
    start = reference.document_start(doc, b, t)
    inside = torch.zeros(B, T, dtype=torch.bool)
    inside[b] = torch.tensor([reference.document_start(doc, b, s) == start for s in range(T)])

    changed = torch.where(inside[..., None], case.logits.flip(-1) * 2 + 1, case.logits)
    before, after = gradient(case, loss, W), gradient(case, loss, W, logits=changed)
    assert torch.equal(before[:, ~inside], after[:, ~inside])


# Laws of the batch


@costly
@given(gates(), st.integers(0, 9), windows)
@every_loss
def test_packing_documents_into_one_row_changes_nothing(loss, case, cut, W):
    """A row of two documents equals the two documents as rows of their own, padded."""
    logits, mask = case.logits[:, :1], case.mask[:1]
    T = logits.shape[2]
    cut = min(cut, T)
    packed = Gates(logits, case.top_k, mask, torch.tensor([[0] * cut + [1] * (T - cut)]))

    alone_logits = torch.zeros(logits.shape[0], 2, T, logits.shape[3])
    alone_mask = torch.zeros(2, T, dtype=torch.bool)
    alone_logits[:, 0, :cut], alone_mask[0, :cut] = logits[:, 0, :cut], mask[0, :cut]
    alone_logits[:, 1, : T - cut], alone_mask[1, : T - cut] = logits[:, 0, cut:], mask[0, cut:]
    alone = Gates(alone_logits, case.top_k, alone_mask, None)

    torch.testing.assert_close(loss(packed.trace(), W), loss(alone.trace(), W), rtol=1e-5, atol=1e-7)


def test_a_border_matters():
    logits, doc = one_hot(0, 0, 1, 1), torch.tensor([[0, 0, 1, 1]])
    flat, split = RoutingTrace.from_logits(logits, 1), RoutingTrace.from_logits(logits, 1, doc=doc)
    assert consistency_loss(flat).item() == pytest.approx(2 / 3)
    assert consistency_loss(split).item() == 0.0
    assert anchor_loss(flat, window=4).item() == pytest.approx(2 * (2 / 4 + 3 / 4) / 4)
    assert anchor_loss(split, window=4).item() == 0.0


@pytest.mark.parametrize("T", [1, 4])
@every_loss
def test_a_batch_without_a_real_token_costs_nothing(loss, T):
    torch.manual_seed(0)
    case = Gates(torch.randn(2, 3, T, 4), 2, torch.zeros(3, T, dtype=torch.bool), None)
    assert loss(case.trace(), 2).item() == 0.0
    assert (gradient(case, loss, 2) == 0).all()


@each_pair_loss
def test_a_single_token_costs_nothing(loss):
    torch.manual_seed(0)
    case = Gates(torch.randn(2, 3, 1, 4), 2, torch.ones(3, 1, dtype=torch.bool), None)
    assert loss(case.trace(), 2).item() == 0.0
    assert (gradient(case, loss, 2) == 0).all()


@every_loss
def test_losses_are_fp32_under_bf16(loss):
    torch.manual_seed(0)
    logits = torch.randn(2, 2, 6, 4).bfloat16()
    half = Gates(logits, 2, torch.ones(2, 6, dtype=torch.bool), None)
    full = half._replace(logits=logits.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(half.trace(), 3)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(full.trace(), 3).item(), rel=1e-6)
