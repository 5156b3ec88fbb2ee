"""AdamW, gradient clipping and the learning-rate schedule of the protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stickymoe.runs.config import TrainConfig


class AdamW(torch.optim.AdamW):
    """AdamW that also takes sparse gradients: it reads and writes only the rows of a table that have a gradient.

    The moments of other rows stay as they are, as in `torch.optim.SparseAdam`. Rows have no weight decay.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    self._step_rows(p, group)
                    p.grad = None
        return super().step(closure)

    def _step_rows(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  p ← p − lr · m̂ / (√v̂ + ε), for the rows that were read."""
        assert p.grad is not None
        grad = p.grad.coalesce()
        rows, g = grad.indices()[0], grad.values()
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        t, (beta1, beta2) = float(state["step"]), group["betas"]
        m = state["exp_avg"].index_select(0, rows).lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, m)
        state["exp_avg_sq"].index_copy_(0, rows, v)
        update = (m / (1 - beta1**t)).div_((v / (1 - beta2**t)).sqrt_().add_(group["eps"]))
        p.index_copy_(0, rows, p.index_select(0, rows).add_(update, alpha=-group["lr"]))  # faster than index_add_


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: TrainConfig,
    row_lr: Mapping[nn.Parameter, float] | None = None,
) -> AdamW:
    """AdamW over named parameters; weight decay on matrices and embeddings, none on biases, norms and tables.

    `row_lr` maps each table of rows to its learning rate, relative to that of the other parameters.
    """
    row_lr = row_lr or {}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {(config.weight_decay, 1.0): [], (0.0, 1.0): []}
    for name, p in parameters:
        plain = p in row_lr or "bias" in name or "norm" in name
        groups.setdefault((0.0 if plain else config.weight_decay, row_lr.get(p, 1.0)), []).append(p)
    return AdamW(
        [{"params": ps, "weight_decay": wd, "lr_scale": scale} for (wd, scale), ps in groups.items() if ps],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def clip_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the global gradient norm, including sparse gradients; returns the norm before clipping."""
    parameters = [p for p in parameters if p.grad is not None]
    sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    if not sparse:
        norm: Tensor = accelerator.clip_grad_norm_(parameters, max_norm)
        return norm
    for p in sparse:
        assert p.grad is not None
        p.grad = p.grad.coalesce()
    gradients = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step` (zero-based): linear warm-up, then cosine down to `final_lr` of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step + 1 - config.warmup) / max(config.steps - config.warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)
