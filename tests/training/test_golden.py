"""The numbers of short runs, variant by variant: a change that should not change numbers must reproduce them.

After one that should, raise `NUMERICS_VERSION` in runs/folder.py and write them anew:
    python tests/training/test_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stickymoe.routing.losses import LossContext
from stickymoe.runs.config import ModelConfig, RunConfig, TrainConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runs.settings import config_from
from stickymoe.training.build import build_model
from stickymoe.training.optimiser import adamw, learning_rate
from stickymoe.variants import variant_names

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 20
# Every variant as it comes, and settings that change what is computed.
ROWS = {
    **{name: {"name": name} for name in variant_names()},
    "recommended": RECOMMENDED,
    "residency that grows strict": {"name": "residency", "free": 0.2, "rise": 0.6},
}


def losses(name: str) -> list[float]:
    """Loss of twenty steps on random tokens, in double precision so that processors hardly differ."""
    config = RunConfig(
        model=ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, seq_len=16),
        train=TrainConfig(steps=STEPS, warmup=4, lr=1e-2),
        variant=config_from({"variant": ROWS[name]}).variant,
    )
    model = build_model(config, 50).double()
    optimiser = adamw(list(model.named_parameters()), config.train)
    rng = torch.Generator().manual_seed(0)
    terms = config.variant.phases()[-1].terms
    out = []
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (4, 17), generator=rng)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, config.train)
        result = model(tokens[:, :-1], tokens[:, 1:], done=step / STEPS)
        loss = result.loss
        for term in terms:
            loss = loss + term.weighed(term.fn(result.trace, LossContext()))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        out.append(loss.item())
    return out


def test_every_row_has_its_numbers():
    assert set(json.loads(GOLDEN.read_text())) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_losses_are_those_written_down(name):
    assert losses(name) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-7)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(name) for name in ROWS}, indent=1) + "\n")
