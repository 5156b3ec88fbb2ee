"""Models on disk that the tests of the offload runtime share. None may be changed: copy it first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from offloading import write_run

from stickymoe.runtime.packing import pack_model

Stored = Callable[..., Path]


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a name in `offloading.RUNS`."""
    return cache(lambda name: write_run(tmp_path_factory.mktemp("run") / "run", name))


@pytest.fixture(scope="session")
def store_of(run_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The packed store of a run, in some precision."""

    @cache
    def stored(name: str = "vanilla", experts: str = "fp32", budget: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("store") / "store"
        pack_model(run_of(name), folder, experts=experts, budget=budget, tokens=64)
        return folder

    return stored
