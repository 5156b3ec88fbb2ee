"""Checkpoints: folders of safetensors and readable JSON, complete or absent, with a checksum of each file.

checkpoints/step-000100/
  model.safetensors       parameters
  optimiser.safetensors   moments and step counts of AdamW, named after the parameters; the random state
  state.json              step, phase, best evaluation, checksums

The processes of a sharded model write one file each, model-00001-of-00002.safetensors and so on, with whole tensors and
the index that transformers uses, model.safetensors.index.json. Any number of processes can read either layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stickymoe import files
from stickymoe.errors import RunError, shown
from stickymoe.reading import read_json, reason
from stickymoe.runs.folder import checkpoint_name
from stickymoe.training.processes import Processes

SCHEMA = 1
KEEP = 2
_FILES = {"model.safetensors", "optimiser.safetensors"}
_INDEX = ".safetensors.index.json"
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
    with _explained(final):
        temporary = _begin(final)
        if temporary is not None:
            with _removed_on_error(temporary):
                save_file(_parameters(model), temporary / "model.safetensors")
                save_file(_optimiser_tensors(model, optimiser), temporary / "optimiser.safetensors")
                sums = {p.name: _checksum(p) for p in sorted(temporary.glob("*.safetensors"))}
                _publish(temporary, final, progress, sums)
    return final


def save_shards(
    folder: Path, progress: Progress, model: nn.Module, optimiser: torch.optim.Optimizer, processes: Processes
) -> None:
    """Write a checkpoint of a sharded model: every process gathers and writes its share of the tensors."""
    final = folder / checkpoint_name(progress.step)
    with _explained(final):
        temporary = processes.in_main(lambda: _begin(final))
        if temporary is None:
            return
        tensors = {"model": _parameters(model), "optimiser": _optimiser_tensors(model, optimiser)}
        shares = {kind: _share(whole, processes) for kind, whole in tensors.items()}
        with _removed_on_error(temporary) if processes.is_main else contextlib.nullcontext():
            written = processes.gathered(processes.everywhere(lambda: _write_shares(temporary, shares, processes)))
            processes.in_main(lambda: _publish_shards(temporary, final, progress, written))


def _begin(final: Path) -> Path | None:
    """A new hidden folder for a checkpoint; None if the checkpoint is there and intact."""
    if final.exists() and checkpoint_damage(final) is None:
        return None
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(".step-*"):  # left by a save that was killed
        shutil.rmtree(left)
    temporary = final.with_name(f".{final.name}")
    temporary.mkdir()
    return temporary


def _publish(temporary: Path, final: Path, progress: Progress, sums: dict[str, str]) -> None:
    """Make the checkpoint visible, then delete all but the newest few."""
    state = {"schema": SCHEMA, **asdict(progress), "sha256": sums}
    state["checksum"] = _state_checksum(state)
    (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    if final.exists():
        shutil.rmtree(final)  # damaged
    files.publish_folder(temporary, final)
    for old in checkpoints_in(final.parent)[:-KEEP]:
        shutil.rmtree(old)


@contextlib.contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Say which checkpoint could not be saved, and which one is left."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        kept = checkpoints_in(final.parent)
        which = f"{kept[-1].name} is intact" if kept else "there is no earlier one"
        raise RunError(f"Checkpoint {final} could not be saved ({getattr(e, 'strerror', None) or e}); {which}.") from e


@contextlib.contextmanager
def _removed_on_error(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Shard(NamedTuple):
    """A file that a process wrote."""

    kind: str
    name: str
    sha256: str
    n_bytes: int
    tensors: list[str]


def _share(tensors: dict[str, Tensor], processes: Processes) -> dict[str, Tensor]:
    """The whole tensors that this process writes. All processes gather all tensors, one at a time."""
    loads, share = [0] * processes.count, {}
    for name, tensor in tensors.items():
        owner = loads.index(min(loads))
        loads[owner] += tensor.numel() * tensor.element_size()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if owner == processes.index:
            share[name] = whole.cpu().contiguous()
    return share


def _write_shares(folder: Path, shares: dict[str, dict[str, Tensor]], processes: Processes) -> list[_Shard]:
    with _explained(folder.with_name(folder.name.removeprefix("."))):
        return [_write_share(folder, kind, share, processes) for kind, share in shares.items() if share]


def _write_share(folder: Path, kind: str, share: dict[str, Tensor], processes: Processes) -> _Shard:
    file = folder / f"{kind}-{processes.index + 1:05d}-of-{processes.count:05d}.safetensors"
    save_file(share, file, metadata={"format": "pt"})
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in share.values())
    return _Shard(kind, file.name, _checksum(file), n_bytes, list(share))


def _publish_shards(temporary: Path, final: Path, progress: Progress, written: list[list[_Shard]]) -> None:
    shards = [shard for process in written for shard in process]
    sums = {shard.name: shard.sha256 for shard in shards}
    absent = next((name for name in sums if not (temporary / name).is_file()), None)
    if absent is not None:
        raise RunError(f"{temporary / absent} is missing: give --out a folder that all machines share.")
    for kind in ("model", "optimiser"):
        own = [shard for shard in shards if shard.kind == kind]
        index = {
            "metadata": {"total_size": sum(shard.n_bytes for shard in own)},
            "weight_map": {name: shard.name for shard in own for name in shard.tensors},
        }
        file = temporary / f"{kind}{_INDEX}"
        file.write_text(json.dumps(index, indent=1) + "\n")
        sums[file.name] = _checksum(file)
    with _explained(final):
        _publish(temporary, final, progress, sums)


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
        for name in sorted(state["sha256"]):
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
    if state.get("checksum") != _state_checksum(state) or not _are_complete(set(state["sha256"])):
        raise RunError(f"{file}: its checksum differs.")
    return state


def _are_complete(names: set[str]) -> bool:
    return names == _FILES or {f"model{_INDEX}", f"optimiser{_INDEX}"} <= names


def read_progress(path: Path) -> Progress:
    state = _read_state(path)
    return Progress(**{k: state[k] for k in ("step", "best_ppl", "best_step")})


def load_model(path: Path, model: nn.Module) -> None:
    tensors = _load(path, "model")
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as e:
        raise RunError(
            f"Checkpoint {path} does not fit the model of its config: another version of stickymoe saved it. "
            "Use that version, or train again in a new folder."
        ) from e


def load_optimiser(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Restore moments, step counts and the random state."""
    tensors = _load(path, "optimiser")
    for name, parameter in _trained(model):
        for key in _MOMENTS:
            moment = tensors.get(f"{key}/{name}")
            if moment is None or moment.shape != (() if key == "step" else parameter.shape):
                raise RunError(f"Checkpoint {path} does not fit the optimiser ({key}/{name}). {_TRAIN_AGAIN}")
        optimiser.state[parameter] = {key: _placed(tensors[f"{key}/{name}"], parameter) for key in _MOMENTS}
    try:
        torch.set_rng_state(tensors["rng"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise RunError(f"Checkpoint {path} has no random state ({reason(e)}). {_TRAIN_AGAIN}") from e


def _placed(moment: Tensor, parameter: nn.Parameter) -> Tensor:
    """A moment on the device of its parameter, sharded like it; a step count is a scalar, which is never sharded."""
    if moment.ndim and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return distribute_tensor(moment.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return moment.to(parameter.device)


def _load(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, from one file or from shards."""
    single = checkpoint / f"{kind}.safetensors"
    shards = sorted(checkpoint.glob(f"{kind}-*.safetensors")) if not single.exists() else []
    return {name: tensor for file in shards or [single] for name, tensor in _load_file(file).items()}


def _load_file(file: Path) -> dict[str, Tensor]:
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
