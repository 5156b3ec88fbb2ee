"""The paper's model: its size, its first weights, its head and its loss."""

from math import log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lively import SIZES, VOCAB, kinds_of_router, lively, random_tokens
from stickymoe.errors import StickyError
from stickymoe.models.gpt import GPT
from stickymoe.models.moe import MoE
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.presets import preset
from stickymoe.training.build import build_model
from stickymoe.variants import Site, variant_class

every_variant = pytest.mark.parametrize("variant", kinds_of_router())
GPT2_VOCAB = 50_257
# By hand: embeddings (V + 256)·d, final norm 2d, and per layer attention 4d² + 4d, norms 4d, a gate 4d and four
# experts 2·d·d_ff + d_ff + d each; the dense control has one network of width 2·d_ff and no gate.
PARAMETERS = {"small": (8_841_600, 7_785_344), "medium": (22_401_792, 18_192_128)}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# Size


@every_variant
@pytest.mark.parametrize("size", PARAMETERS)
@pytest.mark.parametrize("protocol", ["paper", "cpu"])
def test_parameter_count(variant, size, protocol):
    config = RunConfig(
        model=ModelConfig(**preset(f"{protocol}-{size}")["model"]),
        variant=variant_class(variant)(),
    )
    with torch.device("meta"):
        model = build_model(config, GPT2_VOCAB)
    routed, dense = PARAMETERS[size]
    sizes = config.model
    second_gates = sizes.n_layers * sizes.n_experts * sizes.d_model if variant in ("two_speed", "siblings") else 0
    assert parameters(model) == (dense if variant == "dense" else routed + second_gates)


def test_the_dense_control_multiplies_as_much_as_the_active_experts():
    dense = build_model(RunConfig(model=SIZES, variant=variant_class("dense")()), VOCAB)
    for block in dense.blocks:
        assert block.ffn.up.weight.shape == (SIZES.top_k * SIZES.d_ff, SIZES.d_model)
        assert block.ffn.down.weight.shape == (SIZES.d_model, SIZES.top_k * SIZES.d_ff)


# First weights

INIT = ModelConfig(d_model=64, n_layers=3, n_heads=4, n_experts=8, top_k=2, d_ff=96, seq_len=64)


def assert_normal(p, std):
    """N(0, std), as closely as a sample of this size can tell."""
    assert abs(p.std().item() / std - 1) < 5 / sqrt(2 * p.numel())
    assert abs(p.mean().item()) < 5 * std / sqrt(p.numel())


@pytest.mark.parametrize("variant", ["vanilla", "dense"])
def test_first_weights(variant):
    model = build_model(RunConfig(model=INIT, variant=variant_class(variant)(), seed=3), 1000)
    into_residual = 0.02 / sqrt(2 * INIT.n_layers)
    stds, zeros, ones = {}, [], []
    stds[model.token_embedding.weight] = stds[model.position_embedding.weight] = 0.02
    for block in model.blocks:
        stds[block.attention.qkv.weight] = 0.02
        stds[block.attention.out.weight] = into_residual
        zeros += [block.attention.qkv.bias, block.attention.out.bias]
        if isinstance(block.ffn, MoE):
            experts = block.ffn.experts
            stds[block.ffn.router.gate.weight] = stds[experts.up] = 0.02
            stds[experts.down] = into_residual
            zeros += [experts.up_bias, experts.down_bias]
        else:
            stds[block.ffn.up.weight] = 0.02
            stds[block.ffn.down.weight] = into_residual
            zeros += [block.ffn.up.bias, block.ffn.down.bias]
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            ones.append(module.weight)
            zeros.append(module.bias)
    for p, std in stds.items():
        assert_normal(p, std)
    assert all((p == 0).all() for p in zeros)
    assert all((p == 1).all() for p in ones)
    assert {id(p) for p in (*stds, *zeros, *ones)} == {id(p) for p in model.parameters()}


def test_every_expert_and_layer_starts_differently():
    model = build_model(RunConfig(model=INIT), 100)
    ups = torch.cat([block.ffn.experts.up for block in model.blocks])
    gates = torch.stack([block.ffn.router.gate.weight for block in model.blocks])
    assert len(torch.unique(ups, dim=0)) == INIT.n_layers * INIT.n_experts
    assert len(torch.unique(gates, dim=0)) == INIT.n_layers


@every_variant
def test_the_seed_decides_the_first_weights(variant):
    def weights(seed):
        return build_model(RunConfig(model=SIZES, variant=variant_class(variant)(), seed=seed), VOCAB).state_dict()

    first, second, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_a_new_model_predicts_almost_uniformly():
    model = build_model(RunConfig(model=INIT), 1000)
    tokens = torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(1))
    assert model(tokens, targets).loss.item() == pytest.approx(log(1000), rel=0.02)


# Head


