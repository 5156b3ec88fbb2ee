"""From a config to a model, and from a run folder to a trained one."""

from __future__ import annotations

import torch

from stickymoe.models.gpt import GPT
from stickymoe.runs.config import RunConfig
from stickymoe.variants import RouterSite


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """The model of a run at its first step; a function of the config and the seed."""
    torch.manual_seed(config.seed)
    c = config.model
    return GPT(
        c,
        vocab_size,
        lambda layer: config.variant.router(
            RouterSite(layer=layer, d_model=c.d_model, n_experts=c.n_experts, top_k=c.top_k)
        ),
    )
