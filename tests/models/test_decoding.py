"""Decoding equals the full pass, documents equal themselves alone, nothing looks ahead: for every way to route."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lively import SIZES, VOCAB, assert_same, decode, full, kinds_of_router, lively, random_tokens
from stickymoe.errors import StickyError
from stickymoe.models.gpt import DecodeCache
from strategies import documents

some = settings(deadline=None, max_examples=12)
COMBINED = ["hysteresis+smooth+soft", "oracle+residency+smooth", "segment+smooth"]
every_variant = pytest.mark.parametrize("variant", [*kinds_of_router(), *COMBINED, "recommended"])
seeds = st.integers(0, 10_000)
batches = st.integers(1, 2)
lengths = st.integers(1, SIZES.seq_len)


@st.composite
def numbered(draw, B, T):
    """Documents whose numbers only grow."""
    borders = torch.zeros(B, T, dtype=torch.long)
    for b in range(B):
        for t in draw(st.lists(st.integers(0, T - 1), max_size=4)):
            borders[b, t] = 1
    return borders.cumsum(1)


# Step by step


@every_variant
def test_one_token_at_a_time_is_the_full_pass(variant):
    model, tokens = lively(variant), random_tokens(0, 2, SIZES.seq_len)
    assert_same(decode(model, tokens, None, list(range(1, SIZES.seq_len))), full(model, tokens))


@every_variant
@some
@given(seed=seeds, B=batches, T=lengths, data=st.data())
def test_uneven_pieces_are_the_full_pass(variant, seed, B, T, data):
    model, tokens = lively(variant), random_tokens(seed, B, T)
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    doc = data.draw(st.none() | numbered(B, T))
    assert_same(decode(model, tokens, doc, cuts), full(model, tokens, doc))


@every_variant
@some
@given(seed=seeds, B=batches, T=lengths, data=st.data())
def test_pieces_of_documents_whose_numbers_come_back_are_the_full_pass(variant, seed, B, T, data):
    model, tokens = lively(variant), random_tokens(seed, B, T)
    doc = torch.tensor(data.draw(documents(B, T)))
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    assert_same(decode(model, tokens, doc, cuts), full(model, tokens, doc))


@every_variant
def test_one_prefix_can_be_continued_twice(variant):
    """A copied cache is not touched by what happens to the original."""
    model, tokens = lively(variant), random_tokens(1, 2, 12)
    cache = DecodeCache.empty(SIZES.n_layers)
    model(tokens[:, :8], cache=cache)
    copy = DecodeCache(layers=list(cache.layers), position=cache.position, doc=cache.doc)
    first = model(tokens[:, 8:], cache=cache).logits
    assert torch.equal(model(tokens[:, 8:], cache=copy).logits, first)


# Documents


def assert_documents_stand_alone(model, tokens, doc):
    """Each run of a document number, passed alone, gives its part of the packed pass."""
    logits, S = full(model, tokens, doc)
    B, T = tokens.shape
    for b in range(B):
        starts = [t for t in range(T) if t == 0 or doc[b, t] != doc[b, t - 1]]
        for start, stop in zip(starts, [*starts[1:], T], strict=True):
            alone = full(model, tokens[b : b + 1, start:stop])
            part = logits[b : b + 1, start:stop], None if S is None else S[:, b : b + 1, start:stop]
            assert_same(alone, part)


@every_variant
@some
@given(seed=seeds, B=batches, T=lengths, data=st.data())
def test_packed_documents_equal_the_documents_alone(variant, seed, B, T, data):
    assert_documents_stand_alone(lively(variant), random_tokens(seed, B, T), data.draw(numbered(B, T)))


@every_variant
def test_a_document_number_that_comes_back_is_a_new_document(variant):
    """As it is for positions, loss pairs and caches: a border is where the number changes."""
    assert_documents_stand_alone(lively(variant), random_tokens(2, 1, 9), torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]]))


@every_variant
def test_one_document_is_no_documents(variant):
    model, tokens = lively(variant), random_tokens(3, 2, 10)
    assert_same(full(model, tokens, torch.full((2, 10), 7)), full(model, tokens))


@every_variant
def test_documents_make_a_difference(variant):
    model, tokens = lively(variant), random_tokens(4, 1, 10)
    packed, _ = full(model, tokens, torch.tensor([[0] * 5 + [1] * 5]))
    flat, _ = full(model, tokens)
    torch.testing.assert_close(packed[:, :5], flat[:, :5], rtol=0, atol=1e-9)
    assert ((packed - flat)[:, 5:].abs().amax(-1) > 1e-3).all()


# Causality and independence


@every_variant
@some
@given(seed=seeds, B=batches, T=st.integers(2, SIZES.seq_len), data=st.data())
def test_a_later_token_changes_nothing_earlier(variant, seed, B, T, data):
    model, tokens = lively(variant), random_tokens(seed, B, T)
    t = data.draw(st.integers(1, T - 1))
    doc = data.draw(st.none() | numbered(B, T))
    other = tokens.clone()
    other[:, t:] = random_tokens(seed + 1, B, T - t)
    other[:, t] = (tokens[:, t] + 1) % VOCAB
    (logits, S), (other_logits, other_S) = full(model, tokens, doc), full(model, other, doc)
    before = other_logits[:, :t], None if other_S is None else other_S[:, :, :t]
    assert_same(before, (logits[:, :t], None if S is None else S[:, :, :t]))
    assert (logits[:, t] - other_logits[:, t]).abs().amax(-1).min() > 1e-3


@every_variant
def test_rows_of_a_batch_do_not_influence_each_other(variant):
    model, tokens = lively(variant), random_tokens(5, 3, 11)
    logits, S = full(model, tokens)
    for b in range(3):
        alone = full(model, tokens[b : b + 1])
        assert_same(alone, (logits[b : b + 1], None if S is None else S[:, b : b + 1]))


@every_variant
def test_order_matters(variant):
    """Positions and attention are at work: the last token's logits depend on the order of those before."""
    model, tokens = lively(variant), torch.arange(8)[None]
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert (full(model, tokens)[0] - full(model, swapped)[0])[:, -1].abs().max() > 1e-3


