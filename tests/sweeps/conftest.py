"""A small grid, its cells, and waiting for a condition."""

from __future__ import annotations

import time

import pytest

from stickymoe.sweeps.cells import plan
from stickymoe.sweeps.grid import configs

SHORT = {"steps": 6, "warmup": 1, "eval_every": 3, "checkpoint_every": 2, "log_every": 1}


@pytest.fixture(scope="session")
def grid(corpus):
    return {
        "preset": "tiny",
        "data": {"path": str(corpus), "vocab_size": 300},
        "model": {"d_model": 16, "d_ff": 16, "seq_len": 16},
        "train": SHORT,
    }


def cells_of(grid, out, *variants, seeds=(42,), **row):
    rows = [{"variant": variant, **row} for variant in variants]
    return plan(configs({**grid, "rows": rows}, seeds=list(seeds), flags=[], source="test"), out)


def wait_for(look, seconds=60):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)
    return found
