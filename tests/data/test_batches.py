"""Which tokens a run sees at which step, and what it must predict."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stickymoe.data.batches import Batch, TrainBatches, eval_batches
from stickymoe.data.tokens import TokenSplit
from stickymoe.errors import ConfigError, DataError


def split_of(n: int, doc_lengths: list[int] | None = None) -> TokenSplit:
    """Tokens 1 … n, so that a token shows its position."""
    borders = np.cumsum(doc_lengths or [n])
    doc = np.searchsorted(borders, np.arange(n), side="right").astype(np.int32)
    topics = (None,) * (int(doc.max(initial=0)) + 1)
    return TokenSplit(np.arange(1, n + 1, dtype=np.int32), doc, topics, np.zeros(n, dtype=np.bool_))


def train_batches(n: int, seq_len: int, batch_size: int, seed: int = 0, documents: bool = False) -> TrainBatches:
    return TrainBatches(split_of(n), seq_len=seq_len, batch_size=batch_size, seed=seed, documents=documents)


def equal(a: Batch, b: Batch) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and torch.equal(a.mask, b.mask)


sizes = st.tuples(st.integers(2, 200), st.integers(1, 20), st.integers(1, 12)).filter(lambda s: s[0] > s[1])


@settings(deadline=None)
@given(sizes, st.integers(0, 2**32 - 1))
def test_every_chunk_comes_once_per_epoch(size: tuple[int, int, int], seed: int) -> None:
    n, seq_len, batch_size = size
    batches = train_batches(n, seq_len, batch_size, seed)
    assert batches.n_chunks == (n - 1) // seq_len
    epochs = 3
    steps = -(-epochs * batches.n_chunks // batch_size)
    stream = torch.cat([batches.batch(step).tokens[:, 0] for step in range(steps)]).tolist()
    for epoch in range(epochs):
        seen = stream[epoch * batches.n_chunks : (epoch + 1) * batches.n_chunks]
        assert sorted(seen) == list(range(1, batches.n_chunks * seq_len + 1, seq_len))


@settings(deadline=None)
@given(sizes, st.integers(0, 50))
def test_the_target_is_the_next_token(size: tuple[int, int, int], step: int) -> None:
    n, seq_len, batch_size = size
    batch = train_batches(n, seq_len, batch_size).batch(step)
    assert batch.tokens.shape == (batch_size, seq_len)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(seq_len))
    assert batch.mask.all()
    assert batch.doc is None


@settings(deadline=None)
@given(sizes, st.integers(1, 4), st.integers(0, 30))
def test_parts_make_up_the_whole(size: tuple[int, int, int], parts: int, step: int) -> None:
    n, seq_len, share = size
    batches = train_batches(n, seq_len, share * parts)
    pieces = [batches.batch(step, part=part, parts=parts) for part in range(parts)]
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), batches.batch(step).tokens)


@settings(deadline=None)
@given(sizes, st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_a_batch_depends_on_its_step_alone(size: tuple[int, int, int], visits: list[int]) -> None:
    used = train_batches(*size, seed=7)
    for step in visits:
        assert equal(used.batch(step), train_batches(*size, seed=7).batch(step))


@settings(deadline=None)
@given(sizes)
def test_visits_of_a_token_grow_by_one_with_each_pass(size: tuple[int, int, int]) -> None:
    n, seq_len, batch_size = size
    batches = train_batches(n, seq_len, batch_size)
    seen: dict[int, list[int]] = {}
    for step in range(-(-3 * batches.n_chunks // batch_size)):
        batch = batches.batch(step)
        assert batch.visit is not None
        for token, visit in zip(batch.tokens.flatten().tolist(), batch.visit.flatten().tolist(), strict=True):
            seen.setdefault(token, []).append(visit)
    assert all(visits == list(range(visits[0], visits[0] + len(visits))) for visits in seen.values())


def test_epochs_and_seeds_differ_in_order() -> None:
    def first(seed: int, step: int) -> list[int]:
        tokens: list[int] = train_batches(1001, 10, 100, seed).batch(step).tokens[:, 0].tolist()
        return tokens

    orders = [first(0, 0), first(0, 1), first(1, 0), sorted(first(0, 0))]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("n", [0, 1, 8])
def test_a_text_shorter_than_one_chunk_is_refused(n: int) -> None:
    with pytest.raises(DataError, match=rf"has {n} tokens, but one chunk needs 9 .*--model\.seq_len"):
        train_batches(n, 8, 2)


def test_parts_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size: got 4, expected a multiple of 3"):
        train_batches(100, 8, 4).batch(0, parts=3)
    with pytest.raises(ConfigError, match=r"part: got 2, expected a whole number from 0 to 1"):
        train_batches(100, 8, 4).batch(0, part=2, parts=2)


@settings(deadline=None)
@given(sizes)
def test_evaluation_predicts_every_target_once_and_in_order(size: tuple[int, int, int]) -> None:
    n, seq_len, batch_size = size
    batches = list(eval_batches(split_of(n), seq_len=seq_len, batch_size=batch_size, documents=False))
    tokens, targets, mask = (
        torch.cat([getattr(batch, name) for batch in batches]).flatten() for name in ("tokens", "targets", "mask")
    )
    assert tokens[mask].tolist() == list(range(1, n))
    assert targets[mask].tolist() == list(range(2, n + 1))
    assert (targets[~mask] == -100).all()
    assert all(batch.tokens.shape[0] <= batch_size and batch.tokens.shape[1] == seq_len for batch in batches)
    assert all(batch.mask.any(dim=1).all() and batch.doc is None for batch in batches)


@pytest.mark.parametrize("n", [0, 1])
def test_evaluation_needs_something_to_predict(n: int) -> None:
    with pytest.raises(DataError, match=rf"has {n} tokens, expected at least 2"):
        next(eval_batches(split_of(n), seq_len=4, batch_size=2, documents=False))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 7), st.integers(1, 4))
def test_no_target_lies_in_another_document(lengths: list[int], seq_len: int, batch_size: int) -> None:
    n = sum(lengths) + 1
    split = split_of(n, [*lengths, 1])
    doc = torch.from_numpy(split.doc).long()
    batches = list(eval_batches(split, seq_len=seq_len, batch_size=batch_size, documents=True))
    if n > seq_len:
        train = TrainBatches(split, seq_len=seq_len, batch_size=batch_size, seed=0, documents=True)
        batches += [train.batch(step) for step in range(3)]
    for batch in batches:
        assert batch.doc is not None
        assert (batch.doc[~batch.mask] == -1).all()
        assert torch.equal(batch.doc[batch.mask], doc[batch.tokens[batch.mask] - 1])
        crosses = batch.mask & (doc[batch.tokens] != batch.doc)
        assert torch.equal(batch.targets == -100, crosses | ~batch.mask)


def test_documents_lose_one_target_per_border() -> None:
    split = split_of(30, [10, 5, 15])
    batches = eval_batches(split, seq_len=8, batch_size=2, documents=True)
    kept = Counter(int(target) for batch in batches for target in batch.targets.flatten() if target != -100)
    assert kept == Counter(set(range(2, 31)) - {11, 16})
