"""Corpora as documents of rows, in three splits that never share a row.

A row is one stripped, non-empty line of text. Each row is tokenised alone, which gives the token count of the paper.
Documents have topics, and router state may reset between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from stickymoe.data.factbook import COUNTRY_FOLDS, country_sections
from stickymoe.data.streams import open_streams, without_logs
from stickymoe.errors import DataError, shown, unknown
from stickymoe.reading import read_bytes, reason
from stickymoe.runs.config import DataConfig

SPLIT_NAMES = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
TEXT_SUFFIXES = (".txt", ".md", ".raw", ".tokens")
_BY_HAND = "pass --data.path DIR, a folder with train, valid and test text files"


@dataclass(frozen=True)
class Document:
    """`rows` are stripped and non-empty; `topic` is None if the corpus has no topics."""

    name: str
    rows: tuple[str, ...]
    topic: str | None = None


@dataclass(frozen=True)
class Corpus:
    """`identity` stands for the text of a streamed corpus, whose documents are read only when they are needed."""

    name: str
    train: Iterable[Document]
    valid: Iterable[Document]
    test: Iterable[Document]
    identity: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class _Streamed:
    """The documents of a stream of texts."""

    texts: Iterable[str]

    def __iter__(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            rows = tuple(row for line in text.split("\n") if (row := line.strip()))
            if rows:
                yield Document(str(number), rows)


def load_corpus(config: DataConfig) -> Corpus:
    """The text of `config.path` if given, otherwise the named corpus; a name with a slash is streamed."""
    if config.path is not None:
        corpus = _from_path(Path(config.path).expanduser())
    elif config.corpus in _NAMED:
        corpus = _NAMED[config.corpus]()
    elif "/" in config.corpus:
        return _streamed(config)
    else:
        raise DataError(unknown("corpus", config.corpus, _NAMED))
    _refuse_empty(corpus)
    return corpus


def _streamed(config: DataConfig) -> Corpus:
    identity, texts = open_streams(config.corpus, config.limit)
    splits = (_Streamed(texts.get(split, ())) for split in ("train", "valid", "test"))
    return Corpus(config.corpus, *splits, identity=identity)


def _refuse_empty(corpus: Corpus) -> None:
    for split, documents in (("train", corpus.train), ("valid", corpus.valid)):
        if not documents:
            raise DataError(
                f"Corpus '{corpus.name}' has no text for {split}: expected at least one row. "
                f"Give more rows of text, or {_BY_HAND}."
            )


def _factbook() -> Corpus:
    splits: dict[str, list[Document]] = {"train": [], "valid": [], "test": []}
    for position, (country, sections) in enumerate(country_sections()):
        split = COUNTRY_FOLDS.get(position % 20, "train")
        splits[split] += [Document(f"{country}/{topic}", rows, topic) for topic, rows in sections.items()]
    return Corpus("factbook", *(tuple(documents) for documents in splits.values()))


def _wikitext_2() -> Corpus:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"Corpus 'wikitext-2' needs the package 'datasets', which is not installed. "
            f"Run: pip install 'stickymoe[hub]', or {_BY_HAND}."
        ) from error
    try:
        with without_logs():
            splits = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    # Without a network, the hub's libraries raise a dozen unrelated types.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"Corpus 'wikitext-2' could not be fetched from the hub ({type(error).__name__}: {reason}). "
            f"Connect to the network, or {_BY_HAND}."
        ) from error
    return Corpus("wikitext-2", *(_documents(name, splits[name]["text"]) for name in ("train", "validation", "test")))


_NAMED: dict[str, Callable[[], Corpus]] = {"factbook": _factbook, "wikitext-2": _wikitext_2}


def _from_path(path: Path) -> Corpus:
    try:
        if not path.exists():
            raise DataError(f"data.path: '{path}' does not exist. Expected a folder of text or a text file.")
        if path.is_file():
            return _cut(path.name, _read_documents(path, path.name))
        named = _split_files(path)
        return _from_splits(path, named) if named else _from_folder(path)
    except (OSError, ValueError) as error:  # ValueError: a path that contains the character NUL
        raise DataError(f"data.path: {shown(str(path))} cannot be read ({reason(error)}).") from error


def _split_files(folder: Path) -> dict[str, Path]:
    """Files whose last word names the split: `train.txt`, `wiki.valid.raw`, `my-corpus_dev.md`."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if not _is_text(file):
            continue
        last_word = file.stem.lower().replace("-", ".").replace("_", ".").rpartition(".")[2]
        split = SPLIT_NAMES.get(last_word)
        if split is None:
            continue
        if split in found:
            raise DataError(
                f"data.path: '{folder}' has two files for {split}, {found[split].name} and {file.name}. "
                f"Expected one; remove or rename the other."
            )
        found[split] = file
    return found


