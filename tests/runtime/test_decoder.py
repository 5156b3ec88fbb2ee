"""The decoder gives what the plain model gives: the same experts, weights, logits and text, for every way to route."""

import gc
import weakref
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from alone import alone
from lively import enliven, random_tokens
from stickymoe.errors import ConfigError, StickyError
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.models.moe import MoE
from stickymoe.routing.layer import LayerParts, SidePart
from stickymoe.routing.rules import RouterState, RoutingRule, Scoring
from stickymoe.routing.sequential import Smooth
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runtime.decoder import Decoder
from stickymoe.runtime.formats import ExpertLayout
from stickymoe.training.build import build_model
from stickymoe.variants import base, variant, variant_names
from tests.runtime.experts import expert_spec

VOCAB = 23
SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2, "n_experts": 5, "top_k": 2, "d_ff": 12, "seq_len": 48}
NEW = 32  # tokens that are decoded
SETTINGS = {
    "learned": {"name": "smooth", "learned": True, "decay": 0.7},
    "recommended": dict(RECOMMENDED),
    "siblings with a token gate": {"name": "siblings", "token": True, "hashed": True, "capacity": 3},
    "siblings that win by far": {"name": "siblings", "capacity": 2, "rho": 0.5, "budget": 1.0},
    "siblings rarely loaded": {"name": "siblings", "capacity": 2, "budget": 0.2, "rho": 0.0},
    "siblings never loaded": {"name": "siblings", "capacity": 2, "budget": 0.0},
    "residents by their average": {"name": "residency", "capacity": 3, "average": 0.6, "rho": 0.01, "pinned": 1},
    "residents by their logits": {"name": "residency", "capacity": 3, "average": 0.0, "rho": 3.0},
    "cheap rent": {"name": "rent", "capacity": 3, "price": 0.2},
    "spans": {"name": "trajectory", "span": 5},
    "short segments": {"name": "segment", "span": 4},
    "wide rows": {"name": "lookup", "table_rows": 11, "table_width": 20, "table_heads": 4, "ngrams": (2, 4)},
    "rows of n-grams only": {"name": "lookup", "table_rows": 11, "ngrams_only": True, "ungated": True},
    "combined": {"name": "smooth+hysteresis+lookup", "table_rows": 11},
}
every_variant = pytest.mark.parametrize("name", [*SETTINGS, *variant_names()])


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
        spec = expert_spec(model.config.d_model, model.config.d_ff)
        layout = ExpertLayout(spec, "fp32")
        for layer, block in enumerate(model.blocks):
            if isinstance(block.ffn, MoE):
                weights = dict(zip(("up", "up_bias", "down", "down_bias"), block.ffn.experts.weights(), strict=True))
                stacks = [weights[tensor.name] for tensor in spec.tensors]
                order = np.roll(np.arange(len(stacks[0])), layer)[::-1]
                self.slots[layer] = np.stack([layout.encode([stack[i] for stack in stacks]) for i in order])
                self.place[layer] = np.argsort(order)
                self.spec[layer] = np.repeat(layout.spec_array()[None], model.config.top_k, axis=0)

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


@pytest.mark.parametrize("name", ["recommended", "dense", "drop_cold", "lookup"])
def test_experts_can_be_added_by_hand(name):
    model = model_of(name)
    cache, token = prefill(model, random_tokens(1, 1, 6))
    decoder = decoder_after(model, cache)
    assert_decodes(model, cache, token, lambda token: token_by_parts(decoder, model, token))


@every_variant
def test_a_text_can_begin_without_a_prompt(name):
    model = model_of(name)
    decoder, slots = Decoder(model), Slots(model)
    cache = DecodeCache.empty(model.config.n_layers)
    assert_decodes(model, cache, 5, lambda token: token_in_slots(decoder, slots, token), n=model.config.seq_len)


@pytest.mark.parametrize("name", ["vanilla", "recommended", "lookup", "rent", "cache_prior"])
def test_the_decoder_can_start_again(name):
    """Nothing is left of the text before, and the cache is not changed."""
    model = model_of(name)
    decoder, slots = Decoder(model), Slots(model)
    cache, token = prefill(model, random_tokens(2, 1, 7))
    texts = []
    for _ in range(2):
        decoder.start(cache)
        copy = DecodeCache(list(cache.layers), cache.position, cache.doc)
        texts.append(assert_decodes(model, copy, token, lambda token: token_in_slots(decoder, slots, token), n=9))
    assert texts[0] == texts[1]
    decoder.start()
    empty = DecodeCache.empty(model.config.n_layers)
    assert_decodes(model, empty, 3, lambda token: token_in_slots(decoder, slots, token), n=9)


