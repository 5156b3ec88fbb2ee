"""Around the forward pass: a part beside the experts, progress, gates, bytes, and rows of the decode cache."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lively import SIZES, VOCAB, assert_same, decode, full, kinds_of_router, lively, random_tokens
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.models.moe import Experts, Router
from stickymoe.routing.layer import LayerParts, SidePart
from stickymoe.routing.rules import RouterState, RoutingRule
from stickymoe.runs.config import RunConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.training.build import build_model
from stickymoe.variants import variant

every_variant = pytest.mark.parametrize("name", [*kinds_of_router(), "recommended"])


def model_of(name, **sizes):
    settings = dict(RECOMMENDED) if name == "recommended" else {"name": name}
    config = RunConfig(model=replace(SIZES, **sizes), variant=variant(settings.pop("name"), **settings))
    return build_model(config, VOCAB)


# A part beside the experts


class RunningSum(SidePart):
    """The sum of a table's rows over the tokens of the document so far."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(VOCAB, SIZES.d_model)

    def forward(self, x, state):
        before = 0.0 if state is None or not state.values else state.values["sum"][:, None]
        total = before + self.rows(x.tokens).cumsum(1)
        return total, RouterState({"sum": total[:, -1].detach()})


def with_sides(*, rule=True, seed=0):
    """A model with a part beside every layer."""
    torch.manual_seed(seed)
    model = GPT(
        SIZES, VOCAB, lambda layer: LayerParts(RoutingRule(SIZES.top_k) if rule else None, side=RunningSum())
    ).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@pytest.mark.parametrize("rule", [True, False], ids=["experts", "dense"])
def test_the_output_of_a_side_part_is_added_to_the_residual_stream(rule):
    model, tokens = with_sides(rule=rule), random_tokens(0, 2, 9)
    seen = []
    hooks = [block.register_forward_hook(lambda _, args, out: seen.append((args[0], out[0]))) for block in model.blocks]
    logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    for block, (_, with_side) in zip(model.blocks, seen, strict=True):
        side, block.side = block.side, None
        alone = []
        hook = block.register_forward_hook(lambda _, args, out, alone=alone: alone.append(out[0]))
        model(tokens)
        hook.remove()
        block.side = side
        torch.testing.assert_close(with_side, alone[0] + side.rows(tokens).cumsum(1), rtol=0, atol=1e-9)
    for block in model.blocks:
        nn.init.zeros_(block.side.rows.weight)
    assert (model(tokens).logits - logits).abs().max() > 1e-3


@pytest.mark.parametrize("cuts", [[4], list(range(1, 12))])
def test_decoding_with_a_side_part_is_the_full_pass(cuts):
    model, tokens = with_sides(), random_tokens(0, 2, 12)
    assert_same(decode(model, tokens, None, cuts), full(model, tokens))


def test_a_side_part_learns():
    model, tokens = with_sides(), random_tokens(0, 2, 9)
    model(tokens, tokens).loss.backward()
    for block in model.blocks:
        assert block.side.rows.weight.grad.abs().max() > 0


# Rows of a cache


@pytest.mark.parametrize("name", ["vanilla", "recommended", "residency+smooth", "trajectory", "side part", "dense"])
@torch.no_grad()
def test_the_rows_of_a_cache_are_continued_in_any_order(name):
    """As beam search needs it: keys, values, and the state of routers and side parts."""
    model = with_sides() if name == "side part" else lively(name)
    tokens, rows = random_tokens(0, 3, 12), torch.tensor([2, 0, 2, 1])
    cache = DecodeCache.empty(SIZES.n_layers)
    model(tokens[:, :7], cache=cache)
    logits = model(tokens[rows, 7:], cache=cache.select(rows)).logits
    torch.testing.assert_close(logits, full(model, tokens[rows])[0][:, 7:], rtol=0, atol=1e-9)


def test_a_selected_cache_keeps_documents():
    cache, doc = DecodeCache.empty(SIZES.n_layers), torch.tensor([[0, 0, 1], [0, 1, 1]])
    lively("vanilla")(random_tokens(0, 2, 3), doc=doc, cache=cache)
    chosen = cache.select(torch.tensor([1]))
    assert chosen.doc.tolist() == [[0, 1, 1]]
    assert chosen.position.tolist() == [[0, 0, 1]]
    assert chosen.length == 3


# Progress


def test_progress_reaches_every_router_and_all_experts():
    model = model_of("siblings")
    model.set_progress(0.25)
    reached = [m.progress for m in model.modules() if isinstance(m, Router | Experts)]
    assert reached == [0.25] * 2 * SIZES.n_layers


@pytest.mark.parametrize("gradient", [True, False])
def test_progress_counts_in_training_and_not_in_evaluation(gradient):
    model = build_model(RunConfig(model=SIZES, variant=variant("residency", free=0.5, rho=1.0)), VOCAB)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    tokens = random_tokens(0, 2, 16)
    with torch.set_grad_enabled(gradient):
        final = model(tokens).trace.S
        model.set_progress(0.0)
        free = model(tokens).trace.S
        assert torch.equal(model.eval()(tokens).trace.S, final)
    assert not torch.equal(free, final)


# Gates and bytes


@every_variant
def test_the_gates_of_a_model_are_those_of_its_routers(name):
    model = model_of(name)
    found = {id(p) for p in model.gate_parameters()}
    expected = {id(p) for key, p in model.named_parameters() if key.endswith("router.gate.weight")}
    assert found == expected
    assert len(found) == (0 if name == "dense" else SIZES.n_layers)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_parameters(name, dtype):
    model = model_of(name).to(dtype)
    size = dtype.itemsize
    d, f = SIZES.d_model, SIZES.d_ff
    layers = 0 if name == "dense" else SIZES.n_layers
    assert model.expert_bytes() == [size * (2 * d * f + f + d)] * layers
    total = sum(p.numel() for p in model.parameters()) * size
    assert model.other_bytes() == total - SIZES.n_experts * sum(model.expert_bytes())


def test_the_gates_of_the_recommended_router_are_counted_three_times():
    d, N, L = SIZES.d_model, SIZES.n_experts, SIZES.n_layers
    assert model_of("recommended").other_bytes() - model_of("vanilla").other_bytes() == L * 2 * N * d * 4


@pytest.mark.parametrize("pool", [{"share_block": 2}, {"universal": True}])
def test_shared_experts_are_not_counted_among_the_rest(pool):
    model = model_of("vanilla", **pool)
    experts = sum(p.nbytes for key, p in model.named_parameters() if ".experts." in key)
    assert model.other_bytes() == sum(p.nbytes for p in model.parameters()) - experts
    assert len(model.expert_bytes()) == SIZES.n_layers


# The trace


def test_a_trace_names_its_layers_and_has_the_weights_that_were_used():
    """A dense layer below a layer with experts: the trace holds the second alone."""
    torch.manual_seed(0)
    model = GPT(SIZES, VOCAB, lambda layer: LayerParts(RoutingRule(SIZES.top_k) if layer else None))
    used = []
    model.blocks[1].ffn.experts.register_forward_hook(lambda _, args, out: used.append(args[1:]))
    trace = model(random_tokens(0, 2, 9)).trace
    assert trace.layers == (1,)
    S, w = used[0]
    assert torch.equal(trace.S[0].flatten(0, 1), S)
    assert torch.equal(trace.w[0].flatten(0, 1), w)
