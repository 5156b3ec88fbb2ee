"""Rule parts that remember, against plain loops; pieces against the whole; documents on their own."""

from dataclasses import replace

import cases
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
    router_input,
    steps,
    windowed_logits,
)
from hypothesis import given
from hypothesis import strategies as st

import reference
from stickymoe.errors import ConfigError
from stickymoe.locality.replay import simulate
from stickymoe.locality.table import RouteTable
from stickymoe.models.moe import Router
from stickymoe.routing.fixed import Hashed, Trajectory, hash_key
from stickymoe.routing.rules import HardWindow, RouterState, RoutingRule, TopK
from stickymoe.routing.sequential import (
    Hysteresis,
    LearnedSmooth,
    Rent,
    Residency,
    Segment,
    SlotChoice,
    SlotGates,
    Smooth,
    TwoSpeed,
)
from strategies import costly, seeds, thorough

CHOICES = {
    "hysteresis": Hysteresis(bonus=0.75),
    "residency by logit": Residency(capacity=3, margin=0.5, average=0.0),
    "residency by average": Residency(capacity=2, margin=0.02, average=0.75),
    "rent": Rent(capacity=3, price=0.2),
    "slots": SlotChoice(capacity=3, margin=0.02, budget=0.4),
    "slots by hash": SlotChoice(capacity=3, margin=0.02, budget=0.4, hashed=1),
    "segment": Segment(window=3),
    "hash": Hashed(1),
    "trajectory": Trajectory(window=3, sentence=False),
    "window": HardWindow(window=2, beta=2.0),
    "top-k": TopK(),
}
every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
N, K = 5, 2


def router(rng, **parts):
    return cases.router(rng, N, K, **parts)


# Against the loops


@thorough
@given(case=windowed_logits(), bonus=st.sampled_from([0.0, 0.5, 1.0, 20.0]))
def test_hysteresis_is_that_of_the_reference(case, bonus):
    logits, k, x = case
    g, S, _ = choose(Hysteresis(bonus=bonus), logits, k, x)
    assert torch.equal(g, logits.softmax(-1)), "weights are without the bonus"
    for b in range(len(logits)):
        assert S[b].tolist() == reference.hysteresis(logits[b].tolist(), k, bonus, doc_of(x, b))


@thorough
@given(
    case=windowed_logits(),
    room=st.integers(0, 4),
    margin=st.sampled_from([0.0, 0.25, 1.0]),
    average=st.sampled_from([0.0, 0.5]),
    pinned=st.integers(0, 2),
)
def test_residency_is_that_of_the_reference(case, room, margin, average, pinned):
    logits, k, x = case
    pinned = min(pinned, k + room - 1)
    choice = Residency(capacity=k + room, margin=margin, average=average, pinned=pinned)
    g, S, state = choose(choice, logits, k, x)
    assert torch.equal(g, logits.softmax(-1))
    for b in range(len(logits)):
        expected, residents = reference.residency(
            logits[b].tolist(), k, k + room, margin, average, doc_of(x, b), pinned
        )
        if average and margin == 0.0:
            continue  # averages that are equal on paper differ in the last bit
        assert S[b].tolist() == expected
        assert set(np.flatnonzero(state.resident[b])) == residents[-1]


@thorough
@given(
    case=windowed_logits(),
    room=st.integers(0, 4),
    margin=st.sampled_from([0.03125, 0.25, 1.0]),
    budget=st.sampled_from([0.1, 0.25, 0.4, 1.0]),
    layer=st.sampled_from([None, 0, 3]),
)
def test_slot_choice_is_that_of_the_reference(case, room, margin, budget, layer):
    logits, k, x = case
    logits = logits + 0.01 * torch.arange(2, 2 + logits.shape[-1]).sqrt()  # no two wins are equal on paper
    g, S, state = choose(SlotChoice(capacity=k + room, margin=margin, budget=budget, hashed=layer), logits, k, x)
    assert torch.equal(g, logits.softmax(-1))
    rest = {0.1: 10, 0.25: 4, 0.4: 3, 1.0: 1}[budget]
    N = logits.shape[-1]
    for b in range(len(logits)):
        drawn = None
        if layer is not None:
            drawn = [reference.hashed_slots(token, k + room, N, k, layer) for token in x.tokens[b].tolist()]
        expected, residents = reference.slot_choice(logits[b].tolist(), k, k + room, margin, rest, doc_of(x, b), drawn)
        assert S[b].tolist() == expected
        assert set(np.flatnonzero(state.resident[b])) == residents[-1]


