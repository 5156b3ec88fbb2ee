"""The loss equations, as pure functions of a `RoutingTrace`.

Each `*_by_layer` function answers one value per layer; the loss of the same name is their mean.
A pair of tokens counts only if both are real and in the same document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stickymoe.errors import require
from stickymoe.routing.trace import RoutingTrace, document_positions


@dataclass(frozen=True)
class LossContext:
    """What a loss needs that one trace cannot carry.

    `load` is the expert load f of the whole batch when the trace holds only a process's share of it.
    """

    load: Float[Tensor, "L N"] | None = None


def expert_load(trace: RoutingTrace) -> Float[Tensor, "L N"]:
    """f: the share of each expert in all k slots of the real tokens; sums to 1 in every layer."""
    L, _, _, N = trace.g.shape
    chosen = trace.S[:, trace.mask].flatten(1)  # [L, real·k]
    counts = torch.zeros(L, N, device=chosen.device).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float))
    return counts / max(chosen.shape[1], 1)


def balance_by_layer(trace: RoutingTrace, *, load: Float[Tensor, "L N"] | None = None) -> Float[Tensor, " L"]:
    """eq:bal_loss. N · Σ_i f_i · p_i, over real tokens."""
    f = expert_load(trace) if load is None else load
    p = torch.where(trace.mask[..., None], trace.g, 0.0).sum((1, 2)) / trace.mask.sum().clamp(min=1)
    return trace.g.shape[-1] * (f * p).sum(-1)


def consistency_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """eq:cons_loss. Mean of ‖g_t − g_{t−1}‖² over the valid pairs of the whole batch."""
    pairs = trace.pairs
    step = (trace.g[:, :, 1:] - trace.g[:, :, :-1]).square().sum(-1)  # [L, B, T-1]
    return torch.where(pairs, step, 0.0).sum((1, 2)) / pairs.sum().clamp(min=1)


def anchor_by_layer(trace: RoutingTrace, *, window: int, anchor_gradient: bool = False) -> Float[Tensor, " L"]:
    """eq:hard_loss. Σ (t−s)/W · ‖g_t − g_s‖² over real tokens, s the first token of t's window; divided by real tokens.

    Windows are counted from the start of the document. The anchor is fixed unless `anchor_gradient`.
    """
    require(window >= 1, "window", window, "a whole number ≥ 1")
    L, B, T, N = trace.g.shape
    position = document_positions(trace.doc, B, T).to(trace.g.device)
    offset = position % window  # t − s
    s = torch.arange(T, device=trace.g.device) - offset  # [B, T]
    anchor = trace.g.gather(2, s[None, ..., None].expand(L, B, T, N))
    if not anchor_gradient:
        anchor = anchor.detach()
    radius = (trace.g - anchor).square().sum(-1)  # [L, B, T]
    valid = trace.mask & trace.mask.gather(1, s)
    ramp = offset / window
    return torch.where(valid, ramp * radius, 0.0).sum((1, 2)) / trace.mask.sum().clamp(min=1)


def balance_loss(trace: RoutingTrace) -> Float[Tensor, ""]:
    """eq:bal_loss, mean over layers: 1 where both the load and the mean gate are uniform."""
    return balance_by_layer(trace).mean()


def consistency_loss(trace: RoutingTrace) -> Float[Tensor, ""]:
    """eq:cons_loss_full. Mean over layers of eq:cons_loss; between 0 and 2."""
    return consistency_by_layer(trace).mean()


def anchor_loss(trace: RoutingTrace, *, window: int, anchor_gradient: bool = False) -> Float[Tensor, ""]:
    """eq:hard_loss, mean over layers."""
    return anchor_by_layer(trace, window=window, anchor_gradient=anchor_gradient).mean()
