"""Runs of twelve small steps, and the same runs never interrupted to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from stickymoe.runs.config import RunConfig
from stickymoe.runs.settings import read_config
from stickymoe.training.loop import train

# An evaluation falls between checkpoints, so that resuming must restore the best perplexity.
SMALL = (
    *("--data.vocab_size", "300"),
    *("--model.d_model", "16", "--model.d_ff", "16", "--model.seq_len", "16"),
    *("--train.steps", "12", "--train.batch_size", "4"),
    *("--train.eval_every", "5", "--train.checkpoint_every", "3"),
)


@pytest.fixture(scope="session")
def flags(corpus: Path) -> list[str]:
    return ["--data.path", str(corpus), *SMALL]


@pytest.fixture(scope="session")
def small(flags: list[str]) -> Callable[..., RunConfig]:
    """`small("--variant.lam", "0.5", variant="soft")`: the config of a small run with these settings on top."""

    def config(*more: str, variant: str = "vanilla") -> RunConfig:
        return read_config([*flags, *more], preset="tiny", variant=variant)

    return config


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Path]:
    """The folder of a config's run, trained without a stop. Not to be written to."""

    @functools.cache
    def run(config: RunConfig) -> Path:
        out = tmp_path_factory.mktemp("finished") / "run"
        assert train(config, out, quiet=True).status == "complete"
        return out

    return run