def test_ties_between_slots_go_to_the_first_and_the_next_load_waits_for_the_budget():
    logits = torch.zeros(1, 13, 4)
    logits[:, 0, :2] = 1.0  # 0 and 1 begin, then 2 and 3 win alike
    logits[:, 1:, 2:] = 1.0
    x = router_input(np.random.default_rng(0), 1, 13)
    _, S, _ = choose(SlotChoice(capacity=2, margin=0.0, budget=0.1), logits, 2, x)
    assert S[0].tolist() == [[0, 1], *[[2, 1]] * 10, *[[2, 3]] * 2], "0.1 is a load every 10 tokens"
    _, S, _ = choose(SlotChoice(capacity=2, margin=0.0, budget=0.0), logits, 2, x)
    assert S[0].tolist() == [[0, 1]] * 13


def test_a_budget_too_small_for_any_text_loads_nothing():
    logits = torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(0))
    x = router_input(np.random.default_rng(0), 1, 40)
    none = choose(SlotChoice(capacity=2, margin=0.0, budget=0.0), logits, 2, x)[1]
    for budget in (1e-20, 5e-324):
        assert torch.equal(choose(SlotChoice(capacity=2, margin=0.0, budget=budget), logits, 2, x)[1], none)


def test_a_non_resident_that_missed_more_but_is_not_wanted_does_not_block_another():
    gates = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.5, 0.3, 0.1], *[[0.05, 0.4, 0.1, 0.45]] * 5])
    x = router_input(np.random.default_rng(0), 1, 7)
    _, S, _ = choose(Rent(capacity=1, price=0.0), gates.log()[None], 1, x)
    assert S.flatten().tolist() == [0, 1, 3, 3, 3, 3, 3]


@thorough
@given(case=windowed_logits(), room=st.integers(0, 4), price=st.sampled_from([0.0, 0.3, 1.0]))
def test_rent_is_that_of_the_reference(case, room, price):
    logits, k, x = case
    g, S, state = choose(Rent(capacity=k + room, price=price), logits, k, x)
    assert torch.equal(g, logits.softmax(-1))
    for b in range(len(logits)):
        expected, residents = reference.rent(logits[b].tolist(), k, k + room, price, doc_of(x, b))
        assert S[b].tolist() == expected
        assert set(np.flatnonzero(state.resident[b])) == residents[-1]


@thorough
@given(case=windowed_logits(), room=st.integers(0, 2), price=st.sampled_from([0.0, 0.3]))
def test_an_lru_cache_loads_no_more_than_rent(case, room, price):
    logits, k, x = case
    assert_lru_loads_no_more(logits, k, x, min(k + room, logits.shape[-1]), price)


@pytest.mark.parametrize(("k", "capacity", "n_experts"), [(2, 4, 8), (2, 4, 16), (3, 6, 10)])
def test_an_lru_cache_loads_no_more_than_rent_if_residents_were_last_used_together(k, capacity, n_experts):
    logits = torch.randn(10, 100, n_experts, generator=torch.Generator().manual_seed(0)).double()
    assert_lru_loads_no_more(logits, k, router_input(np.random.default_rng(0), 10, 100), capacity, 0.3)


