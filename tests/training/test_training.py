"""What a run does at each step: losses, phases, accumulation, processes, precision, and how it fails."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Child, contents, train_losses
from safetensors.torch import load_file

from stickymoe.cli import main
from stickymoe.errors import ConfigError, DataError, DivergedError
from stickymoe.locality.formats import load_table
from stickymoe.routing import losses
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord
from stickymoe.training import checkpoint
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import find_checkpoint
from stickymoe.training.loop import spans, train
from stickymoe.training.restore import evaluate_run
from stickymoe.variants import variant, variant_names

Small = Callable[..., RunConfig]
Finished = Callable[[RunConfig], Path]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


class TestAFinishedRun:
    @pytest.mark.parametrize("name", variant_names())
    def test_learns_and_is_complete(self, small: Small, finished: Finished, name: str) -> None:
        config = small(variant=name)
        run = finished(config)
        record = RunRecord.read(run / "record.json")
        total = spans(config)[-1].last
        assert record.status == "complete"
        assert record.config == config.as_dict()
        lines = RunFolder(run).read_metrics()
        assert [line["step"] for line in lines if "train" in line] == list(range(1, total + 1))
        assert [line["step"] for line in lines if "valid" in line] == sorted({5, 10, total})
        curve = [line["valid"]["ppl"] for line in lines if "valid" in line]
        assert record.metrics["ppl"] == curve[-1] < curve[0] < 300
        assert record.metrics["best_ppl"] == min(curve)
        assert record.metrics["best_step"] == [5, 10, total][curve.index(min(curve))]
        assert (run / "routes").exists() == (name != "dense")

    def test_logs_a_loss_that_is_the_sum_of_its_terms(self, small: Small, finished: Finished) -> None:
        config = small(*("--variant.mu", "0.3", "--variant.lam", "0.7", "--variant.alpha", "0.9"), variant="soft_hard")
        for values in train_losses(finished(config)):
            terms = 0.3 * values["bal"] + 0.7 * values["cons"] + 0.9 * values["hard"]
            assert values["loss"] == pytest.approx(values["ce"] + terms, rel=1e-6)
            assert values["cons"] > 0
            assert values["hard"] > 0

    def test_records_the_bytes_of_its_parameters(self, small: Small, finished: Finished) -> None:
        """Of the recommended router, which has three gates in every layer."""
        config = small("--variant.token", "true", "--variant.hashed", "true", variant="siblings")
        run = finished(config)
        parameters = weights(run, 12)
        in_experts = {name: p.nbytes for name, p in parameters.items() if ".experts." in name}
        gates = [p for name, p in parameters.items() if name.endswith("router.gate.weight")]
        assert [len(gate) for gate in gates] == [3 * config.model.n_experts] * config.model.n_layers
        sizes = RunRecord.read(run / "record.json").sizes
        assert config.model.n_experts * sum(sizes["expert_bytes"]) == sum(in_experts.values())
        assert sizes["other_bytes"] == sum(p.nbytes for p in parameters.values()) - sum(in_experts.values())
        assert len(set(sizes["expert_bytes"])) == 1
        assert len(sizes["expert_bytes"]) == config.model.n_layers

    def test_sets_its_progress_on_the_model(self, small: Small, finished: Finished) -> None:
        """A resident set that is free throughout training routes as vanilla does."""
        free = small("--variant.capacity", "2", "--variant.free", "1.0", variant="residency")
        assert train_losses(finished(free)) == train_losses(finished(small()))
        strict = small("--variant.capacity", "2", variant="residency")
        assert train_losses(finished(strict)) != train_losses(finished(small()))

    def test_starts_near_uniform_prediction(self, small: Small, finished: Finished) -> None:
        first = train_losses(finished(small()))[0]
        assert first["ce"] == pytest.approx(math.log(300), rel=0.02)
        assert first["bal"] == pytest.approx(1.0, abs=0.05)

    def test_is_returned_untouched(self, small: Small, finished: Finished) -> None:
        config = small()
        run = finished(config)
        before = contents(run)
        stamps = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
        for resume in (False, True):
            assert train(config, run, resume=resume, quiet=True) == RunRecord.read(run / "record.json")
        assert contents(run) == before
        assert stamps == {p: p.stat().st_mtime_ns for p in stamps}

    def test_is_measured_again_to_the_same_numbers(self, small: Small, finished: Finished) -> None:
        run = finished(small(variant="soft"))
        record = RunRecord.read(run / "record.json")
        again = evaluate_run(run)
        best = {"best_ppl": record.metrics["best_ppl"], "best_step": record.metrics["best_step"]}
        assert again.metrics | best == record.metrics
        assert again.per_layer == record.per_layer
        test = evaluate_run(run, split="test")
        assert test.metrics["targets"] == record.data["tokens"]["test"] - 1

    def test_is_measured_once_on_the_test_split_for_its_record(
        self, small: Small, finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = tmp_path / "run"
        shutil.copytree(finished(small(variant="soft")), run)
        measured = {name: evaluate_run(run, split=name).metrics for name in ("valid", "test")}
        for options in (["--split", "test"], ["--experts", "int8"], ["--split", "test", "--experts", "int4"]):
            assert main(["eval", str(run), *options, "--save"]) == 0
        record = RunRecord.read(run / "record.json")
        assert set(record.evaluations) == {"test", "valid int8", "test int4"}
        assert record.metrics == RunRecord.read(finished(small(variant="soft")) / "record.json").metrics
        test, rounded = record.evaluations["test"], record.evaluations["valid int8"]
        assert test["ppl"] == measured["test"]["ppl"]
        assert test["expert_bytes"] == record.sizes["expert_bytes"]
        assert rounded["ppl"] == pytest.approx(measured["valid"]["ppl"], rel=1e-2)
        assert rounded["ppl"] != measured["valid"]["ppl"]
        capsys.readouterr()
        refused = {
            ("--split", "test", "--save"): "already has 'test' in its record",
            ("--save",): "add --split test or --experts",
            ("--split", "test", "--save", "--checkpoint", "step-000001"): "omit --checkpoint",
        }
        for arguments, says in refused.items():
            assert main(["eval", str(run), *arguments]) == 2
            assert says in capsys.readouterr().err

    def test_is_the_same_again_and_another_with_another_seed(
        self, small: Small, finished: Finished, tmp_path: Path
    ) -> None:
        config = small()
        train(config, tmp_path / "again", quiet=True)
        ours, theirs = ((run / "metrics.jsonl").read_text() for run in (tmp_path / "again", finished(config)))
        assert ours == theirs
        assert train_losses(finished(small("--seed", "43"))) != train_losses(finished(config))

    def test_with_documents_trains_inside_them(self, tmp_path: Path, small: Small, corpus: Path) -> None:
        articles = tmp_path / "articles"
        articles.mkdir()
        for name in ("train", "valid", "test"):
            rows = (corpus / f"{name}.txt").read_text().splitlines()
            text = "".join(f"= Article {i} =\n{row}\n" for i, row in enumerate(rows))
            (articles / f"{name}.txt").write_text(text)
        more = ("--data.path", str(articles))
        within = train(small(*more, "--data.documents", "true", variant="soft_hard"), tmp_path / "in", quiet=True)
        flat = train(small(*more, variant="soft_hard"), tmp_path / "flat", quiet=True)
        assert within.status == flat.status == "complete"
        n_articles = 40
        assert within.metrics["targets"] == flat.metrics["targets"] - (n_articles - 1)
        assert train_losses(tmp_path / "in")[0]["cons"] != train_losses(tmp_path / "flat")[0]["cons"]


class TestPhases:
    @pytest.mark.parametrize(("steps", "tune"), [(1000, 100), (10_000, 1000), (12, 1), (26, 3), (1, 1)])
    def test_of_remoe_last_a_tenth_more(self, small: Small, steps: int, tune: int) -> None:
        config = small("--train.steps", str(steps), variant="remoe")
        first, second = spans(config)
        assert (first.first, first.last) == (0, steps)
        assert (second.first, second.last) == (steps, steps + tune)

    def test_of_others_are_one(self, small: Small) -> None:
        config = small()
        for name in set(variant_names()) - {"remoe"}:
            (only,) = spans(replace(config, variant=variant(name)))
            assert (only.first, only.last) == (0, 12)

    def test_a_graded_weight_warms_up_over_its_fraction_of_the_phase(self, small: Small, finished: Finished) -> None:
        run = finished(small("--variant.warmup", "0.5", "--variant.lam", "700", variant="graded+boundary"))
        lines = [line for line in RunFolder(run).read_metrics() if "train" in line]
        for line in lines:
            values, rise = line["train"], min((line["step"] - 1) / 6, 1)
            expected = values["ce"] + 0.01 * values["bal"] + rise * 700 * values["bound"]
            assert values["loss"] == pytest.approx(expected, rel=1e-6)
        assert lines[-1]["train"]["loss"] > lines[-1]["train"]["ce"] + 0.02

    def test_shared_experts_train(self, small: Small, finished: Finished) -> None:
        flags = ("--model.share_block", "2", "--variant.within_block", "true")
        record = RunRecord.read(finished(small(*flags, variant="cross_layer")) / "record.json")
        assert record.metrics["cross"] > 0
        assert record.metrics["ppl"] < 300

    def test_a_universal_pool_is_measured_over_all_its_experts(self, small: Small, finished: Finished) -> None:
        run = finished(small("--model.universal", "true", variant="smooth"))
        assert load_table(run / "routes").n_experts == 8
        assert "utilisation_7" in RunRecord.read(run / "record.json").per_layer

    def test_the_second_of_remoe_changes_the_gates_only(self, small: Small, finished: Finished) -> None:
        flags = ("--variant.tune_share", "0.5", "--train.checkpoint_every", "1000")
        run = finished(small(*flags, variant="remoe"))
        before, after = weights(run, 12), weights(run, 18)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if ".gate." in name}
        assert len(changed) == 2

    def test_the_second_of_remoe_has_its_own_rate_and_loss(self, small: Small, finished: Finished) -> None:
        run = finished(small("--variant.tune_share", "0.5", "--variant.lam", "0.7", variant="remoe"))
        lines = [line for line in RunFolder(run).read_metrics() if "train" in line]
        assert [line["phase"] for line in lines] == ["train"] * 12 + ["tune"] * 6
        assert {line["lr"] for line in lines[12:]} == {1e-4}
        assert all("cons" not in line["train"] for line in lines[:12])
        for line in lines[12:]:
            values = line["train"]
            assert values["loss"] == pytest.approx(values["ce"] + 0.01 * values["bal"] + 0.7 * values["cons"], rel=1e-6)

    def test_the_first_of_remoe_is_vanilla(self, small: Small, finished: Finished) -> None:
        remoe, vanilla = (finished(small(variant=name)) for name in ("remoe", "vanilla"))
        assert train_losses(remoe)[:12] == train_losses(vanilla)
        ours, theirs = weights(remoe, 12), weights(vanilla, 12)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class TestAccumulation:
    @pytest.mark.parametrize("parts", [2, 4])
    def test_gives_the_same_run(self, small: Small, finished: Finished, parts: int) -> None:
        config = small("--variant.mu", "0", variant="soft_hard")
        split = small("--variant.mu", "0", "--train.accumulate", str(parts), variant="soft_hard")
        one, many = finished(config), finished(split)
        for whole, summed in zip(train_losses(one), train_losses(many), strict=True):
            for term in ("ce", "cons", "hard", "loss", "grad_norm"):
                assert summed[term] == pytest.approx(whole[term], rel=1e-4), term
        ours, theirs = weights(many, 12), weights(one, 12)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)

    def test_counts_every_target_alike_in_documents(self, tmp_path: Path, small: Small) -> None:
        """Micro-batches with few and many targets: the loss is the mean over targets, not over micro-batches."""
        words = ("ban", "dort", "ken", "lart", "min", "bon")
        lines: list[str] = []
        for i in range(300):
            # Long articles beside very short ones.
            length = 30 if i % 7 == 0 else 1
            lines += [f"= {words[i % 6]} =", " ".join(words[(i * j) % 6] for j in range(1, length + 1))]
        for name in ("train", "valid"):
            (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        more = ("--data.path", str(tmp_path), "--data.documents", "true", "--train.steps", "2")
        whole, summed = tmp_path / "whole", tmp_path / "summed"
        train(small(*more), whole, quiet=True)
        train(small(*more, "--train.accumulate", "4"), summed, quiet=True)
        assert train_losses(summed)[0]["ce"] == pytest.approx(train_losses(whole)[0]["ce"], rel=1e-6)
        assert train_losses(summed)[0]["grad_norm"] == pytest.approx(train_losses(whole)[0]["grad_norm"], rel=1e-3)


class TestDivergence:
    """The loss is made to leave the numbers in the ways it does in practice."""

    def check_failed(self, config: RunConfig, out: Path, step: int, last_good: str) -> None:
        with pytest.raises(DivergedError, match=rf"(?i)\b(nan|inf)\b.* step {step}\b.*(Lower|lower)") as caught:
            train(config, out, quiet=True)
        assert "\n" not in str(caught.value)
        record = RunRecord.read(out / "record.json")
        assert record.status == "failed"
        assert record.failure == str(caught.value)
        newest = find_checkpoint(out / "checkpoints")
        assert newest is not None
        assert newest.name == last_good
        assert all(torch.isfinite(w).all() for w in load_file(newest / "model.safetensors").values())
        for line in (out / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)

    def term(self, monkeypatch: pytest.MonkeyPatch, at: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let the balance term of the update of step `at` be changed."""
        original = losses.balance_by_layer
        calls = iter(range(1, 1000))

        def balance_by_layer(trace: Any, **kwargs: Any) -> torch.Tensor:
            value = original(trace, **kwargs)
            return change(value) if value.requires_grad and next(calls) == at else value  # not in an evaluation

        monkeypatch.setattr(losses, "balance_by_layer", balance_by_layer)

    def test_of_the_loss_stops_the_run(self, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.term(monkeypatch, 8, lambda x: x * math.nan)
        self.check_failed(small(), tmp_path / "run", 8, "step-000006")

    def test_of_the_gradient_alone_stops_it_before_the_update(
        self, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The root of zero is a number, its slope is not. Step 6 would be saved right after its update."""
        self.term(monkeypatch, 6, lambda x: x + (x * 0).sqrt())
        self.check_failed(small(), tmp_path / "run", 6, "step-000003")

    def test_in_the_evaluation_stops_it(self, small: Small, tmp_path: Path) -> None:
        """A step so large that the loss before it is fine and the model after it is not."""
        config = small("--train.lr", "1e38", "--train.warmup", "0", "--train.eval_every", "1")
        with pytest.raises(DivergedError, match=r"(?i)\b(nan|inf)\b.*step 1\b"):
            train(config, tmp_path / "run", quiet=True)
        assert RunRecord.read(tmp_path / "run" / "record.json").status == "failed"

    def test_is_one_line_and_exit_code_2(
        self, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.term(monkeypatch, 8, lambda x: x * math.nan)
        out = tmp_path / "run"
        assert main(["train", "--preset", "tiny", *flags, "--quiet", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("stickymoe: ")
        assert error.count("\n") == 1
        assert "step 8" in error

    def test_can_be_resumed_from_where_it_was_good(
        self, small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a cause outside the run, such as faulty memory."""
        with monkeypatch.context() as faulty:
            self.term(faulty, 8, lambda x: x * math.nan)
            with pytest.raises(DivergedError):
                train(small(), tmp_path / "run", quiet=True)
        train(small(), tmp_path / "run", resume=True, quiet=True)
        assert (tmp_path / "run" / "record.json").read_text() == (finished(small()) / "record.json").read_text()


class TestFullDisk:
    def fill_at(self, call: int) -> None:
        """From the n-th file of a checkpoint on, the system lets no file grow."""
        original = checkpoint.save_file
        calls = iter(range(1, 100))

        def save_file(*args: Any) -> None:
            if next(calls) == call:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            original(*args)

        checkpoint.save_file = save_file

    def test_is_one_line_and_the_run_resumes_from_the_earlier_checkpoint(
        self, flags: list[str], small: Small, finished: Finished, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        command = ["train", "--preset", "tiny", *flags, "--quiet", "--out", str(out)]

        def work() -> int:
            read, write = os.pipe()  # pipes have no size to limit
            os.dup2(write, 2)
            sys.stderr = os.fdopen(write, "w", buffering=1)
            self.fill_at(4)
            try:
                return main(command)
            except Exception:
                traceback.print_exc()
                return 1
            finally:
                sys.stderr.flush()
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                (tmp_path / "stderr").write_bytes(os.read(read, 100_000))

        ended = Child(work, tmp_path / "outputs").wait()
        message = (tmp_path / "stderr").read_text()
        assert ended.code == 2, message
        assert message.count("\n") == 1, message
        assert "step-000003 is intact" in message
        newest = find_checkpoint(out / "checkpoints")
        assert newest is not None
        assert newest.name == "step-000003"
        assert train(small(), out, resume=True, quiet=True).status == "complete"
        assert (out / "metrics.jsonl").read_text() == (finished(small()) / "metrics.jsonl").read_text()


class TestTextTooShort:
    @pytest.mark.parametrize(("name", "message"), [("train", "one chunk needs 17"), ("valid", "expected at least 2")])
    def test_is_refused_before_training(
        self, small: Small, corpus: Path, tmp_path: Path, name: str, message: str
    ) -> None:
        folder = tmp_path / "text"
        folder.mkdir()
        for split in ("train", "valid"):
            (folder / f"{split}.txt").write_text("x" if split == name else (corpus / f"{split}.txt").read_text())
        with pytest.raises(DataError, match=message):
            train(small("--data.path", str(folder)), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_model_larger_than_memory_is_refused(small: Small, tmp_path: Path) -> None:
    config = small("--model.n_experts", str(10**12))
    with pytest.raises(ConfigError, match=r"^model: got .*n_experts 1000000000000.*do not fit in memory; make one"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_gates_stay_fp32_under_bf16(small: Small) -> None:
    model = build_model(small(variant="hard_window"), 300)
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens)
    assert out.logits.dtype == torch.bfloat16
    assert out.trace.g.dtype == torch.float32
    torch.testing.assert_close(out.trace.g.sum(-1), torch.ones(2, 2, 16), rtol=0, atol=1e-6)


def test_bf16_trains(flags: list[str], small: Small, finished: Finished, tmp_path: Path) -> None:
    """In a process of its own: accelerate settles the precision once per process."""
    out = tmp_path / "run"
    command = ["train", "--preset", "tiny", *flags, "--train.precision", "bf16", "--quiet", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "stickymoe.cli", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    half, full = train_losses(out), train_losses(finished(small()))
    assert half[-1]["ce"] < half[0]["ce"] - 0.05
    assert [v["ce"] for v in half] == pytest.approx([v["ce"] for v in full], rel=0.02)
    assert [v["ce"] for v in half] != [v["ce"] for v in full]
    assert all(w.dtype == torch.float32 for w in weights(out, 12).values())
