"""Models on disk that the tests of the offload runtime share. None may be changed: copy it first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from offloading import write_run

from stickymoe.runtime.checkpoints import open_checkpoint
from stickymoe.runtime.pack import pack, uniform
from stickymoe.runtime.packing import mixed

MIXED_BYTES = 180_000.0  # some experts of the run "vanilla" in int8, some in bf16


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a name in `offloading.RUNS`."""
    return cache(lambda name: write_run(tmp_path_factory.mktemp("run") / "run", name))


@pytest.fixture(scope="session")
def store_of(run_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The packed store of a run, in some precision."""

    @cache
    def stored(name: str = "vanilla", experts: str = "fp32") -> Path:
        source = open_checkpoint(run_of(name))
        folder = tmp_path_factory.mktemp("store") / "store"
        if experts == "mixed":
            importance = np.random.default_rng(0).random((source.n_layers, source.n_experts))
            pack(source, folder, mixed(source, importance, MIXED_BYTES))
        else:
            pack(source, folder, uniform(source, experts))
        return folder

    return stored
