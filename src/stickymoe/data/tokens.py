"""Tokenise a corpus, through the cache, a few thousand rows at a time; the tokens are mapped from the cache's files.

Each row is tokenised alone and the rows are concatenated without special tokens: with GPT-2's tokenizer that
gives the 242,643 validation tokens of the paper. Documents and row starts are kept, because routers may reset there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped
from tokenizers import Tokenizer

from stickymoe.data.cache import Entry, read_entry, write_entry
from stickymoe.data.corpora import Corpus, Document, load_corpus
from stickymoe.data.tokenizers import gpt2_tokenizer, token_bytes, train_bpe
from stickymoe.errors import DataError
from stickymoe.locality.table import BLOCK, blocks, release
from stickymoe.npy import map_npy
from stickymoe.runs.config import DataConfig

# Part of the cache key: raise it when the same corpus and tokenizer would give other files.
FORMAT = 2
SPLITS = ("train", "valid", "test")
_ROWS_AT_ONCE = 4096
_COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "doc": np.int32,
    "row_start": np.bool_,
    "boundary": np.bool_,
}
T = TypeVar("T")
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
        entry = write_entry(folder, lambda temporary: _tokenise(corpus, config, temporary))
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
        "splits": corpus.identity or [[[d.topic, d.rows] for d in getattr(corpus, split)] for split in SPLITS],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _tokenise(corpus: Corpus, config: DataConfig, folder: Path) -> dict[str, Any]:
    """Write the files of a cache entry; returns what `meta.json` says about them."""
    tokenizer = _tokenizer(corpus, config)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    writers = {name: _SplitWriter(folder, name, tokenizer) for name in SPLITS}
    splits = {name: writer.write(getattr(corpus, name)) for name, writer in writers.items()}
    whole = [_token_split(folder, name, splits[name]) for name in SPLITS]
    return {
        "corpus": corpus.name,
        "tokenizer": config.tokenizer,
        "splits": splits,
        "fingerprint": _fingerprint(whole, tokenizer.to_str().encode()),
    }


def _tokenizer(corpus: Corpus, config: DataConfig) -> Tokenizer:
    if config.tokenizer == "gpt2":
        return gpt2_tokenizer()
    return train_bpe((row for document in corpus.train for row in document.rows), config.vocab_size)


class _Column:
    """An array in a file that grows; the header gets its length in the end."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self.length = 0
        self._write_header()

    def append(self, array: Shaped[np.ndarray, " n"]) -> None:
        self._file.write(array.astype(self._dtype, copy=False).tobytes())
        self.length += len(array)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Headers leave room for any length, so they all have the same size."""
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class _SplitWriter:
    """Tokenises the documents of a split into files."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._columns = {kind: _Column(folder / f"{name}.{kind}.npy", dtype) for kind, dtype in _COLUMNS.items()}
        self._boundaries = _Boundaries(tokenizer)
        self._topics: list[str | None] = []
        self._rows = 0

    def write(self, documents: Iterable[Document]) -> dict[str, Any]:
        for batch in batched(self._numbered_rows(documents), _ROWS_AT_ONCE):  # rows are far smaller than encodings
            self._write_rows([row for row, _ in batch], np.array([doc for _, doc in batch], dtype=np.int32))
        for column in self._columns.values():
            column.close()
        return {
            "topics": self._topics if any(topic is not None for topic in self._topics) else None,
            "tokens": self._columns["tokens"].length,
            "documents": len(self._topics),
            "rows": self._rows,
        }

    def _numbered_rows(self, documents: Iterable[Document]) -> Iterator[tuple[str, int]]:
        for number, document in enumerate(documents):
            self._topics.append(document.topic)
            for row in document.rows:
                yield row, number

    def _write_rows(self, rows: list[str], doc_of_row: Int32[np.ndarray, " rows"]) -> None:
        encoded = self._tokenizer.encode_batch_fast(rows, add_special_tokens=False)
        lengths = np.array([len(encoding.ids) for encoding in encoded], dtype=np.int64)
        tokens = np.concatenate([np.array(encoding.ids, dtype=np.int32) for encoding in encoded])
        row_start = np.zeros(len(tokens), dtype=np.bool_)
        row_start[np.cumsum(lengths) - lengths] = True
        self._rows += len(rows)
        columns = self._columns
        columns["tokens"].append(tokens)
        columns["doc"].append(np.repeat(doc_of_row, lengths))
        columns["row_start"].append(row_start)
        columns["boundary"].append(self._boundaries.of_next(tokens, row_start))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items, in order."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


