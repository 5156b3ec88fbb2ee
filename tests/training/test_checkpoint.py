"""Checkpoints: loading restores the saved state, a checkpoint is complete or absent, and damage is refused by name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stickymoe.errors import RunError
from stickymoe.training import checkpoint
from stickymoe.training.checkpoint import (
    KEEP,
    Progress,
    checkpoints_in,
    find_checkpoint,
    load_model,
    load_optimiser,
    read_progress,
    save_checkpoint,
)

FILES = ("model.safetensors", "optimiser.safetensors", "state.json")


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)


def update(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    loss = model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(0)
    optimiser = optimiser_of(model)
    for _ in range(3):
        update(model, optimiser)
    return model, optimiser


@pytest.fixture
def folder(tmp_path: Path, trained: tuple[nn.Module, torch.optim.Optimizer]) -> Path:
    """A folder with the checkpoints of steps 3 and 6."""
    for step in (3, 6):
        save_checkpoint(tmp_path / "checkpoints", Progress(step, best_ppl=9.5, best_step=2), *trained)
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


class TestRoundTrip:
    def test_resumes_as_if_never_stopped(self, folder: Path, trained: Any) -> None:
        model, optimiser = trained
        expected_random = torch.rand(3)
        other = network(1)
        resumed = optimiser_of(other)
        found = find_checkpoint(folder)
        assert found == folder / "step-000006"
        load_model(found, other)
        load_optimiser(found, other, resumed)
        assert torch.equal(torch.rand(3), expected_random)
        for _ in range(4):
            update(model, optimiser)
            update(other, resumed)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def test_keeps_progress(self, folder: Path) -> None:
        assert read_progress(folder / "step-000006") == Progress(6, best_ppl=9.5, best_step=2)

    def test_holds_only_what_is_trained(self, tmp_path: Path) -> None:
        """As in a phase that trains the gates alone."""
        model = network(0)
        model[0].requires_grad_(False)
        optimiser = optimiser_of(model)
        update(model, optimiser)
        saved = save_checkpoint(tmp_path, Progress(1), model, optimiser)
        update(model, optimiser)

        other = network(1)
        other[0].requires_grad_(False)
        resumed = optimiser_of(other)
        load_model(saved, other)
        load_optimiser(saved, other, resumed)
        update(other, resumed)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def test_is_safetensors_and_json(self, folder: Path) -> None:
        assert names(folder / "step-000003") == sorted(FILES)
        state = json.loads((folder / "step-000003" / "state.json").read_text())
        assert state["step"] == 3


class TestFolder:
    def test_keeps_the_newest_few(self, tmp_path: Path, trained: Any) -> None:
        for step in (2, 4, 10, 100):
            save_checkpoint(tmp_path, Progress(step), *trained)
        assert names(tmp_path) == ["step-000010", "step-000100"]
        assert KEEP == 2

    def test_orders_by_step_not_by_name(self, tmp_path: Path, trained: Any) -> None:
        for step in (999_999, 1_000_000):
            save_checkpoint(tmp_path, Progress(step), *trained)
        newest = find_checkpoint(tmp_path)
        assert newest is not None
        assert read_progress(newest).step == 1_000_000

    def test_an_interrupted_save_is_not_a_checkpoint_and_the_next_save_removes_it(
        self, folder: Path, trained: Any
    ) -> None:
        shutil.copytree(folder / "step-000006", folder / ".step-000009")
        (folder / ".step-000009" / "state.json").unlink()
        assert find_checkpoint(folder) == folder / "step-000006"
        save_checkpoint(folder, Progress(9), *trained)
        assert names(folder) == ["step-000006", "step-000009"]
        assert find_checkpoint(folder) == folder / "step-000009"

    def test_empty_has_none(self, tmp_path: Path) -> None:
        assert find_checkpoint(tmp_path) is None
        assert find_checkpoint(tmp_path / "nowhere") is None
        assert checkpoints_in(tmp_path) == []

    def test_finds_a_checkpoint_by_name(self, folder: Path) -> None:
        assert find_checkpoint(folder, "step-000003") == folder / "step-000003"

    @pytest.mark.parametrize("name", ["step-000004", "", ".", "../checkpoints/step-000003"])
    def test_refuses_an_unknown_name(self, folder: Path, name: str) -> None:
        with pytest.raises(RunError, match=r"No checkpoint .*Available: step-000003, step-000006"):
            find_checkpoint(folder, name)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(bytes(content))


def empty(file: Path) -> None:
    file.write_bytes(b"")


class TestDamage:
    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("harm", [truncate, flip, empty, Path.unlink])
    def test_is_refused_by_name_and_the_previous_offered(
        self, folder: Path, file: str, harm: Callable[[Path], None]
    ) -> None:
        harm(folder / "step-000006" / file)
        with pytest.raises(RunError, match=r"step-000006 is damaged \(.*--checkpoint step-000003") as caught:
            find_checkpoint(folder)
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "change",
        [
            {"step": 5},
            {"best_ppl": 1.0},
            {"best_step": 1},
            {"schema": 99},
            {"sha256": {}},
            {"sha256": None},
        ],
        ids=lambda change: "-".join(change),
    )
    def test_to_the_state_is_noticed(self, folder: Path, change: dict[str, Any]) -> None:
        file = folder / "step-000006" / "state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(RunError, match=r"step-000006 is damaged .*--checkpoint step-000003"):
            find_checkpoint(folder)

    @pytest.mark.parametrize("key", ["step", "best_ppl", "sha256"])
    def test_a_key_missing_from_the_state_is_noticed(self, folder: Path, key: str) -> None:
        file = folder / "step-000006" / "state.json"
        state = json.loads(file.read_text())
        del state[key]
        file.write_text(json.dumps(state))
        with pytest.raises(RunError, match=r"step-000006 is damaged .*--checkpoint step-000003"):
            find_checkpoint(folder)

    def test_of_the_previous_one_too_leaves_none_to_offer(self, folder: Path) -> None:
        for name in ("step-000003", "step-000006"):
            truncate(folder / name / "model.safetensors")
        with pytest.raises(RunError, match=r"step-000006 is damaged .*start again"):
            find_checkpoint(folder)

    def test_of_the_one_named_is_refused(self, folder: Path) -> None:
        flip(folder / "step-000003" / "model.safetensors")
        with pytest.raises(RunError, match=r"step-000003 is damaged .*model.safetensors"):
            find_checkpoint(folder, "step-000003")

    def test_is_repaired_by_saving_that_step_again(self, folder: Path, trained: Any) -> None:
        """A run resumed from the previous checkpoint reaches the damaged step again."""
        flip(folder / "step-000006" / "model.safetensors")
        save_checkpoint(folder, Progress(6), *trained)
        assert find_checkpoint(folder) == folder / "step-000006"


@contextlib.contextmanager
def no_space(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, which the system refuses as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestFullDisk:
    @pytest.mark.parametrize("call", [1, 2])
    def test_leaves_the_earlier_ones_intact(
        self, folder: Path, trained: Any, monkeypatch: pytest.MonkeyPatch, call: int
    ) -> None:
        calls = iter(range(1, 10))
        original = checkpoint.save_file

        def save_file(tensors: Any, path: Path) -> None:
            if next(calls) == call:
                Path(path).write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(tensors, path)

        monkeypatch.setattr(checkpoint, "save_file", save_file)
        with pytest.raises(RunError, match=r"step-000009 could not be saved \(No space left.*step-000006 is intact"):
            save_checkpoint(folder, Progress(9), *trained)
        assert names(folder) == ["step-000003", "step-000006"]
        assert find_checkpoint(folder) == folder / "step-000006"

    @pytest.mark.parametrize("size", [0, 300])
    def test_refused_by_the_system_itself(self, folder: Path, trained: Any, size: int) -> None:
        message = r"step-000009 could not be saved \(.*step-000006 is intact"
        with pytest.raises(RunError, match=message) as caught, no_space(size):
            save_checkpoint(folder, Progress(9), *trained)
        assert "\n" not in str(caught.value)
        assert names(folder) == ["step-000003", "step-000006"]
        assert find_checkpoint(folder) == folder / "step-000006"

    def test_at_the_first_save_says_there_is_none(
        self, tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def save_file(tensors: Any, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoint, "save_file", save_file)
        with pytest.raises(RunError, match=re.escape("there is no earlier one")):
            save_checkpoint(tmp_path / "checkpoints", Progress(3), *trained)
        assert find_checkpoint(tmp_path / "checkpoints") is None


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    other = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))
    with pytest.raises(RunError, match="step-000006 does not fit the model of its config"):
        load_model(folder / "step-000006", other)