# Too long


@every_variant
def test_too_long_a_sequence_is_refused(variant):
    model = lively(variant)
    with pytest.raises(StickyError, match=r"^tokens: got 17 in a row, expected at most seq_len=16\.$"):
        model(random_tokens(6, 2, 17))


@every_variant
def test_decoding_is_refused_beyond_the_last_position_and_forgets_nothing(variant):
    model, tokens = lively(variant), random_tokens(7, 1, 17)
    cache = DecodeCache.empty(SIZES.n_layers)
    model(tokens[:, :15], cache=cache)
    with pytest.raises(StickyError, match=r"^tokens: got 17 in a row, expected at most seq_len=16\.$"):
        model(tokens[:, 15:], cache=cache)
    last = model(tokens[:, 15:16], cache=cache)
    expected, _ = full(model, tokens[:, :16])
    torch.testing.assert_close(last.logits, expected[:, 15:], rtol=0, atol=1e-9)


@every_variant
def test_a_row_of_any_length_is_accepted_if_its_documents_fit(variant):
    model, tokens = lively(variant), random_tokens(8, 1, 20)
    doc = torch.tensor([[0] * 10 + [1] * 10])
    assert_documents_stand_alone(model, tokens, doc)


# What cannot be continued


def test_an_empty_batch_is_refused():
    with pytest.raises(StickyError, match="at least one sequence"):
        lively("vanilla")(torch.zeros(1, 0, dtype=torch.long))


def test_padding_is_refused_beside_a_cache():
    model, tokens = lively("vanilla"), random_tokens(0, 1, 5)
    mask = torch.tensor([[True, True, True, True, False]])
    assert model(tokens, mask=mask).logits.shape[1] == 5
    with pytest.raises(StickyError, match="mask: padding is not supported with a decode cache"):
        model(tokens, mask=mask, cache=DecodeCache.empty(SIZES.n_layers))


@pytest.mark.parametrize("at_first", [True, False])
def test_documents_are_given_always_or_never(at_first):
    model, tokens, cache = lively("vanilla"), random_tokens(0, 1, 5), DecodeCache.empty(SIZES.n_layers)
    doc = torch.zeros(1, 4, dtype=torch.long)
    model(tokens[:, :4], doc=doc if at_first else None, cache=cache)
    with pytest.raises(StickyError, match="pass doc always or never"):
        model(tokens[:, 4:], doc=None if at_first else doc[:, :1], cache=cache)


def test_a_cache_of_fewer_rows_is_refused():
    """As when a beam is widened by hand, and the routers' state forgotten."""
    model, tokens, cache = lively("siblings"), random_tokens(0, 2, 5), DecodeCache.empty(SIZES.n_layers)
    model(tokens[:, :4], cache=cache)
    twice = [
        type(layer)(layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1), layer.router)
        for layer in cache.layers
    ]
    wide = DecodeCache(layers=twice, position=cache.position.repeat(2, 1), doc=None)
    with pytest.raises(StickyError, match=r"^RouterState: got '\w+' of 2 rows, expected 4 as the logits\.$"):
        model(tokens[:, 4:].repeat(2, 1), cache=wide)
