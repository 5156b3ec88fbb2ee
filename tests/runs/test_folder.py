"""The files of a run: one writer at a time, complete files, and no lines that were cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stickymoe import files
from stickymoe.errors import RunError
from stickymoe.files import write_text
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


HOLD = """
import sys
from pathlib import Path
from stickymoe.runs.folder import RunFolder

with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class TestLock:
    def test_keeps_another_process_out(self, folder: RunFolder, holder: subprocess.Popen[str]) -> None:
        with pytest.raises(RunError, match=r"run is being written by another process"), folder.lock():
            pytest.fail("two writers")

    def test_is_free_again_when_its_holder_is_killed(self, folder: RunFolder, holder: subprocess.Popen[str]) -> None:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with folder.lock():
            assert folder.path.is_dir()

    def test_is_free_again_after_use_and_after_an_error(self, folder: RunFolder) -> None:
        with pytest.raises(ZeroDivisionError), folder.lock():
            raise ZeroDivisionError
        with folder.lock():
            pass

    def test_makes_the_folder(self, tmp_path: Path) -> None:
        deep = RunFolder(tmp_path / "a" / "b")
        with deep.lock():
            assert deep.path.is_dir()

    def test_errors_inside_pass_through(self, folder: RunFolder) -> None:
        with pytest.raises(FileNotFoundError), folder.lock():
            raise FileNotFoundError("of something else")

    @pytest.mark.parametrize("inside", ["file", "file/run"])
    def test_of_an_impossible_folder_is_refused(self, tmp_path: Path, inside: str) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(RunError, match=r"cannot be written \(.+\)\. Choose another folder with --out"):  # noqa: SIM117
            with RunFolder(tmp_path / inside).lock():
                pytest.fail("locked a file")
        assert (tmp_path / "file").read_text() == "mine"


class TestRewind:
    def lines(self, folder: RunFolder) -> list[int]:
        return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]

    def write(self, folder: RunFolder) -> None:
        for step in (1, 2, 3):
            folder.append(folder.metrics, {"step": step, "train": {"loss": step / 3}})
        folder.append(folder.metrics, {"step": 3, "valid": {"ppl": 2.5}})
        folder.append(folder.metrics, {"step": 4, "train": {"loss": 0.1}})

    @pytest.mark.parametrize(("step", "left"), [(0, []), (2, [1, 2]), (3, [1, 2, 3, 3]), (9, [1, 2, 3, 3, 4])])
    def test_removes_later_lines(self, folder: RunFolder, step: int, left: list[int]) -> None:
        self.write(folder)
        folder.rewind(step)
        assert self.lines(folder) == left

    def test_changes_no_byte_of_what_it_keeps(self, folder: RunFolder) -> None:
        self.write(folder)
        before = folder.metrics.read_bytes()
        folder.rewind(4)
        assert folder.metrics.read_bytes() == before

    @pytest.mark.parametrize("cut", ["{", '{"step": 4', '{"step": 4, "train": {"loss": 0.1}}'])
    def test_removes_a_line_that_was_cut_off(self, folder: RunFolder, cut: str) -> None:
        """Even a complete line without its line end: its step is repeated."""
        for step in (1, 2, 3):
            folder.append(folder.metrics, {"step": step})
        with folder.metrics.open("a") as f:
            f.write(cut)
        assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
        folder.rewind(9)
        assert self.lines(folder) == [1, 2, 3]
        folder.append(folder.metrics, {"step": 4})
        assert self.lines(folder) == [1, 2, 3, 4]

    def test_of_a_missing_file_creates_nothing(self, folder: RunFolder) -> None:
        folder.rewind(3)
        assert not folder.metrics.exists()

    def test_numbers_survive_exactly(self, folder: RunFolder) -> None:
        line = {"step": 1, "x": 0.1 + 0.2, "y": 1e-300, "z": None, "λ": "ψ"}
        folder.append(folder.metrics, line)
        assert folder.read_metrics() == [line]

    def test_nan_is_not_written(self, folder: RunFolder) -> None:
        with pytest.raises(ValueError, match="JSON compliant"):
            folder.append(folder.metrics, {"step": 1, "x": float("nan")})
        assert not folder.metrics.exists() or folder.metrics.read_text() == ""


class TestWriteAtomic:
    def test_replaces_the_content(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        for text in ("one", "zwölf"):
            write_text(file, text)
            assert file.read_text(encoding="utf-8") == text
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_failing_leaves_the_old_content_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        file = tmp_path / "file"
        write_text(file, "old")

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files.os if step == "fsync" else Path, step, fail)
        with pytest.raises(OSError, match="No space"):
            write_text(file, "new")
        assert file.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def test_reaches_the_disk_before_it_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "file"
        events: list[str] = []
        fsync, replace = os.fsync, Path.replace
        monkeypatch.setattr(files.os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
        monkeypatch.setattr(Path, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
        write_text(file, "text")
        assert events[:2] == ["fsync", "replace"]


def test_the_config_written_is_the_config_read(folder: RunFolder) -> None:
    config = read_config(["--seed", "7", "--data.path", "/tmp/λ x", "--variant.lam", "1e-5"], variant="soft")
    folder.write_config(config)
    assert read_config(file=folder.config) == config
    assert RunConfig.from_dict(yaml.safe_load(folder.config.read_text(encoding="utf-8"))) == config


def test_a_lock_that_cannot_be_opened_does_not_mean_another_writer(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    assert not RunFolder(tmp_path).is_locked()
    with pytest.raises(RunError, match="cannot be written"), RunFolder(tmp_path).lock():
        pass


def test_metrics_that_are_not_text_are_damaged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b"\xff\xfe\n")
    with pytest.raises(RunError, match="is damaged"):
        folder.read_metrics()
