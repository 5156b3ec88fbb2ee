"""FSDP2 through accelerate's configuration: the losses of one process, and checkpoints that any number of them read."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE, free_port, in_two, on_call, raise_at_step, same_losses, train_losses
from safetensors.torch import load_file

from stickymoe.cli import main
from stickymoe.data.batches import TrainBatches
from stickymoe.errors import RunError
from stickymoe.huggingface.export import export_run
from stickymoe.runs.config import RunConfig
from stickymoe.runs.record import RunRecord
from stickymoe.runtime.checkpoints import RunCheckpoint
from stickymoe.training import checkpoint
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import find_checkpoint, load_model
from stickymoe.training.loop import train
from stickymoe.training.restore import evaluate_run

Small = Callable[..., RunConfig]
Finished = Callable[[RunConfig], Path]

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
STOPPED = 5  # the step after which `stopped` was stopped


def trained_in_two(config: RunConfig, out: Path, outputs: Path, settings: dict[str, str] = FSDP) -> None:
    for ended in in_two(lambda rank: train(config, out, resume=True, quiet=True) and 0, outputs, settings):
        assert ended.code == 0, ended.stderr


def newest(run: Path) -> Path:
    found = find_checkpoint(run / "checkpoints")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def sharded(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two processes. Not to be written to."""
    folder = tmp_path_factory.mktemp("sharded")
    trained_in_two(small(variant="soft"), folder / "run", folder)
    return folder / "run"