def assert_lru_loads_no_more(logits, k, x, capacity, price):
    _, S, _ = choose(Rent(capacity=capacity, price=price), logits, k, x)
    for b in range(len(logits)):
        doc = doc_of(x, b)
        _, residents = reference.rent(logits[b].tolist(), k, capacity, price, doc)
        starts = reference.starts(len(residents), doc)
        loaded = sum(
            len(R - before) for before, R, start in zip(residents, residents[1:], starts[1:], strict=False) if not start
        )
        table = RouteTable(
            S=S[b : b + 1].numpy().astype(np.uint8)[None],
            n_experts=logits.shape[-1],
            mask=np.ones((1, len(residents)), np.bool_),
            doc=None if doc is None else np.array([doc]),
        )
        cold = sum(starts) * capacity
        assert simulate(table, capacity=capacity).misses <= loaded + cold


@thorough
@given(
    case=windowed_logits(),
    room=st.integers(0, 2),
    average=st.sampled_from([0.0, 0.5]),
    slots=st.booleans(),
)
def test_at_most_one_expert_is_loaded_per_token(case, room, average, slots):
    logits, k, x = case
    shared = Residency(capacity=k + room, margin=0.0, average=average)
    choice = SlotChoice(capacity=k + room, margin=0.0) if slots else shared
    T, state, residents = logits.shape[1], None, []
    for t in range(T):
        _, S, state = choose(choice, logits[:, t : t + 1], k, steps(x, t, t + 1), state)
        residents.append(state.resident)
        assert residents[-1].gather(1, S[:, 0]).all(), "only residents are chosen"
    for t in range(1, T):
        loaded = (residents[t] & ~residents[t - 1]).sum(-1)
        assert (loaded[x.position[:, t] > 0] <= 1).all()


@thorough
@given(case=windowed_logits(), budget=st.sampled_from([0.0, 0.1, 0.3, 0.5]))
def test_slot_choice_keeps_to_its_budget(case, budget):
    logits, k, x = case
    x = replace(x, doc=None, position=torch.arange(logits.shape[1]).expand(logits.shape[:2]))
    choice, state, loads = SlotChoice(capacity=k, margin=0.0, budget=budget), RouterState(), 0
    for t in range(logits.shape[1]):
        before = state.resident
        _, _, state = choose(choice, logits[:, t : t + 1], k, steps(x, t, t + 1), state)
        loads = loads + (state.resident & ~before).sum(-1) if t else torch.zeros(len(logits))
        assert (loads <= 1 + budget * t + 1e-9).all()


@thorough
@given(case=windowed_logits(), window=st.integers(1, 6))
def test_segment_is_that_of_the_reference(case, window):
    logits, k, x = case
    g, S, _ = choose(Segment(window=window), logits, k, x)
    assert torch.equal(g, logits.softmax(-1))
    for b in range(len(logits)):
        assert S[b].tolist() == reference.segment(logits[b].tolist(), k, window, doc_of(x, b))


@thorough
@given(x=inputs(), rng=seeds(), decay=st.sampled_from([0.0, 0.3, 0.9]))
def test_smoothing_logits_is_smoothing_what_the_gate_reads(x, rng, decay):
    route = router(rng, filter=Smooth(decay))
    smooth = [reference.smooth(x.h[b].tolist(), decay, doc_of(x, b)) for b in range(len(x.h))]
    expected = (torch.tensor(smooth, dtype=torch.float64) @ route.gate.weight.T).softmax(-1)
    torch.testing.assert_close(route(x).g, expected, rtol=1e-9, atol=1e-12)


@thorough
@given(x=inputs(), rng=seeds(), decay=st.sampled_from([0.3, 0.9]), data=st.data())
def test_two_speeds_add_the_logits_of_the_token_and_of_the_average(x, rng, decay, data):
    route = router(rng, filter=TwoSpeed(decay))
    now, slow = route.gate.weight.split(N)
    smooth = [reference.smooth(x.h[b].tolist(), decay, doc_of(x, b)) for b in range(len(x.h))]
    expected = (x.h @ now.T + torch.tensor(smooth, dtype=torch.float64) @ slow.T).softmax(-1)
    torch.testing.assert_close(route(x).g, expected, rtol=1e-9, atol=1e-12)
    assert_pieces_are_the_whole(route, x, data)


