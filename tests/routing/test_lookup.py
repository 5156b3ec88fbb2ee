"""Rows in slow memory: against plain loops, at document borders, in bytes, and their optimiser."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stickymoe.errors import ConfigError
from stickymoe.routing.lookup import Lookup, NgramTable
from stickymoe.routing.rules import RouterInput, RouterState
from stickymoe.runs.config import ModelConfig, RunConfig, TrainConfig
from stickymoe.training.build import build_model
from stickymoe.training.optimiser import adamw, clip_gradients
from stickymoe.variants import variant

D, V = 8, 13
WRAP = 1 << 64


def lookup(**settings):
    torch.manual_seed(0)
    defaults = {"tokens": True, "ngrams": (2, 3), "rows": 5, "heads": 2, "width": 0, "gated": True, "lr_scale": 1.0}
    part = Lookup(D, V, **(defaults | settings))
    for p in part.parameters():
        nn.init.normal_(p)
    with torch.no_grad():
        for ngram in part.ngrams:
            ngram.table.weight[-1] = 0  # what an n-gram reads that is not there
    return part


def inputs(tokens, position=None):
    tokens = torch.as_tensor(tokens)
    position = torch.arange(tokens.shape[1]).expand_as(tokens) if position is None else torch.as_tensor(position)
    h = torch.randn(*tokens.shape, D, generator=torch.Generator().manual_seed(1))
    return RouterInput(h, tokens=tokens, position=position)


def signed(x):
    x %= WRAP
    return x - WRAP if x >= WRAP // 2 else x


def mixed(x):
    """The hash, in whole numbers of any size."""
    x = signed(x * -4658895280553007687)
    x ^= (x >> 32) & 0xFFFFFFFF
    x = signed(x * -7723592293110705685)
    return x ^ ((x >> 29) & 0x7FFFFFFFF)


def plain(part, x):
    """The definition, token by token."""
    out = torch.zeros_like(x.h)
    for b, t in torch.cartesian_prod(*(torch.arange(n) for n in x.tokens.shape)).tolist():
        r = torch.zeros(D) if part.tokens is None else part.tokens.weight[x.tokens[b, t]].clone()
        for table in part.ngrams:
            if x.position[b, t] < table.n - 1:
                continue
            heads = []
            for head, salt in enumerate(table.salts.tolist()):
                key = salt
                for back in range(table.n):
                    key = mixed(key ^ int(x.tokens[b, t - back]))
                heads.append(table.table.weight[head * table.rows + key % table.rows])
            r = r + torch.cat(heads)
        out[b, t] = r if part.gate is None else (1 + part.gate.weight @ x.h[b, t]) * r
    return out


@pytest.mark.parametrize("settings", [{}, {"tokens": False}, {"ngrams": ()}, {"ngrams": (4,)}, {"gated": False}])
def test_rows_are_those_of_the_definition(settings):
    part = lookup(**settings)
    x = inputs(torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(2)))
    torch.testing.assert_close(part(x, None)[0], plain(part, x))


def test_n_grams_stay_inside_documents():
    part = lookup(tokens=False)
    x = inputs([[1, 2, 3, 4, 5, 6]], position=[[0, 1, 2, 0, 1, 2]])
    other = inputs([[7, 8, 9, 4, 5, 6]], position=[[0, 1, 2, 0, 1, 2]])
    y, y_other = part(x, None)[0], part(other, None)[0]
    assert (y[:, 0] == 0).all()
    assert (y[:, 3] == 0).all()
    torch.testing.assert_close(y[:, 3:], y_other[:, 3:])
    assert not torch.equal(y[:, 1:3], y_other[:, 1:3])


def test_narrow_rows_are_projected():
    part = lookup(width=4)
    x = inputs([[1, 2, 3]])
    assert part.tokens.weight.shape == (V, 4)
    assert part(x, None)[0].shape == (1, 3, D)


def test_pieces_equal_the_whole():
    part = lookup()
    x = inputs([[1, 2, 3, 4, 5]])
    whole = part(x, None)[0]
    state, pieces = None, []
    for piece in (slice(0, 2), slice(2, 3), slice(3, 5)):
        y, state = part(RouterInput(x.h[:, piece], tokens=x.tokens[:, piece], position=x.position[:, piece]), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert state.select(torch.tensor([0, 0])).values["recent"].tolist() == [[4, 5], [4, 5]]


def test_missing_input_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^RouterInput: tokens or position is missing, but lookup reads both"):
        lookup()(RouterInput(torch.zeros(1, 1, D)), None)
    with pytest.raises(ConfigError, match=r"^RouterState: got tokens from position 3 without the state"):
        lookup()(inputs([[1, 2]], position=[[3, 4]]), RouterState())


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match=r"^variant.table_heads: got 3, expected a divisor of the row width 8\.$"):
        lookup(heads=3)


def config(**settings):
    sizes = ModelConfig(d_model=D, n_layers=3, n_heads=2, d_ff=12, seq_len=16)
    return RunConfig(model=sizes, variant=variant("hash+lookup", table_rows=5, **settings))


def test_salts_differ_between_seeds_and_layers_and_are_saved():
    def salts(seed):
        model = build_model(RunConfig(**{**vars(config()), "seed": seed}), V)
        return [value.tolist() for name, value in model.state_dict().items() if name.endswith("salts")]

    assert len({tuple(s) for s in salts(1)}) == 4  # two tables in each of the first two layers
    assert salts(1) == salts(1) != salts(2)


def test_tables_are_counted_as_slow_memory():
    model = build_model(config(), V)
    sizes = model.sizes()
    tables = sum(p.nbytes for name, p in model.named_parameters() if "tokens.weight" in name or "table.weight" in name)
    assert sizes["table_bytes"] == tables == 4 * (3 * V * D + 2 * 2 * (2 * 5 + 1) * D // 2)
    assert sizes["row_bytes"] == 4 * D * (3 + 2 * 2)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert sizes["other_bytes"] == sum(p.nbytes for p in model.parameters()) - experts - tables


def test_the_keys_of_rows_are_those_of_the_tables():
    """The rows of all layers for a token are one; every head of an n-gram table has a salt of its own."""
    model = build_model(config(), V)
    first, *rest = model.row_keys()
    assert (first.n, first.rows, first.nbytes) == (1, V, 3 * 4 * D)
    salts = [salt for side in model.blocks[:2] for table in side.side.ngrams for salt in table.salts.tolist()]
    assert [(key.n, key.rows, key.nbytes) for key in rest] == 2 * [(n, 5, 4 * D // 2) for n in (2, 2, 3, 3)]
    assert [key.salt for key in rest] == salts
    assert sum(key.nbytes for key in model.row_keys()) == model.row_bytes()


def test_only_rows_that_were_read_change():
    model = build_model(config(), V)
    table = model.blocks[0].side.tokens.weight
    before = table.detach().clone()
    optimiser = adamw(list(model.named_parameters()), TrainConfig(), model.slow_parameters())
    tokens = torch.tensor([[1, 2, 3, 1]])
    model(tokens, tokens).loss.backward()
    optimiser.step()
    changed = (table != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 3]


def test_rows_are_updated_as_by_sparse_adam():
    ours, theirs = (nn.Parameter(torch.arange(12.0).view(6, 2)) for _ in range(2))
    settings = TrainConfig(lr=0.1)
    optimiser = adamw([("table", ours)], settings, {ours: 1.0})
    other = torch.optim.SparseAdam([theirs], lr=0.1, betas=(settings.beta1, settings.beta2))
    for rows in ([0, 2, 2], [2, 5], [1]):
        for p in (ours, theirs):
            (nn.functional.embedding(torch.tensor(rows), p, sparse=True) ** 2).sum().backward()
        optimiser.step()
        other.step()
        optimiser.zero_grad()
        other.zero_grad()
        torch.testing.assert_close(ours, theirs)


def test_the_learning_rate_of_rows_is_relative():
    model = build_model(config(table_lr=3.0), V)
    optimiser = adamw(list(model.named_parameters()), TrainConfig(), model.slow_parameters())
    scales = {group["lr_scale"]: group for group in optimiser.param_groups}
    assert set(scales[3.0]["params"]) == set(model.slow_parameters())
    assert scales[3.0]["weight_decay"] == 0


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_counts_sparse_gradients_as_dense_ones(limit):
    dense, sparse, weight = (nn.Parameter(torch.arange(6.0).view(3, 2)) for _ in range(3))
    for p, is_sparse in ((dense, False), (sparse, True)):
        weight.grad = None
        out = nn.functional.embedding(torch.tensor([0, 2, 2]), p, sparse=is_sparse) @ weight.T
        (out**2).sum().backward()
        norm = clip_gradients(Accelerator(cpu=True), [p, weight], limit)
        found = (float(norm), p.grad.to_dense(), weight.grad.clone())
        if not is_sparse:
            expected = found
    assert found[0] == pytest.approx(expected[0])
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-5, atol=1e-6)


def test_a_token_that_drops_its_n_gram_rows_reads_the_row_of_the_token_alone():
    part = lookup(drop=0.5)
    x = inputs([[1, 2, 3, 4, 5]])
    y = part(dataclasses.replace(x, visit=torch.tensor([[1, 3, 0, 7, 8]])), None)[0]
    bare = lookup(ngrams=())
    bare.tokens, bare.gate = part.tokens, part.gate
    kept = torch.tensor([True, True, False, True, False])
    torch.testing.assert_close(y[:, kept], part(x, None)[0][:, kept])
    torch.testing.assert_close(y[:, ~kept], bare(x, None)[0][:, ~kept])


@given(st.floats(0, 0.99), st.integers(0, 2**20))
def test_n_gram_rows_are_read_in_passes_that_are_spread_evenly(drop, first):
    part = Lookup(8, V, tokens=False, ngrams=(2,), rows=4, heads=1, width=0, gated=False, lr_scale=1.0, drop=drop)
    reads = part._reads(torch.arange(first, first + 200)[None])[0].long().cumsum(0)
    passes = torch.arange(1, 201)
    assert ((reads - passes * (1 - drop)).abs() <= 1 + 1e-6).all()


def test_a_model_drops_rows_where_it_gets_visits():
    model = build_model(config(table_drop=0.5), V)
    tokens, visit = torch.randint(V, (2, 16)), torch.arange(32).view(2, 16)
    model(tokens, tokens, visit=visit).loss.backward()
    for table in (m for m in model.modules() if isinstance(m, NgramTable)):
        nothing = len(table.table.weight) - 1
        read = table.table.weight.grad._indices()[0]
        assert int((read != nothing).sum()) == len(table.salts) * int((visit % 2)[:, table.n - 1 :].sum())
