"""`RoutingTrace`: how it is made, what it refuses, and the table it becomes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import ConfigError
from stickymoe.routing import losses
from stickymoe.routing.rules import RouterInput, RoutingRule, Scoring
from stickymoe.routing.trace import RoutingTrace, token_positions
from strategies import documents, gates, masks, thorough

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
@given(st.integers(1, 3), st.integers(1, 12), st.booleans(), st.data())
def test_positions_count_the_real_tokens_of_the_document(B, T, packed, data):
    mask = data.draw(masks(B, T))
    doc = data.draw(documents(B, T)) if packed else None
    positions = token_positions(torch.tensor(mask), None if doc is None else torch.tensor(doc))
    for b, t in reference.real_tokens(mask):
        assert positions[b, t] == reference.position(mask, doc, b, t)
    assert (positions >= 0).all()


def test_positions_without_documents_count_from_the_first_real_token_of_the_row():
    mask = torch.tensor([[True] * 4, [False, False, True, True], [True, True, False, False]])
    assert token_positions(mask).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 1, 1]]


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
    S, w = torch.zeros(2, 1, 1, 1, dtype=torch.long), torch.ones(2, 1, 1, 1)
    trace = RoutingTrace(g=g, S=S, w=w, mask=torch.ones(1, 1, dtype=torch.bool))
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


def test_table_holds_the_weights_that_the_rule_gave():
    """Not a softmax of its own: a sigmoid router without renormalisation weighs differently."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(2, 3, 5, generator=generator), torch.randn(5, generator=generator)
    scoring = Scoring(score="sigmoid", bias=bias, renormalise=False, scale=2.5)
    routing = RoutingRule(2, scoring=scoring)(logits, RouterInput(h=torch.zeros(2, 3, 1)))
    trace = RoutingTrace.from_choice(routing.g[None], routing.S[None], routing.w[None])
    table = trace.table()
    np.testing.assert_array_equal(table.weights[0], routing.w.numpy())
    np.testing.assert_allclose(table.weights[0], 2.5 * logits.sigmoid().gather(-1, routing.S), rtol=1e-6)
    assert (table.weights.sum(-1) > 1).all()


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


# From a choice


def choice_of(L=2, B=2, T=6, N=4, k=2, seed=0):
    """Normalised scores, experts and weights of a router, in no particular order."""
    rng = np.random.default_rng(seed)
    g = torch.tensor(rng.dirichlet(np.ones(N), (L, B, T)), dtype=torch.float32)
    S = torch.tensor(rng.permuted(np.broadcast_to(np.arange(N), (L, B, T, N)), axis=-1)[..., :k].copy())
    return g, S, torch.tensor(rng.random((L, B, T, k)), dtype=torch.float32)


def test_experts_are_put_in_order_of_weight():
    g, S, w = choice_of()
    trace = RoutingTrace.from_choice(g, S, w)
    for l, b, t in np.ndindex(*S.shape[:3]):
        pairs = sorted(zip(w[l, b, t].tolist(), S[l, b, t].tolist(), strict=True), reverse=True)
        assert trace.w[l, b, t].tolist() == [weight for weight, _ in pairs]
        assert trace.S[l, b, t].tolist() == [expert for _, expert in pairs]
    assert trace.mask.all()
    assert torch.equal(trace.g, g)


def test_weights_keep_their_gradient_when_they_are_put_in_order():
    g, S, w = choice_of()
    w.requires_grad_()
    RoutingTrace.from_choice(g, S, w).w[..., 0].sum().backward()
    assert torch.equal(w.grad, (w == w.amax(-1, keepdim=True)).float())


