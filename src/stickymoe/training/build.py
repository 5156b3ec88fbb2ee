"""Build the model of a config at its first step, and set up its devices."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from stickymoe.errors import ConfigError
from stickymoe.models.gpt import GPT
from stickymoe.runs.config import RunConfig
from stickymoe.training.processor import disable_missing_amx
from stickymoe.variants import Site


def make_accelerator(config: RunConfig) -> Accelerator:
    """Device, precision and processes of a run."""
    accelerator = Accelerator(mixed_precision="bf16" if config.train.precision == "bf16" else "no")
    if config.train.precision == "bf16" and accelerator.device.type == "cpu":
        disable_missing_amx()
    return accelerator


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """The model of a run at its first step; a function of the config and the seed."""
    torch.manual_seed(config.seed)
    c = config.model
    try:
        return GPT(
            c,
            vocab_size,
            lambda layer: config.variant.parts(Site(layer, c.d_model, c.pool_size, c.top_k, vocab_size)),
        )
    except RuntimeError as e:
        if "allocate" not in str(e):
            raise
        sizes = f"n_layers {c.n_layers}, n_experts {c.n_experts}, d_model {c.d_model} and d_ff {c.d_ff}"
        raise ConfigError(f"model: got {sizes}, whose weights do not fit in memory; make one of them smaller.") from e