@every_variant
def test_the_head_is_the_embedding(variant):
    model = build_model(RunConfig(model=SIZES, variant=variant_class(variant)()), VOCAB).double()
    assert sum(p.shape == (VOCAB, SIZES.d_model) for p in model.parameters()) == 1
    tokens = torch.randint(0, VOCAB - 1, (2, 6), generator=torch.Generator().manual_seed(0))  # never the last one
    with torch.no_grad():
        before = model(tokens).logits
        model.token_embedding.weight[-1] *= 3
        after = model(tokens).logits
    torch.testing.assert_close(after[..., :-1], before[..., :-1], rtol=0, atol=0)
    torch.testing.assert_close(after[..., -1], 3 * before[..., -1], rtol=1e-9, atol=1e-12)


# Loss


def with_targets(variant, seed, ignored):
    tokens, targets = random_tokens(seed, 2, 9), random_tokens(seed + 1, 2, 9)
    model = lively(variant)
    return model, tokens, targets.masked_fill(ignored, -100)


@every_variant
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1000), kept=st.sets(st.integers(0, 17), min_size=1))
def test_loss_is_the_mean_over_targets_that_count(variant, seed, kept):
    ignored = torch.ones(18, dtype=torch.bool)
    ignored[sorted(kept)] = False
    model, tokens, targets = with_targets(variant, seed, ignored.view(2, 9))
    out = model(tokens, targets)
    log_p = model(tokens).logits.log_softmax(-1).flatten(0, 1)
    by_hand = -sum(log_p[i, targets.flatten()[i]] for i in kept) / len(kept)
    assert out.loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


@every_variant
def test_ignored_targets_give_no_gradient(variant):
    """A token after the last counted target reaches no loss: its embedded position gets no gradient."""
    model = build_model(RunConfig(model=SIZES, variant=variant_class(variant)()), VOCAB)
    targets = random_tokens(1, 2, 9)
    targets[:, 5:] = -100
    model(random_tokens(0, 2, 9), targets).loss.backward()
    moved = model.position_embedding.weight.grad.abs().amax(-1) > 0
    assert moved.tolist() == [True] * 5 + [False] * (SIZES.seq_len - 5)


@every_variant
def test_a_pass_answers_loss_or_logits(variant):
    model, tokens = lively(variant), random_tokens(0, 2, 9)
    trained, asked = model(tokens, tokens), model(tokens)
    assert trained.logits is None
    assert asked.loss is None
    assert asked.logits.shape == (2, 9, VOCAB)
    assert trained.loss.shape == ()


@every_variant
def test_fast_and_plain_paths_give_the_same(variant):
    """Loss, logits, choices and every gradient."""
    chosen = variant_class(variant)()

    def make_parts(layer):
        return chosen.parts(Site(layer, SIZES.d_model, SIZES.n_experts, SIZES.top_k, VOCAB))

    tokens, targets = random_tokens(0, 2, 9), random_tokens(1, 2, 9)
    targets[0, 3] = -100
    results = {}
    for fast in (True, False):
        model = GPT(SIZES, VOCAB, make_parts, fast=fast).double()
        model.load_state_dict(lively(variant).state_dict())
        out = model(tokens, targets)
        out.loss.backward()
        choices = None if out.trace is None else out.trace.S
        results[fast] = out.loss, model(tokens).logits, choices, [p.grad for p in model.parameters()]
    (loss, logits, S, grads), (plain_loss, plain_logits, plain_S, plain_grads) = results[True], results[False]
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-9)
    assert S is plain_S is None or torch.equal(S, plain_S)
    for got, expected in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


# Trace


@every_variant
def test_mask_and_documents_reach_the_trace(variant):
    model, tokens = lively(variant), random_tokens(0, 2, 6)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    doc = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
    masked, bare = model(tokens, mask=mask, doc=doc).trace, model(tokens).trace
    if variant == "dense":
        assert masked is bare is None
        return
    assert torch.equal(masked.mask, mask)
    assert torch.equal(masked.doc, doc)
    assert bare.mask.all()
    assert bare.doc is None


@every_variant
def test_gates_are_fp32_in_a_bf16_pass(variant):
    model = build_model(RunConfig(model=SIZES, variant=variant_class(variant)()), VOCAB)
    tokens = random_tokens(0, 2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, tokens)
        out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())
    if out.trace is not None:
        assert out.trace.g.dtype == torch.float32
        torch.testing.assert_close(out.trace.g.sum(-1), torch.ones(2, 2, 9), rtol=0, atol=1e-6)


def test_loss_is_that_of_torch():
    """Against `F.cross_entropy` on the logits, as a third opinion."""
    model, tokens, targets = with_targets("vanilla", 5, torch.zeros(2, 9, dtype=torch.bool))
    logits = model(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert model(tokens, targets).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_padding_in_front_is_refused():
    model, tokens = lively("vanilla"), random_tokens(0, 2, 6)
    mask = torch.tensor([[True] * 6, [False, False, True, True, True, True]])
    with pytest.raises(StickyError, match="pad on the right"):
        model(tokens, mask=mask)
    assert model(tokens, mask=mask.flip(1)).logits.shape[:2] == (2, 6)


def test_a_mask_of_ones_and_zeros_is_one():
    model, tokens = lively("vanilla"), random_tokens(0, 2, 6)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    assert torch.equal(model(tokens, mask=mask.long()).trace.mask, mask)
    with pytest.raises(StickyError, match="padding before real tokens"):
        model(tokens, mask=mask.flip(1).long())
