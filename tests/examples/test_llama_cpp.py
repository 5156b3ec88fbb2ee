"""The comparison with llama.cpp: equal and different tokens and experts are counted, and the page states the record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.llama_cpp.compare import HERE, compared, sentence
from stickymoe.locality.formats import save_table
from stickymoe.locality.table import RouteTable

S = np.array([[[[0, 1], [2, 1], [3, 0], [1, 2]]], [[[3, 1], [0, 1], [2, 0], [1, 3]]]])  # [layers, 1, tokens, k]
TEXT = np.array([[7, 8, 9, 5]], np.int32)
ANSWER = {"prompt": [7, 8], "tokens": [9, 5, 4]}


def written(folder: Path, experts: np.ndarray = S, masked: int = 0, **fields: np.ndarray) -> Path:
    mask = np.ones((1, experts.shape[2]), bool)
    mask[0, :masked] = False
    save_table(RouteTable(S=experts, n_experts=4, mask=mask, **fields), folder)
    return folder


def test_equal_tokens_and_choices_are_counted(tmp_path):
    ours = written(tmp_path / "ours", tokens=TEXT)
    theirs = written(tmp_path / "theirs", S[..., ::-1], masked=1)  # another order of the experts is no difference
    found = compared(ours, theirs, ANSWER)
    assert found == {"layers": 2, "tokens": 2, "equal_tokens": 2, "choices": 12, "equal_choices": 12}


def test_differences_are_counted(tmp_path):
    other = S.copy()
    other[1, 0, 3] = [0, 2]
    ours = written(tmp_path / "ours", tokens=TEXT)
    found = compared(ours, written(tmp_path / "theirs", other), {**ANSWER, "tokens": [9, 6, 4]})
    assert (found["equal_tokens"], found["choices"], found["equal_choices"]) == (1, 16, 14)


def test_traces_of_different_models_are_refused(tmp_path):
    ours = written(tmp_path / "ours", tokens=TEXT)
    with pytest.raises(SystemExit, match="different models"):
        compared(ours, written(tmp_path / "theirs", S[:1]), ANSWER)


def test_the_page_states_the_record():
    record = json.loads((HERE / "record.json").read_text())
    assert sentence(record) in (HERE / "README.md").read_text()
    assert record["equal_choices"] == record["choices"]
