"""Tokenise a corpus, through the cache.

Each row is tokenised alone and the rows are concatenated without special tokens: with GPT-2's tokenizer that
gives the 242,643 validation tokens of the paper. Documents and row starts are kept, because routers may reset there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped
from tokenizers import Tokenizer

from stickymoe.data.cache import Entry, read_entry, write_entry
from stickymoe.data.corpora import Corpus, Document, load_corpus
from stickymoe.data.tokenizers import gpt2_tokenizer, token_bytes, train_bpe
from stickymoe.errors import DataError
from stickymoe.npy import parse_npy
from stickymoe.runs.config import DataConfig

# Part of the cache key: raise it when the same corpus and tokenizer would give other files.
FORMAT = 1
SPLITS = ("train", "valid", "test")
_ROWS_AT_ONCE = 4096
_SPACE = "Ġ"  # how byte-level vocabularies write a space
# The ends of sentences, as byte-level vocabularies write them.
_STOP = re.compile(r"""[.!?]["')\]]*$""")
_TITLE = re.compile(rf"{_SPACE}([A-Z]|Mrs?|Ms|Dr|St|Prof|Rev|Gen|Col|Capt|Lt|Sgt|Sen|Gov|No|Jr|vs|cf|ca|al|approx)")
_BRACKET = re.compile(rf"{_SPACE}?[')\]]")
_QUOTE = re.compile(rf'{_SPACE}?"')
_OPENS = re.compile(rf"""{_SPACE}([\w"'(\[<].*)?""")


@dataclass(frozen=True)
class TokenSplit:
    """One stream of n tokens; `doc` indexes `topics`, and `row_start` marks the first token of each row.

    `boundary` marks the first token of each sentence and row: rows are paragraphs.
    """

    tokens: Int32[np.ndarray, " n"]
    doc: Int32[np.ndarray, " n"]
    topics: tuple[str | None, ...]
    row_start: Bool[np.ndarray, " n"]
    boundary: Bool[np.ndarray, " n"] | None = None


@dataclass(frozen=True)
class TokenData:
    """`fingerprint` is a hash of tokens, documents and tokenizer; it does not depend on where the text is stored."""

    train: TokenSplit
    valid: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer
    fingerprint: str
    token_bytes: Int64[np.ndarray, " vocab"]

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def describe(self) -> dict[str, Any]:
        """The description of the data in the record of a run."""
        sizes = {name: len(getattr(self, name).tokens) for name in ("train", "valid", "test")}
        return {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size, "tokens": sizes}


def load_tokens(config: DataConfig) -> TokenData:
    """The corpus of `config` as tokens, from the cache if it was tokenised before."""
    corpus = load_corpus(config)
    folder = _cache_root(config) / _key(corpus, config)
    entry = read_entry(folder)
    if entry is None:
        entry = _tokenise(corpus, config)
        write_entry(folder, entry)
    return _token_data(entry, config.fraction)


def _cache_root(config: DataConfig) -> Path:
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "stickymoe" / "tokens"


def _key(corpus: Corpus, config: DataConfig) -> str:
    identity = {
        "format": FORMAT,
        "tokenizer": [config.tokenizer, config.vocab_size if config.tokenizer == "bpe" else None],
        "splits": [[[d.topic, d.rows] for d in getattr(corpus, split)] for split in SPLITS],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _tokenise(corpus: Corpus, config: DataConfig) -> Entry:
    tokenizer = _tokenizer(corpus, config)
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    splits: dict[str, Any] = {}
    for name in SPLITS:
        split = _tokenise_split(getattr(corpus, name), tokenizer)
        for array in ("tokens", "doc", "row_start"):
            files[f"{name}.{array}.npy"] = _npy(getattr(split, array))
        splits[name] = {
            "topics": split.topics,
            "tokens": len(split.tokens),
            "documents": len(split.topics),
            "rows": int(split.row_start.sum()),
        }
    about = {"corpus": corpus.name, "tokenizer": config.tokenizer, "splits": splits}
    return Entry(about=about, files=files)


def _tokenizer(corpus: Corpus, config: DataConfig) -> Tokenizer:
    if config.tokenizer == "gpt2":
        return gpt2_tokenizer()
    return train_bpe((row for document in corpus.train for row in document.rows), config.vocab_size)


def _tokenise_split(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenSplit:
    rows = [row for document in documents for row in document.rows]
    encoded = _encode(rows, tokenizer)
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    doc_of_row = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d.rows) for d in documents])
    row_start = np.zeros(lengths.sum(), dtype=np.bool_)
    row_start[np.cumsum(lengths) - lengths] = True
    return TokenSplit(
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *encoded]),
        doc=np.repeat(doc_of_row, lengths),
        topics=tuple(document.topic for document in documents),
        row_start=row_start,
    )


