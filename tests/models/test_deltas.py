"""Experts that are a resident base and a small difference: against loops, and what they cost to keep and to load."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from lively import assert_same, decode, enliven, full, random_tokens
from stickymoe.errors import ConfigError
from stickymoe.models.moe import DeltaExperts, Experts
from stickymoe.routing.deltas import Deltas
from stickymoe.routing.ties import TiedExperts
from stickymoe.runs.config import ModelConfig, RunConfig, TrainConfig
from stickymoe.training.build import build_model
from stickymoe.training.optimiser import adamw
from stickymoe.variants import variant

SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)
D, F = 5, 7
each_path = pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])


def model_of(name="delta", model=SIZES, **settings):
    return build_model(RunConfig(model=model, variant=variant(name, **{"capacity": 2, "rank": 3, **settings})), 31)


def layer(N, C, r, seed, *, fast=True, ties=None):
    made = DeltaExperts(N, D, F, Deltas(C, r), fast=fast, ties=ties).double()
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return made


def routed(n, N, k, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    h = torch.randn(n, D, generator=generator, dtype=torch.float64).requires_grad_()
    S = torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(n)])
    return h, S, torch.rand(n, k, generator=generator, dtype=torch.float64)


def matrix(base, out, inner):
    return torch.stack([torch.stack(row) for row in reference.with_difference(base, out, inner)])


def naive(made, h, S, w):
    """Token by token, expert by expert, the weights of each entry by entry."""
    C = made.deltas.bases
    weights = [
        (
            matrix(made.up[e % C], made.up_out[e], made.up_in[e]),
            matrix(made.down[e % C], made.down_out[e], made.down_in[e]),
        )
        for e in range(len(made.up_in))
    ]
    rows = []
    for x, experts, factors in zip(h, S.tolist(), w, strict=True):
        y = torch.zeros_like(x)
        for e, factor in zip(experts, factors, strict=True):
            up, down = weights[e]
            inner = up @ x + made.up_bias[e]
            inner = 0.5 * inner * (1 + torch.erf(inner / sqrt(2)))
            y = y + factor * (down @ inner + made.down_bias[e])
        rows.append(y)
    return torch.stack(rows)


@each_path
@settings(deadline=None, max_examples=15)
@given(
    size=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)).filter(
        lambda s: s[1] <= s[0] and s[2] <= s[0]
    ),
    seed=st.integers(0, 10_000),
)
def test_the_layer_is_that_of_the_loops_with_gradients(fast, size, seed):
    N, C, k, r = size
    made = layer(N, C, r, seed, fast=fast)
    h, S, w = routed(4, N, k, seed)
    leaves = {"h": h, **dict(made.named_parameters())}
    got, expected = made(h, S, w), naive(made, h, S, w)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    uneven = torch.arange(1, got.numel() + 1, dtype=got.dtype).view_as(got).cos()
    found, wanted = (
        torch.autograd.grad((y * uneven).sum(), list(leaves.values()), materialize_grads=True, allow_unused=True)
        for y in (got, expected)
    )
    for name, mine, theirs in zip(leaves, found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_without_a_difference_experts_are_their_bases():
    """With as many bases as experts, that is a plain layer."""
    made, plain = layer(4, 4, 2, 0), Experts(4, D, F).double()
    for p in (made.up_out, made.down_out):
        torch.nn.init.zeros_(p)
    plain.load_state_dict({name: p for name, p in made.state_dict().items() if name in plain.state_dict()})
    h, S, w = routed(6, 4, 2, 0)
    torch.testing.assert_close(made(h, S, w), plain(h, S, w))


def test_the_experts_of_a_base_start_equal_and_diverge():
    model = model_of()
    experts = model.blocks[0].ffn.experts
    for weights in experts.weights():
        assert torch.equal(weights[0], weights[2])
        assert torch.equal(weights[1], weights[3])
    assert not torch.equal(experts.weights()[0][0], experts.weights()[0][1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(random_tokens(0, 3, 24), random_tokens(1, 3, 24)).loss.backward()
    optimiser.step()
    up = experts.weights()[0]
    assert not torch.allclose(up[0], up[2])


def test_ties_share_the_gradient_of_the_whole_weights():
    h, S, w = routed(7, 4, 2, 3)
    gradients = []
    for ties in (None, TiedExperts(2, 0.25)):
        made = layer(5, 2, 3, 3, ties=ties)
        made(h, S, w).square().sum().backward()
        gradients.append(made)
    own, mixed = gradients
    for slot in ([0, 2, 4], [1, 3]):
        mean = sum(own.up_bias.grad[i] for i in slot) / len(slot)
        for i in slot:
            torch.testing.assert_close(mixed.up_bias.grad[i], 0.25 * mean + 0.75 * own.up_bias.grad[i])
    torch.testing.assert_close(mixed.up.grad, own.up.grad, msg="a base has the sum over its slot either way")


def test_experts_that_share_all_gradient_stay_equal():
    model = model_of("siblings+delta", shared_gradient=1.0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(random_tokens(step, 3, 24), random_tokens(step + 1, 3, 24)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    up = model.blocks[0].ffn.experts.weights()[0]
    assert torch.equal(up[0], up[2])
    assert not torch.equal(up[0], up[1])


def test_a_load_is_the_difference_and_bases_stay_in_memory():
    c = ModelConfig(d_model=128, n_layers=3, n_heads=4, n_experts=16, top_k=2, d_ff=512, seq_len=24)
    model = model_of("siblings+delta", c, capacity=4, rank=8)
    plain = build_model(RunConfig(model=c, variant=variant("siblings", capacity=4)), 31)
    d, f, r = 128, 512, 8
    difference, base = 4 * (2 * r * (d + f) + d + f), 4 * 2 * d * f
    assert model.expert_bytes() == [difference] * 3
    assert 0.05 < difference / plain.expert_bytes()[0] < 0.1
    assert model.other_bytes() == plain.other_bytes() + 3 * 4 * base
    assert model.other_bytes() + 16 * sum(model.expert_bytes()) == sum(p.nbytes for p in model.parameters())


def test_layers_that_share_experts_share_bases():
    model = model_of(model=replace(SIZES, share_block=2))
    first, second = (block.ffn.experts for block in model.blocks)
    assert first is second
    assert model._no_split_modules == ("Block", "DeltaExperts")
    assert model.other_bytes() + SIZES.n_experts * first.expert_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("name", ["siblings+delta", "residency+delta", "hash+delta", "delta+lookup"])
def test_a_combination_decodes_as_it_reads(name):
    made = enliven(model_of(name).double()).requires_grad_(False)
    tokens = random_tokens(0, 2, 24)
    assert_same(decode(made, tokens, None, list(range(1, 24))), full(made, tokens))


def test_the_slots_of_a_combination_are_one_setting():
    combined = variant("siblings+delta", capacity=4, rank=2)
    assert combined.settings()["capacity"] == 4
    assert combined.deltas() == Deltas(4, 2)
    assert combined.ties() == TiedExperts(4, 0.9)


def test_matrices_decay_and_biases_do_not():
    model = model_of()
    groups = adamw(model.named_parameters(), TrainConfig()).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, p in model.blocks[0].ffn.experts.named_parameters():
        assert (decays[id(p)] > 0) == ("bias" not in name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 13}, "variant.rank: got 13, expected at most 12, the rank of an expert's matrices."),
        ({"capacity": 6}, "variant.capacity: got 6, expected at most the 5 experts of a layer."),
        ({"rank": 0}, "variant.rank: got 0, expected a whole number ≥ 1."),
    ],
)
def test_a_size_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError) as e:
        model_of(**settings)
    assert str(e.value) == message