class _Boundaries:
    """Marks where sentences begin: at the start of a row, and at a token with a leading space after a stop.

    Closing quotes and brackets may follow the stop. The stop of an initial or a title does not end a sentence, and a
    sentence does not begin with a lower-case letter or a punctuation mark. The point in a number or a web address is
    not a stop. Only the first token of a sentence is needed to decide, none after it, and before it only its row and
    the last three tokens.
    """

    _ROWS_BEFORE = 3

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = tokenizer.get_vocab()
        stops, titles, brackets, quotes, opens = (np.zeros(max(words.values()) + 1, dtype=np.bool_) for _ in range(5))
        for word, index in words.items():
            stop = _STOP.search(word)
            stops[index] = stop is not None and not (stop.start() and _TITLE.fullmatch(word[: stop.start()]))
            titles[index] = _TITLE.fullmatch(word) is not None
            brackets[index] = _BRACKET.fullmatch(word) is not None
            quotes[index] = _QUOTE.fullmatch(word) is not None
            opens[index] = _OPENS.fullmatch(word) is not None and not word[1:2].islower()
        self._stops, self._titles, self._brackets, self._quotes, self._opens = stops, titles, brackets, quotes, opens
        self._before = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)

    def of_next(self, tokens: Int32[np.ndarray, " n"], row_start: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """The boundaries of the next whole rows of a split."""
        n_before = len(self._before[0])
        tokens, row_start = (np.concatenate(pair) for pair in zip(self._before, (tokens, row_start), strict=True))
        starts = np.flatnonzero(row_start)
        kept = starts[max(len(starts) - self._ROWS_BEFORE, 0)]
        self._before = tokens[kept:], row_start[kept:]
        return self._of_rows(tokens, row_start)[n_before:]

    def _of_rows(self, tokens: Int32[np.ndarray, " n"], row_start: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        row = np.flatnonzero(row_start)[row_start.cumsum() - 1]
        before = self._quotes[tokens].cumsum() - self._quotes[tokens]  # quotes before each token
        closes = self._brackets[tokens] | (self._quotes[tokens] & ((before - before[row]) % 2 == 1))
        ended = self._stops[tokens]
        ended[1:] &= ~self._titles[tokens[:-1]] | row_start[1:]
        for _ in range(2):  # a quote, then a bracket around it
            ended[1:] |= ended[:-1] & closes[1:]
        boundary = row_start.copy()
        boundary[1:] |= ended[:-1] & self._opens[tokens[1:]] & ~closes[1:]
        return boundary


def _token_data(entry: Entry, fraction: float) -> TokenData:
    splits = entry.about["splits"]
    train, valid, test = (_token_split(entry.folder, name, splits[name]) for name in SPLITS)
    train = _shorten(train, fraction)
    definition = (entry.folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(definition.decode())
    whole = fraction == 1
    return TokenData(
        train=train,
        valid=valid,
        test=test,
        tokenizer=tokenizer,
        fingerprint=entry.about["fingerprint"] if whole else _fingerprint((train, valid, test), definition),
        token_bytes=token_bytes(tokenizer),
    )


def _token_split(folder: Path, name: str, about: dict[str, Any]) -> TokenSplit:
    arrays = {kind: map_npy(folder / f"{name}.{kind}.npy", DataError) for kind in _COLUMNS}
    topics = about["topics"]
    return TokenSplit(**arrays, topics=(None,) * about["documents"] if topics is None else tuple(topics))


def _shorten(split: TokenSplit, fraction: float) -> TokenSplit:
    """The first part of a split; the tokenizer is that of the whole split."""
    n = round(fraction * len(split.tokens))
    return replace(split, **{kind: getattr(split, kind)[:n] for kind in _COLUMNS})


def _fingerprint(splits: Sequence[TokenSplit], tokenizer_json: bytes) -> str:
    digest = hashlib.sha256(tokenizer_json)
    for split in splits:
        digest.update(f"\n{len(split.tokens)}\n".encode())
        for array in (split.tokens, split.doc):
            for block in blocks(len(array), BLOCK):
                digest.update(array[block].astype("<i4").tobytes())
            release(array)
    return digest.hexdigest()
