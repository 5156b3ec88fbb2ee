"""Open a model for generation: find its store, or pack one, and build the model around it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.errors import ConfigError, StoreError
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.runtime.store import INDEX, Store

if TYPE_CHECKING:
    from stickymoe.runtime.engine import Host
    from stickymoe.runtime.experts import Layers

Progress = Callable[[str, int], Any]  # title, number of experts → a context manager that gives the function to call


def open_store(
    model: Path,
    *,
    experts: str | None = None,
    store: Path | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Store | None:
    """The store of a model: `model` itself, or one that is packed from it. None if the model has no experts.

    With `replace`, a store of another model or precision in the folder `store` is packed anew, as in the user's cache.
    """
    if not model.exists():
        raise ConfigError(
            f"{model} does not exist: expected a packed store, a run folder or a folder of a transformers model."
        )
    if (model / INDEX).is_file():
        found = Store.open(model)
        if experts is not None and experts != found.precision:
            raise ConfigError(f"experts: got {experts}, but {model} is packed in {found.precision}; omit it.")
        return found
    if _is_dense(model):
        return None
    from stickymoe.runtime.checkpoints import open_checkpoint
    from stickymoe.runtime.pack import contents_of, default_precision, pack, uniform

    source = open_checkpoint(model)
    precision = experts or default_precision(source)
    folder = store or _cache_folder() / f"{model.resolve().name}-{_digest(str(model.resolve()))}-{precision}"
    plan = uniform(source, precision)
    replace = replace or store is None
    if (folder / INDEX).is_file():
        try:
            found = Store.open(folder)
            if found.contents == contents_of(source) and found.precision == precision:
                return found
        except StoreError:
            if not replace:
                raise
        if not replace:
            raise ConfigError(f"{store} is a store of another model or precision. Choose another folder.")
        _discard(folder)
    elif store is None and folder.exists():  # what an interrupted deletion left
        _discard(folder)
    total = sum(len(pool) for pool in plan)
    with nullcontext() if progress is None else progress(f"pack {source.name} into {folder}", total) as advance:
        return pack(source, folder, plan, progress=advance)


def open_host(folder: Path, layers: Layers | None, threads: int) -> Host:
    """The model of a store around its expert layers, or a model without experts."""
    if (folder / "config.yaml").is_file():
        from stickymoe.runtime.gpt import RunHost

        return RunHost(folder, layers, threads)
    from stickymoe.runtime.foreign import TransformersHost

    assert layers is not None
    return TransformersHost(folder, layers, threads)


def _is_dense(model: Path) -> bool:
    """Whether a folder is a run of the dense control."""
    config = RunFolder(model).config
    return config.is_file() and not read_config(file=config).variant.routes


def _discard(folder: Path) -> None:
    """Delete an outdated or damaged store; its index first, so that what is left is no store."""
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stickymoe" / "stores"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
