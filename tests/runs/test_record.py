"""The record of a run: reading returns what was written, and damage is reported."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stickymoe.errors import RunError
from stickymoe.runs import environment as environment_module
from stickymoe.runs.config import RunConfig
from stickymoe.runs.environment import describe_environment
from stickymoe.runs.record import RunRecord


@pytest.fixture
def record() -> RunRecord:
    return RunRecord(
        run_id="0123456789abcdef",
        status="complete",
        config=RunConfig().as_dict(),
        data={"fingerprint": "f", "vocab_size": 300, "tokens": {"train": 10, "valid": 5, "test": 0}},
        environment={"python": "3.11"},
        metrics={"ppl": 12.5, "best_ppl": None},
        per_layer={"switch_rate": [0.5, None, 0.25, 1]},
    )


@pytest.fixture
def file(record: RunRecord, tmp_path: Path) -> Path:
    path = tmp_path / "run" / "record.json"
    path.parent.mkdir()
    record.write(path)
    return path


class TestRoundTrip:
    def test_is_the_same(self, record: RunRecord, file: Path) -> None:
        assert RunRecord.read(file) == record

    def test_is_the_same_bytes(self, record: RunRecord, file: Path) -> None:
        before = file.read_bytes()
        RunRecord.read(file).write(file)
        assert file.read_bytes() == before
        assert before.endswith(b"}\n")

    def test_nan_is_not_written(self, record: RunRecord, file: Path) -> None:
        before = file.read_bytes()
        record.metrics["ppl"] = float("nan")
        with pytest.raises(ValueError, match="JSON compliant"):
            record.write(file)
        assert file.read_bytes() == before


class TestDamage:
    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", "{}", '{"schema": 1}', '{"schema": 2}', "not json", "\ufffd"],
    )
    def test_is_refused_with_the_files_name(self, file: Path, text: str) -> None:
        file.write_text(text)
        with pytest.raises(RunError, match=r"record\.json is damaged") as caught:
            RunRecord.read(file)
        assert "\n" not in str(caught.value)

    def test_bytes_that_are_not_text(self, file: Path) -> None:
        file.write_bytes(b"\xff\xfe\x00{")
        with pytest.raises(RunError, match=r"record\.json is damaged"):
            RunRecord.read(file)

    @pytest.mark.parametrize("length", [1, 10, 200, -2])
    def test_cut_off(self, file: Path, length: int) -> None:
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(RunError, match=r"record\.json is damaged"):
            RunRecord.read(file)

    @pytest.mark.parametrize("key", ["run_id", "status", "config", "data", "environment", "schema"])
    def test_a_key_missing(self, file: Path, key: str) -> None:
        values = json.loads(file.read_text())
        del values[key]
        file.write_text(json.dumps(values))
        with pytest.raises(RunError, match=r"record\.json is damaged"):
            RunRecord.read(file)

    @pytest.mark.parametrize(
        "metrics", [{"ppl": math.nan}, {"ppl": -5.0}, {"ppl": 0}, {"ppl": 9.0, "ce": math.inf}, {}]
    )
    def test_metrics_that_no_complete_run_has(self, file: Path, metrics: dict[str, float]) -> None:
        change = {"status": "complete", "metrics": metrics}
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(RunError, match=r"record\.json is damaged: .* expected"):
            RunRecord.read(file)

    @pytest.mark.parametrize("change", [{"extra": 1}, {"schema": 99}, {"schema": "1"}])
    def test_of_another_version(self, file: Path, change: dict[str, Any]) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(RunError, match="schema 1"):
            RunRecord.read(file)

    def test_missing_means_not_a_run_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"nowhere is not a run folder: it has no readable record\.json\."):
            RunRecord.read(tmp_path / "nowhere" / "record.json")


def test_the_environment_is_described_and_fits_a_record(record: RunRecord, tmp_path: Path) -> None:
    environment = describe_environment()
    assert environment["python"].startswith("3.")
    assert environment["packages"]["torch"]
    assert environment["packages"]["numpy"]
    assert environment == describe_environment()
    assert json.loads(json.dumps(environment)) == environment


def test_a_commit_is_marked_if_anything_of_the_package_was_changed_since(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(Path(environment_module.__file__).parent, package / "runs", ignore=shutil.ignore_patterns("__*"))
    (package / "routing.py").write_text("a = 1\n")

    def git(*ask: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, "-C", str(tmp_path), *ask], check=True, capture_output=True)

    git("init")
    git("add", "-A")
    git("commit", "-m", "all")
    spec = importlib.util.spec_from_file_location("copied", package / "runs" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert re.fullmatch("[0-9a-f]{40}", copied._commit())
    (package / "new.py").write_text("")
    assert copied._commit().endswith("-changed"), "a file that is not known yet"
    (package / "new.py").unlink()
    (package / "routing.py").write_text("a = 2\n")
    assert copied._commit().endswith("-changed")
