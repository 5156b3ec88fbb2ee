"""Llama-shaped models decode in compiled loops as in their own forward pass: the same experts, logits and text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralForCausalLM, PreTrainedModel

from alone import alone
from stickymoe.errors import ConfigError
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.runtime.engine import Engine, offload
from stickymoe.runtime.formats import ExpertLayout
from stickymoe.runtime.hosts import expert_spec
from stickymoe.runtime.llama import _BLOCK, LlamaDecoder
from tests.huggingface.tiny import VOCABULARY, tiny

NEW = 24  # tokens that are decoded
LONG = {"max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"sliding_window": None}),
    "mixtral with grouped queries": ("mixtral", {"num_key_value_heads": 2}),
    "mixtral with one key head": ("mixtral", {"num_key_value_heads": 1, "num_experts_per_tok": 1}),
    "mixtral with a short window": ("mixtral", {"sliding_window": 5}),
    "mixtral with wide heads": ("mixtral", {"head_dim": 24, "tie_word_embeddings": True}),
    "mixtral with yarn": ("mixtral", {"rope_parameters": YARN}),
    "olmoe": ("olmoe", {}),
    "olmoe without renormalised weights": ("olmoe", {"norm_topk_prob": False, "num_key_value_heads": 2}),
    "olmoe clipped and biased": ("olmoe", {"clip_qkv": 0.5, "attention_bias": True}),
    "qwen3": ("qwen3_moe", {}),
    "qwen3 with all options": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 with a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3 with linear scaling": ("qwen3_moe", {"rope_parameters": LINEAR}),
    "qwen3 with a dense layer": ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 40}),
    "qwen3 with dense layers around": ("qwen3_moe", {"decoder_sparse_step": 2}),
}
every_case = pytest.mark.parametrize("case", CASES)


def model_of(case: str, **changes: Any) -> PreTrainedModel:
    """A model whose norms and biases matter."""
    family, settings = CASES[case]
    model = tiny(family, **settings | changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif name.endswith("proj.bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = None
    return model


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


class Slots:
    """The experts of a model in fp32 slots, one for each expert."""

    def __init__(self, model: Any) -> None:
        self.of_layer = {}
        for layer, block in enumerate(model.model.layers):
            if hasattr(block.mlp, "experts"):
                experts = block.mlp.experts
                layout = ExpertLayout(expert_spec(experts), "fp32")
                pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
                specs = np.repeat(layout.spec_array()[None], block.mlp.gate.top_k, axis=0)
                self.of_layer[layer] = np.stack([layout.encode(pair) for pair in pairs]), specs


def token_in_slots(decoder: LlamaDecoder, slots: Slots, token: int) -> tuple[list[Any], np.ndarray]:
    """S and w of all layers that have experts, and the logits."""
    decoder.begin(token)
    routed, before = [], ()
    for layer in range(decoder.n_layers):
        found = decoder.step(layer, *before)
        before = ()
        if found is not None:
            S, w = (x.copy() for x in found)
            routed.append((S, w))
            before = (*slots.of_layer[layer], S)
    return routed, decoder.logits(*before).copy()


class Gates:
    """What the gates of a model choose in its own forward pass."""

    def __init__(self, model: Any) -> None:
        self.chosen: list[Any] = []
        for block in model.model.layers:
            if hasattr(block.mlp, "gate"):
                block.mlp.gate.register_forward_hook(self._note)

    def _note(self, gate: Any, given: Any, output: Any) -> None:
        _, w, S = output
        self.chosen.append((S[-1].numpy(), w[-1].numpy()))


@torch.no_grad()
def assert_decodes(model: Any, decoder: LlamaDecoder, length: int, n: int = NEW) -> list[int]:
    """The decoder gives what `model` gives, token after token."""
    slots, gates = Slots(model), Gates(model)
    out = model(input_ids=prompt_of(length), use_cache=True)
    decoder.start(out.past_key_values)
    text = [int(out.logits[0, -1].argmax())]
    for _ in range(n):
        gates.chosen.clear()
        out = model(input_ids=torch.tensor([text[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        routed, logits = token_in_slots(decoder, slots, text[-1])
        for (S, w), (expected, weights) in zip(routed, gates.chosen, strict=True):
            assert S.tolist() == expected.tolist()
            np.testing.assert_allclose(w, weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(logits, out.logits[0, -1].numpy(), rtol=1e-4, atol=1e-5)
        text.append(int(logits.argmax()))
    return text


def decoder_of(model: PreTrainedModel, threads: int = 1) -> LlamaDecoder:
    decoder = LlamaDecoder.of(model, threads=threads)
    assert decoder is not None
    return decoder


@every_case
@pytest.mark.parametrize("length", [1, 2, 13])
def test_decoding_is_that_of_the_model(case, length):
    model = model_of(case)
    text = assert_decodes(model, decoder_of(model), length)
    ids = prompt_of(length)
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW + 1, do_sample=False)
    assert text == own[0, length:].tolist()


@pytest.mark.parametrize(
    "case", ["mixtral with grouped queries", "olmoe clipped and biased", "qwen3 with a dense layer"]
)
def test_bf16_weights_are_computed_in_fp32(case):
    model = model_of(case).bfloat16()
    decoder = decoder_of(model)
    assert_decodes(copy.deepcopy(model).float(), decoder, 9)


@pytest.mark.parametrize("case", ["mixtral", "mixtral with a short window"])
def test_texts_longer_than_a_block(case):
    """Keys and values move to a larger place, and leave it if they are outside of the window."""
    model = model_of(case, **LONG)
    decoder = decoder_of(model)
    assert_decodes(model, decoder, _BLOCK - 6, n=_BLOCK + 12)
    assert decoder._capacity == (_BLOCK if "window" in case else 3 * _BLOCK)


@every_case
def test_a_text_can_begin_without_a_prompt(case):
    model = model_of(case)
    decoder, slots = decoder_of(model), Slots(model)
    tokens = prompt_of(12)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0].numpy()
    for _ in range(2):  # nothing is left of the first text
        decoder.start()
        logits = [token_in_slots(decoder, slots, token)[1] for token in tokens[0].tolist()]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@every_case
@alone
def test_threads_do_not_change_a_bit(case):
    model = model_of(case)
    decoders, slots = [decoder_of(model, threads) for threads in (1, 2)], Slots(model)
    with torch.no_grad():
        past = model(input_ids=prompt_of(6), use_cache=True).past_key_values
    for decoder in decoders:
        decoder.start(past)
    for token in prompt_of(NEW)[0].tolist():
        (one, a), (two, b) = (token_in_slots(decoder, slots, token) for decoder in decoders)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_equal(one, two)


@alone
def test_threads_do_not_change_a_bit_of_bf16_matrices():
    model = model_of("qwen3 with a dense layer", hidden_size=96, intermediate_size=136).bfloat16()
    slots = Slots(model)
    one, two = (decoder_of(model, threads) for threads in (1, 2))
    for token in prompt_of(NEW)[0].tolist():
        (_, a), (_, b) = (token_in_slots(decoder, slots, token) for decoder in (one, two))
        np.testing.assert_array_equal(a, b)


def test_the_matrices_of_the_model_are_not_copied():
    model = model_of("mixtral")
    decoder, slots = decoder_of(model), Slots(model)
    _, before = token_in_slots(decoder, slots, 5)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    decoder.start()
    _, after = token_in_slots(decoder, slots, 5)
    np.testing.assert_array_equal(after, 2 * before)


@every_case
def test_a_prediction_changes_nothing(case):
    model = model_of(case)
    decoder = decoder_of(model)
    gates = [model.model.layers[layer].mlp.gate for layer in decoder.expert_layers]
    decoder.begin(7)
    for layer in range(decoder.expert_layers[0] + 1):
        routed = decoder.step(layer)
    kept = [x.copy() for x in routed]
    h = torch.tensor(decoder.h(layer))[None]
    for later, gate in zip(decoder.expert_layers, gates, strict=True):
        assert decoder.predict(later) == gate(h)[2][0].tolist()
    np.testing.assert_equal(kept, list(routed))


# What is left to the model's own forward pass


class Other(MixtralForCausalLM):
    """A model of a user."""


def other_class() -> PreTrainedModel:
    return Other(model_of("mixtral").config).eval()


def other_head() -> PreTrainedModel:
    model = model_of("mixtral")
    model.lm_head = torch.nn.Linear(32, VOCABULARY)
    return model


def other_norm() -> PreTrainedModel:
    model = model_of("qwen3")
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(32)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny("qwen2_moe"),
        lambda: tiny("gpt_oss"),
        lambda: model_of("mixtral", hidden_act="gelu"),
        lambda: model_of("qwen3", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        lambda: model_of("olmoe", sliding_window=8),
        lambda: model_of("qwen3", layer_types=["full_attention"] * 3),
        lambda: model_of("mixtral").half(),
        lambda: model_of("mixtral").train(),
        other_class,
        other_head,
        other_norm,
    ],
)
def test_other_models_are_not_supported(make):
    assert LlamaDecoder.of(make()) is None


def test_mixed_types_are_not_supported():
    model = model_of("mixtral")
    model.lm_head.bfloat16()
    assert LlamaDecoder.of(model) is None


def test_what_the_decoder_refuses():
    model = model_of("mixtral")
    decoder = decoder_of(model)
    with pytest.raises(ConfigError, match=rf"^token: got {VOCABULARY}, expected 0 … {VOCABULARY - 1}\.$"):
        decoder.begin(VOCABULARY)
    with torch.no_grad():
        past = model(input_ids=prompt_of(4).repeat(2, 1), use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=r"^past: got 2 rows, expected one text\.$"):
        decoder.start(past)
    with pytest.raises(ValueError, match="call begin for the next token"):
        decoder.step(0)


# In the engine

ENGINE_CASES = ("mixtral with grouped queries", "olmoe without renormalised weights", "qwen3 with a dense layer")
engine_case = pytest.mark.parametrize("case", ENGINE_CASES)


def opened(model: PreTrainedModel, folder: Path, **settings: Any) -> Engine:
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
    return offload(folder / "model", store=folder / "store", experts="fp32", io="buffered", **settings)


def greedy(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return whole[0, ids.shape[1] :].tolist()


@engine_case
def test_every_capacity_gives_the_text_of_transformers(case, tmp_path):
    model = model_of(case)
    for length in (1, 6):
        ids = prompt_of(length)
        expected = greedy(model, ids)
        for slots in (1, 2, 3, None):
            with opened(model, tmp_path, slots=slots) as engine:
                assert engine.host.decoder is not None
                out = engine.generate(ids, max_new_tokens=NEW, stop_ids=())
            assert out.tokens == expected
            caches = simulate(out.table, capacity=engine.slots).caches
            assert sum(cache.misses for cache in caches) == out.stats.misses


@engine_case
@pytest.mark.parametrize(
    "settings",
    [{"prefetch": "next_layer"}, {"prefetch": "previous"}, {"on_miss": "bypass"}, {"policy": "lfu"}, {"threads": 2}],
    ids=str,
)
@alone
def test_settings_of_the_cache_do_not_change_the_text(case, settings, tmp_path):
    model = model_of(case)
    access = Access(prefetch="recorded" if "prefetch" in settings else None, on_miss=settings.get("on_miss", "load"))
    with opened(model, tmp_path, slots=3, **settings) as engine:
        for length in (1, 6):
            ids = prompt_of(length)
            out = engine.generate(ids, max_new_tokens=NEW, stop_ids=())
            assert out.tokens == greedy(model, ids)
            caches = simulate(out.table, capacity=3, policy=settings.get("policy", "lru"), access=access).caches
            assert sum(cache.misses for cache in caches) == out.stats.misses


@engine_case
def test_the_text_of_a_bf16_model_does_not_depend_on_the_cache(case, tmp_path):
    model, texts = model_of(case).bfloat16(), []
    for slots in (1, 3, None):
        with opened(model, tmp_path, slots=slots) as engine:
            assert engine.host.model.dtype == torch.bfloat16
            assert engine.host.decoder is not None
            texts.append(engine.generate(prompt_of(5), max_new_tokens=NEW, stop_ids=()).tokens)
    assert texts[0] == texts[1] == texts[2]


@engine_case
def test_the_routes_are_those_of_the_model_itself(case, tmp_path):
    model, ids = model_of(case), prompt_of(5)
    tables = []
    for kernel in ("torch", "compiled"):
        with opened(model, tmp_path, slots=2, kernel=kernel, prefetch="next_layer") as engine:
            tables.append(engine.generate(ids, max_new_tokens=NEW, stop_ids=()).table)
    plain, compiled = tables
    np.testing.assert_array_equal(plain.S, compiled.S)
    np.testing.assert_array_equal(plain.predicted, compiled.predicted)
    np.testing.assert_allclose(plain.weights, compiled.weights, rtol=1e-4, atol=1e-6)


def test_an_unsupported_model_decodes_by_its_own_forward_pass(tmp_path):
    model, ids = model_of("mixtral", hidden_act="gelu"), prompt_of(5)
    with opened(model, tmp_path, slots=2) as engine:
        assert engine.host.decoder is None
        assert engine.layers.kernel == "compiled"
        assert engine.generate(ids, max_new_tokens=NEW, stop_ids=()).tokens == greedy(model, ids)
