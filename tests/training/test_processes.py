"""Two processes give the results of one, and what happens in one of them ends both."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import DEADLINE, Ended, free_port, in_two, on_call, raise_at_step, same_losses
from safetensors.torch import load_file

from stickymoe.cli import main
from stickymoe.data.batches import TrainBatches
from stickymoe.routing import losses
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord
from stickymoe.training import checkpoint, loop
from stickymoe.training.checkpoint import find_checkpoint
from stickymoe.training.loop import train
from stickymoe.training.restore import evaluate_run

Small = Callable[..., RunConfig]
Finished = Callable[[RunConfig], Path]


@pytest.fixture
def command(flags: list[str], tmp_path: Path) -> list[str]:
    """The command line of a small run into the folder `run`."""
    return ["train", "--preset", "tiny", *flags, "--quiet", "--out", str(tmp_path / "run")]


def ended_in_one_line(ended: list[Ended], code: int) -> str:
    """The line that the first process printed; the second one printed nothing."""
    first, second = ended
    assert [first.code, second.code] == [code, code], (first.stderr, second.stderr)
    assert (first.stderr.count("\n"), second.stderr) == (1, "")
    return first.stderr


def torchrun() -> list[str]:
    """The arguments of Python before those of the command line."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return [*launcher, "-m", "stickymoe.cli"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The newest ones."""
    newest = find_checkpoint(run / "checkpoints")
    assert newest is not None
    return load_file(newest / "model.safetensors")


class TestLosses:
    """With a heavy balance term, which is not a mean over processes unless the load is shared between them."""

    def check(self, run: Path, config: RunConfig, finished: Finished) -> None:
        same_losses(run, finished(config))
        assert RunRecord.read(run / "record.json").environment["processes"] == 2
        ours, theirs = (weights(folder) for folder in (run, finished(config)))
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("variant", ["remoe", "lookup"])
    def test_are_those_of_one_process(self, small: Small, finished: Finished, tmp_path: Path, variant: str) -> None:
        config = small("--variant.mu", "0.5", variant=variant)
        for ended in in_two(lambda rank: train(config, tmp_path / "run", quiet=True) and 0, tmp_path):
            assert ended.code == 0, ended.stderr
        self.check(tmp_path / "run", config, finished)

    def test_are_those_of_one_process_under_torchrun(
        self, command: list[str], small: Small, finished: Finished, tmp_path: Path
    ) -> None:
        settings = ["--variant.mu", "0.5"]
        args = [sys.executable, *torchrun(), *command, "--variant", "soft", *settings]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("PPL") == 1
        self.check(tmp_path / "run", small(*settings, variant="soft"), finished)