@pytest.fixture
def stopped(flags: list[str], tmp_path: Path) -> Path:
    """A run of two processes, of which one was asked to stop at step 5."""
    out = tmp_path / "run"

    def work(rank: int) -> int:
        if rank == 1:
            on_call(TrainBatches, "batch", STOPPED, lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        return main(["train", "--preset", "tiny", *flags, "--quiet", "--out", str(out)])

    for ended in in_two(work, tmp_path, FSDP):
        assert ended.code == 130, ended.stderr
    return out


class TestTraining:
    def test_has_the_losses_and_metrics_of_one_process(self, sharded: Path, small: Small, finished: Finished) -> None:
        expected = finished(small(variant="soft"))
        same_losses(sharded, expected)
        ours, theirs = (RunRecord.read(run / "record.json") for run in (sharded, expected))
        assert ours.sizes == theirs.sizes

    @pytest.mark.parametrize(
        ("variant", "more", "settings"),
        [
            ("remoe", ("--train.accumulate", "2", "--variant.mu", "0"), FSDP),
            ("siblings", (), {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}),
            ("cross_layer", ("--model.share_block", "2"), FSDP),
            ("dense", (), {**FSDP, "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}),
        ],
    )
    def test_with(
        self,
        small: Small,
        finished: Finished,
        tmp_path: Path,
        variant: str,
        more: tuple[str, ...],
        settings: dict[str, str],
    ) -> None:
        """Phases and micro-batches, weights on one process only, shared experts, and one unit for the whole model."""
        config = small(*more, variant=variant)
        trained_in_two(config, tmp_path / "run", tmp_path, settings)
        same_losses(tmp_path / "run", finished(config))

    def test_with_the_file_of_the_guide(
        self, flags: list[str], small: Small, finished: Finished, tmp_path: Path
    ) -> None:
        """Typed as in docs/guide.md, with two processes."""
        guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
        (settings,) = re.findall(r"^```yaml\n(compute_environment.*?)^```", guide, re.MULTILINE | re.DOTALL)
        (tmp_path / "fsdp.yaml").write_text(settings.replace("num_processes: 8", "num_processes: 2"))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml")]
        launch += ["--main_process_port", str(free_port()), "-m", "stickymoe.cli"]
        done = subprocess.run(
            [*launch, "train", "--preset", "tiny", *flags, "--quiet", "--out", str(tmp_path / "run")],
            env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stderr
        assert len(list(newest(tmp_path / "run").glob("model-*"))) == 2
        same_losses(tmp_path / "run", finished(small()))

    def test_in_bf16_keeps_weights_and_gates_in_fp32(self, small: Small, finished: Finished, tmp_path: Path) -> None:
        trained_in_two(small("--train.precision", "bf16"), tmp_path / "run", tmp_path)
        half, full = train_losses(tmp_path / "run"), train_losses(finished(small()))
        assert [v["ce"] for v in half] == pytest.approx([v["ce"] for v in full], rel=0.02)
        assert [v["ce"] for v in half] != [v["ce"] for v in full]
        for file in newest(tmp_path / "run").glob("model-*"):
            assert {w.dtype for w in load_file(file).values()} == {torch.float32}

    @pytest.mark.parametrize(
        ("variant", "settings", "message"),
        [
            ("lookup", FSDP, "variant: got lookup, whose tables have sparse gradients"),
            ("vanilla", {**FSDP, "FSDP_VERSION": "1"}, "fsdp_version: got 1, expected 2"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:FSDP1 is deprecated")
    def test_refuses(
        self, flags: list[str], tmp_path: Path, variant: str, settings: dict[str, str], message: str
    ) -> None:
        command = ["train", "--preset", "tiny", "--variant", variant, *flags, "--out", str(tmp_path / "run")]
        first, second = in_two(lambda rank: main(command), tmp_path, settings)
        assert (first.code, second.code) == (2, 2)
        assert message in first.stderr
        assert second.stderr == ""


class TestCheckpoints:
    def test_have_a_part_of_every_process_and_the_index_of_transformers(self, sharded: Path, small: Small) -> None:
        folder = newest(sharded)
        assert sorted(p.name for p in folder.iterdir()) == [
            *(f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)),
            "model.safetensors.index.json",
            *(f"optimiser-{i:05d}-of-00002.safetensors" for i in (1, 2)),
            "optimiser.safetensors.index.json",
            "state.json",
        ]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        whole = build_model(small(variant="soft"), 300).state_dict()
        assert set(index["weight_map"]) == set(whole)
        assert index["metadata"]["total_size"] == sum(w.nbytes for w in whole.values())
        sizes = [p.stat().st_size for p in folder.glob("model-*")]
        assert max(sizes) < 0.8 * sum(sizes)
        for name, file in index["weight_map"].items():
            assert load_file(folder / file)[name].shape == whole[name].shape

    def test_give_one_process_the_numbers_of_two(self, sharded: Path) -> None:
        assert evaluate_run(sharded).metrics["ppl"] == RunRecord.read(sharded / "record.json").metrics["ppl"]

    def test_resume_on_one_process(self, stopped: Path, small: Small, finished: Finished) -> None:
        assert newest(stopped).name == f"step-{STOPPED:06d}"
        train(small(), stopped, resume=True, quiet=True)
        same_losses(stopped, finished(small()))
        assert (newest(stopped) / "model.safetensors").exists()

    def test_resume_on_two_without_fsdp(self, stopped: Path, small: Small, finished: Finished, tmp_path: Path) -> None:
        trained_in_two(small(), stopped, tmp_path, {})
        same_losses(stopped, finished(small()))

    def test_of_one_process_resume_on_two(
        self, flags: list[str], small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, STOPPED - 1, signal.SIGINT)
            assert main(["train", "--preset", "tiny", *flags, "--quiet", "--out", str(out)]) == 130
        trained_in_two(small(), out, tmp_path)
        same_losses(out, finished(small()))

    @pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "optimiser.safetensors.index.json"])
    @pytest.mark.parametrize("damage", ["changed", "missing"])
    def test_refuse_damage_of_a_part(self, stopped: Path, small: Small, name: str, damage: str) -> None:
        file = newest(stopped) / name
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        with pytest.raises(RunError, match=rf"step-00000{STOPPED} is damaged \({name}: .*--checkpoint step-000003"):
            train(small(), stopped, resume=True, quiet=True)
        train(small(), stopped, resume=True, checkpoint="step-000003", quiet=True)

    def test_that_cannot_be_written_end_both_processes(
        self, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk of the second process is full."""
        original = checkpoint.save_file
        calls = iter(range(1, 100))

        def save_file(*args: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1" and next(calls) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(*args, **kwargs)

        monkeypatch.setattr(checkpoint, "save_file", save_file)
        command = ["train", "--preset", "tiny", *flags, "--quiet", "--out", str(tmp_path / "run")]
        first, second = in_two(lambda rank: main(command), tmp_path, FSDP)
        assert [first.code, second.code] == [2, 2], (first.stderr, second.stderr)
        assert "step-000006 could not be saved (No space left on device); step-000003 is intact" in first.stderr
        assert (first.stderr.count("\n"), second.stderr) == (1, "")
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


class TestEverythingElse:
    def test_loads_the_model(self, sharded: Path, small: Small, finished: Finished) -> None:
        ours, theirs = (build_model(small(variant="soft"), 300) for _ in range(2))
        load_model(newest(sharded), ours)
        load_model(newest(finished(small(variant="soft"))), theirs)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)

    def test_packs_and_exports(self, sharded: Path, tmp_path: Path) -> None:
        whole = {name: w for file in newest(sharded).glob("model-*") for name, w in load_file(file).items()}
        opened = RunCheckpoint(sharded)
        assert {name for name, _ in opened.dense()} == {name for name in whole if ".ffn.experts." not in name}
        stacks = [whole[f"blocks.1.ffn.experts.{tensor.name}"] for tensor in opened.spec.tensors]
        for ours, stack in zip(opened.expert(1, 2), stacks, strict=True):
            assert torch.equal(ours, stack[2])
        export_run(sharded, tmp_path / "exported")
        exported = load_file(tmp_path / "exported" / "model.safetensors")
        assert torch.equal(exported["gpt.final_norm.weight"], whole["final_norm.weight"])
