"""The losses of short runs, variant by variant: a change that should not change numbers must reproduce them.

After one that should, raise `NUMERICS_VERSION` in runs/folder.py and write them again:
    python tests/training/test_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from stickymoe.data.batches import Batch
from stickymoe.runs.config import ModelConfig, RunConfig, TrainConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runs.settings import config_from
from stickymoe.training.build import build_model
from stickymoe.training.update import Span, Updates
from stickymoe.variants import Phase, variant_names

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 20
VOCAB = 50
# Every variant with its defaults, and settings that change what is computed.
ROWS = {
    **{name: {"name": name} for name in variant_names()},
    "recommended": RECOMMENDED,
    "residency that grows strict": {"name": "residency", "free": 0.2, "anneal": 0.6},
}


class RandomBatches:
    """Four rows of random tokens for every step."""

    def __init__(self) -> None:
        self._rng = torch.Generator().manual_seed(0)

    def batch(self, step: int, *, part: int = 0, parts: int = 1) -> Batch:
        tokens = torch.randint(0, VOCAB, (4, 17), generator=self._rng)
        return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(4, 16, dtype=torch.bool), doc=None)


def losses(name: str) -> list[float]:
    """The loss of every update, in double precision so that processors hardly differ; gradients are not clipped."""
    config = RunConfig(
        model=ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, seq_len=16),
        train=TrainConfig(steps=STEPS, warmup=4, lr=1e-2, batch_size=4, clip=1e9),
        variant=config_from({"variant": ROWS[name]}).variant,
    )
    phase = Phase("train", config.variant.phases()[-1].terms)
    model = build_model(config, VOCAB).double()
    updates = Updates(model, RandomBatches(), config, Span(phase, 0, STEPS), Accelerator(cpu=True))
    return [updates(step)["loss"] for step in range(STEPS)]


def test_every_row_has_its_numbers():
    assert set(json.loads(GOLDEN.read_text())) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_losses_are_those_written_down(name):
    assert losses(name) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-7)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(name) for name in ROWS}, indent=1) + "\n")