@thorough
@given(
    x=inputs(),
    rng=seeds(),
    slots=st.integers(1, N + 1),
    fast=st.sampled_from([0.0, 0.6]),
    token=st.booleans(),
    data=st.data(),
)
def test_a_gate_of_slots_and_one_of_their_experts_add_up(x, rng, slots, fast, token, data):
    route = router(rng, filter=SlotGates(slots, fast=fast, slow=0.9, token=token))
    first, own, *context = (gate.tolist() for gate in route.gate.weight.split(N))
    rows = (context[0], own) if token else (first, own)
    alone = first if token else None
    logits = [
        reference.slot_gates(x.h[b].tolist(), *rows, slots, fast, 0.9, doc_of(x, b), alone) for b in range(len(x.h))
    ]
    torch.testing.assert_close(route(x).g, torch.tensor(logits, dtype=torch.float64).softmax(-1), rtol=1e-9, atol=1e-12)
    assert_pieces_are_the_whole(route, x, data)


@thorough
@given(case=windowed_logits(), progress=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
def test_residency_is_annealed_from_top_k_to_its_full_resistance(case, progress):
    logits, k, x = case
    n = logits.shape[-1]
    annealed = Residency(capacity=max(n - 1, k), margin=0.25, average=0.75, free=0.25, anneal=0.5)
    _, S, _ = choose(annealed, logits, k, x, progress=progress)
    if progress <= 0.25:
        expected = choose(TopK(), logits, k, x)[1]
    else:
        margin, average = (0.125, 0.5) if progress == 0.5 else (0.25, 0.75)
        constant = replace(annealed, margin=margin, average=average, free=0.0, anneal=0.0)
        expected = choose(constant, logits, k, x)[1]
    assert torch.equal(S, expected)


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_a_router_is_annealed_while_it_trains_and_not_in_evaluation(progress):
    rng = np.random.default_rng(4)
    x = router_input(rng, 2, 12)
    route = router(rng, choice=Rent(capacity=2, price=2.0, anneal=1.0))
    route.progress = progress
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            annealed, final = route.train()(x).S, route.eval()(x).S
        at_progress = replace(route.rule.choice, anneal=0.0, price=progress * 2.0)
        expected = TopK() if progress == 0 else at_progress
        assert torch.equal(annealed, choose(expected, x.h @ route.gate.weight.T, K, x)[1])
        assert torch.equal(final, choose(Rent(capacity=2, price=2.0), x.h @ route.gate.weight.T, K, x)[1])
        assert not torch.equal(annealed, final)


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_gradient_of_smoothing(learned):
    rng = np.random.default_rng(3)
    x = router_input(rng, 2, 7, torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7]))
    smooth = LearnedSmooth(0.7).double() if learned else Smooth(0.7)
    logits = torch.tensor(rng.standard_normal((2, 7, 3)), requires_grad=True)
    bias = [smooth.decay_bias] if learned else []

    def of(values, *_):
        return smooth(values, x, RouterState())[0]

    assert torch.autograd.gradcheck(of, (logits, *bias))


def test_a_learned_decay_starts_at_the_given_one():
    rng = np.random.default_rng(4)
    x, logits = router_input(rng, 2, 6), torch.tensor(rng.standard_normal((2, 6, 3)))
    given, learned = (smooth(logits, x, RouterState())[0] for smooth in (Smooth(0.7), LearnedSmooth(0.7).double()))
    torch.testing.assert_close(learned, given)


@thorough
@given(case=windowed_logits(), window=st.integers(0, 4), sentence=st.booleans(), data=st.data())
def test_a_trajectory_is_decided_by_the_first_token_of_its_span(case, window, sentence, data):
    logits, k, x = case
    B, T, n_experts = logits.shape

    def heaviest_first(row, key):
        return sorted(sorted(reference.hashed_experts(key, n_experts, k)), key=lambda i: -row.softmax(-1)[i])

    flags = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))).view(B, T)
    x = replace(x, boundary=flags)
    _, S, _ = choose(Trajectory(window=window, sentence=sentence), logits, k, x)
    for b in range(B):
        first = reference.span_starts(T, window, sentence, flags[b], doc_of(x, b))
        keys = x.tokens[b, first].tolist()
        assert S[b].tolist() == [heaviest_first(logits[b, t], key) for t, key in enumerate(keys)]


