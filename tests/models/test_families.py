"""Experts of a family: one at first, apart at the end."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.models.moe import Experts, tied
from stickymoe.routing.families import Families
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.training.build import build_model
from stickymoe.variants import variant_class

SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)


def model_of(**settings):
    return build_model(RunConfig(model=SIZES, variant=variant_class("siblings")(capacity=2, **settings)), 31)


def experts(families, *, seed=0, fast=True):
    made = Experts(5, 4, 6, fast=fast, families=families).double()
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return made


def routed(n=7, N=5, k=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    S = torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(n)])
    w = torch.rand(n, k, generator=generator, dtype=torch.float64)
    return h, S, w


@given(apart=st.floats(0.01, 1.0), done=st.floats(0.0, 1.0))
def test_a_tie_falls_from_one_to_nothing(apart, done):
    families = Families(2, apart)
    assert families.tie(0.0) == 1.0
    assert families.tie(done) == pytest.approx(max(0.0, 1 - done / apart))
    assert families.tie(max(apart, done)) == 0.0
    assert Families(2).tie(done) == 0.0


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
def test_tied_experts_are_one_and_apart_ones_are_not(fast):
    made = experts(Families(2, apart=0.5), fast=fast)
    h, S, w = routed()
    brother = (S + 2) % 4  # 0 and 2, 1 and 3
    torch.testing.assert_close(made(h, S % 4, w, done=0.0), made(h, brother, w, done=0.0))
    assert not torch.allclose(made(h, S % 4, w, done=0.5), made(h, brother, w, done=0.5))
    torch.testing.assert_close(made(h, S, w, done=0.5), made(h, S, w))


def test_a_tie_mixes_weights_and_shares_their_gradient():
    stack = torch.tensor([[1.0], [10.0], [3.0], [20.0], [5.0]], dtype=torch.float64, requires_grad=True)
    half = tied(stack, 2, 0.5)
    torch.testing.assert_close(half.flatten(), torch.tensor([2.0, 12.5, 3.0, 17.5, 4.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(half[0].sum(), stack)
    torch.testing.assert_close(gradient.flatten(), torch.tensor([4.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64) / 6)


def test_members_begin_with_the_same_weights_where_they_begin_as_one():
    for block in model_of(apart=0.5).blocks:
        for p in block.ffn.experts.parameters():
            assert torch.equal(p[0], p[2])
            assert torch.equal(p[0], p[4])
            assert torch.equal(p[1], p[3])
        assert not torch.equal(block.ffn.experts.up[0], block.ffn.experts.up[1])
    up = model_of(apart=0.0).blocks[0].ffn.experts.up
    assert not torch.equal(up[0], up[2])


def test_a_model_whose_families_are_one_is_a_smaller_mixture():
    """Tied experts and gates that know no sibling from another: the routing of two experts, smoothed."""
    model = model_of(apart=1.0, fast=0.3)
    for block in model.blocks:
        torch.nn.init.zeros_(block.ffn.router.filter.gate.weight)
    tokens = torch.randint(0, 31, (3, 24), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, done=0.0)
    assert (whole.trace.S < 2).all(), "equal siblings never change places"
    smooth = variant_class("smooth")(decay=0.3)
    small = build_model(RunConfig(model=replace(SIZES, n_experts=2), variant=smooth), 31)
    weights = {n: p for n, p in model.state_dict().items() if "filter" not in n}
    for name, p in weights.items():
        if "experts" in name:
            weights[name] = p[:2]
        if name.endswith("router.gate.weight"):
            weights[name] = torch.stack([p[0::2].mean(0), p[1::2].mean(0)])
    small.load_state_dict(weights)
    torch.testing.assert_close(small(tokens).logits, whole.logits, rtol=1e-4, atol=1e-5)