@pytest.mark.parametrize("pool", [{"share_block": 2}, {"share_block": 4}, {"universal": True}], ids=str)
@pytest.mark.parametrize("name", ["vanilla", "recommended", "residency", "max_rank"])
def test_layers_that_share_experts(name, pool):
    check(model_of(name, n_layers=4, **pool), 9)


@pytest.mark.parametrize("sizes", [{"top_k": 1}, {"top_k": 4, "n_experts": 9}, {"d_model": 24, "n_heads": 3}], ids=str)
@pytest.mark.parametrize("name", ["vanilla", "hash", "drop_cold", "two_speed", "dense"])
def test_other_sizes(name, sizes):
    check(model_of(name, **sizes), 4)


def test_the_sizes_of_the_paper():
    sizes = {"d_model": 128, "n_layers": 4, "n_heads": 4, "n_experts": 4, "d_ff": 512, "seq_len": 256}
    config = RunConfig(model=ModelConfig(top_k=2, **sizes), variant=variant("vanilla"))
    model = build_model(config, 4096).requires_grad_(False).eval()
    prompt = torch.randint(0, 4096, (1, 200), generator=torch.Generator().manual_seed(0))
    cache, token = prefill(model, prompt)
    decoder, slots = decoder_after(model, cache), Slots(model)
    assert_decodes(model, cache, token, lambda token: token_in_slots(decoder, slots, token))


def test_the_last_document_of_a_packed_prompt_is_continued():
    model = model_of("lookup")
    prompt, doc = random_tokens(3, 1, 12), torch.tensor([[0] * 7 + [1] * 5])
    cache, token = prefill(model, prompt, doc=doc)
    decoder, slots = decoder_after(model, cache), Slots(model)
    alone, same = prefill(model, prompt[:, 7:])
    assert same == token
    assert_decodes(model, alone, token, lambda token: token_in_slots(decoder, slots, token))


def test_sentences_end_spans():
    model = model_with(variant("trajectory", sentence=True))
    prompt = random_tokens(4, 1, 8)
    cache, token = prefill(model, prompt, boundary=torch.arange(8)[None] % 3 == 0)
    decoder, slots = decoder_after(model, cache), Slots(model)
    boundaries = [t % 4 == 1 for t in range(NEW)]

    def step(token, boundary):
        return token_in_slots(decoder, slots, token, boundary=boundary)

    assert_decodes(model, cache, token, step, boundaries=boundaries)
    with pytest.raises(ConfigError, match=r"^RouterInput: boundary is missing, but this rule reads it; pass boundary"):
        decoder.begin(0)


@alone
def test_threads_do_not_change_the_logits():
    sizes = ModelConfig(**SIZES | {"d_model": 40})
    model = enliven(build_model(RunConfig(model=sizes, variant=variant("dense")), 1001)).requires_grad_(False)
    one, two = Decoder(model), Decoder(model, threads=2)
    for token in range(8):
        (_, a), (_, b) = (token_in_slots(decoder, None, token) for decoder in (one, two))
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", ["vanilla", "lookup", "cache_prior"])
def test_the_decoder_keeps_no_experts(name):
    model = model_of(name)
    decoder, up = Decoder(model), weakref.ref(model.blocks[0].ffn.experts)
    del model
    gc.collect()
    assert up() is None
    decoder.begin(1)
    assert decoder.route(0) is not None


# Rules and parts that the compiled loops do not know


class Alternating:
    """A choice of a user: the expert t mod N, and the best other one. It also remembers its input."""

    def __call__(self, given, x, state):
        p = given.scoring.scores(given.logits)
        N, t = p.shape[-1], state.values.get("t", torch.zeros(len(p), 1, dtype=torch.long))
        fixed = ((t + torch.arange(p.shape[1])) % N)[..., None]
        last = state.values.get("last", torch.zeros_like(given.logits[:, -1]))
        ranking = (given.logits + last[:, None]) if p.shape[1] == 1 else given.logits
        best = ranking.scatter(-1, fixed, torch.inf).topk(2, dim=-1).indices
        S = best.gather(-1, p.gather(-1, best).argsort(-1, descending=True))
        return p, S, RouterState({"t": t + p.shape[1], "last": given.logits[:, -1]})


