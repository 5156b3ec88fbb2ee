"""Interpolated Kneser-Ney n-gram models: what counting alone predicts on the tokens of a run.

p_n(w | h) = max(c(h w) − D, 0) / c(h) + D · N₁₊(h ·) / c(h) · p_{n−1}(w | h'), with D = n₁ / (n₁ + 2 n₂), or ½ if no
n-gram occurs once. The highest order counts occurrences; lower orders count the different tokens that precede (Kneser
and Ney, 1995).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64, Integer

from stickymoe.errors import ConfigError, DataError, require

MOST_KEYS = 2**63


@dataclass(frozen=True)
class _Order:
    """The counts of one order. `keys` are sorted n-grams, as numbers in base V; `contexts` their first n − 1 tokens."""

    keys: Int64[np.ndarray, " grams"]
    counts: Float[np.ndarray, " grams"]
    contexts: Int64[np.ndarray, " contexts"]
    totals: Float[np.ndarray, " contexts"]
    different: Float[np.ndarray, " contexts"]  # tokens that follow the context
    discount: float

    @classmethod
    def of(cls, keys: Int64[np.ndarray, " grams"], counts: Int64[np.ndarray, " grams"], vocab_size: int) -> _Order:
        contexts, first, different = np.unique(keys // vocab_size, return_index=True, return_counts=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once else 0.5
        totals = np.add.reduceat(counts, first)
        return cls(keys, counts.astype(float), contexts, totals.astype(float), different.astype(float), discount)

    def probabilities(
        self, keys: Int64[np.ndarray, " n"], lower: Float[np.ndarray, " n"], vocab_size: int
    ) -> Float[np.ndarray, " n"]:
        """p(w | h) of n-grams, given that of the next lower order; `lower` itself where h never occurred."""
        count = _find(self.keys, self.counts, keys)
        total = _find(self.contexts, self.totals, keys // vocab_size)
        different = _find(self.contexts, self.different, keys // vocab_size)
        known = total > 0
        total = np.where(known, total, 1.0)
        mixed = np.maximum(count - self.discount, 0.0) / total + self.discount * different / total * lower
        return np.where(known, mixed, lower)


def _find(
    keys: Int64[np.ndarray, " grams"], values: Float[np.ndarray, " grams"], wanted: Int64[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The values of the wanted keys; 0 for a key that is not there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)


def kneser_ney(
    train: Integer[np.ndarray, " n"], text: Integer[np.ndarray, " m"], *, order: int, vocab_size: int
) -> Float[np.ndarray, " targets"]:
    """ln p of every token of `text` but the first, by the model of `train`."""
    require(order >= 1, "order", order, "a whole number ≥ 1")
    if vocab_size**order >= MOST_KEYS:
        raise ConfigError(f"order: got {order} with a vocabulary of {vocab_size}, expected fewer than 2^63 n-grams.")
    if len(train) < order + 1 or len(text) < 2:
        raise DataError(
            f"n-grams: got {len(train)} and {len(text)} tokens, expected at least {order + 1} to train on and 2 to "
            "predict."
        )
    p = np.full(len(text) - 1, 1.0 / vocab_size)
    for n, counted in enumerate(_orders(train, order, vocab_size), start=1):
        if n > len(text):
            break
        # The first n − 1 targets have too short a history for this order.
        start = max(n - 2, 0)
        keys = _keys(text[1:] if n == 1 else text, n, vocab_size)
        p[start:] = counted.probabilities(keys, p[start:], vocab_size)
    return np.asarray(np.log(p))


def _orders(train: Integer[np.ndarray, " n"], order: int, vocab_size: int) -> Iterator[_Order]:
    """The counts of each order, unigrams first."""
    for n in range(1, order):
        longer = np.unique(_keys(train, n + 1, vocab_size))
        yield _Order.of(*np.unique(longer % vocab_size**n, return_counts=True), vocab_size)
    yield _Order.of(*np.unique(_keys(train, order, vocab_size), return_counts=True), vocab_size)


def _keys(tokens: Integer[np.ndarray, " m"], n: int, vocab_size: int) -> Int64[np.ndarray, " grams"]:
    """Every n adjacent tokens as one number."""
    keys = np.zeros(len(tokens) - n + 1, np.int64)
    for i in range(n):
        keys = keys * vocab_size + tokens[i : len(tokens) - n + 1 + i]
    return keys
