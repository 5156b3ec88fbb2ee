"""Upcycling: a Mixtral of equal experts is the dense model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples.smollm2.upcycle import upcycle


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,  # not hidden_size / heads
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokens():
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_are_the_dense_models(dense, tokens):
    assert torch.allclose(upcycle(dense)(tokens).logits, dense(tokens).logits, atol=1e-5)


def test_greedy_text_is_the_dense_models(dense, tokens):
    ours, theirs = (
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False)
        for model in (upcycle(dense), dense)
    )
    assert ours.tolist() == theirs.tolist()


@torch.no_grad()
def test_the_saved_folder_gives_the_same_logits(dense, tokens, tmp_path):
    model = upcycle(dense, noise=0.1)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)


@torch.no_grad()
def test_layers_keeps_the_first(dense, tokens):
    model = upcycle(dense, layers=2)
    hidden = dense(tokens, output_hidden_states=True).hidden_states[2]
    expected = dense.lm_head(dense.model.norm(hidden))
    assert torch.allclose(model(tokens).logits, expected, atol=1e-5)


def gate_gradient(model, tokens):
    model(input_ids=tokens, labels=tokens).loss.backward()
    return max(layer.mlp.gate.weight.grad.abs().max().item() for layer in model.model.layers)


def test_gates_learn_only_where_experts_differ(dense, tokens):
    equal, different = (gate_gradient(upcycle(dense, noise=noise), tokens) for noise in (0.0, 0.1))
    assert equal < 1e-6
    assert different > 1e-4


def test_noise_is_relative_to_the_weights(dense):
    weight = dense.model.layers[0].mlp.down_proj.weight
    experts = upcycle(dense, noise=0.5).model.layers[0].mlp.experts.down_proj
    off = (experts - weight).std() / weight.std()
    assert off.item() == pytest.approx(0.5, rel=0.05)


def test_router_logits_have_the_given_spread(dense):
    """Over many gates, for a dense norm with any weights."""
    tokens = torch.randint(3, 97, (4, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        dense.model.layers[1].post_attention_layernorm.weight.copy_(torch.linspace(0.1, 2, 48))
    model, seen = upcycle(dense, n_experts=64, spread=0.5), []
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda m, args, out: seen.append(out[0].detach()))
    model(tokens)
    handle.remove()
    with torch.no_grad():
        dense.model.layers[1].post_attention_layernorm.weight.fill_(1.0)
    assert seen[0].std().item() == pytest.approx(0.5, rel=0.2)


def test_more_layers_than_there_are_is_refused(dense):
    with pytest.raises(ValueError, match="1 … 3 layers, got 4"):
        upcycle(dense, layers=4)