@pytest.mark.parametrize("variant", ["soft", "dense"])
def test_a_shared_evaluation_has_the_numbers_of_one_process(
    small: Small, finished: Finished, tmp_path: Path, variant: str
) -> None:
    """Of three batches, so that one process evaluates one more than the other."""
    run = finished(small("--eval.batch_size", "11", variant=variant))
    expected = evaluate_run(run)
    assert -(-(expected.data["tokens"]["valid"] - 1) // 16 // 11) % 2 == 1

    def work(rank: int) -> None:
        found = evaluate_run(run)
        assert (found.metrics, found.per_layer) == (expected.metrics, expected.per_layer)

    for ended in in_two(work, tmp_path):
        assert ended.code == 0, ended.stderr


def test_the_routes_of_a_shared_evaluation_are_in_the_order_of_the_text(
    small: Small, finished: Finished, tmp_path: Path
) -> None:
    """Hashed routing does not depend on weights, which differ in their last digits."""
    config = small("--eval.batch_size", "11", variant="hash")
    for ended in in_two(lambda rank: train(config, tmp_path / "run", quiet=True) and 0, tmp_path):
        assert ended.code == 0, ended.stderr
    for file in sorted((finished(config) / "routes").glob("*.npy")):
        assert np.array_equal(np.load(tmp_path / "run" / "routes" / file.name), np.load(file)), file.name


class TestAnErrorEndsBothInOneLine:
    def test_nan_in_one_process(self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original = losses.balance_by_layer
        calls = iter(range(1, 1000))

        def balance_by_layer(trace: Any, **kwargs: Any) -> Any:
            value = original(trace, **kwargs)
            return value * math.nan if value.requires_grad and next(calls) == 8 else value

        def work(rank: int) -> int:
            if rank == 1:
                monkeypatch.setattr(losses, "balance_by_layer", balance_by_layer)
            return main(command)

        line = ended_in_one_line(in_two(work, tmp_path), 2)
        assert "The loss became nan at step 8; the checkpoint step-000006 is kept" in line
        record = RunRecord.read(tmp_path / "run" / "record.json")
        assert (record.status, f"stickymoe: {record.failure}\n") == ("failed", line)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--train.lr", "-1"), "train.lr"),
            (("--data.path", "nowhere"), "data.path: 'nowhere' does not exist"),
            (("--train.batch_size", "3"), "train.batch_size: got 3, expected a multiple of 2"),
        ],
    )
    def test_a_refused_config(self, command: list[str], tmp_path: Path, more: tuple[str, ...], message: str) -> None:
        assert message in ended_in_one_line(in_two(lambda rank: main([*command, *more]), tmp_path), 2)

    def test_another_corpus_on_another_machine(self, command: list[str], corpus: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        for name in ("train", "valid"):
            (other / f"{name}.txt").write_text((corpus / f"{name}.txt").read_text() + "One row more.\n")
        more = ["--data.path", str(other)]
        ended = in_two(lambda rank: main([*command, *(more if rank else [])]), tmp_path)
        assert "Give all machines the same corpus" in ended_in_one_line(ended, 2)

    def test_a_full_disk(self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoint, "save_file", full)
        line = ended_in_one_line(in_two(lambda rank: main(command), tmp_path), 2)
        assert "step-000003 could not be saved (No space left on device)" in line

    def test_an_unfinished_run_without_resume(
        self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            raise_at_step(patch, 2, signal.SIGINT)
            assert main(command) == 130
        assert "Add --resume" in ended_in_one_line(in_two(lambda rank: main(command), tmp_path), 2)

    def test_a_process_that_is_killed(
        self, command: list[str], small: Small, finished: Finished, tmp_path: Path
    ) -> None:
        """The other one ends by itself, and one process resumes the run."""

        def work(rank: int) -> int:
            if rank == 1:
                on_call(loop._Run, "_update", 8, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return main(command)

        first, second = in_two(work, tmp_path)
        assert (first.code, second.code) == (2, -signal.SIGKILL)
        assert first.stderr.count("\n") == 1
        assert "another process was lost" in first.stderr
        assert RunRecord.read(tmp_path / "run" / "record.json").status == "failed"
        train(small(), tmp_path / "run", resume=True, quiet=True)
        same_losses(tmp_path / "run", finished(small()))

    def test_a_bug_has_its_traceback_once(self, command: list[str], tmp_path: Path) -> None:
        def bug(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a bug")

        def work(rank: int) -> int:
            if rank == 1:
                on_call(TrainBatches, "batch", 5, bug)
            return main(command)

        first, second = in_two(work, tmp_path)
        assert first.code == 2
        assert first.stderr.count("\n") == 1
        assert second.stderr.count("Traceback") == 1
        assert "ZeroDivisionError: a bug" in second.stderr


class TestStoppedAndResumed:
    @pytest.mark.parametrize("signalled", [0, 1])
    def test_on_one_process(
        self, command: list[str], small: Small, finished: Finished, tmp_path: Path, signalled: int
    ) -> None:
        """A signal to one of them stops both after the same step."""

        def work(rank: int) -> int:
            if rank == signalled:
                on_call(TrainBatches, "batch", 5, lambda *_, **__: signal.raise_signal(signal.SIGTERM))
            return main(command)

        line = ended_in_one_line(in_two(work, tmp_path), 130)
        assert line.startswith("Stopped at step 5 of 12, saved.")
        train(small(), tmp_path / "run", resume=True, quiet=True)
        same_losses(tmp_path / "run", finished(small()))

    def test_on_two_after_one(
        self, command: list[str], small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            raise_at_step(patch, 4, signal.SIGINT)
            assert main(command) == 130
        for ended in in_two(lambda rank: main([*command, "--resume"]), tmp_path):
            assert ended.code == 0, ended.stderr
        same_losses(tmp_path / "run", finished(small()))

    def test_ctrl_c_under_torchrun_saves(self, command: list[str], tmp_path: Path) -> None:
        """The terminal sends it to all processes, and torchrun repeats it to its own."""
        process = subprocess.Popen(
            [sys.executable, *torchrun(), *command, "--train.steps", "100000"],
            env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        metrics = tmp_path / "run" / "metrics.jsonl"
        try:
            give_up = time.monotonic() + DEADLINE
            while not metrics.exists() and process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            _, message = process.communicate(timeout=DEADLINE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        last = RunFolder(tmp_path / "run").read_metrics()[-1]["step"]
        assert message.count(f"Stopped at step {last} of 100000, saved.") == 1, message
        assert "stickymoe/" not in message  # no traceback of ours
        assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}").is_dir()
        assert RunRecord.read(tmp_path / "run" / "record.json").status == "interrupted"
