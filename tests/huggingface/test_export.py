"""From a run to a folder that transformers loads: text, evaluation, and every mistake one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import stickymoe.huggingface  # noqa: F401
from stickymoe.cli import main
from stickymoe.data.tokenizers import gpt2_tokenizer
from stickymoe.errors import RunError
from stickymoe.huggingface.export import export_run
from stickymoe.models.gpt import GPT
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import load_model

SMALL = (
    *("--preset", "tiny", "--variant", "smooth", "--quiet", "--data.vocab_size", "300"),
    *("--model.d_model", "16", "--model.d_ff", "16", "--model.seq_len", "48"),
    *("--train.steps", "12", "--train.batch_size", "4", "--train.eval_every", "12", "--train.checkpoint_every", "6"),
)
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small steps, with checkpoints at 6 and 12. Not to be written to."""
    out = tmp_path_factory.mktemp("export") / "run"
    assert main(["train", *SMALL, "--data.path", str(corpus), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "new" / "model"
    export_run(run, out)
    return out


@pytest.fixture(scope="module")
def model(exported: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(exported).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer(exported: Path) -> Any:
    return AutoTokenizer.from_pretrained(exported)


def ours(run: Path, step: str = "step-000012") -> GPT:
    """The model of a run as the rest of the package builds it."""
    folder = RunFolder(run)
    gpt = build_model(read_config(file=folder.config), Tokenizer.from_file(str(folder.tokenizer)).get_vocab_size())
    load_model(folder.checkpoints / step, gpt)
    return gpt.eval().requires_grad_(False)


def assert_same_weights(gpt: GPT, other: GPT) -> None:
    expected, given = gpt.state_dict(), other.state_dict()
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


# The folder


def test_it_has_the_files_that_transformers_reads_and_nothing_else_is_left(exported):
    assert {p.name for p in exported.iterdir()} == FILES
    assert list(exported.parent.iterdir()) == [exported]


def test_it_has_the_weights_of_the_newest_checkpoint(run, model):
    assert_same_weights(ours(run), model.gpt)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens).logits, ours(run)(tokens).logits)


def test_an_earlier_checkpoint_can_be_chosen(run, tmp_path, capsys):
    out = tmp_path / "early"
    assert main(["export", str(run), str(out), "--checkpoint", "step-000006"]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    assert_same_weights(ours(run, "step-000006"), AutoModelForCausalLM.from_pretrained(out).gpt)


@pytest.mark.parametrize("text", ["ban kert lo.", " two  spaces\n", "é 日本 Ā ÿ", "<|endoftext|>", "a\0b", ""])
def test_text_is_encoded_as_in_training(run, tokenizer, text):
    """Text that looks like a special token is plain text."""
    original = Tokenizer.from_file(str(RunFolder(run).tokenizer))
    assert len(tokenizer) == original.get_vocab_size()
    ids = tokenizer(text)["input_ids"]
    assert ids == original.encode(text).ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_in_the_vocabulary(run, tokenizer, model):
    """A new one would have no embedding."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.generation_config.pad_token_id
    assert tokenizer.pad_token_id < model.config.vocab_size
    assert tokenizer.decode([tokenizer.eos_token_id]) == "\0"
    assert tokenizer.padding_side == "right"
    assert tokenizer.model_max_length == 48


def test_gpt2s_tokenizer_keeps_its_own_end_of_text(run, tmp_path):
    """A run with GPT-2's vocabulary, at its first step."""
    from stickymoe.training.checkpoint import Progress, save_checkpoint

    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    gpt2_tokenizer().save(str(folder.tokenizer))
    config = read_config(["--data.tokenizer", "gpt2"], file=RunFolder(run).config)
    folder.write_config(config)
    gpt = build_model(config, 50257)
    save_checkpoint(folder.checkpoints, Progress(0), gpt, torch.optim.AdamW(gpt.parameters()))
    export_run(folder.path, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(50256) == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.encode("<|endoftext|>") == gpt2_tokenizer().encode("<|endoftext|>").ids
    assert len(tokenizer) == 50257
    assert_same_weights(gpt, AutoModelForCausalLM.from_pretrained(tmp_path / "model").gpt)


# Text and batches


def test_a_pipeline_writes_text(exported, model, tokenizer):
    (out,) = pipeline("text-generation", model=str(exported))("ban kert", max_new_tokens=8, do_sample=False)
    ids = model.generate(**tokenizer("ban kert", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert out["generated_text"] == tokenizer.decode(ids[0])
    assert out["generated_text"].startswith("ban kert")
    assert ids.shape[1] == len(tokenizer("ban kert")["input_ids"]) + 8


def test_a_padded_batch_has_the_logits_of_its_rows(model, tokenizer):
    texts = ["ban kert lo mi da.", "lo"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    logits = model(**batch).logits
    for row, text in zip(logits, texts, strict=True):
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(row[: len(alone)], alone)


# lm-evaluation-harness


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """Three contexts with two continuations each: to choose from, to score as one text, and to continue."""
    docs = [
        {"context": "ban kert lo", "choices": [" mi da", " bort"], "answer": 0},
        {"context": "", "choices": ["lo lo", "kan."], "answer": 1},
        {"context": "den mart bo ki la" * 8, "choices": [" le", " ma mi mo mu"], "answer": 0},
    ]
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    folder = tmp_path / "tasks"
    folder.mkdir()
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
    }
    choice = {
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
    }
    text = {
        "task": "tiny_text",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}{{choices[0]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    generation = {
        "task": "tiny_generation",
        "output_type": "generate_until",
        "doc_to_text": "{{choices[0]}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["?"], "max_gen_toks": 6},
    }
    for task in (choice, text, generation):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    return TaskManager(include_path=str(folder), include_defaults=False)


def by_hand(gpt: GPT, context: list[int], continuation: list[int]) -> float:
    """log p(continuation | context), from the last tokens that fit."""
    tokens = torch.tensor([(context + continuation)[-(gpt.config.seq_len + 1) :]])
    logp = gpt(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])
    return float(logp[0, -len(continuation) :].sum())


def test_the_harness_finds_our_log_likelihoods_and_text(run, model, tokenizer, tasks):
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=["tiny_choice", "tiny_text", "tiny_generation"],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    gpt, end = ours(run), tokenizer.eos_token_id

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    samples = results["samples"]["tiny_choice"]
    assert len(samples) == 3
    for sample in samples:
        context = sample["doc"]["context"]
        for choice, (found,) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = ids(context + choice) if context else [end, *ids(choice)]
            n = len(ids(context)) if context else 1
            assert float(found[0]) == pytest.approx(by_hand(gpt, whole[:n], whole[n:]), abs=1e-4)
    scored = 0
    for sample in results["samples"]["tiny_text"]:
        text = ids(sample["doc"]["context"] + sample["doc"]["choices"][0])
        if len(text) <= gpt.config.seq_len:  # the harness cuts a longer text into windows
            assert float(sample["resps"][0][0]) == pytest.approx(by_hand(gpt, [end], text), abs=1e-4)
            scored += 1
    assert scored == 2
    for sample in results["samples"]["tiny_generation"]:
        prompt = ids(sample["doc"]["choices"][0])
        written = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        assert sample["resps"] == [[tokenizer.decode(written)]]


# What is refused


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The one line with which the command fails; nothing is written."""
    assert main(["export", *map(str, args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stickymoe: ")
    assert err.count("\n") == 1
    return err.removeprefix("stickymoe: ").rstrip("\n")


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_not_overwritten(run, tmp_path, capsys, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    line = refused(capsys, run, out)
    assert line == f"{out} exists already, expected a new folder. Choose another one, or delete it first."
    assert list(tmp_path.iterdir()) == [out]
    assert kind != "file" or out.read_text() == "mine"


@pytest.mark.parametrize("name", ["missing", "empty", "config.yaml"])
def test_what_is_no_run_is_refused(tmp_path, capsys, name):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name == "config.yaml":
        path.write_text("")
    line = refused(capsys, path, tmp_path / "out")
    assert line == f"{path} is not a run: it has no config.yaml. Pass a folder that stickymoe train wrote."
    assert not (tmp_path / "out").exists()


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_a_run_without_a_checkpoint_is_refused(copied, tmp_path, capsys):
    shutil.rmtree(copied / "checkpoints")
    line = refused(capsys, copied, tmp_path / "out")
    assert line == f"{copied} has no checkpoint to export: resume or repeat the run first."


def test_an_unknown_checkpoint_is_refused(run, tmp_path, capsys):
    line = refused(capsys, run, tmp_path / "out", "--checkpoint", "step-7")
    assert line == f"No checkpoint 'step-7' in {run / 'checkpoints'}. Available: step-000006, step-000012."


def test_a_damaged_checkpoint_is_refused(copied, tmp_path, capsys):
    weights = copied / "checkpoints" / "step-000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert "step-000012 is damaged" in refused(capsys, copied, tmp_path / "out")


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_run_without_its_tokenizer_is_refused(copied, tmp_path, capsys, damage):
    file = copied / "tokenizer.json"
    file.unlink() if damage == "missing" else file.write_text("{}")
    assert refused(capsys, copied, tmp_path / "out").startswith(f"{file} is missing or damaged (")


def test_the_tokenizer_of_another_run_is_refused(copied, tmp_path, capsys):
    gpt2_tokenizer().save(str(copied / "tokenizer.json"))
    assert "does not fit the model of its config" in refused(capsys, copied, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_refused(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = refused(capsys, run, tmp_path / "file" / "out")
    assert line == f"{tmp_path / 'file' / 'out'} cannot be written (Not a directory). Choose another folder."


def test_a_failed_export_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stickymoe.files.publish_folder", full)
    with pytest.raises(RunError, match=r"out cannot be written \(No space left on device\)\. Choose another folder\.$"):
        export_run(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
