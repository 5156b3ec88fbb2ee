"""Routers: Hard-Window against the reference, whole sequences against their pieces, and what holds for every part."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stickymoe.routing.routers import Attended, HardWindow, Hidden, Router, RouterInput, TopK
from stickymoe.routing.scan import as_numpy

import reference
from stickymoe.errors import StickyError
from stickymoe.routing.trace import document_positions
from strategies import costly, documents, seeds, thorough

D = 6
SOURCES = {"hidden": Hidden(), "attended": Attended()}
CHOICES = {"top-k": TopK(), "window 1": HardWindow(window=1, beta=2.0), "window 3": HardWindow(window=3, beta=10.0)}
PARTS = {f"{c} of {s}": (source, choice) for c, choice in CHOICES.items() for s, source in SOURCES.items()}
every_part = pytest.mark.parametrize(("source", "choice"), PARTS.values(), ids=PARTS.keys())
every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())


def router_input(rng, B, T, doc=None, dtype=torch.float64):
    """Tokens of `T` steps, whose hidden and attended values have nothing in common."""
    h, attended = (torch.tensor(rng.standard_normal((B, T, D)), dtype=dtype) for _ in range(2))
    return RouterInput(
        h=h,
        attended=attended,
        tokens=rng.integers(0, 50, (B, T)),
        position=as_numpy(document_positions(doc, B, T)),
        doc=doc,
    )


def router(rng, N, k, *, source=None, choice=None, dtype=torch.float64):
    made = Router(D, N, k, source=source, choice=choice).to(dtype)
    made.gate.weight.data = torch.tensor(rng.standard_normal((N, D)), dtype=dtype)
    return made


def steps(x, start, stop):
    return RouterInput(
        h=x.h[:, start:stop],
        attended=x.attended[:, start:stop],
        tokens=np.ascontiguousarray(x.tokens[:, start:stop]),
        position=np.ascontiguousarray(x.position[:, start:stop]),
        doc=None if x.doc is None else x.doc[:, start:stop],
    )


@st.composite
def inputs(draw, max_T=12):
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, max_T))
    doc = draw(st.none() | documents(B, T))
    return router_input(draw(seeds()), B, T, None if doc is None else torch.tensor(doc))


@st.composite
def windowed_logits(draw):
    """Logits in quarters: many ties, and sums with β that floating point does not blur."""
    B, T, N = draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    doc = draw(st.none() | documents(B, T))
    rng = draw(seeds())
    x = router_input(rng, B, T, None if doc is None else torch.tensor(doc))
    return torch.tensor(rng.integers(-6, 7, (B, T, N)) / 4), draw(st.integers(1, N)), x


# Hard-Window


@thorough
@given(windowed_logits(), st.integers(1, 14), st.sampled_from([0.0, 0.5, 1.0, 10.0, 40.0]))
def test_hard_window_is_that_of_the_reference(case, window, beta):
    logits, k, x = case
    g, S, _ = HardWindow(window=window, beta=beta)(logits, k, x, {})
    for b in range(len(logits)):
        doc = None if x.doc is None else x.doc[b].tolist()
        expected_g, expected_S = reference.hard_window(logits[b].tolist(), k, window, beta, doc)
        assert S[b].tolist() == expected_S
        np.testing.assert_allclose(g[b].numpy(), expected_g, rtol=1e-12, atol=1e-300)


@thorough
@given(windowed_logits(), st.integers(1, 14))
def test_no_bonus_is_top_k(case, window):
    logits, k, x = case
    g, S, _ = HardWindow(window=window, beta=0.0)(logits, k, x, {})
    plain_g, plain_S, _ = TopK()(logits, k, x, {})
    assert torch.equal(g, plain_g)
    assert torch.equal(S, plain_S)


def test_the_window_holds_unbiased_choices_and_so_does_not_lock():
    """Expert 0 leads once, then expert 1: with a window of 1 the bonus follows the leader of the step before."""
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    x = router_input(np.random.default_rng(0), 1, 3)
    _, S, _ = HardWindow(window=1, beta=10.0)(logits, 1, x, {})
    assert S.flatten().tolist() == [0, 0, 1]


@thorough
@given(windowed_logits(), st.integers(1, 5))
def test_window_history_has_no_gradient_but_the_gates_have(case, window):
    """The bonus is a constant: the gradient is that of softmax(logits + constant)."""
    logits, k, x = case
    choice = HardWindow(window=window, beta=1.5)
    coefficients = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).cos()
    leaf = logits.clone().requires_grad_()
    g, _, _ = choice(leaf, k, x, {})
    (g * coefficients).sum().backward()
    # g alone tells which experts had the bonus, up to a constant per token that the softmax forgets.
    bonus = g.detach().log() - logits
    fixed = logits.clone().requires_grad_()
    ((fixed + bonus).softmax(-1) * coefficients).sum().backward()
    torch.testing.assert_close(leaf.grad, fixed.grad, rtol=1e-9, atol=1e-12)


# Pieces of a sequence


@every_part
@costly
@given(x=inputs(), rng=seeds(), N=st.integers(1, 6), data=st.data())
def test_any_pieces_are_routed_as_the_whole(source, choice, x, rng, N, data):
    """With gradient or without, which is on tensors or on arrays."""
    T = x.h.shape[1]
    k = data.draw(st.integers(1, N))
    cuts = data.draw(st.sets(st.integers(1, T - 1))) if T > 1 else set()
    route = router(rng, N, k, source=source, choice=choice)
    whole = route(x)
    state, pieces = None, []
    edges = [0, *sorted(cuts), T]
    for start, stop in pairwise(edges):
        with torch.set_grad_enabled(data.draw(st.booleans())):
            pieces.append(route(steps(x, start, stop), state))
        state = pieces[-1].state
    assert torch.equal(torch.cat([p.S for p in pieces], dim=1), whole.S)
    torch.testing.assert_close(torch.cat([p.g for p in pieces], dim=1), whole.g, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([p.w for p in pieces], dim=1), whole.w, rtol=1e-12, atol=1e-14)
    assert state.keys() == whole.state.keys()
    for name, remembered in whole.state.items():
        assert np.array_equal(state[name], remembered)


@every_part
def test_state_is_not_changed_by_the_next_call(source, choice):
    """So that one prefix can be continued in several ways."""
    rng = np.random.default_rng(3)
    x = router_input(rng, 2, 9)
    route = router(rng, 5, 2, source=source, choice=choice)
    state = route(steps(x, 0, 5)).state
    before = {name: remembered.copy() for name, remembered in state.items()}
    first = route(steps(x, 5, 9), state)
    assert all(np.array_equal(before[name], state[name]) for name in before)
    assert torch.equal(route(steps(x, 5, 9), state).S, first.S)


@every_part
@costly
@given(x=inputs(), rng=seeds())
def test_documents_are_routed_as_if_alone(source, choice, x, rng):
    route = router(rng, 5, 2, source=source, choice=choice)
    whole = route(x)
    for b in range(len(x.h)):
        starts = [t for t in range(x.h.shape[1]) if x.position[b, t] == 0]
        for start, stop in zip(starts, [*starts[1:], x.h.shape[1]], strict=True):
            alone = steps(x, start, stop)
            alone = RouterInput(*(v[b : b + 1] for v in (alone.h, alone.attended, alone.tokens, alone.position)))
            routed = route(alone)
            assert torch.equal(routed.S[0], whole.S[b, start:stop])
            torch.testing.assert_close(routed.g[0], whole.g[b, start:stop], rtol=1e-12, atol=1e-14)


# What the gate reads


@every_choice
@pytest.mark.parametrize(("source", "read"), [(Hidden(), "h"), (Attended(), "attended")], ids=["hidden", "attended"])
def test_a_source_reads_one_thing_only(source, read, choice):
    rng = np.random.default_rng(5)
    x = router_input(rng, 2, 7)
    route = router(rng, 4, 2, source=source, choice=choice)
    g = route(x).g
    ignored = "attended" if read == "h" else "h"
    other = replace(x, **{ignored: torch.full_like(x.h, torch.nan), "tokens": x.tokens + 1})
    assert torch.equal(route(other).g, g)
    assert not torch.allclose(route(replace(x, **{read: x.h + x.attended})).g, g)


@pytest.mark.parametrize(("source", "read"), [(Hidden(), "h"), (Attended(), "attended")], ids=["hidden", "attended"])
def test_gradient_reaches_what_the_gate_reads_and_the_gate(source, read):
    rng = np.random.default_rng(6)
    x = router_input(rng, 1, 5)
    x.h.requires_grad_()
    x.attended.requires_grad_()
    route = router(rng, 4, 2, source=source, choice=HardWindow(window=2, beta=1.0))
    routing = route(x)
    routing.w[..., 0].sum().backward()
    ignored = "attended" if read == "h" else "h"
    assert getattr(x, read).grad.abs().min() > 0
    assert getattr(x, ignored).grad is None
    assert route.gate.weight.grad.abs().max() > 0


def test_a_router_reads_the_hidden_state_by_top_k_unless_told_otherwise():
    rng = np.random.default_rng(7)
    x = router_input(rng, 2, 6)
    route = router(rng, 4, 3)
    g = (x.h @ route.gate.weight.T).softmax(-1)
    torch.testing.assert_close(route(x).g, g, rtol=1e-12, atol=1e-14)
    assert route(x).S.tolist() == [[reference.top_k(row, 3) for row in sequence] for sequence in g.tolist()]


@every_part
def test_gates_for_the_gate_alone_have_the_values_of_g_and_no_other_gradient(source, choice):
    rng = np.random.default_rng(12)
    x = router_input(rng, 2, 5)
    x.h.requires_grad_()
    x.attended.requires_grad_()
    gate = router(rng, 4, 2).gate
    route = Router(D, 4, 2, source=source, choice=choice, gate_only=True).double()
    route.gate = gate
    routing = route(x)
    assert torch.equal(routing.g_gate, routing.g)
    coefficients = torch.arange(routing.g.numel(), dtype=torch.float64).view_as(routing.g).cos()
    (of_g,) = torch.autograd.grad((routing.g * coefficients).sum(), gate.weight, retain_graph=True)
    (routing.g_gate * coefficients).sum().backward()
    assert x.h.grad is None
    assert x.attended.grad is None
    torch.testing.assert_close(gate.weight.grad, of_g, rtol=1e-12, atol=1e-14)
    assert Router(D, 4, 2, source=source, choice=choice).double()(x).g_gate is None


# Precision


@every_part
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_gates_are_fp32_under_bf16(source, choice, weights):
    rng = np.random.default_rng(8)
    x = router_input(rng, 2, 6, dtype=torch.bfloat16)
    route = router(rng, 4, 2, source=source, choice=choice, dtype=weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(x)
    assert routing.g.dtype == routing.w.dtype == torch.float32
    exact = Router(D, 4, 2, source=source, choice=choice)
    exact.gate.weight.data = route.gate.weight.data.float()
    by_hand = exact(replace(x, h=x.h.float(), attended=x.attended.float()))
    assert torch.equal(routing.g, by_hand.g)
    assert torch.equal(routing.S, by_hand.S)


# Weights and order


@every_part
@costly
@given(x=inputs(), rng=seeds(), N=st.integers(1, 6), data=st.data())
def test_weights_are_the_gates_of_the_chosen_renormalised_heaviest_first(source, choice, x, rng, N, data):
    k = data.draw(st.integers(1, N))
    routing = router(rng, N, k, source=source, choice=choice)(x)
    assert routing.S.tolist() == [[reference.top_k(row, k) for row in sequence] for sequence in routing.g.tolist()]
    torch.testing.assert_close(routing.g.sum(-1), torch.ones_like(routing.g[..., 0]), rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.w.sum(-1), torch.ones_like(routing.w[..., 0]), rtol=1e-12, atol=0)
    assert (routing.w[..., 1:] <= routing.w[..., :-1]).all()
    shares = routing.g.gather(-1, routing.S)
    torch.testing.assert_close(routing.w * shares.sum(-1, keepdim=True), shares, rtol=1e-12, atol=1e-300)


@every_part
@pytest.mark.parametrize("N", [4, 40])
def test_of_equal_experts_the_lowest_index_is_chosen(source, choice, N):
    x = router_input(np.random.default_rng(9), 2, 6, dtype=torch.float32)
    route = Router(D, N, 3, source=source, choice=choice)
    torch.nn.init.zeros_(route.gate.weight)
    routing = route(x)
    assert torch.equal(routing.S, torch.tensor([0, 1, 2]).expand(2, 6, 3))
    torch.testing.assert_close(routing.w, torch.full((2, 6, 3), 1 / 3))


# What compiled loops must not be handed


def test_as_many_experts_as_there_are_can_be_chosen_and_no_more():
    assert Router(D, 4, 4)(router_input(np.random.default_rng(0), 1, 3, dtype=torch.float32)).S.shape == (1, 3, 4)
    for k in (0, 5):
        with pytest.raises(StickyError, match=rf"top_k: got {k}, expected 1 … 4"):
            Router(D, 4, k)


@pytest.mark.parametrize(("name", "said"), [("position", "positions"), ("tokens", "tokens"), ("boundary", "boundary")])
def test_what_is_of_other_rows_is_refused(name, said):
    x = router_input(np.random.default_rng(0), 3, 4)
    # Past the types, which are checked in tests alone.
    object.__setattr__(x, name, torch.zeros(1, 4, dtype=torch.bool) if name == "boundary" else getattr(x, name)[:1])
    with pytest.raises(StickyError, match=rf"{said} of shape \[1, 4\], expected \[3, 4\]"):
        router(np.random.default_rng(0), 4, 2)(x)


def test_a_part_that_is_exchanged_is_used_with_gradient_and_without():
    rng = np.random.default_rng(0)
    route, x = router(rng, 6, 2), router_input(rng, 2, 9)
    route.choice = HardWindow(window=3, beta=10.0)
    with torch.no_grad():
        scanned = route(x)
    assert torch.equal(scanned.S, route(x).S)
    assert scanned.state.keys() == {"left"}