def test_padding_is_cleaned():
    """Whatever a model computed there, also NaN and experts that do not exist."""
    g, S, w = choice_of(T=4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])  # as tokenizers give it
    padding = ~mask.bool()
    for tensor, value in ((g, torch.nan), (w, torch.nan), (S, -1)):
        tensor[:, padding] = value
    g.requires_grad_()
    w.requires_grad_()
    trace = RoutingTrace.from_choice(g, S, w, mask)
    assert (trace.g[:, padding] == 0.25).all()
    assert (trace.w[:, padding] == 0.5).all()
    assert (trace.S[:, padding] == torch.tensor([0, 1])).all()
    (trace.g.square().sum() + trace.w.square().sum()).backward()
    for leaf in (g, w):
        assert (leaf.grad[:, padding] == 0).all()
        assert (leaf.grad[:, ~padding] != 0).all()
    assert trace.gate_entropy_by_layer().isfinite().all()


ANY_LOSS = {
    "balance": losses.balance_by_layer,
    "balance of slots": lambda trace: losses.slot_balance_by_layer(trace, capacity=2),
    "consistency": losses.consistency_by_layer,
    "anchor": lambda trace: losses.anchor_by_layer(trace, window=3),
    "cross layer": losses.cross_layer_loss,
    "grouped": lambda trace: losses.grouped_by_layer(trace, groups=2, inside=0.25),
    "replacement": losses.replacement_by_layer,
    "adjacent entropy": losses.adjacent_entropy_by_layer,
    "chunk": lambda trace: losses.chunk_by_layer(trace, window=3),
    "expected misses": lambda trace: losses.expected_misses_by_layer(trace, capacity=2),
}


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("loss", ANY_LOSS.values(), ids=ANY_LOSS.keys())
def test_the_side_of_the_padding_makes_no_difference(loss, packed):
    g, S, w = choice_of(T=7)
    doc = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]]) if packed else None
    alone = RoutingTrace.from_choice(g, S, w, doc=doc)
    expected = loss(alone)
    for left in (0, 1, 4):
        pad = (left, 4 - left)
        mask = torch.nn.functional.pad(torch.ones(2, 7, dtype=torch.bool), pad)
        wide = [torch.nn.functional.pad(x, (0, 0, *pad)) for x in (g, S, w)]
        padded_doc = None if doc is None else torch.nn.functional.pad(doc, pad, value=-1)
        trace = RoutingTrace.from_choice(*wide, mask, padded_doc)
        torch.testing.assert_close(loss(trace), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(trace.positions[:, left : left + 7], alone.positions)
        assert trace.table().pairs.sum() == alone.table().pairs.sum()


def test_layers_are_counted_from_0_unless_given():
    g, S, w = choice_of(L=3)
    assert RoutingTrace.from_choice(g, S, w).layers == (0, 1, 2)
    assert RoutingTrace.from_choice(g, S, w, layers=[1, 3, 5]).layers == (1, 3, 5)
    with pytest.raises(ConfigError, match=r"^layers: got 2 indices, expected 3, one for each layer\.$"):
        RoutingTrace.from_choice(g, S, w, layers=[1, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g, S, w: (g, S, w[..., :1], None, None),
            r"choice: got S \[2, 2, 6, 2\] and w \[2, 2, 6, 1\], expected .*",
        ),
        (lambda g, S, w: (g, S[:1], w[:1], None, None), r"choice: got S \[1, 2, 6, 2\] and w .* as g \[2, 2, 6, 4\]\."),
        (lambda g, S, w: (g, S + 2, w, None, None), r"S: got experts 2 … 5, expected 0 … 3\."),
        (lambda g, S, w: (g, S - 1, w, None, None), r"S: got experts -1 … 2, expected 0 … 3\."),
        (
            lambda g, S, w: (g, S, w, torch.ones(2, 5), None),
            r"mask: got shape \[2, 5\], expected \[2, 6\] as the gates .*",
        ),
        (
            lambda g, S, w: (g, S, w, None, torch.zeros(1, 6, dtype=torch.long)),
            r"doc: got shape \[1, 6\], expected \[2, 6\] as the gates .*",
        ),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(change, message):
    # Around the type checks, which run in tests only.
    from_choice = RoutingTrace.from_choice.__func__.__wrapped__
    with pytest.raises(ConfigError, match=f"^{message}$"):
        from_choice(RoutingTrace, *change(*choice_of()))