def _encode(rows: list[str], tokenizer: Tokenizer) -> list[Int32[np.ndarray, " _"]]:
    """Encode a few thousand rows at a time: an `Encoding` is about fifty times larger than its ids."""
    encoded = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        batch = tokenizer.encode_batch_fast(rows[start : start + _ROWS_AT_ONCE], add_special_tokens=False)
        encoded += [np.array(encoding.ids, dtype=np.int32) for encoding in batch]
    return encoded


def _npy(array: Shaped[np.ndarray, " n"]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _token_data(entry: Entry, fraction: float) -> TokenData:
    train, valid, test = (_token_split(entry, name) for name in SPLITS)
    train = _shorten(train, fraction)
    definition = entry.files["tokenizer.json"]
    tokenizer = Tokenizer.from_str(definition.decode())
    train, valid, test = (_with_boundaries(split, tokenizer) for split in (train, valid, test))
    return TokenData(
        train=train,
        valid=valid,
        test=test,
        tokenizer=tokenizer,
        fingerprint=_fingerprint((train, valid, test), definition),
        token_bytes=token_bytes(tokenizer),
    )


def _token_split(entry: Entry, name: str) -> TokenSplit:
    def array(kind: str) -> Shaped[np.ndarray, " n"]:
        file = f"{name}.{kind}.npy"
        return parse_npy(entry.files[file], f"Token cache: {file}", DataError)

    topics = tuple(entry.about["splits"][name]["topics"])
    return TokenSplit(tokens=array("tokens"), doc=array("doc"), topics=topics, row_start=array("row_start"))


def _with_boundaries(split: TokenSplit, tokenizer: Tokenizer) -> TokenSplit:
    """Mark where sentences begin: at the start of a row, and at a token with a leading space after a stop.

    Closing quotes and brackets may follow the stop. The stop of an initial or a title does not end a sentence, and a
    sentence does not begin with a lower-case letter or a punctuation mark. The point in a number or a web address is
    not a stop. Only the first token of a sentence is needed to decide, none after it.
    """
    words = tokenizer.get_vocab()
    stops, titles, brackets, quotes, opens = (np.zeros(max(words.values()) + 1, dtype=np.bool_) for _ in range(5))
    for word, index in words.items():
        stop = _STOP.search(word)
        stops[index] = stop is not None and not (stop.start() and _TITLE.fullmatch(word[: stop.start()]))
        titles[index] = _TITLE.fullmatch(word) is not None
        brackets[index] = _BRACKET.fullmatch(word) is not None
        quotes[index] = _QUOTE.fullmatch(word) is not None
        opens[index] = _OPENS.fullmatch(word) is not None and not word[1:2].islower()
    tokens = split.tokens
    row = np.flatnonzero(split.row_start)[split.row_start.cumsum() - 1] if len(tokens) else tokens
    before = quotes[tokens].cumsum() - quotes[tokens]  # quotes before each token
    closes = brackets[tokens] | (quotes[tokens] & ((before - before[row]) % 2 == 1))
    ended = stops[tokens]
    ended[1:] &= ~titles[tokens[:-1]] | split.row_start[1:]
    for _ in range(2):  # a quote, then a bracket around it
        ended[1:] |= ended[:-1] & closes[1:]
    boundary = split.row_start.copy()
    boundary[1:] |= ended[:-1] & opens[tokens[1:]] & ~closes[1:]
    return replace(split, boundary=boundary)


def _shorten(split: TokenSplit, fraction: float) -> TokenSplit:
    """The first part of a split; the tokenizer is that of the whole split."""
    n = round(fraction * len(split.tokens))
    return replace(split, tokens=split.tokens[:n], doc=split.doc[:n], row_start=split.row_start[:n])


def _fingerprint(splits: Sequence[TokenSplit], tokenizer_json: bytes) -> str:
    digest = hashlib.sha256(tokenizer_json)
    for split in splits:
        digest.update(f"\n{len(split.tokens)}\n".encode())
        digest.update(split.tokens.astype("<i4").tobytes())
        digest.update(split.doc.astype("<i4").tobytes())
    return digest.hexdigest()
