"""Routing rules: scoring and Hard-Window against plain loops, pieces against the whole, and what is refused."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cases import (
    D,
    assert_documents_stand_alone,
    assert_pieces_are_the_whole,
    choose,
    doc_of,
    inputs,
    router,
    router_input,
    steps,
    windowed_logits,
)
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import ConfigError
from stickymoe.models.moe import Router
from stickymoe.routing.fixed import Hashed, Trajectory
from stickymoe.routing.rules import HardWindow, RouterState, RoutingRule, ScannedChoice, Scoring, TopK
from stickymoe.routing.sequential import Hysteresis, Residency, Segment, SlotChoice, Smooth
from strategies import costly, seeds, thorough

CHOICES = {"top-k": TopK(), "window 1": HardWindow(window=1, beta=2.0), "window 3": HardWindow(window=3, beta=10.0)}
PARTS = {
    f"{c} of {source}": {"source": source, "choice": choice}
    for c, choice in CHOICES.items()
    for source in ("h", "attended")
}
every_part = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
every_source = pytest.mark.parametrize("source", ["h", "attended"])


# Scoring


@st.composite
def scorings(draw, N):
    """Settings of a scoring that fits N experts, and how many experts it can choose."""
    groups = draw(st.sampled_from([n for n in range(1, N + 1) if N % n == 0]))
    kept = draw(st.integers(1, groups))
    group_score = "max" if groups == N else draw(st.sampled_from(["max", "top2"]))
    rng = draw(seeds())
    settings = {
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "bias": draw(st.none() | st.just(rng.integers(-4, 5, N) / 8)),
        "groups": groups,
        "groups_kept": kept,
        "group_score": group_score,
        "renormalise": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
    }
    return settings, draw(st.integers(1, kept * (N // groups)))


@thorough
@given(x=inputs(), rng=seeds(), N=st.integers(1, 8), gradient=st.booleans(), data=st.data())
def test_scoring_is_that_of_the_reference(x, rng, N, gradient, data):
    settings, k = data.draw(scorings(N))
    bias = None if settings["bias"] is None else torch.tensor(settings["bias"])
    rule = RoutingRule(k, scoring=Scoring(**{**settings, "bias": bias}))
    logits = torch.tensor(rng.standard_normal((*x.h.shape[:2], N)))
    with torch.set_grad_enabled(gradient):
        routing = rule(logits, x)
    for b, t in np.ndindex(*logits.shape[:2]):
        plain = {**settings, "bias": None if bias is None else bias.tolist()}
        g, S, w = reference.scored(logits[b, t].tolist(), k, **plain)
        assert routing.S[b, t].tolist() == S
        np.testing.assert_allclose(routing.g[b, t], g, rtol=1e-12)
        np.testing.assert_allclose(routing.w[b, t], w, rtol=1e-12)


def test_a_selection_bias_decides_the_choice_and_not_the_weights():
    scoring = Scoring(score="sigmoid", bias=torch.tensor([0.0, 0.0, 5.0]))
    logits = torch.tensor([[[2.0, 1.0, -1.0]]])
    routing = RoutingRule(2, scoring=scoring)(logits, router_input(np.random.default_rng(0), 1, 1))
    assert routing.S.tolist() == [[[0, 2]]], "heaviest first, whatever its bias"
    p = logits.sigmoid()[0, 0]
    torch.testing.assert_close(routing.w[0, 0], p[[0, 2]] / (p[0] + p[2]))
    torch.testing.assert_close(routing.g[0, 0], p / p.sum())


@pytest.mark.parametrize(("group_score", "chosen"), [("max", [0, 1]), ("top2", [2, 3])])
def test_a_group_is_as_good_as_its_best_expert_or_its_best_two(group_score, chosen):
    logits = torch.tensor([[[2.0, -5.0, 1.5, 1.4]]])
    scoring = Scoring(score="sigmoid", groups=2, groups_kept=1, group_score=group_score)
    routing = RoutingRule(2, scoring=scoring)(logits, router_input(np.random.default_rng(0), 1, 1))
    assert routing.S[0, 0].tolist() == chosen


def test_scores_have_gradient_through_any_scoring():
    scoring = Scoring(score="sigmoid", bias=torch.zeros(4), groups=2, groups_kept=1, renormalise=False, scale=2.0)
    logits = torch.tensor([[[2.0, 1.0, 0.5, 0.25]]], dtype=torch.float64, requires_grad=True)
    routing = RoutingRule(2, scoring=scoring)(logits, router_input(np.random.default_rng(0), 1, 1))
    (gradient,) = torch.autograd.grad(routing.w.sum(), logits)
    p = logits.detach().sigmoid()
    expected = 2.0 * p * (1 - p)
    expected[..., 2:] = 0.0
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 2, "groups_kept": 3}, r"groups_kept: got 3, expected 1 … 2 \(groups\)\."),
        ({"groups": 2, "groups_kept": 0}, r"groups_kept: got 0, expected 1 … 2 \(groups\)\."),
        ({"groups": 3, "groups_kept": 2}, r"groups: got 3, expected a divisor of the 4 experts\."),
        ({"groups": 4, "groups_kept": 2, "group_score": "top2"}, r"groups: got 4, expected groups of at least 2 .*"),
        ({"groups": 4, "groups_kept": 1}, r"groups_kept: got 1, expected groups with at least 2 experts, not 1\."),
        ({"bias": torch.zeros(3)}, r"bias: got \[3\], expected one number for each of 4\."),
    ],
)
def test_scoring_that_does_not_fit_the_experts_is_refused(settings, message):
    x = router_input(np.random.default_rng(0), 1, 2)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        RoutingRule(2, scoring=Scoring(**settings))(torch.zeros(1, 2, 4), x)


SEQUENTIAL = {
    "hysteresis": Hysteresis(bonus=0.2),
    "residency by score": Residency(capacity=3, margin=0.0, average=0.5),
    "residency by rank": Residency(capacity=3, margin=0.0, average=0.0),
    "slots": SlotChoice(capacity=3, margin=0.0),
    "segment": Segment(window=2),
    "window": HardWindow(window=2, beta=1.0),
}


@pytest.mark.parametrize("choice", SEQUENTIAL.values(), ids=SEQUENTIAL.keys())
@pytest.mark.parametrize("scoring", [{"score": "sigmoid"}, {"score": "sigmoid", "groups": 3, "groups_kept": 2}])
@costly
@given(x=inputs(), rng=seeds(), data=st.data())
def test_choices_that_remember_work_with_any_scoring(choice, scoring, x, rng, data):
    route = router(rng, 6, 2, choice=choice, scoring=Scoring(**scoring))
    assert_pieces_are_the_whole(route, x, data)
    routing = route(x)
    assert (routing.S[..., 0] != routing.S[..., 1]).all()
    assert (routing.w[..., 0] >= routing.w[..., 1]).all()
    torch.testing.assert_close(routing.g.sum(-1), torch.ones_like(routing.g[..., 0]))


def test_residents_are_still_exchanged_where_groups_are_excluded():
    """The experts of an excluded group rank at −∞; when their group returns, they can be loaded again."""
    logits = torch.full((1, 4, 4), -3.0)
    logits[0, :2, :2] = torch.tensor([3.0, 2.0])
    logits[0, 2:, 2:] = torch.tensor([3.0, 2.0])
    scoring = Scoring(score="sigmoid", groups=2, groups_kept=1)
    rule = RoutingRule(1, choice=Residency(capacity=2, margin=0.0, average=0.0), scoring=scoring)
    routing = rule(logits, router_input(np.random.default_rng(0), 1, 4))
    assert routing.S[0, :, 0].tolist() == [0, 0, 2, 2]


# Hard-Window


@thorough
@given(windowed_logits(), st.integers(1, 14), st.sampled_from([0.0, 0.5, 1.0, 10.0, 40.0]))
def test_hard_window_is_that_of_the_reference(case, window, beta):
    logits, k, x = case
    g, S, _ = choose(HardWindow(window=window, beta=beta), logits, k, x)
    for b in range(len(logits)):
        expected_g, expected_S = reference.hard_window(logits[b].tolist(), k, window, beta, doc_of(x, b))
        assert S[b].tolist() == expected_S
        np.testing.assert_allclose(g[b].numpy(), expected_g, rtol=1e-12, atol=1e-300)


@thorough
@given(windowed_logits(), st.integers(1, 14))
def test_a_window_without_bonus_is_top_k(case, window):
    logits, k, x = case
    g, S, _ = choose(HardWindow(window=window, beta=0.0), logits, k, x)
    plain_g, plain_S, _ = choose(TopK(), logits, k, x)
    assert torch.equal(g, plain_g)
    assert torch.equal(S, plain_S)


def test_the_window_holds_unbiased_choices_and_so_does_not_lock():
    """Expert 0 leads once, then expert 1: with a window of 1 the bonus follows the leader of the step before."""
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    x = router_input(np.random.default_rng(0), 1, 3)
    _, S, _ = choose(HardWindow(window=1, beta=10.0), logits, 1, x)
    assert S.flatten().tolist() == [0, 0, 1]


@thorough
@given(windowed_logits(), st.integers(1, 5))
def test_window_history_has_no_gradient_but_the_gates_have(case, window):
    """The bonus is a constant: the gradient is that of softmax(logits + constant)."""
    logits, k, x = case
    coefficients = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).cos()
    leaf = logits.clone().requires_grad_()
    g, _, _ = choose(HardWindow(window=window, beta=1.5), leaf, k, x)
    (g * coefficients).sum().backward()
    # g alone shows which experts had the bonus, up to a constant per token that the softmax removes.
    bonus = g.detach().log() - logits
    fixed = logits.clone().requires_grad_()
    ((fixed + bonus).softmax(-1) * coefficients).sum().backward()
    torch.testing.assert_close(leaf.grad, fixed.grad, rtol=1e-9, atol=1e-12)


# Pieces of a sequence


@every_part
@costly
@given(x=inputs(), rng=seeds(), N=st.integers(1, 6), data=st.data())
def test_any_pieces_are_routed_as_the_whole(parts, x, rng, N, data):
    route = router(rng, N, data.draw(st.integers(1, N)), **parts)
    assert_pieces_are_the_whole(route, x, data)


@every_part
def test_state_is_not_changed_by_the_next_call(parts):
    """So that one prefix can be continued in several ways."""
    rng = np.random.default_rng(3)
    x = router_input(rng, 2, 9)
    route = router(rng, 5, 2, **parts)
    state = route(steps(x, 0, 5)).state
    before = {name: value.clone() for name, value in state.values.items()}
    first = route(steps(x, 5, 9), state)
    assert all(torch.equal(before[name], state.values[name]) for name in before)
    assert torch.equal(route(steps(x, 5, 9), state).S, first.S)


@every_part
@costly
@given(x=inputs(), rng=seeds())
def test_documents_are_routed_as_if_alone(parts, x, rng):
    assert_documents_stand_alone(router(rng, 5, 2, **parts), x)


# State


def test_a_state_selects_rows_in_any_order():
    rng = np.random.default_rng(3)
    x = router_input(rng, 3, 9)
    route = router(rng, 5, 2, choice=Residency(capacity=3, margin=0.02, average=0.5), filter=Smooth(0.5))
    state = route(steps(x, 0, 5)).state
    rows = torch.tensor([2, 0, 2])
    chosen = replace(
        steps(x, 5, 9), **{f: getattr(steps(x, 5, 9), f)[rows] for f in ("h", "attended", "tokens", "position")}
    )
    assert torch.equal(route(chosen, state.select(rows)).S, route(steps(x, 5, 9), state).S[rows])
    assert state.select(rows).values.keys() == state.values.keys() == {"smooth", "demand", "resident"}
    assert torch.equal(state.select(rows).resident, state.resident[rows])
    assert len(state.select(torch.tensor([], dtype=torch.long)).resident) == 0


def test_residents_have_one_type_and_are_absent_where_none_are_kept():
    rng = np.random.default_rng(3)
    x = router_input(rng, 2, 5)
    for choice in (Residency(capacity=3, margin=0.0, average=0.5), SlotChoice(capacity=3, margin=0.0)):
        resident = router(rng, 5, 2, choice=choice)(x).state.resident
        assert resident.dtype == torch.bool
        assert resident.sum(-1).tolist() == [3, 3]
    assert router(rng, 5, 2)(x).state.resident is None
    assert RouterState().select(torch.tensor([0])).values == {}


# Inputs


@every_choice
@every_source
def test_a_rule_reads_one_source_only(source, choice):
    rng = np.random.default_rng(5)
    x = router_input(rng, 2, 7)
    route = router(rng, 4, 2, source=source, choice=choice)
    g = route(x).g
    ignored = "attended" if source == "h" else "h"
    other = replace(x, **{ignored: torch.full_like(x.h, torch.nan), "tokens": x.tokens + 1})
    assert torch.equal(route(other).g, g)
    assert not torch.allclose(route(replace(x, **{source: x.h + x.attended})).g, g)


@every_source
def test_gradient_reaches_the_source_and_the_gate(source):
    rng = np.random.default_rng(6)
    x = router_input(rng, 1, 5)
    x.h.requires_grad_()
    x.attended.requires_grad_()
    route = router(rng, 4, 2, source=source, choice=HardWindow(window=2, beta=1.0))
    routing = route(x)
    routing.w[..., 0].sum().backward()
    ignored = "attended" if source == "h" else "h"
    assert getattr(x, source).grad.abs().min() > 0
    assert getattr(x, ignored).grad is None
    assert route.gate.weight.grad.abs().max() > 0


def test_the_standard_rule_is_softmax_and_top_k_of_the_hidden_state():
    rng = np.random.default_rng(7)
    x = router_input(rng, 2, 6)
    route = router(rng, 4, 3)
    g = (x.h @ route.gate.weight.T).softmax(-1)
    torch.testing.assert_close(route(x).g, g, rtol=1e-12, atol=1e-14)
    assert route(x).S.tolist() == [[reference.top_k(row, 3) for row in sequence] for sequence in g.tolist()]


def test_a_rule_works_on_the_logits_of_any_gate_with_the_hidden_state_alone():
    x = replace(router_input(np.random.default_rng(7), 2, 6), attended=None, tokens=None, position=None)
    logits = torch.tensor(np.random.default_rng(8).standard_normal((2, 6, 5)))
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            routing = RoutingRule(2)(logits, x)
        torch.testing.assert_close(routing.g, logits.softmax(-1), rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class CachedFirst(ScannedChoice):
    """The experts of the caller's cache, lowest index first."""

    def choose(self, rank, g, x, state, progress, S):
        cached = x.resident.numpy()
        for b in range(len(S)):
            S[b] = np.flatnonzero(cached[b])[: S.shape[-1]]
        return RouterState()