class Remembering(SidePart):
    """A side part of a user: half of the state before."""

    def forward(self, x, state):
        last = x.h.new_zeros(len(x.h), 1, x.h.shape[-1]) if state is None else state.values["last"]
        before = torch.cat([last, x.h[:, :-1]], dim=1)
        return 0.5 * before, RouterState({"last": x.h[:, -1:]})


def model_of_parts(parts) -> GPT:
    torch.manual_seed(0)
    return enliven(GPT(ModelConfig(**SIZES), VOCAB, parts)).requires_grad_(False).eval()


class UserRule(RoutingRule):
    """A rule of a user that keeps every part and negates the logits."""

    def __call__(self, logits, x, state=None, progress=1.0):
        return super().__call__(-logits, x, state, progress)


@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(2, scoring=Scoring(score="sigmoid", scale=1.7)),
        RoutingRule(2, scoring=Scoring(bias=torch.tensor([0.0, 3.0, 0.0, -1.0, 0.5]))),
        UserRule(2),
    ],
    ids=["sigmoid", "bias", "subclass"],
)
def test_a_rule_that_is_not_compiled_runs_as_in_the_model(rule):
    check(model_of_parts(lambda layer: LayerParts(rule)), 5)


def test_parts_of_a_user_run_as_in_the_model_beside_compiled_ones():
    parts = [
        LayerParts(RoutingRule(2, filter=Smooth(0.5), choice=Alternating())),
        LayerParts(None, side=Remembering()),
        LayerParts(RoutingRule(2), side=Remembering()),
    ]
    model = model_of_parts(lambda layer: parts[layer])
    check(model, 5)
    decoder, slots = Decoder(model), Slots(model)
    assert_decodes(model, DecodeCache.empty(3), 1, lambda token: token_in_slots(decoder, slots, token))


def test_a_variant_that_a_user_registers(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    @base.register
    @dataclass(frozen=True)
    class AlternatingVariant(base.Balanced):
        """Takes turns."""

        name: ClassVar[str] = "alternating"
        equation: ClassVar[str] = "S_t = t mod N and the best other"

        def choice(self, site):
            return Alternating()

    check(model_of("alternating"), 6)


# What is refused


def test_positions_beyond_the_last_are_refused_and_nothing_is_forgotten():
    model = model_of("recommended", seq_len=16)
    tokens = random_tokens(5, 1, 15)
    cache, token = prefill(model, tokens)
    decoder, slots = decoder_after(model, cache), Slots(model)
    assert_decodes(model, cache, token, lambda token: token_in_slots(decoder, slots, token), n=1)
    with pytest.raises(StickyError, match=r"^tokens: got 17 in a row, expected at most seq_len=16\.$"):
        decoder.begin(0)


def test_a_batch_is_refused():
    model = model_of("vanilla")
    cache, _ = prefill(model, random_tokens(0, 2, 4))
    with pytest.raises(ConfigError, match=r"^cache: got 2 rows, expected one text\.$"):
        Decoder(model).start(cache)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ConfigError, match=rf"^token: got {token}, expected 0 … 22\.$"):
        Decoder(model_of("vanilla")).begin(token)


def test_a_cache_without_the_state_of_its_router_is_refused():
    model = model_of("recommended")
    cache, _ = prefill(model, random_tokens(0, 1, 4))
    cache.layers[1].router = RouterState()
    with pytest.raises(ConfigError, match=r"^RouterState: got tokens from position 4 without the state"):
        Decoder(model).start(cache)


def test_layers_run_once_and_in_order():
    decoder = Decoder(model_of("vanilla"))
    with pytest.raises(ValueError, match="call begin for the next token"):
        decoder.route(0)
    decoder.begin(1)
    with pytest.raises(ValueError, match="got 1, expected 0"):
        decoder.route(1)
    with pytest.raises(ValueError, match="no layer waits for its experts"):
        decoder.add(0, np.zeros(16, np.float32))
    decoder.route(0)
    with pytest.raises(ValueError, match="got no experts before layer 1"):
        decoder.route(1)
