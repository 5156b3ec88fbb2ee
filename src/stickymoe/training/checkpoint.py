"""Checkpoints: folders of safetensors and readable JSON, complete or absent, with a checksum of each file.

checkpoints/step-000100/
  model.safetensors       parameters
  optimiser.safetensors   moments and step counts of AdamW, named after the parameters; the random state
  state.json              step, phase, best evaluation, checksums
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stickymoe import files
from stickymoe.errors import RunError, shown
from stickymoe.reading import read_json, reason
from stickymoe.runs.folder import checkpoint_name

SCHEMA = 1
KEEP = 2
_FILES = {"model.safetensors", "optimiser.safetensors"}
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_TRAIN_AGAIN = "Train again in a new folder."


@dataclass(frozen=True)
class Progress:
    """The steps done over all phases, and the best evaluation so far."""

    step: int
    best_ppl: float | None = None
    best_step: int | None = None


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. An interrupted save leaves only a hidden folder."""
    return sorted(
        (p for p in folder.glob("step-*") if p.is_dir() and re.fullmatch("step-[0-9]+", p.name)), key=_step_of
    )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def drop_later_checkpoints(folder: Path, step: int) -> None:
    """Delete checkpoints after `step`. Training continues from that step, and a later resume must not use them."""
    for path in checkpoints_in(folder):
        if _step_of(path) > step:
            shutil.rmtree(path)


def save_checkpoint(folder: Path, progress: Progress, model: nn.Module, optimiser: torch.optim.Optimizer) -> Path:
    """Write a checkpoint, then delete all but the newest few."""
    final = folder / checkpoint_name(progress.step)
    if final.exists() and checkpoint_damage(final) is None:
        return final
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # left by a save that was killed
        shutil.rmtree(left)
    temporary = folder / f".{final.name}"
    try:
        temporary.mkdir()
        save_file(_parameters(model), temporary / "model.safetensors")
        save_file(_optimiser_tensors(model, optimiser), temporary / "optimiser.safetensors")
        sums = {p.name: _checksum(p) for p in sorted(temporary.glob("*.safetensors"))}
        state = {"schema": SCHEMA, **asdict(progress), "sha256": sums}
        state["checksum"] = _state_checksum(state)
        (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        if final.exists():
            shutil.rmtree(final)  # damaged
        files.publish_folder(temporary, final)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = checkpoints_in(folder)
        which = f"{kept[-1].name} is intact" if kept else "there is no earlier one"
        reason = getattr(e, "strerror", None) or e
        raise RunError(f"Checkpoint {final} could not be saved ({reason}); {which}.") from e
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in checkpoints_in(folder)[:-KEEP]:
        shutil.rmtree(old)
    return final


def find_checkpoint(folder: Path, name: str | None = None) -> Path | None:
    """The checkpoint of that name, or the newest; refused if it is damaged."""
    found = checkpoints_in(folder)
    if name is not None:
        if folder / name not in found:
            there = ", ".join(p.name for p in found) or "none"
            raise RunError(f"No checkpoint '{name}' in {folder}. Available: {there}.")
        chosen = folder / name
    elif found:
        chosen = found[-1]
    else:
        return None
    damage = checkpoint_damage(chosen)
    if damage is not None:
        good = [p for p in found if _step_of(p) < _step_of(chosen) and checkpoint_damage(p) is None]
        offer = (
            f"The previous intact one is {good[-1].name}: add --checkpoint {good[-1].name} to resume from it"
            if good
            else "There is no earlier one: start again in a new folder"
        )
        raise RunError(f"Checkpoint {chosen} is damaged ({damage}). {offer}.")
    return chosen


def checkpoint_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        state = _read_state(path)
        for name in sorted(_FILES):
            if _checksum(path / name) != state["sha256"][name]:
                return f"{name}: its checksum differs"
    except RunError as e:
        return str(e).removeprefix(f"{path}/").rstrip(".")
    except OSError as e:
        return f"{name}: {reason(e)}"
    return None


def _read_state(path: Path) -> dict[str, Any]:
    """The content of `state.json`, as it was written."""
    file = path / "state.json"
    state = read_json(file, RunError)
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        given = shown(state.get("schema")) if isinstance(state, dict) else shown(state)
        raise RunError(f"{file}: got schema {given}, expected {SCHEMA}.")
    if state.get("checksum") != _state_checksum(state) or set(state["sha256"]) != _FILES:
        raise RunError(f"{file}: its checksum differs.")
    return state


def read_progress(path: Path) -> Progress:
    state = _read_state(path)
    return Progress(**{k: state[k] for k in ("step", "best_ppl", "best_step")})


def load_model(path: Path, model: nn.Module) -> None:
    tensors = _load(path / "model.safetensors")
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as e:
        raise RunError(
            f"Checkpoint {path} does not fit the model of its config: another version of stickymoe saved it. "
            "Use that version, or train again in a new folder."
        ) from e


def load_optimiser(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Restore moments, step counts and the random state."""
    tensors = _load(path / "optimiser.safetensors")
    for name, parameter in _trained(model):
        for key in _MOMENTS:
            moment = tensors.get(f"{key}/{name}")
            if moment is None or moment.shape != (() if key == "step" else parameter.shape):
                raise RunError(f"Checkpoint {path} does not fit the optimiser ({key}/{name}). {_TRAIN_AGAIN}")
        optimiser.state[parameter] = {key: tensors[f"{key}/{name}"].to(parameter.device) for key in _MOMENTS}
    try:
        torch.set_rng_state(tensors["rng"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise RunError(f"Checkpoint {path} has no random state ({reason(e)}). {_TRAIN_AGAIN}") from e


def _load(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except OSError as e:
        raise RunError(f"{file} cannot be read ({reason(e)}).") from e
    except SafetensorError as e:
        raise RunError(f"{file} is damaged: {reason(e)}.") from e
    return tensors


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().contiguous() for name, p in model.state_dict().items()}


def _optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for name, parameter in _trained(model):
        state: dict[str, Any] = optimiser.state.get(parameter, {})
        tensors |= {f"{key}/{name}": value for key, value in state.items()}
    return tensors


def _state_checksum(state: dict[str, Any]) -> str:
    content = {key: value for key, value in state.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
