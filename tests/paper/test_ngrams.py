"""n-gram models against plain loops, and the laws of a probability."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stickymoe.errors import ConfigError, DataError
from stickymoe.paper.ngrams import kneser_ney

texts = st.lists(st.integers(0, 3), min_size=6, max_size=40)


def counts_of(train, n, order):
    """Occurrences of the n-grams of the highest order; for a lower one, how many different tokens precede each."""
    if n == order:
        return Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1))
    longer = {tuple(train[i : i + n + 1]) for i in range(len(train) - n)}
    return Counter(gram[1:] for gram in longer)


def probability(train, history, word, order, vocab_size):
    """p(word | history), straight from the equation."""
    p = 1 / vocab_size
    for n in range(1, order + 1):
        if len(history) < n - 1:
            break
        context = tuple(history[len(history) - n + 1 :])
        counts = counts_of(train, n, order)
        follows = defaultdict(dict)
        for gram, count in counts.items():
            follows[gram[:-1]][gram[-1]] = count
        if context not in follows:
            continue
        once, twice = (sum(c == i for c in counts.values()) for i in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        here = follows[context]
        total = sum(here.values())
        p = max(here.get(word, 0) - discount, 0) / total + discount * len(here) / total * p
    return p


@settings(max_examples=40, deadline=None)
@given(train=texts, text=st.lists(st.integers(0, 3), min_size=2, max_size=8), order=st.integers(1, 4))
def test_it_equals_the_equation(train, text, order):
    found = kneser_ney(np.array(train), np.array(text), order=order, vocab_size=4)
    expected = [math.log(probability(train, text[:i], text[i], order, 4)) for i in range(1, len(text))]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@settings(max_examples=30, deadline=None)
@given(train=texts, history=st.lists(st.integers(0, 3), min_size=1, max_size=4), order=st.integers(1, 4))
def test_probabilities_sum_to_one(train, history, order):
    last = [kneser_ney(np.array(train), np.array([*history, w]), order=order, vocab_size=4)[-1] for w in range(4)]
    assert sum(map(math.exp, last)) == pytest.approx(1.0)


def test_what_cannot_be_counted_is_refused():
    few, text = np.array([1, 2]), np.array([0, 1, 2])
    with pytest.raises(DataError, match="got 2 and 3 tokens, expected at least 4 to train on"):
        kneser_ney(few, text, order=3, vocab_size=4)
    with pytest.raises(ConfigError, match=r"order: got 5 with a vocabulary of 50257, expected fewer than 2\^63"):
        kneser_ney(text, text, order=5, vocab_size=50_257)
    with pytest.raises(ConfigError, match="order: got 0"):
        kneser_ney(text, text, order=0, vocab_size=4)