@pytest.mark.parametrize("keys", [(0, 1), (hash_key(1, salt=42), hash_key(1, salt=43))], ids=["layers", "salts"])
def test_a_hash_is_fair_and_differs_between_layers_and_salts(keys):
    n = 40_000
    x = router_input(np.random.default_rng(0), 1, n)
    x = replace(x, tokens=torch.arange(n)[None])
    layers = [choose(Hashed(key), torch.zeros(1, n, 4), 2, x)[1] for key in keys]
    for key, S in zip(keys, layers, strict=True):
        assert S[0, :50].tolist() == [sorted(reference.hashed_experts(t, 4, 2, key)) for t in range(50)]
        assert (S[..., 0] != S[..., 1]).all()
        shares = S.flatten().bincount(minlength=4) / S.numel()
        torch.testing.assert_close(shares, torch.full((4,), 0.25), rtol=0, atol=0.01)
    same = (layers[0] == layers[1]).all(-1).float().mean()
    assert same.item() == pytest.approx(1 / 6, abs=0.01)


@pytest.mark.parametrize(
    ("n_experts", "capacity", "expected"),
    # Of sizes 2, 1, 1 the first is drawn at once (1/2) or after another (2/3 of the rest), and so on.
    [
        (4, 3, [5 / 6, 7 / 12, 7 / 12]),
        (5, 4, [7 / 10, 13 / 30, 13 / 30, 13 / 30]),
        (6, 3, [2 / 3] * 3),
        (3, 5, [2 / 3] * 3),
    ],
)
def test_a_hash_draws_larger_slots_more_often(n_experts, capacity, expected):
    n = 40_000
    x = replace(router_input(np.random.default_rng(0), 1, n), tokens=torch.arange(n)[None])
    _, S, _ = choose(SlotChoice(capacity=capacity, margin=0.0, hashed=1), torch.zeros(1, n, n_experts), 2, x)
    drawn = (S[0] % capacity).flatten().bincount(minlength=len(expected)) / n
    torch.testing.assert_close(drawn, torch.tensor(expected), rtol=0, atol=0.01)


# Pieces and documents, alone and combined

FILTERS = {"none": {}, "smooth": {"filter": Smooth(0.6)}}


@every_choice
@costly
@given(x=inputs(), rng=seeds(), parts=st.sampled_from(list(FILTERS.values())), data=st.data())
def test_any_parts_route_pieces_as_the_whole(choice, x, rng, parts, data):
    source = data.draw(st.sampled_from(["h", "attended"]))
    assert_pieces_are_the_whole(router(rng, choice=choice, source=source, **parts), x, data)


@every_choice
@costly
@given(x=inputs(), rng=seeds(), parts=st.sampled_from(list(FILTERS.values())))
def test_any_parts_route_documents_as_if_alone(choice, x, rng, parts):
    assert_documents_stand_alone(router(rng, choice=choice, **parts), x)


@every_choice
@costly
@given(x=inputs(), rng=seeds())
def test_the_chosen_are_different_and_heaviest_first(choice, x, rng):
    routing = router(rng, choice=choice, filter=Smooth(0.5))(x)
    assert (routing.S[..., 0] != routing.S[..., 1]).all()
    assert (routing.w[..., 0] >= routing.w[..., 1]).all()
    torch.testing.assert_close(routing.g.sum(-1), torch.ones_like(routing.g[..., 0]))


@every_choice
def test_state_is_not_changed_by_the_next_call(choice):
    rng = np.random.default_rng(5)
    x = router_input(rng, 2, 9)
    route = router(rng, choice=choice, filter=Smooth(0.6))
    state = route(steps(x, 0, 5)).state
    before = {name: value.clone() for name, value in state.values.items()}
    route(steps(x, 5, 9), state)
    assert all(torch.equal(before[name], state.values[name]) for name in before)


