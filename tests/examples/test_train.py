"""The trainings of the examples, at toy size: results, resume, and a folder that loads."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.common import Rows, last_checkpoint
from examples.evaluate import batches, evaluate
from examples.olmoe import train as olmoe
from examples.smollm2 import train as smollm2
from examples.smollm2.upcycle import upcycle


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "soft-1"
    olmoe.main(f"--text {corpus} --out {out} --variant soft --steps 3 --batch 2 --seq_len 32".split())
    return out


def test_a_training_leaves_a_record_and_a_model(trained):
    record = json.loads((trained / "results.json").read_text())
    assert (record["method"], record["seed"], record["training"]["steps"]) == ("soft", 1, 3)
    assert set(record["metrics"]) == {"valid", "test"}
    assert 0 < record["metrics"]["test"]["misses_c4"] <= 1
    assert str(trained.parent) not in json.dumps(record)
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.num_parameters() == record["model"]["parameters"]
    text = AutoTokenizer.from_pretrained(trained)("hello").input_ids
    assert max(text) < model.config.vocab_size


def test_rows_drop_the_rest():
    rows = Rows(np.arange(10, dtype=np.int16), 4)
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_token_but_the_first_is_a_target_once():
    found = [targets[mask] for _, mask, targets in batches(np.arange(12), 4, 2)]
    assert torch.cat(found).tolist() == list(range(1, 12))


def test_perplexity_is_that_of_the_whole_rows(trained):
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokens = np.random.default_rng(0).integers(0, 500, 41)
    found = evaluate(model, tokens, length=16, rows=2)
    rows = [torch.from_numpy(tokens[i : i + 17])[None] for i in range(0, 40, 16)]
    with torch.no_grad():
        nll = sum(model(row, labels=row).loss.item() * (row.numel() - 1) for row in rows)
    assert found["ppl"] == pytest.approx(np.exp(nll / 40), rel=1e-4)


def test_only_complete_checkpoints_count(tmp_path):
    for step, complete in ((9, True), (10, True), (11, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "none") is None


@pytest.fixture
def upcycled(trained, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = upcycle(LlamaForCausalLM(config), noise=0.1)
    model.save_pretrained(tmp_path / "upcycled")
    tokenizer.save_pretrained(tmp_path / "upcycled")
    return tmp_path / "upcycled"


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


class Interrupt(threading.Event):
    """Ctrl-C during the third step."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def is_set(self):
        self.steps += 1
        return self.steps >= 3


def test_training_an_upcycled_model_moves_experts_and_gates_only(upcycled, corpus, monkeypatch, capsys):
    flags = f"--model {upcycled} --text {corpus} --variant soft --steps 5 --seq_len 32 --out".split()
    whole, parts = upcycled.parent / "whole", upcycled.parent / "parts"
    smollm2.main([*flags, str(whole)])
    before, after = weights(upcycled), weights(whole)
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in after if ".mlp." in name}
    assert "answer" in json.loads((whole / "results.json").read_text())

    with monkeypatch.context() as patch:
        patch.setattr("examples.common.stop_request", lambda: contextlib.nullcontext(Interrupt()))
        smollm2.main([*flags, str(parts)])
    assert "Stopped at step 3; the same command continues from there." in capsys.readouterr().out
    assert not (parts / "config.json").exists()
    smollm2.main([*flags, str(parts)])
    assert all(torch.equal(weight, after[name]) for name, weight in weights(parts).items())
