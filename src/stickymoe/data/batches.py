"""The order in which a run sees its tokens: a function of seed and step, so resuming needs only the step.

B sequences per batch, T tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from torch import Tensor

from stickymoe.data.tokens import TokenSplit
from stickymoe.errors import DataError, require

NO_TARGET = -100  # torch's cross-entropy skips it
NO_DOCUMENT = -1


@dataclass(frozen=True)
class Batch:
    """`targets` are -100 where nothing is predicted; `mask` marks real tokens, `doc` their documents.

    `boundary` marks the first token of a sentence or paragraph, where the split knows it. In training, `visit` counts
    how often a token of the text has come, from a random number of its own.
    """

    tokens: Int64[Tensor, "B T"]
    targets: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    doc: Int64[Tensor, "B T"] | None
    boundary: Bool[Tensor, "B T"] | None = None
    visit: Int64[Tensor, "B T"] | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        doc, boundary, visit = (None if x is None else x.to(device) for x in (self.doc, self.boundary, self.visit))
        tokens, targets, mask = (x.to(device) for x in (self.tokens, self.targets, self.mask))
        return Batch(tokens, targets, mask, doc, boundary, visit)


class TrainBatches:
    """Shuffled chunks of T tokens, each once per epoch.

    The last token of a chunk predicts the first token of the chunk that follows it in the text. The permutations of all
    epochs form one endless stream of chunks. Batch `step` is the `step`-th group of `batch_size` chunks of this stream,
    so an epoch may end inside a batch.
    """

    def __init__(self, split: TokenSplit, *, seq_len: int, batch_size: int, seed: int, documents: bool) -> None:
        self.n_chunks = (len(split.tokens) - 1) // seq_len
        if self.n_chunks < 1:
            raise DataError(
                f"The training text has {len(split.tokens)} tokens, but one chunk needs {seq_len + 1} "
                f"(model.seq_len + 1). Give more text or a smaller --model.seq_len."
            )
        self._split = split
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._seed = seed
        self._documents = documents
        self._order: tuple[int, Int64[np.ndarray, " n_chunks"]] | None = None

    def batch(self, step: int, *, part: int = 0, parts: int = 1) -> Batch:
        """The batch of `step`, or the `part`-th of `parts` equal shares of its rows."""
        require(
            self._batch_size % parts == 0,
            "train.batch_size",
            self._batch_size,
            f"a multiple of {parts} (processes × micro-batches)",
        )
        require(0 <= part < parts, "part", part, f"a whole number from 0 to {parts - 1}")
        share = self._batch_size // parts
        first = step * self._batch_size + part * share
        places = [divmod(position, self.n_chunks) for position in range(first, first + share)]
        chunks = np.array([self._chunk(epoch, index) for epoch, index in places])
        visit = np.stack([epoch + self._offsets(int(chunk)) for (epoch, _), chunk in zip(places, chunks, strict=True)])
        return replace(_gather(self._split, chunks, self._seq_len, self._documents), visit=_int64(visit))

    def _offsets(self, chunk: int) -> Int64[np.ndarray, " seq_len"]:
        """The number from which the visits of each token of a chunk are counted."""
        return np.random.Generator(np.random.PCG64([self._seed, 0, chunk])).integers(2**20, size=self._seq_len)

    def _chunk(self, epoch: int, index: int) -> int:
        if self._order is None or self._order[0] != epoch:
            shuffle = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = (epoch, shuffle.permutation(self.n_chunks))
        return int(self._order[1][index])


def eval_batches(split: TokenSplit, *, seq_len: int, batch_size: int, documents: bool) -> Iterator[Batch]:
    """The split in order; every token except the first is predicted once.

    The last chunk is padded; the last batch may have fewer rows.
    """
    for index in range(n_eval_batches(split, seq_len=seq_len, batch_size=batch_size)):
        yield eval_batch(split, index, seq_len=seq_len, batch_size=batch_size, documents=documents)


def eval_batch(split: TokenSplit, index: int, *, seq_len: int, batch_size: int, documents: bool) -> Batch:
    """One of `eval_batches`."""
    chunks = np.arange(index * batch_size, min((index + 1) * batch_size, _n_eval_chunks(split, seq_len)))
    return _gather(split, chunks, seq_len, documents)


def n_eval_batches(split: TokenSplit, *, seq_len: int, batch_size: int) -> int:
    """The number of all `eval_batches`."""
    return -(-_n_eval_chunks(split, seq_len) // batch_size)


def _n_eval_chunks(split: TokenSplit, seq_len: int) -> int:
    """The number of rows of all `eval_batches`, including the padded one."""
    n_targets = len(split.tokens) - 1
    if n_targets < 1:
        raise DataError(f"The text to evaluate on has {len(split.tokens)} tokens, expected at least 2. Give more text.")
    return -(-n_targets // seq_len)


def _gather(split: TokenSplit, chunks: Int64[np.ndarray, " B"], seq_len: int, documents: bool) -> Batch:
    position = chunks[:, None] * seq_len + np.arange(seq_len)
    last = len(split.tokens) - 1
    mask = position < last
    here, after = np.minimum(position, last), np.minimum(position + 1, last)
    doc = split.doc[here]
    predicted = mask & (doc == split.doc[after]) if documents else mask
    return Batch(
        tokens=_int64(np.where(mask, split.tokens[here], 0)),
        targets=_int64(np.where(predicted, split.tokens[after], NO_TARGET)),
        mask=torch.from_numpy(mask),
        doc=_int64(np.where(mask, doc, NO_DOCUMENT)) if documents else None,
        boundary=None if split.boundary is None else torch.from_numpy(split.boundary[here] & mask),
    )


def _int64(array: Integer[np.ndarray, "B T"]) -> Int64[Tensor, "B T"]:
    return torch.from_numpy(array.astype(np.int64))
