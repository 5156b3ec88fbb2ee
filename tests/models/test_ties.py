"""Experts that share a slot: tied at initialisation, and they share a fraction of their gradients."""

from dataclasses import replace

import pytest
import torch

from stickymoe.errors import ConfigError
from stickymoe.models.moe import Experts
from stickymoe.routing.losses import LossContext, slot_balance_by_layer
from stickymoe.routing.ties import TiedExperts
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.training.build import build_model
from stickymoe.variants import variant

SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)


def model_of(**settings):
    return build_model(RunConfig(model=SIZES, variant=variant("siblings", capacity=2, **settings)), 31)


def tokens_for(seed):
    return torch.randint(0, 31, (3, 24), generator=torch.Generator().manual_seed(seed))


def gradients(shared, *, fast=True):
    """Of a layer of random experts, of which not all are used."""
    made = Experts(5, 4, 6, fast=fast, ties=None if shared is None else TiedExperts(2, shared)).double()
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    h = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    S = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    w = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    y = made(h, S, w)
    y.square().sum().backward()
    return y, [p.grad for p in made.parameters()]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("shared", [0.25, 1.0])
def test_a_fraction_of_each_gradient_is_the_mean_over_the_slot(shared, fast):
    plain_y, own = gradients(None)
    y, mixed = gradients(shared, fast=fast)
    torch.testing.assert_close(y, plain_y, msg="ties change gradients only")
    for mine, theirs in zip(mixed, own, strict=True):
        for slot in ([0, 2, 4], [1, 3]):
            mean = sum(theirs[i] for i in slot) / len(slot)
            for i in slot:
                torch.testing.assert_close(mine[i], shared * mean + (1 - shared) * theirs[i])


def test_the_shared_fraction_is_1_until_experts_are_untied():
    ties = TiedExperts(2, 0.25, untie_after=0.5)
    assert [ties.shared_at(progress) for progress in (0.0, 0.49, 0.5, 1.0)] == [1.0, 1.0, 0.25, 0.25]


def test_in_evaluation_ties_are_those_of_the_end_of_training():
    made = Experts(4, 2, 2, ties=TiedExperts(2, 0.5, untie_after=0.5))
    for p in made.parameters():
        torch.nn.init.ones_(p)
    made.progress = 0.0
    h, S, w = torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    for mode, other in ((made.train, 0.5), (made.eval, 0.25)):
        mode()
        (bias,) = torch.autograd.grad(made(h, S, w).sum(), made.down_bias)
        assert bias[:, 0].tolist() == [1 - other, 0.0, other, 0.0]


def test_the_experts_of_a_slot_start_equal_only_if_tied():
    for block in model_of(shared_gradient=0.5).blocks:
        for p in block.ffn.experts.parameters():
            assert torch.equal(p[0], p[2])
            assert torch.equal(p[0], p[4])
            assert torch.equal(p[1], p[3])
        assert not torch.equal(block.ffn.experts.up[0], block.ffn.experts.up[1])
    up = model_of(shared_gradient=0.0).blocks[0].ffn.experts.up
    assert not torch.equal(up[0], up[2])


def test_experts_that_share_all_gradient_stay_equal_and_others_diverge():
    for shared in (1.0, 0.5):
        model = model_of(shared_gradient=shared)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(tokens_for(step), tokens_for(step + 1)).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        up = model.blocks[0].ffn.experts.up
        assert torch.equal(up[0], up[2]) == (shared == 1.0)


def test_the_experts_of_a_slot_stay_equal_until_they_are_untied():
    model = model_of(shared_gradient=0.5, untie_after=0.5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slot = model.blocks[0].ffn.experts.up[0::2]
    for progress in (0.0, 0.25, 0.49, 0.5):
        assert torch.equal(slot, slot[:1].expand_as(slot))
        model.set_progress(progress)
        model(tokens_for(0), tokens_for(1)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert not torch.equal(slot, slot[:1].expand_as(slot))


@pytest.mark.parametrize(("shared", "untie_after"), [(0.0, 0.5), (1.0, 0.5), (0.5, 1.0), (0.5, -0.1)])
def test_a_time_to_untie_is_refused_where_experts_are_never_or_always_tied(shared, untie_after):
    with pytest.raises(ConfigError, match=r"^variant\.untie_after: got "):
        model_of(shared_gradient=shared, untie_after=untie_after)


def test_an_expert_with_a_slot_of_its_own_shares_no_gradient():
    alone, tied = (Experts(4, 8, 8, ties=TiedExperts(C, 0.9)) for C in (4, 3))
    assert alone.ties is None
    assert tied.ties is not None


def test_ties_and_balance_are_kept_in_a_combination():
    combined = variant("siblings+soft", capacity=2)
    assert combined.ties() == TiedExperts(2, 0.9)
    trace = model_of()(tokens_for(0)).trace
    values = {term.symbol: term.fn(trace, LossContext()) for term in combined.terms()}
    assert values.keys() == {"bal", "cons"}
    torch.testing.assert_close(values["bal"], slot_balance_by_layer(trace, capacity=2))


def test_a_model_whose_slots_hold_equal_experts_is_a_smaller_mixture():
    """Equal experts in each slot, and gates that do not tell them apart: two experts, smoothed."""
    model = model_of(shared_gradient=1.0, fast=0.3)
    for block in model.blocks:
        torch.nn.init.zeros_(block.ffn.router.gate.weight[SIZES.n_experts :])
    whole = model(tokens_for(0))
    assert (whole.trace.S < 2).all(), "equal experts do not replace each other"
    smooth = variant("smooth", decay=0.3)
    small = build_model(RunConfig(model=replace(SIZES, n_experts=2), variant=smooth), 31)
    weights = model.state_dict()
    for name, p in weights.items():
        if "experts" in name:
            weights[name] = p[:2]
        if name.endswith("router.gate.weight"):
            of_slots = p[: SIZES.n_experts]
            weights[name] = torch.stack([of_slots[0::2].mean(0), of_slots[1::2].mean(0)])
    small.load_state_dict(weights)
    torch.testing.assert_close(small(tokens_for(0)).logits, whole.logits, rtol=1e-4, atol=1e-5)