@every_choice
def test_gates_for_the_gate_alone_have_the_values_of_g(choice):
    rng = np.random.default_rng(6)
    x = router_input(rng, 2, 5)
    x.h.requires_grad_()
    routing = router(rng, choice=choice, filter=Smooth(0.6), gate_only=True)(x)
    assert torch.equal(routing.g_gate, routing.g)
    routing.g_gate[..., 0].sum().backward()
    assert x.h.grad is None


@every_choice
def test_gates_are_fp32_under_bf16(choice):
    rng = np.random.default_rng(7)
    x = router_input(rng, 2, 6, dtype=torch.bfloat16)
    route = Router(D, N, RoutingRule(K, choice=choice, filter=LearnedSmooth(0.5))).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(x)
    assert routing.g.dtype == routing.w.dtype == torch.float32
    routing.w.sum().backward()


@pytest.mark.parametrize(
    "choice",
    [Residency(capacity=1, margin=0.0, average=0.0), SlotChoice(capacity=1, margin=0.0)],
    ids=lambda c: type(c),
)
def test_too_few_residents_are_refused(choice):
    x = router_input(np.random.default_rng(8), 1, 3)
    with pytest.raises(ConfigError, match=r"^variant.capacity: got 1, expected at least the 2 experts of a token\.$"):
        choose(choice, torch.zeros(1, 3, 4), 2, x)


def test_a_bonus_holds_the_first_choice_and_none_is_top_k():
    logits = torch.tensor([[[1.0, 0.0], [0.0, 0.9], [0.0, 2.0]]])
    x = router_input(np.random.default_rng(0), 1, 3)
    assert choose(Hysteresis(bonus=1.0), logits, 1, x)[1].flatten().tolist() == [0, 0, 1]
    assert choose(Hysteresis(bonus=0.0), logits, 1, x)[1].flatten().tolist() == [0, 1, 1]


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("part", [{"choice": Residency(capacity=3, margin=0.0, average=0.0)}, {"filter": Smooth(0.5)}])
def test_tokens_are_not_continued_without_their_state(part, gradient):
    rng = np.random.default_rng(0)
    route, x = router(rng, **part), router_input(rng, 2, 9)
    message = r"^RouterState: got tokens from position 5 without the state of the tokens before them;"
    with torch.set_grad_enabled(gradient), pytest.raises(ConfigError, match=message):
        route(steps(x, 5, 9))


@pytest.mark.parametrize("gradient", [True, False])
def test_experts_whose_gates_underflow_get_equal_weights(gradient):
    """Residents that the gate gives nothing, in fp32, are still all that can be chosen."""
    route = Router(2, 3, RoutingRule(2, choice=Residency(capacity=2, margin=1e6, average=0.0)))
    route.gate.weight.data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    h = torch.tensor([[[1.0, 0.0], [0.0, 150.0], [0.0, 95.0]]], requires_grad=True)
    x = replace(router_input(np.random.default_rng(0), 1, 3, dtype=torch.float32), h=h, attended=h)
    with torch.set_grad_enabled(gradient):
        routing = route(x)
    assert routing.S.tolist() == [[[0, 1]] * 3]
    assert torch.equal(routing.w.detach(), torch.full((1, 3, 2), 0.5))
    if gradient:
        routing.w[..., 0].sum().backward()
        assert h.grad.isfinite().all()


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("part", [Smooth(0.5), SlotGates(3, fast=0.5, slow=0.9)], ids=["smooth", "slot gates"])
def test_nan_in_a_document_does_not_reach_the_next(part, gradient):
    rng = np.random.default_rng(0)
    doc = torch.tensor([[0, 0, 0, 1, 1, 1]])
    x = router_input(rng, 1, 6, doc)
    x.h[0, 1] = torch.nan
    with torch.set_grad_enabled(gradient):
        g = router(rng, filter=part)(x).g
    assert g[0, 1:3].isnan().all()
    assert not g[0, 3:].isnan().any()