def _is_text(file: Path) -> bool:
    return file.suffix.lower() in TEXT_SUFFIXES and file.is_file()


def _from_splits(folder: Path, files: dict[str, Path]) -> Corpus:
    missing = [split for split in ("train", "valid") if split not in files]
    if missing:
        raise DataError(
            f"data.path: '{folder}' has {', '.join(file.name for file in files.values())} "
            f"but no file for {' or '.join(missing)}. "
            f"Add {' and '.join(f'{split}.txt' for split in missing)}, or rename the files that are there."
        )
    splits = {split: _read_documents(file, file.name) for split, file in files.items()}
    corpus = Corpus(folder.resolve().name, splits["train"], splits["valid"], splits.get("test", ()))
    _refuse_mixed_unknowns(corpus)
    return corpus


def _from_folder(folder: Path) -> Corpus:
    relative = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if _is_text(file))
    visible = [name for name in relative if not any(part.startswith(".") for part in name.split("/"))]
    if not visible:
        raise DataError(
            f"data.path: '{folder}' has no text files. Expected names ending in {', '.join(TEXT_SUFFIXES)}."
        )
    documents = [document for name in visible for document in _read_documents(folder / name, name)]
    return _cut(folder.resolve().name, documents)


def _read_documents(file: Path, name: str) -> tuple[Document, ...]:
    content = read_bytes(file, DataError)
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{file}' is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}. "
            f"Convert the file, for example with iconv -t utf-8."
        ) from error
    # Not splitlines: rows of WikiText may contain U+2028 and similar characters.
    return _documents(name, text.split("\n"))


def _documents(name: str, lines: Iterable[str]) -> tuple[Document, ...]:
    """One document, or one per article where the text has WikiText's `= Title =` rows."""
    rows = [line.strip() for line in lines]
    titles = _title_rows(rows)
    names = [name, *(rows[i][2:-2] for i in titles)]
    documents = []
    for title, (start, end) in zip(names, pairwise([0, *titles, len(rows)]), strict=True):
        kept = tuple(filter(None, rows[start:end]))
        if kept:
            documents.append(Document(title, kept))
    return tuple(documents)


def _title_rows(rows: Sequence[str]) -> list[int]:
    """Rows like `= Title =`; if the text has blank rows, only those between blank rows.

    Articles of WikiText also contain legends and broken formulas of that shape. Blank rows distinguish the 600 training
    titles from these.
    """
    shaped = [i for i, row in enumerate(rows) if _has_title_shape(row)]
    padded = ["", *rows, ""]
    alone = [i for i in shaped if not padded[i] and not padded[i + 2]]
    return alone if "" in rows[:-1] else shaped


def _has_title_shape(row: str) -> bool:
    inner = row[2:-2]
    return row.startswith("= ") and row.endswith(" =") and inner.strip("= ") == inner != ""


def _cut(name: str, documents: Sequence[Document]) -> Corpus:
    """Split into 90, 5 and 5 % of the bytes, between rows; a document at a border is divided between two splits."""
    total = sum(len(row.encode()) for document in documents for row in document.rows)
    borders = (total * 90 // 100, total * 95 // 100)
    splits: tuple[list[Document], ...] = ([], [], [])
    start = 0
    for document in documents:
        parts: tuple[list[str], ...] = ([], [], [])
        for row in document.rows:
            parts[bisect_right(borders, start)].append(row)
            start += len(row.encode())
        for split, rows in zip(splits, parts, strict=True):
            if rows:
                split.append(replace(document, rows=tuple(rows)))
    return Corpus(name, *map(tuple, splits))


def _refuse_mixed_unknowns(corpus: Corpus) -> None:
    """Refuse to train on `<unk>` text and validate on raw text, or the reverse: perplexities would be meaningless."""
    for name, held_out in (("valid", corpus.valid), ("test", corpus.test)):
        if held_out and (_mostly_unknown(corpus.train, held_out) or _mostly_unknown(held_out, corpus.train)):
            raise DataError(
                f"Corpus '{corpus.name}' mixes two texts: only one of train and {name} has '<unk>' "
                f"for rare words. Use the files of one release for all splits (raw or not)."
            )


def _mostly_unknown(documents: Iterable[Document], others: Iterable[Document]) -> bool:
    """Whether `<unk>` is more than 1 of 1,000 words here and does not occur in the others."""
    if _unknowns(others) or not (count := _unknowns(documents)):
        return False
    words = sum(len(row.split()) for document in documents for row in document.rows)
    return count * 1000 > words


def _unknowns(documents: Iterable[Document]) -> int:
    return sum(row.count("<unk>") for document in documents for row in document.rows)