@pytest.mark.parametrize("gradient", [True, False])
def test_a_choice_can_read_what_the_callers_cache_holds(gradient):
    rng = np.random.default_rng(9)
    resident = torch.tensor([[False, True, False, True], [True, False, True, False]])
    x = replace(router_input(rng, 2, 3), resident=resident)
    with torch.set_grad_enabled(gradient):
        routing = router(rng, 4, 2, choice=CachedFirst())(x)
    assert routing.S.tolist() == [[[1, 3]] * 3, [[0, 2]] * 3]


@every_part
def test_gates_for_the_gate_alone_have_the_values_of_g_and_no_other_gradient(parts):
    rng = np.random.default_rng(12)
    x = router_input(rng, 2, 5)
    x.h.requires_grad_()
    x.attended.requires_grad_()
    route = router(rng, 4, 2, gate_only=True, **parts)
    routing = route(x)
    assert torch.equal(routing.g_gate, routing.g)
    coefficients = torch.arange(routing.g.numel(), dtype=torch.float64).view_as(routing.g).cos()
    (of_g,) = torch.autograd.grad((routing.g * coefficients).sum(), route.gate.weight, retain_graph=True)
    (routing.g_gate * coefficients).sum().backward()
    assert x.h.grad is None
    assert x.attended.grad is None
    torch.testing.assert_close(route.gate.weight.grad, of_g, rtol=1e-12, atol=1e-14)
    assert router(rng, 4, 2, **parts)(x).g_gate is None


