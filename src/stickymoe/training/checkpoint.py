"""Checkpoints: a folder of safetensors and a readable JSON, complete or absent, each file with its checksum.

checkpoints/step-000100/
  model.safetensors       parameters
  optimiser.safetensors   AdamW's moments and step counts, named after the parameters; the random state
  state.json              step, phase, best evaluation, checksums
"""

from __future__ import annotations

import hashlib
import json
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
from stickymoe.errors import RunError
from stickymoe.runs.folder import checkpoint_name

SCHEMA = 1
KEEP = 2
_FILES = {"model.safetensors", "optimiser.safetensors"}


@dataclass(frozen=True)
class Progress:
    """Where training stands: steps done over all phases, and the best evaluation so far."""

    step: int
    best_ppl: float | None = None
    best_step: int | None = None


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A save that was cut off leaves only a hidden folder."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def drop_later_checkpoints(folder: Path, step: int) -> None:
    """Forget checkpoints after `step`: training goes on from there, and they would be taken up instead."""
    for path in checkpoints_in(folder):
        if _step_of(path) > step:
            shutil.rmtree(path)


def save_checkpoint(folder: Path, progress: Progress, model: nn.Module, optimiser: torch.optim.Optimizer) -> Path:
    """Write a checkpoint beside the earlier ones, then drop all but the newest few."""
    final = folder / checkpoint_name(progress.step)
    if final.exists() and checkpoint_damage(final) is None:
        return final
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # of a save that was killed
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
    """The checkpoint of that name, or the newest; checked, and refused if damaged."""
    found = checkpoints_in(folder)
    if name is not None:
        if folder / name not in found:
            there = ", ".join(p.name for p in found) or "none"
            raise RunError(f"No checkpoint '{name}' in {folder}. There are: {there}.")
        chosen = folder / name
    elif found:
        chosen = found[-1]
    else:
        return None
    damage = checkpoint_damage(chosen)
    if damage is not None:
        good = [p for p in found if _step_of(p) < _step_of(chosen) and checkpoint_damage(p) is None]
        offer = (
            f"The previous good one is {good[-1].name}: add --checkpoint {good[-1].name} to go on from it"
            if good
            else "There is no earlier one: start again in a new folder"
        )
        raise RunError(f"Checkpoint {chosen} is damaged ({damage}). {offer}.")
    return chosen


def checkpoint_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state["schema"] != SCHEMA:
            return f"state.json: got schema {state['schema']}, expected {SCHEMA}"
        if state["checksum"] != _state_checksum(state) or set(state["sha256"]) != _FILES:
            return "state.json: its checksum differs"
        for name, expected in state["sha256"].items():
            if _checksum(path / name) != expected:
                return f"{name}: its checksum differs"
    except OSError as e:
        return f"{Path(e.filename).name}: {e.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "state.json is not readable"
    return None


def read_progress(path: Path) -> Progress:
    state = json.loads((path / "state.json").read_text())
    return Progress(**{k: state[k] for k in ("step", "best_ppl", "best_step")})


def load_model(path: Path, model: nn.Module) -> None:
    try:
        model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    except RuntimeError as e:
        raise RunError(
            f"Checkpoint {path} does not fit the model of its config: another version of stickymoe saved it. "
            "Use that version, or train again in a new folder."
        ) from e


def load_optimiser(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Put moments, step counts and the random state back as they were."""
    tensors = load_file(path / "optimiser.safetensors")
    torch.set_rng_state(tensors["rng"])
    for name, parameter in _trained(model):
        optimiser.state[parameter] = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}


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
