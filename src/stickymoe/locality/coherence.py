"""Does sticky routing follow the topic of the text? The mutual information of experts and topics.

Topics are numbers per token, −1 where unknown; `topics_of_chunks` gives them for the rows of an evaluation. All metrics
are per layer, over real tokens. `figures` has run lengths and the specialisation on token ids.
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
    """The topic of every token of a flat stream, in the rows of an evaluation; `doc` indexes `topics`."""
    names = sorted({topic for topic in topics if topic is not None})
    number = np.array([-1 if topic is None else names.index(topic) for topic in topics], dtype=np.int64)
    B, T = shape
    rows = np.full(B * T, -1, dtype=np.int64)
    n = min(len(doc), B * T)
    rows[:n] = number[doc[:n]]
    return rows.reshape(B, T)


def topic_information_above_chance_by_layer(
    table: RouteTable, topics: Integer[np.ndarray, "B T"], shifts: int = 16
) -> Float[np.ndarray, " L"]:
    """I(expert; topic) minus its value by chance: about 0 for routing that ignores the topic.

    Topics and sticky experts both stay for many tokens, so they coincide by chance, and more often the longer they
    stay. Chance is the mean information about topics that are rotated by 1/(n+1) … n/(n+1) of the text's length.
    """
    known = table.mask & (topics >= 0)
    S, labels = table.S[:, known], topics[known]
    steps = np.arange(1, shifts + 1) * len(labels) // (shifts + 1)
    by_chance = [information_by_layer(S, np.roll(labels, step), table.n_experts) for step in steps]
    return np.asarray(information_by_layer(S, labels, table.n_experts) - np.stack(by_chance, axis=1).mean(1))


def information_by_layer(
    S: Integer[np.ndarray, "L n k"], labels: Integer[np.ndarray, " n"], n_experts: int
) -> Float[np.ndarray, " L"]:
    """I(expert; label) = Σ p(e, c)·log₂ p(e, c) / (p(e)·p(c)), in bits, over all k slots of n tokens.

    0 where experts ignore the label; at most the entropy of the experts, and of the labels.
    """
    return np.array([_information(_joint(layer, labels, n_experts)) for layer in S])


def _joint(
    S: Integer[np.ndarray, "n k"], labels: Integer[np.ndarray, " n"], n_experts: int
) -> Float[np.ndarray, "labels N"]:
    """Number of uses of each expert by tokens of each label."""
    n_labels = int(labels.max(initial=-1)) + 1
    width = n_experts + 1  # the last column counts slots that use no expert
    cells = (labels[:, None] * width + S).ravel()
    counts = np.bincount(cells, minlength=n_labels * width).reshape(n_labels, width)
    return counts[:, :n_experts].astype(np.float64)


def _information(counts: Float[np.ndarray, "labels N"]) -> float:
    if counts.sum() == 0:
        return float("nan")
    p = counts / counts.sum()
    independent = p.sum(0, keepdims=True) * p.sum(1, keepdims=True)
    seen = p > 0
    return float((p[seen] * np.log2(p[seen] / independent[seen])).sum())