# Precision


@every_part
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_gates_are_fp32_under_bf16(parts, weights):
    rng = np.random.default_rng(8)
    x = router_input(rng, 2, 6, dtype=torch.bfloat16)
    route = router(rng, 4, 2, dtype=weights, **parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(x)
    assert routing.g.dtype == routing.w.dtype == torch.float32
    exact = router(rng, 4, 2, dtype=torch.float32, **parts)
    exact.gate.weight.data = route.gate.weight.data.float()
    by_hand = exact(replace(x, h=x.h.float(), attended=x.attended.float()))
    assert torch.equal(routing.g, by_hand.g)
    assert torch.equal(routing.S, by_hand.S)


# Weights and order


@every_part
@costly
@given(x=inputs(), rng=seeds(), N=st.integers(1, 6), data=st.data())
def test_weights_are_the_gates_of_the_chosen_renormalised_heaviest_first(parts, x, rng, N, data):
    k = data.draw(st.integers(1, N))
    routing = router(rng, N, k, **parts)(x)
    assert routing.S.tolist() == [[reference.top_k(row, k) for row in sequence] for sequence in routing.g.tolist()]
    torch.testing.assert_close(routing.g.sum(-1), torch.ones_like(routing.g[..., 0]), rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.w.sum(-1), torch.ones_like(routing.w[..., 0]), rtol=1e-12, atol=0)
    assert (routing.w[..., 1:] <= routing.w[..., :-1]).all()
    chosen = routing.g.gather(-1, routing.S)
    torch.testing.assert_close(routing.w * chosen.sum(-1, keepdim=True), chosen, rtol=1e-12, atol=1e-300)


@every_part
@pytest.mark.parametrize("N", [4, 40])
def test_ties_go_to_the_lowest_index(parts, N):
    x = router_input(np.random.default_rng(9), 2, 6, dtype=torch.float32)
    route = Router(D, N, RoutingRule(3, **parts))
    torch.nn.init.zeros_(route.gate.weight)
    routing = route(x)
    assert torch.equal(routing.S, torch.tensor([0, 1, 2]).expand(2, 6, 3))
    torch.testing.assert_close(routing.w, torch.full((2, 6, 3), 1 / 3))


# What compiled loops must not get


def test_a_token_can_have_all_experts_and_no_more():
    x = router_input(np.random.default_rng(0), 1, 3, dtype=torch.float32)
    assert Router(D, 4, RoutingRule(4))(x).S.shape == (1, 3, 4)
    for k in (0, 5):
        with pytest.raises(ConfigError, match=rf"^top_k: got {k}, expected 1 … 4 \(the number of experts\)\.$"):
            Router(D, 4, RoutingRule(k))
        with pytest.raises(ConfigError, match=rf"^top_k: got {k}, expected 1 … 4 \(the number of experts\)\.$"):
            RoutingRule(k)(torch.zeros(1, 3, 4), x)


@pytest.mark.parametrize("name", ["position", "tokens", "boundary", "doc"])
def test_fields_of_another_shape_are_refused(name):
    x = router_input(np.random.default_rng(0), 3, 4)
    # Around the type checks, which run in tests only.
    object.__setattr__(x, name, torch.zeros(1, 4, dtype=torch.bool if name == "boundary" else torch.long))
    expected = rf"^RouterInput: got {name} of shape \[1, 4\], expected \[3, 4\] as the logits\.$"
    with pytest.raises(ConfigError, match=expected):
        router(np.random.default_rng(0), 4, 2)(x)


def test_residents_of_other_rows_are_refused():
    x = router_input(np.random.default_rng(0), 3, 4)
    object.__setattr__(x, "resident", torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"^RouterInput: got resident of 1 rows, expected 3 as the logits\.$"):
        router(np.random.default_rng(0), 4, 2)(x)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"left": torch.zeros(2, 4, dtype=torch.long)}, r"got 'left' of 2 rows, expected 3 as the logits"),
        ({"left": torch.zeros(3, 5, dtype=torch.long)}, r"got 'left' of width 5, expected 4"),
    ],
)
def test_a_state_of_another_shape_is_refused(state, message):
    rng = np.random.default_rng(0)
    route, x = router(rng, 4, 2, choice=HardWindow(window=3, beta=1.0)), router_input(rng, 3, 4)
    with pytest.raises(ConfigError, match=rf"^RouterState: {message}\.$"):
        route(x, RouterState(state))


NEEDS = {
    "attended": {"source": "attended"},
    "tokens": {"choice": Hashed(0)},
    "position": {"filter": Smooth(0.5)},
    "boundary": {"choice": Trajectory(window=0, sentence=True)},
}


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(("name", "parts"), NEEDS.items(), ids=NEEDS.keys())
def test_a_missing_field_is_refused_in_one_line(name, parts, gradient):
    rng = np.random.default_rng(0)
    route, x = router(rng, 4, 2, **parts), replace(router_input(rng, 2, 3), **{name: None})
    message = rf"^RouterInput: {name} is missing, but this rule reads it; pass {name}\.$"
    with torch.set_grad_enabled(gradient), pytest.raises(ConfigError, match=message):
        route(x)


def test_an_exchanged_rule_is_used_with_gradient_and_without():
    rng = np.random.default_rng(0)
    route, x = router(rng, 6, 2), router_input(rng, 2, 9)
    route.rule = replace(route.rule, choice=HardWindow(window=3, beta=10.0))
    with torch.no_grad():
        scanned = route(x)
    assert torch.equal(scanned.S, route(x).S)
    assert scanned.state.values.keys() == {"left"}
