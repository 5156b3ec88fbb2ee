"""Is sticky routing topical? How much experts tell of the topic.

Topics are numbers per token, −1 where unknown; `topics_of_chunks` has them for the rows of an evaluation. Everything
is per layer, over real tokens. How long experts stay and how far the word alone decides is in `figures`.
L layers, B sequences, T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from stickymoe.locality.table import RouteTable


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


def topic_information_above_chance_by_layer(
    table: RouteTable, topics: Integer[np.ndarray, "B T"], shifts: int = 16
) -> Float[np.ndarray, " L"]:
    """I(expert; topic) less what the same routing tells of topics it cannot have seen: about 0 for blind routing.

    Topics and sticky experts both stay for many tokens, so some of them meet by chance, and ever more the longer they
    stay. Chance is the mean over topics that are moved round the text by 1/(n+1) … n/(n+1) of its length.
    """
    known = table.mask & (topics >= 0)
    S, labels = table.S[:, known], topics[known]
    steps = np.arange(1, shifts + 1) * len(labels) // (shifts + 1)
    out = np.empty(table.n_layers)
    for i, layer in enumerate(S):
        by_chance = [_information(_joint(layer, np.roll(labels, step), table.n_experts)) for step in steps]
        out[i] = _information(_joint(layer, labels, table.n_experts)) - np.mean(by_chance)
    return out


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
