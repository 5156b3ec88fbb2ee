"""Is sticky routing topical? Experts against topics and words, and how long they stay.

Topics are numbers per token, −1 where unknown; `topics_of_chunks` has them for the rows of an evaluation. Everything
is per layer, over real tokens; a mean over nothing is NaN. L layers, B sequences, T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from stickymoe.errors import require
from stickymoe.locality.table import RouteTable

RARE = 10  # tokens seen less often say nothing about specialisation


def topics_of_chunks(
    doc: Integer[np.ndarray, " n"], topics: Sequence[str | None], shape: tuple[int, int]
) -> Integer[np.ndarray, "B T"]:
    """The topic of every token of a flat stream, laid out as the rows of an evaluation; `doc` indexes `topics`."""
    names = sorted({topic for topic in topics if topic is not None})
    number = np.array([-1 if topic is None else names.index(topic) for topic in topics], dtype=np.int64)
    B, T = shape
    rows = np.full(B * T, -1, dtype=np.int64)
    n = min(len(doc), B * T)
    rows[:n] = number[doc[:n]]
    return rows.reshape(B, T)


def topic_information_by_layer(table: RouteTable, topics: Integer[np.ndarray, "B T"]) -> Float[np.ndarray, " L"]:
    """I(expert; topic) = Σ p(e, c)·log₂ p(e, c) / (p(e)·p(c)), in bits, over all k slots of tokens with a topic.

    0 where experts ignore the topic; at most the entropy of the experts, and of the topics.
    """
    known = table.mask & (topics >= 0)
    return np.array([_information(_joint(layer[known], topics[known], table.n_experts)) for layer in table.S])


def _joint(
    S: Integer[np.ndarray, "n k"], labels: Integer[np.ndarray, " n"], n_experts: int
) -> Float[np.ndarray, "labels N"]:
    """How often each label came with each expert."""
    n_labels = int(labels.max(initial=-1)) + 1
    cells = (labels[:, None] * n_experts + S).ravel()
    return np.bincount(cells, minlength=n_labels * n_experts).reshape(n_labels, n_experts).astype(np.float64)


def _information(counts: Float[np.ndarray, "labels N"]) -> float:
    if counts.sum() == 0:
        return float("nan")
    p = counts / counts.sum()
    independent = p.sum(0, keepdims=True) * p.sum(1, keepdims=True)
    seen = p > 0
    return float((p[seen] * np.log2(p[seen] / independent[seen])).sum())


def run_lengths(table: RouteTable, layer: int) -> Integer[np.ndarray, " runs"]:
    """Tokens in a row with the same heaviest expert; a run ends with its document and at padding."""
    top1 = table.S[layer, ..., 0]
    begins = table.mask.copy()
    begins[:, 1:] &= ~(table.pairs & (top1[:, 1:] == top1[:, :-1]))
    first = np.flatnonzero(begins)
    real = np.append(0, table.mask.ravel().cumsum())  # a run's tokens are all real
    return np.asarray(real[np.append(first[1:], table.mask.size)] - real[first])


def mean_run_length_by_layer(table: RouteTable) -> Float[np.ndarray, " L"]:
    """Mean number of tokens for which the heaviest expert stays."""
    lengths = [run_lengths(table, layer) for layer in range(table.n_layers)]
    return np.array([run.mean() if len(run) else np.nan for run in lengths])


def vocabulary_specialisation_by_layer(table: RouteTable, at_least: int = RARE) -> Float[np.ndarray, " L"]:
    """max_e N(x, e) / N(x), mean over words x by how often they are seen: is a word's favourite expert among its k?

    1 where the word alone decides, k/N where it says nothing; words seen fewer than `at_least` times do not count.
    """
    require(table.tokens is not None, "table.tokens", None, "token ids, as an evaluation stores them")
    assert table.tokens is not None
    words = np.asarray(table.tokens)[table.mask].astype(np.int64)
    seen = np.bincount(words)
    common = seen >= at_least
    if not common.any():
        return np.full(table.n_layers, np.nan)
    favourites = [_joint(layer[table.mask], words, table.n_experts).max(1) for layer in table.S]
    return np.array([favourite[common].sum() / seen[common].sum() for favourite in favourites])
