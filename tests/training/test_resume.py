"""Stopped at any moment and resumed, a run ends in the same bytes as one never stopped."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import Child, contents, die, on_call, raise_at_step, same_results

from stickymoe import files
from stickymoe.cli import main
from stickymoe.errors import InterruptedRunError, RunError
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord
from stickymoe.training import checkpoint, loop
from stickymoe.training.loop import train

Small = Callable[..., RunConfig]
Finished = Callable[[RunConfig], Path]


@pytest.fixture
def remoe(small: Small) -> RunConfig:
    """Twelve steps, then six on the gates."""
    return small("--variant.tune_share", "0.5", variant="remoe")


class TestInterrupted:
    @pytest.mark.parametrize(
        ("step", "number"), [(0, signal.SIGINT), (3, signal.SIGINT), (4, signal.SIGTERM), (9, signal.SIGTERM)]
    )
    def test_and_resumed(
        self,
        small: Small,
        finished: Finished,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        step: int,
        number: signal.Signals,
    ) -> None:
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, step, number)
            with pytest.raises(InterruptedRunError, match=rf"Stopped at step {step + 1} of 12, saved"):
                train(small(), out, quiet=True)
        assert RunRecord.read(out / "record.json").status == "interrupted"
        assert (out / "checkpoints" / f"step-{step + 1:06d}").is_dir()
        train(small(), out, resume=True, quiet=True)
        same_results(out, finished(small()))

    def test_rows_that_are_dropped_at_random_are_the_same_after_resuming(
        self, small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = small("--variant.table_drop", "0.5", "--variant.table_rows", "64", variant="hash+lookup")
        with monkeypatch.context() as patch:
            raise_at_step(patch, 4, signal.SIGINT)
            with pytest.raises(InterruptedRunError):
                train(config, tmp_path / "run", quiet=True)
        train(config, tmp_path / "run", resume=True, quiet=True)
        same_results(tmp_path / "run", finished(config))

    def test_twice(self, small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "run"
        for step in (1, 6):
            with monkeypatch.context() as patch:
                raise_at_step(patch, step, signal.SIGINT)
                with pytest.raises(InterruptedRunError):
                    train(small(), out, resume=True, quiet=True)
        train(small(), out, resume=True, quiet=True)
        same_results(out, finished(small()))

    def test_at_its_last_step_it_finishes(
        self, small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raise_at_step(monkeypatch, 11, signal.SIGINT)
        assert train(small(), tmp_path / "run", quiet=True).status == "complete"
        same_results(tmp_path / "run", finished(small()))

    @pytest.mark.parametrize("step", [11, 12, 14])
    def test_between_and_inside_phases(
        self, remoe: RunConfig, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
    ) -> None:
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, step, signal.SIGINT)
            with pytest.raises(InterruptedRunError):
                train(remoe, out, quiet=True)
        train(remoe, out, resume=True, quiet=True)
        same_results(out, finished(remoe))

    def test_leaves_the_signal_handlers_as_they_were(
        self, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        raise_at_step(monkeypatch, 2, signal.SIGINT)
        with pytest.raises(InterruptedRunError):
            train(small(), tmp_path / "run", quiet=True)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def test_with_another_interval_of_checkpoints_it_is_the_same_run(
        self, small: Small, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, 4, signal.SIGINT)
            with pytest.raises(InterruptedRunError):
                train(small("--train.checkpoint_every", "1000"), out, quiet=True)
        train(small(), out, resume=True, quiet=True)
        same_results(out, finished(small()))


class TestCtrlC:
    def test_exits_130_and_the_command_it_names_works(
        self,
        flags: list[str],
        small: Small,
        finished: Finished,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        out = tmp_path / "it's a run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, 7, signal.SIGINT)
            assert main(["train", "--preset", "tiny", *flags, "--quiet", "--out", str(out)]) == 130
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        _, _, command = message.partition("Resume with: ")
        program, *args = shlex.split(command)
        assert program == "stickymoe"
        assert main([*args, "--quiet"]) == 0
        same_results(out, finished(small()))

    def test_from_outside(self, flags: list[str], tmp_path: Path) -> None:
        out = tmp_path / "run"
        args = ["train", "--preset", "tiny", *flags, "--train.steps", "100000", "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "stickymoe.cli", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            give_up = time.monotonic() + 120
            while not (out / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, message = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, message
        assert "Traceback" not in message
        assert f"stickymoe train --resume --out {out}" in message
        record = RunRecord.read(out / "record.json")
        assert record.status == "interrupted"
        last = RunFolder(out).read_metrics()[-1]["step"]
        assert f"Stopped at step {last} of 100000" in message
        assert (out / "checkpoints" / f"step-{last:06d}").is_dir()


def torn_append(folder: RunFolder, path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(line)[:20])
    die()


def torn_delete(path: Path, **_: Any) -> None:
    next(Path(path).glob("*.json")).unlink()
    die()


def torn_save(tensors: Any, path: Path) -> None:
    Path(path).write_bytes(b"half a file")
    die()


# Owner, function, its n-th call, what happens there, and when.
MOMENTS: dict[str, tuple[Any, str, int, Callable[..., None], str]] = {
    "before the first record": (RunRecord, "write", 1, lambda *_: die(), "before"),
    "after the first record": (RunRecord, "write", 1, lambda *_: die(), "after"),
    "after the config": (RunFolder, "write_config", 1, lambda *_: die(), "after"),
    "before the first line": (RunFolder, "append", 1, lambda *_: die(), "before"),
    "inside a line": (RunFolder, "append", 9, torn_append, "before"),
    "between a line and its timing": (RunFolder, "append", 9, lambda *_: die(), "after"),
    "before an evaluation": (loop, "evaluate", 1, lambda *_, **__: die(), "before"),
    "after an evaluation": (loop, "evaluate", 2, lambda *_, **__: die(), "after"),
    "before the first save": (loop, "save_checkpoint", 1, lambda *_: die(), "before"),
    "inside the first save": (checkpoint, "save_file", 1, torn_save, "before"),
    "inside a save": (checkpoint, "save_file", 6, torn_save, "before"),
    "before a save is complete": (files, "_sync", 3, lambda *_: die(), "before"),
    "before an old one is dropped": (checkpoint.shutil, "rmtree", 1, lambda *_, **__: die(), "before"),
    "while an old one is dropped": (checkpoint.shutil, "rmtree", 1, torn_delete, "before"),
    "after a save": (loop, "save_checkpoint", 2, lambda *_: die(), "after"),
    "after the last save": (loop, "save_checkpoint", 4, lambda *_: die(), "after"),
    "before the routes": (loop, "save_table", 1, lambda *_: die(), "before"),
    "after the routes": (loop, "save_table", 1, lambda *_: die(), "after"),
    "before the last record": (RunRecord, "write", 2, lambda *_: die(), "before"),
}


class TestKilled:
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_at_a_moment_and_resumed(
        self, small: Small, finished: Finished, tmp_path: Path, flags: list[str], moment: str
    ) -> None:
        owner, name, n, act, when = MOMENTS[moment]
        out = tmp_path / "run"

        def work() -> None:
            on_call(owner, name, n, act, when=when)
            train(small(), out, quiet=True)

        ended = Child(work, tmp_path / "outputs").wait()
        assert ended.code == -signal.SIGKILL, ended.stderr
        # What a user would type: the first command again if no run was started, else only the folder.
        started = (out / "record.json").exists()
        again = ["--resume"] if started else ["--preset", "tiny", *flags]
        resumed = Child(lambda: main(["train", *again, "--quiet", "--out", str(out)]), tmp_path / "outputs").wait()
        assert resumed.code == 0, resumed.stderr
        same_results(out, finished(small()))
        assert not [p.name for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]

    @pytest.mark.parametrize("seed", range(2))
    def test_at_random_moments_until_it_is_done(
        self, remoe: RunConfig, finished: Finished, tmp_path: Path, seed: int
    ) -> None:
        out = tmp_path / "run"
        delays = random.Random(seed)
        for _ in range(6):
            child = Child(partial(train, remoe, out, resume=True, quiet=True), tmp_path / "outputs")
            time.sleep(delays.uniform(0.02, 0.5))
            child.kill()
            ended = child.wait()
            assert ended.code in (0, -signal.SIGKILL), ended.stderr
        train(remoe, out, resume=True, quiet=True)
        same_results(out, finished(remoe))

    @pytest.mark.parametrize("step", [13, 15, 17])
    def test_inside_the_second_phase(self, remoe: RunConfig, finished: Finished, tmp_path: Path, step: int) -> None:
        out = tmp_path / "run"

        def work() -> None:
            on_call(loop._Run, "_update", step, lambda *_: die())
            train(remoe, out, quiet=True)

        assert Child(work, tmp_path / "outputs").wait().code == -signal.SIGKILL
        train(remoe, out, resume=True, quiet=True)
        same_results(out, finished(remoe))


class TestDamagedCheckpoint:
    @pytest.fixture
    def stopped(self, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Stopped at step 6, with the checkpoints of steps 3 and 6."""
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, 5, signal.SIGINT)
            with pytest.raises(InterruptedRunError):
                train(small(), out, quiet=True)
        return out

    def test_is_refused_and_the_run_resumes_from_the_previous(
        self, small: Small, finished: Finished, stopped: Path
    ) -> None:
        weights = stopped / "checkpoints" / "step-000006" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        before = contents(stopped)
        with pytest.raises(RunError, match=r"step-000006 is damaged .*--checkpoint step-000003"):
            train(small(), stopped, resume=True, quiet=True)
        assert contents(stopped) == before
        train(small(), stopped, resume=True, checkpoint="step-000003", quiet=True)
        same_results(stopped, finished(small()))

    def test_is_replaced_when_its_step_comes_again(self, small: Small, finished: Finished, tmp_path: Path) -> None:
        """The last one, in a run killed before its record: without it, the finished run would have no model."""
        out = tmp_path / "run"

        def work() -> None:
            on_call(loop, "save_checkpoint", 4, lambda *_: die(), when="after")
            train(small(), out, quiet=True)

        assert Child(work, tmp_path / "outputs").wait().code == -signal.SIGKILL
        (out / "checkpoints" / "step-000012" / "model.safetensors").write_bytes(b"")
        train(small(), out, resume=True, checkpoint="step-000009", quiet=True)
        same_results(out, finished(small()))

    def test_resuming_from_an_earlier_one_drops_the_later(
        self, small: Small, finished: Finished, stopped: Path, tmp_path: Path
    ) -> None:
        """Killed right after that, the run must not resume from the checkpoint that was dropped."""

        def work() -> None:
            on_call(loop._Run, "_update", 2, lambda *_: die())
            train(small(), stopped, resume=True, checkpoint="step-000003", quiet=True)

        assert Child(work, tmp_path / "outputs").wait().code == -signal.SIGKILL
        train(small(), stopped, resume=True, quiet=True)
        same_results(stopped, finished(small()))


class TestMoved:
    def test_run_and_corpus_are_found_elsewhere(
        self, small: Small, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Finished
    ) -> None:
        """Paths are no part of a run: moved, it is the same one and ends in the same curve."""
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            raise_at_step(patch, 5, signal.SIGINT)
            with pytest.raises(InterruptedRunError):
                train(small(), out, quiet=True)
        moved = out.rename(tmp_path / "moved")
        text = shutil.copytree(corpus, tmp_path / "text")
        train(small("--data.path", str(text)), moved, resume=True, quiet=True)
        assert (moved / "metrics.jsonl").read_text() == (finished(small()) / "metrics.jsonl").read_text()
