"""Expert pools that layers share: counted, saved and trained once, routed over by each layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lively import VOCAB, assert_same, decode, full, random_tokens
from stickymoe.errors import ConfigError
from stickymoe.routing.losses import LossContext, cross_layer_loss
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.folder import run_id
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import Progress, load_model, save_checkpoint
from stickymoe.training.optimiser import adamw
from stickymoe.variants import variant as make_variant

SIZES = {"d_model": 16, "n_layers": 4, "n_heads": 2, "n_experts": 3, "top_k": 2, "d_ff": 12, "seq_len": 16}
EXPERT = 2 * 16 * 12 + 12 + 16
POOLS = {"none": {}, "pairs": {"share_block": 2}, "one": {"share_block": 4}, "universal": {"universal": True}}
every_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS.keys())


def config_of(pool, variant="vanilla", **settings):
    return RunConfig(model=ModelConfig(**SIZES, **pool), variant=make_variant(variant, **settings))


def model_of(pool, variant="vanilla"):
    return build_model(config_of(pool, variant), VOCAB)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters_are_counted_once():
    plain = parameters(model_of({}))
    assert parameters(model_of({"share_block": 2})) == plain - 2 * 3 * EXPERT
    assert parameters(model_of({"share_block": 4})) == plain - 3 * 3 * EXPERT
    assert parameters(model_of({"universal": True})) == plain + 4 * (12 - 3) * 16, "the same experts, wider gates"


def test_the_dense_control_shares_nothing():
    assert parameters(model_of({"share_block": 4}, "dense")) == parameters(model_of({}, "dense"))


@pytest.mark.parametrize(("pool", "distinct"), [({}, 4), ({"share_block": 2}, 2), ({"universal": True}, 1)])
def test_layers_of_a_block_use_the_same_tensors(pool, distinct):
    model = model_of(pool)
    tensors = [id(block.ffn.experts.up) for block in model.blocks]
    assert len(set(tensors)) == distinct
    assert tensors == sorted(tensors, key=tensors.index), "blocks are adjacent layers"
    assert model.double().blocks[0].ffn.experts.up.dtype == model.blocks[3].ffn.experts.up.dtype == torch.float64


@every_pool
def test_every_weight_learns_and_a_shared_one_from_all_its_layers(pool):
    model = model_of(pool)
    out = model(random_tokens(0, 3, 12), random_tokens(1, 3, 12))
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name


def test_a_universal_pool_is_routed_over_by_every_layer():
    trace = model_of({"universal": True})(random_tokens(0, 2, 16)).trace
    assert trace.g.shape[-1] == 12
    table = trace.table()
    assert table.n_experts == 12
    assert int(table.S.max()) > 2


@every_pool
@pytest.mark.parametrize("variant", ["vanilla", "residency+smooth", "siblings"])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 99), data=st.data())
def test_pieces_are_the_full_pass(pool, variant, seed, data):
    model = model_of(pool, variant).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype))
    tokens = random_tokens(seed, 2, 12)
    cuts = sorted(data.draw(st.sets(st.integers(1, 11))))
    assert_same(decode(model, tokens, None, cuts), full(model, tokens))


@every_pool
def test_a_checkpoint_holds_a_shared_weight_once_and_comes_back(pool, tmp_path):
    config = config_of(pool)
    model = build_model(config, VOCAB)
    optimiser = adamw(list(model.named_parameters()), config.train)
    path = save_checkpoint(tmp_path, Progress(step=1), model, optimiser)
    other = build_model(RunConfig(model=config.model, seed=7), VOCAB)
    load_model(path, other)
    assert_same(full(other, random_tokens(0, 1, 9)), full(model, random_tokens(0, 1, 9)))


def test_ids_tell_pools_apart_and_those_without_are_as_before():
    ids = [run_id(config_of(pool), "data") for pool in POOLS.values()]
    assert len(set(ids)) == len(ids)
    assert run_id(RunConfig(), "data") == "becb14f064042867"


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"share_block": 3}, r"^model.share_block: got 3, expected a divisor of n_layers=4\.$"),
        ({"share_block": 0}, r"^model.share_block: got 0, expected a whole number ≥ 1\.$"),
        ({"share_block": 2, "universal": True}, r"^model.share_block: got 2, expected 1 if universal\.$"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(pool, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**SIZES, **pool)


def test_within_block_counts_only_layers_that_share():
    trace = model_of({"share_block": 2})(random_tokens(0, 2, 8)).trace
    (_, _, cross) = make_variant("cross_layer", within_block=True).terms()
    by_hand = sum((trace.g[l] - trace.g[l + 1]).square().sum(-1).mean() for l in (0, 2))
    torch.testing.assert_close(cross.fn(trace, LossContext(share_block=2)), by_hand)
    assert cross.fn(trace, LossContext()).item() == 0.0, "no layer shares"
    assert cross.fn(trace, LossContext(share_block=4)).item() == pytest.approx(cross_layer_loss(trace).item())


def test_sentence_borders_reach_the_trajectory_and_pieces_of_it():
    config = config_of({}, "trajectory", sentence=True)
    model, tokens = build_model(config, VOCAB), random_tokens(3, 2, 12)
    boundary = torch.zeros(2, 12, dtype=torch.bool)
    boundary[:, 5] = True
    S = model(tokens, boundary=boundary).trace.S.sort(-1).values
    plain = model(tokens, boundary=torch.zeros_like(boundary)).trace.S.sort(-1).values
    with pytest.raises(
        ConfigError, match=r"^RouterInput: boundary is missing, but this rule reads it; pass boundary\.$"
    ):
        model(tokens)
    assert torch.equal(S[:, :, :5], plain[:, :, :5])
    assert (S[:, :, 5:] == S[:, :, 5:6]).all()
    assert (plain == plain[:, :, :1]).all(), "without borders the span is the sequence"
    assert not torch.equal(S, plain)
