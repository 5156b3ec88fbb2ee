"""Corpora that `datasets` streams, and tokens that need not fit in memory."""

from __future__ import annotations

import json
import logging
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stickymoe.cli import main
from stickymoe.data import corpora, streams, tokens
from stickymoe.data.corpora import load_corpus
from stickymoe.data.tokens import load_tokens
from stickymoe.errors import ConfigError, DataError
from stickymoe.runs.config import DataConfig

TEXTS = [f"Row {i} of a text.\n\n It has another row, {i * 7919 % 97}. \n" for i in range(450)]


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """Writes a folder that `datasets` reads: `dataset(train=[…])`; its path has a slash."""

    def write(column: str = "text", **splits: list[str]) -> str:
        folder = tmp_path / "dataset"
        folder.mkdir(exist_ok=True)
        for name, texts in splits.items():
            lines = (json.dumps({column: text}) + "\n" for text in texts)
            (folder / f"{name}.jsonl").write_text("".join(lines))
        return str(folder)

    return write


def config(corpus: str, tmp_path: Path, **more: Any) -> DataConfig:
    return DataConfig(corpus=corpus, vocab_size=280, cache_dir=str(tmp_path / "cache"), **more)


def test_has_the_tokens_of_the_same_text_in_files(dataset: Callable[..., str], folder: Any, tmp_path: Path) -> None:
    splits = {"train": TEXTS[:300], "validation": TEXTS[300:400], "test": TEXTS[400:]}
    streamed = load_tokens(config(dataset(**splits), tmp_path))
    files = {f"{name}.txt": "".join(texts) for name, texts in splits.items()}
    read = load_tokens(DataConfig(path=str(folder(files)), vocab_size=280, cache_dir=str(tmp_path / "cache")))
    for name in ("train", "valid", "test"):
        ours, theirs = getattr(streamed, name), getattr(read, name)
        for kind in ("tokens", "row_start", "boundary"):
            assert np.array_equal(getattr(ours, kind), getattr(theirs, kind)), kind
    assert len(streamed.train.topics) == 300
    assert np.array_equal(np.unique(streamed.train.doc), np.arange(300))


def test_without_validation_texts_two_of_200_are_held_out(dataset: Callable[..., str], tmp_path: Path) -> None:
    corpus = load_corpus(config(dataset(train=TEXTS), tmp_path))
    rows = {name: [d.rows[0] for d in getattr(corpus, name)] for name in ("train", "valid", "test")}
    assert rows["valid"] == [f"Row {i} of a text." for i in (0, 200, 400)]
    assert rows["test"] == [f"Row {i} of a text." for i in (1, 201, 401)]
    assert len(rows["train"]) == 444


def test_a_limit_counts_documents(dataset: Callable[..., str], tmp_path: Path) -> None:
    name = dataset(train=TEXTS, validation=TEXTS[:5])
    limited, whole = (load_tokens(config(name, tmp_path, limit=limit)) for limit in (30, 0))
    assert (len(limited.train.topics), len(limited.valid.topics)) == (30, 5)
    assert limited.fingerprint != whole.fingerprint
    with pytest.raises(ConfigError, match=r"^data\.limit: got -1"):
        DataConfig(limit=-1)


def test_is_read_once_until_it_changes(
    dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = dataset(train=TEXTS)
    first = load_tokens(config(name, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(streams.Stream, "__iter__", lambda self: pytest.fail("read again"))
        assert load_tokens(config(name, tmp_path)).fingerprint == first.fingerprint
    dataset(train=TEXTS[1:])
    os.utime(Path(name) / "train.jsonl", (1, 1))
    assert load_tokens(config(name, tmp_path)).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("splits", "column", "message"),
    [
        ({"train": TEXTS[:3]}, "body", r"has the columns body, expected 'text' with text\.$"),
        ({"validation": TEXTS[:3]}, "text", r"has the splits validation, expected train\.$"),
        ({}, "text", r"could not be read with datasets \(.*or pass --data\.path DIR"),
    ],
)
def test_refuses(
    dataset: Callable[..., str], tmp_path: Path, splits: dict[str, list[str]], column: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_tokens(config(dataset(column, **splits), tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("broken/folder", r"could not be read with datasets \(ArrowInvalid: JSON parse error"),
        ("./nowhere", r"the folder '\./nowhere' does not exist\.$"),
        ("./nowhere:subset", r"the folder '\./nowhere' does not exist\.$"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    corpus: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`datasets` logs what it raises."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken" / "folder").mkdir(parents=True)
    (tmp_path / "broken" / "folder" / "train.jsonl").write_text('{"text": "a')
    assert main(["train", "--preset", "tiny", "--data.corpus", corpus, "--out", "run"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line)


def test_the_libraries_of_the_hub_log_again_afterwards() -> None:
    with streams.without_logs():
        assert not logging.getLogger("datasets.load").isEnabledFor(logging.ERROR)
    assert logging.getLogger("datasets.load").isEnabledFor(logging.ERROR)


def test_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less than its tokens, both when it is prepared and when it is read."""
    n, text = 1500, "A short text that comes again. " * 40

    def texts() -> Iterator[dict[str, str]]:
        return ({"text": text} for _ in range(n))

    stream = streams.Stream("a/b", texts, lambda number: True)
    short = streams.Stream("a/b", texts, lambda number: number == 0)
    monkeypatch.setattr(corpora, "open_streams", lambda *_: ("id", {"train": stream, "valid": short}))
    monkeypatch.setattr(tokens, "_ROWS_AT_ONCE", 64)
    chosen = config("a/b", tmp_path)
    monkeypatch.setattr(tokens, "BLOCK", 1 << 12)
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        data = load_tokens(chosen)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    size = sum(getattr(data.train, kind).nbytes for kind in ("tokens", "doc", "row_start", "boundary"))
    assert all(isinstance(getattr(data.train, kind), np.memmap) for kind in ("tokens", "doc"))
    assert max(peaks) < size / 2, (peaks, size)


def test_boundaries_do_not_depend_on_how_many_rows_are_tokenised_at_once(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["He left .", '" Yes . "', ")", '"', "( No .", ") Dr .", "Who ?", 'A . " B', "x", '." ) C d .', "E"] * 9
    path = folder({"train.txt": "\n".join([*rows, *rows[::2], *rows[::3]]), "valid.txt": "x y"})
    found = []
    for size in (1, 2, 5, 4096):
        monkeypatch.setattr(tokens, "_ROWS_AT_ONCE", size)
        found.append(load_tokens(DataConfig(path=str(path), vocab_size=300, cache_dir=str(tmp_path / str(size)))))
    for data in found[:-1]:
        assert np.array_equal(data.train.boundary, found[-1].train.boundary), "boundary"
        assert data.fingerprint == found[-1].fingerprint
