"""The decoder gives what the plain model gives: the same experts, weights, logits and text, for every way to route."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from lively import enliven, random_tokens

from stickymoe.errors import ConfigError, StickyError
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.models.moe import MoE
from stickymoe.routing.layer import LayerParts, SidePart
from stickymoe.routing.rules import RouterState, RoutingRule, Scoring, TopK
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runtime.decoder import Decoder
from stickymoe.training.build import build_model
from stickymoe.variants import variant, variant_names

VOCAB = 23
SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2, "n_experts": 5, "top_k": 2, "d_ff": 12, "seq_len": 48}
NEW = 32  # tokens that are decoded
SETTINGS = {
    "learned": {"name": "smooth", "learned": True, "decay": 0.7},
    "recommended": dict(RECOMMENDED),
    "siblings with a token gate": {"name": "siblings", "token": True, "hashed": True, "capacity": 3},
    "siblings rarely loaded": {"name": "siblings", "capacity": 2, "budget": 0.2, "rho": 0.0},
    "siblings never loaded": {"name": "siblings", "capacity": 2, "budget": 0.0},
    "residents by their average": {"name": "residency", "capacity": 3, "average": 0.6, "rho": 0.01, "pinned": 1},
    "residents by their logits": {"name": "residency", "capacity": 3, "average": 0.0, "rho": 0.1},
    "cheap rent": {"name": "rent", "capacity": 3, "price": 0.2},
    "spans": {"name": "trajectory", "span": 5},
    "short segments": {"name": "segment", "span": 4},
    "wide rows": {"name": "lookup", "table_rows": 11, "table_width": 20, "table_heads": 4, "ngrams": (2, 4)},
    "rows of n-grams only": {"name": "lookup", "table_rows": 11, "ngrams_only": True, "ungated": True},
    "combined": {"name": "smooth+hysteresis+lookup", "table_rows": 11},
}
COMPILED = [*SETTINGS, *(name for name in variant_names())]
every_variant = pytest.mark.parametrize("name", COMPILED)


def model_of(name: str, **sizes) -> GPT:
    settings = dict(SETTINGS.get(name, {"name": name}))
    if settings["name"] == "lookup":
        settings.setdefault("table_rows", 11)
    return model_with(variant(**settings), **sizes)


def model_with(variant, **sizes) -> GPT:
    config = RunConfig(model=ModelConfig(**SIZES | sizes), variant=variant)
    return enliven(build_model(config, VOCAB)).requires_grad_(False).eval()


class Slots:
    """The experts of a model in fp32 slots: one for each expert, in an order of its own."""

    def __init__(self, model: GPT) -> None:
        self.slots, self.place, self.spec = {}, {}, {}
        for layer, block in enumerate(model.blocks):
            if isinstance(block.ffn, MoE):
                e = block.ffn.experts
                pieces = [[p[i].numpy().reshape(-1) for p in (e.up, e.up_bias, e.down, e.down_bias)] for i in range(len(e.up))]
                order = np.roll(np.arange(len(pieces)), layer)[::-1]
                self.slots[layer] = np.stack([np.concatenate(pieces[i]) for i in order]).view(np.uint8)
                self.place[layer] = np.argsort(order)
                begins = np.cumsum([0] + [4 * len(piece) for piece in pieces[0][:3]])
                self.spec[layer] = np.tile([*begins, e.up.shape[1]], (model.config.top_k, 1))

    def of(self, layer: int, S, w) -> tuple:
        which = np.where(w > 0, self.place[layer][S], -1)
        return self.slots[layer], self.spec[layer], which


def expert_output(model: GPT, layer: int, h, S, w):
    """Σ w·expert(h) by the plain model."""
    tensors = (torch.tensor(x)[None] for x in (h, S, w))
    return model.blocks[layer].ffn.experts(*tensors)[0].numpy()


def token_in_slots(decoder: Decoder, slots: Slots, token: int, **given) -> tuple:
    """S and w of all layers, and the logits, with one compiled call for each layer."""
    decoder.begin(token, **given)
    routed, bring = [], None
    for layer in range(decoder.n_layers):
        found = decoder.route(layer) if bring is None else decoder.step(layer, *bring)
        bring = None if found is None else slots.of(layer, *found)
        routed += [] if found is None else [[x.copy() for x in found]]
    return routed, (decoder.logits() if bring is None else decoder.logits(*bring)).copy()


def token_by_parts(decoder: Decoder, model: GPT, token: int) -> tuple:
    """The same with the experts of the plain model, added by hand."""
    decoder.begin(token)
    routed = []
    for layer in range(decoder.n_layers):
        found = decoder.route(layer)
        if found is not None:
            routed.append([x.copy() for x in found])
            decoder.add(layer, expert_output(model, layer, decoder.h(layer), *found))
    return routed, decoder.logits().copy()


@torch.no_grad()
def prefill(model: GPT, prompt: torch.Tensor, **given) -> tuple[DecodeCache, int]:
    cache = DecodeCache.empty(model.config.n_layers)
    out = model(prompt, cache=cache, **given)
    return cache, int(out.logits[0, -1].argmax())


@torch.no_grad()
def assert_decodes(model: GPT, cache: DecodeCache, token: int, step, n: int = NEW, boundaries=None) -> list[int]:
    """`step` decodes as the plain model, greedily; returns the text."""
    text = []
    for t in range(n):
        given = {} if boundaries is None else {"boundary": torch.tensor([[boundaries[t]]])}
        plain = model(torch.tensor([[token]]), cache=cache, **given)
        routed, logits = step(token) if boundaries is None else step(token, boundary=boundaries[t])
        if plain.trace is not None:
            for layer, (S, w) in enumerate(routed):
                assert S.tolist() == plain.trace.S[layer, 0, 0].tolist(), (t, layer)
                np.testing.assert_allclose(w, plain.trace.w[layer, 0, 0].numpy(), rtol=0, atol=1e-5)
        expected = plain.logits[0, 0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
        token = int(expected.argmax())
        assert int(logits.argmax()) == token
        text.append(token)
    return text


def decoder_after(model: GPT, cache: DecodeCache) -> Decoder:
    decoder = Decoder(model)
    decoder.start(cache)
    return decoder


def check(model: GPT, length: int, seed: int = 0) -> Decoder:
    """A decode in slots after a prompt of that length."""
    cache, token = prefill(model, random_tokens(seed, 1, length))
    decoder, slots = decoder_after(model, cache), Slots(model)
    assert_decodes(model, cache, token, lambda token: token_in_slots(decoder, slots, token))
    return decoder


@every_variant
@pytest.mark.parametrize("length", [1, 2, 13])
def test_decoding_is_that_of_the_plain_model(name, length):
    check(model_of(name), length)
