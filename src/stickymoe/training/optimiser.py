"""AdamW and the learning-rate schedule of the protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from stickymoe.runs.config import TrainConfig


def adamw(parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over named parameters; weight decay on matrices and embeddings, none on biases and norms."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, p in parameters:
        (plain if "bias" in name or "norm" in name else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2), fused=True
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of the update with zero-based index `step`: linear warm-up, then cosine down to `final_lr` of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step + 1 - config.warmup) / max(config.steps - config.warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)
