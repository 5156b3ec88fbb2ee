"""`profile`, `reroute` and `adapt` on a checkpoint: results against plain computations, resuming, and bad input."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stickymoe
from checkpoints import TEXT, byte_tokenizer, write_checkpoint
from stickymoe.cli import main
from stickymoe.errors import StickyError
from stickymoe.huggingface.adapt import _AdaptTrainer, adapt, terms_of
from stickymoe.huggingface.reroute import strengths
from stickymoe.huggingface.text import load_model, padded, score_text, token_chunks
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.runs.adaptation import METHODS, AdaptConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Run a command in the folder; returns its exit code and what it printed."""
    monkeypatch.chdir(place)

    def command(*argv):
        code = main([str(word) for word in argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def rows_of(place, length=32, most=512):
    loaded = load_model(str(place / "model"))
    return loaded, list(token_chunks(loaded.tokenizer, place / "text.txt", length, most))


# Texts


def test_rows_are_the_tokens_of_the_text_in_order(place):
    _, rows = rows_of(place, most=None)
    assert torch.cat(rows).tolist() == byte_tokenizer()(TEXT)["input_ids"]
    assert {len(row) for row in rows[:-1]} == {32}
    assert sum(map(len, rows_of(place, most=100)[1])) == 100


def test_a_folder_is_read_file_by_file(tmp_path):
    for name, text in (("b.md", "second file"), ("a.txt", "first file"), ("c.json", "{}")):
        (tmp_path / name).write_text(text)
    rows = list(token_chunks(byte_tokenizer(), tmp_path, 64))
    assert [byte_tokenizer().decode(row) for row in rows] == ["first file", "second file"]


def test_the_score_of_a_text_is_that_of_the_model_s_own_loss(place):
    loaded, rows = rows_of(place, most=120)
    with stickymoe.attach(loaded.model) as attached:
        scored = score_text(attached, rows, batch_size=3)
    nats = 0.0
    for row in rows:
        with torch.no_grad():
            nats += float(loaded.model(input_ids=row[None], labels=row[None]).loss) * (len(row) - 1)
    assert scored.targets == sum(len(row) - 1 for row in rows)
    assert scored.nats == pytest.approx(nats / scored.targets, rel=1e-5)
    assert scored.table.mask.sum() == 120
    assert scored.table.tokens[scored.table.mask].tolist() == torch.cat(rows).tolist()


# profile


def test_profile_writes_a_trace_that_simulate_and_plan_take(run, place):
    code, out, _ = run("profile", "model", "--text", "text.txt", "--tokens", 256, "--seq_len", 32, "--out", "trace")
    assert code == 0
    assert "model: 2 layers, 6 experts, top-2, 8 × 32 tokens" in out
    table = stickymoe.load_table(place / "trace")
    loaded, rows = rows_of(place, most=256)
    ids, _ = padded(rows)
    with stickymoe.attach(loaded.model) as attached, torch.no_grad():
        loaded.model(input_ids=ids)
        assert np.array_equal(table.S, attached.trace.S.numpy())
    experts = loaded.model.model.layers[0].mlp.experts
    one = sum(p[0].nbytes for p in experts.parameters())
    assert table.expert_bytes == (one, one)
    assert table.other_bytes + 2 * 6 * one == sum(p.nbytes for p in loaded.model.parameters())
    assert run("simulate", "trace", "--capacity", "2,3")[0] == 0
    assert run("plan", "trace", "--device", "raspberry-pi-5")[0] == 0


def test_profile_marks_prompts_and_answers(run, place):
    argv = ("profile", "model", "--text", "text.txt", "--tokens", 64, "--seq_len", 16, "--generate", 5)
    assert run(*argv, "--out", "answers")[0] == 0
    table = stickymoe.load_table(place / "answers")
    loaded, rows = rows_of(place, length=16, most=64)
    ids = loaded.model.generate(torch.stack(rows), max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    assert np.array_equal(table.tokens, ids[:, :-1].numpy())  # the last token is not routed
    assert table.phase[:, :16].sum() == 0
    assert table.phase[:, 16:].all()
    with stickymoe.attach(loaded.model) as attached, torch.no_grad():
        loaded.model(input_ids=ids[:, :-1])
        assert np.array_equal(table.S, attached.trace.S.numpy())


def test_an_interrupted_profile_leaves_no_trace(place, monkeypatch):
    from stickymoe.huggingface.profile import profile

    loaded, rows = rows_of(place)

    def stop(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(loaded, rows, place / "half", progress=stop)
    assert not (place / "half").exists()


def test_a_folder_with_files_is_left_alone(run, place):
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").write_text("keep me")
    code, _, err = run("profile", "model", "--text", "text.txt", "--out", "mine")
    assert code == 2
    assert "mine is not empty" in err
    assert (place / "mine" / "notes.txt").read_text() == "keep me"


# reroute


def test_reroute_counts_the_loads_of_every_rule(run, place):
    argv = ("reroute", "model", "--text", "text.txt", "--tokens", 256, "--seq_len", 32, "--slots", 3)
    code, _, err = run(*argv, "--json", "rules.json", "--figure", "rules.svg")
    assert code == 0, err
    found = json.loads((place / "rules.json").read_text())
    rows = found["rows"]
    assert [row["rule"] for row in rows][:2] == ["as it is", "cache_prior"]
    assert {row["rule"] for row in rows} == {"as it is", "cache_prior", "max_rank", "tau_reroute", "drop_cold"}
    loaded, text = rows_of(place, most=256)
    for row in (rows[0], rows[3]):
        strength = row["strength"]
        rule = None if strength is None else stickymoe.variant("cache_prior", capacity=3, strength=strength)
        with stickymoe.attach(loaded.model, rule) as attached:
            scored = score_text(attached, text)
        loads = simulate(scored.table, capacity=3, access=Access(order="decode")).misses
        assert row["loads_per_token"] == pytest.approx(loads / 256)
        assert row["ppl"] == pytest.approx(scored.ppl, rel=1e-5)
    assert (place / "rules.svg").read_text().startswith("<svg")
    by_rule = {(row["rule"], row["strength"]): row["loads_per_token"] for row in rows}
    assert by_rule["tau_reroute", 0.8] < by_rule["as it is", None]


# adapt


def adapt_argv(out, *more, method="soft", train="routers"):
    fixed = ("--seq_len", 32, "--held_out_tokens", 128, "--batch_size", 2, "--lr", 0.02, "--quiet", "--steps", 6)
    return ("adapt", "model", "--text", "text.txt", "--out", out, "--method", method, "--train", train, *fixed, *more)


@pytest.mark.parametrize("method", ["soft", "soft_hard", "remoe", "remoe_full"])
def test_adapting_routers_changes_the_gates_alone(run, place, method):
    code, _, err = run(*adapt_argv(f"adapted-{method}", method=method))
    assert code == 0, err
    before, after = (
        load_file(place / "model/model.safetensors"),
        load_file(place / f"adapted-{method}/model.safetensors"),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("gate.weight")}
    record = json.loads((place / f"adapted-{method}" / "adapt.json").read_text())
    assert math.isfinite(record["after"]["ppl"])
    assert record["settings"]["method"] == method
    AutoModelForCausalLM.from_pretrained(place / f"adapted-{method}")  # no code of ours
    assert not list(place.glob(".adapted*"))


@pytest.mark.parametrize("train", ["all", "lora"])
def test_adapting_more_than_the_routers_loads_in_plain_transformers(run, place, train):
    code, _, err = run(*adapt_argv(f"adapted-{train}", train=train))
    assert code == 0, err
    before, after = (
        load_file(place / "model/model.safetensors"),
        load_file(place / f"adapted-{train}/model.safetensors"),
    )
    assert set(before) == set(after)
    attention = [name for name in before if "q_proj" in name]
    assert all(not torch.equal(before[name], after[name]) for name in attention)


def test_an_interrupted_adaptation_resumes_with_the_same_result(run, place, monkeypatch):
    assert run(*adapt_argv("whole", "--save_every", 2))[0] == 0
    step = _AdaptTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(_AdaptTrainer, "training_step", interrupted)
    assert run(*adapt_argv("parts", "--save_every", 2))[0] == 130
    assert not (place / "parts").exists()
    monkeypatch.setattr(_AdaptTrainer, "training_step", step)
    assert run(*adapt_argv("parts", "--save_every", 2))[0] == 0
    whole, parts = (load_file(place / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_work_with_other_settings_is_not_resumed(run, place, monkeypatch):
    def stop(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(_AdaptTrainer, "training_step", stop)
    assert run(*adapt_argv("other"))[0] == 130
    code, _, err = run(*adapt_argv("other", "--lam", 0.7))
    assert code == 2
    assert "unfinished work with other settings" in err


def test_a_half_precision_checkpoint_is_trained_in_fp32_and_saved_as_it_was(run, place):
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
    model.save_pretrained(place / "half-model")
    byte_tokenizer().save_pretrained(place / "half-model")
    argv = adapt_argv("adapted-half")
    assert run("adapt", "half-model", *argv[2:])[0] == 0
    saved = load_file(place / "adapted-half" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    with pytest.raises(StickyError, match="in which updates round away"):
        adapt(load_model(str(place / "half-model")), place / "no", AdaptConfig(), [], [], slots=2)


def test_strengths_of_max_rank_follow_the_sizes_of_the_model():
    assert strengths("max_rank", 2, 6) == [3.0, 4.0, 6.0]
    assert strengths("max_rank", 8, 128) == [12.0, 16.0, 24.0, 32.0]


# Bad input


@pytest.fixture(scope="module")
def bad_places(place):
    """Folders and files that the commands must refuse."""
    (place / "empty").mkdir()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(place / "dense")
    byte_tokenizer().save_pretrained(place / "dense")
    write_checkpoint(place / "weightless")
    (place / "weightless" / "model.safetensors").unlink()
    write_checkpoint(place / "tokenless")
    for file in (place / "tokenless").glob("token*"):
        file.unlink()
    (place / "blank.txt").write_text("")
    (place / "short.txt").write_text("Too short.")
    (place / "latin.txt").write_bytes("über".encode("latin-1"))
    (place / "taken").mkdir()
    (place / "taken" / "header.json").write_text("{}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("profile", "nowhere", "--text", "text.txt"), "cannot be loaded as a transformers model"),
        (("profile", "empty", "--text", "text.txt"), "has no config.json"),
        (("profile", "dense", "--text", "text.txt"), "which has no gate and experts. Supported families: "),
        (("profile", "weightless", "--text", "text.txt"), "cannot be loaded as a transformers model"),
        (("profile", "tokenless", "--text", "text.txt"), "cannot be loaded as a transformers model"),
        (("profile", "model", "--text", "missing.txt"), "missing.txt does not exist"),
        (("profile", "model", "--text", "blank.txt"), "blank.txt is empty"),
        (("profile", "model", "--text", "latin.txt"), "latin.txt is not UTF-8 text"),
        (("profile", "model", "--text", "empty"), "empty has no text files"),
        (("profile", "model", "--text", "text.txt", "--generate", "-1"), "--generate: got -1"),
        (("profile", "model", "--text", "text.txt", "--seq_len", "1"), "seq_len: got 1"),
        (("profile", "model", "--text", "text.txt", "--dtype", "int3"), "dtype: got 'int3'"),
        (("profile", "model", "--text", "text.txt", "--out", "taken"), "taken is not empty"),
        (("reroute", "model", "--text", "text.txt", "--rules", "tau"), "Unknown rule 'tau'"),
        (
            ("reroute", "model", "--text", "text.txt", "--policy", "belady", "--tokens", "64"),
            "policy that a device can run",
        ),
        (("reroute", "model", "--text", "text.txt", "--slots", "0", "--tokens", "64"), "slots: got 0"),
        (("adapt", "model", "--text", "text.txt", "--out", "taken"), "taken exists"),
        (("adapt", "model", "--text", "text.txt", "--out", "new", "--method", "hard"), "method: got 'hard'"),
        (("adapt", "model", "--text", "text.txt", "--out", "new", "--train", "body"), "train: got 'body'"),
        (("adapt", "model", "--text", "short.txt", "--out", "new"), "short.txt is too short"),
    ],
    ids=lambda value: "-".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_line(bad_places, run, place, argv, message):
    code, _, err = run(*argv)
    assert code == 2, err
    assert err.startswith("stickymoe: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (place / "new").exists()


def test_settings_without_a_name_are_refused(place):
    with pytest.raises(StickyError, match="got settings lam without the name of a variant"):
        stickymoe.attach(load_model(str(place / "model")).model, lam=0.1)


def test_the_terms_of_a_method_are_those_of_its_variant():
    symbols = {method: [term.symbol for term in terms_of(AdaptConfig(method=method))] for method in METHODS}
    assert symbols["soft"] == symbols["remoe"] == ["bal", "cons"]
    assert symbols["soft_hard"] == ["bal", "cons", "hard"]
    assert symbols["remoe_full"] == ["ref_kl", "reuse", "lag_kl", "window_entropy"]
