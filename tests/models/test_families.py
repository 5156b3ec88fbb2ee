"""Experts of a family: one at first, and what one learns in part all learn."""

from dataclasses import replace

import pytest
import torch
from stickymoe.routing.families import Families

from stickymoe.errors import ConfigError
from stickymoe.models.moe import Experts
from stickymoe.routing.losses import LossContext, family_balance_by_layer
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.training.build import build_model
from stickymoe.variants import variant_class

SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)


def model_of(**settings):
    return build_model(RunConfig(model=SIZES, variant=variant_class("siblings")(capacity=2, **settings)), 31)


def tokens_for(seed):
    return torch.randint(0, 31, (3, 24), generator=torch.Generator().manual_seed(seed))


def gradients(kin, *, fast=True):
    """Of a layer of random experts, of which not all are used."""
    made = Experts(5, 4, 6, fast=fast, families=None if kin is None else Families(2, kin)).double()
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
@pytest.mark.parametrize("kin", [0.25, 1.0])
def test_a_share_of_each_gradient_goes_to_the_whole_family(kin, fast):
    plain_y, own = gradients(None)
    y, mixed = gradients(kin, fast=fast)
    torch.testing.assert_close(y, plain_y, msg="the experts themselves are as they are")
    for mine, theirs in zip(mixed, own, strict=True):
        for family in ([0, 2, 4], [1, 3]):
            mean = sum(theirs[i] for i in family) / len(family)
            for i in family:
                torch.testing.assert_close(mine[i], kin * mean + (1 - kin) * theirs[i])


def test_kin_begin_as_one_and_strangers_do_not():
    for block in model_of(kin=0.5).blocks:
        for p in block.ffn.experts.parameters():
            assert torch.equal(p[0], p[2])
            assert torch.equal(p[0], p[4])
            assert torch.equal(p[1], p[3])
        assert not torch.equal(block.ffn.experts.up[0], block.ffn.experts.up[1])
    up = model_of(kin=0.0).blocks[0].ffn.experts.up
    assert not torch.equal(up[0], up[2])


def test_siblings_of_full_kin_stay_one_and_others_grow_apart():
    for kin in (1.0, 0.5):
        model = model_of(kin=kin)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(tokens_for(step), tokens_for(step + 1)).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        up = model.blocks[0].ffn.experts.up
        assert torch.equal(up[0], up[2]) == (kin == 1.0)


def test_siblings_stay_one_until_they_are_let_apart():
    model = model_of(kin=0.5, apart=0.5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    family = model.blocks[0].ffn.experts.up[0::2]
    for done in (0.0, 0.25, 0.49, 0.5):
        assert torch.equal(family, family[:1].expand_as(family))
        model(tokens_for(0), tokens_for(1), done=done).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert not torch.equal(family, family[:1].expand_as(family))


@pytest.mark.parametrize(("kin", "apart"), [(0.0, 0.5), (1.0, 0.5), (0.5, 1.0), (0.5, -0.1)])
def test_siblings_that_never_part_are_not_told_when_to(kin, apart):
    with pytest.raises(ConfigError, match=r"variant\.apart"):
        model_of(kin=kin, apart=apart)


def test_an_expert_with_a_slot_of_its_own_shares_no_gradient():
    alone, kin = (Experts(4, 8, 8, families=Families(C, 0.9)) for C in (4, 3))
    assert alone.families is None
    assert kin.families is not None


def test_siblings_keep_their_families_and_balance_in_company():
    variant = variant_class("siblings+soft")(capacity=2)
    assert variant.families == Families(2, variant.kin)
    trace = model_of()(tokens_for(0)).trace
    values = {term.symbol: term.fn(trace, LossContext()) for term in variant.terms()}
    assert values.keys() == {"bal", "cons"}
    torch.testing.assert_close(values["bal"], family_balance_by_layer(trace, capacity=2))


def test_a_model_whose_siblings_are_one_is_a_smaller_mixture():
    """Experts of a family that are the same, and gates that know no sibling from another: two experts, smoothed."""
    model = model_of(kin=1.0, fast=0.3)
    for block in model.blocks:
        torch.nn.init.zeros_(block.ffn.router.gate.weight[SIZES.n_experts :])
    whole = model(tokens_for(0))
    assert (whole.trace.S < 2).all(), "equal siblings never change places"
    smooth = variant_class("smooth")(decay=0.3)
    small = build_model(RunConfig(model=replace(SIZES, n_experts=2), variant=smooth), 31)
    weights = model.state_dict()
    for name, p in weights.items():
        if "experts" in name:
            weights[name] = p[:2]
        if name.endswith("router.gate.weight"):
            families = p[: SIZES.n_experts]
            weights[name] = torch.stack([families[0::2].mean(0), families[1::2].mean(0)])
    small.load_state_dict(weights)
    torch.testing.assert_close(small(tokens_for(0)).logits, whole.logits, rtol=1e-4, atol=1e-5)
