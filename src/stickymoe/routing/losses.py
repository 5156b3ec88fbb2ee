"""The loss equations, as pure functions of a `RoutingTrace`, and `objective`, which sums them.

Each `*_by_layer` function returns one value per layer; the loss of the same name is their mean.
A pair of tokens counts only if both are real and in the same document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from stickymoe.errors import require
from stickymoe.routing import kernels
from stickymoe.routing.terms import Term
from stickymoe.routing.trace import RoutingTrace, slot_sums

_SMALL = 1e-6  # keeps logarithms finite where a gate is 0 or 1


@dataclass(frozen=True)
class LossContext:
    """What a loss needs in addition to the trace.

    `load` is the expert load f of the whole batch, where the trace holds only the part of one process. `share_block`
    adjacent layers use the same expert weights. `reference` is the trace of a frozen model on the same tokens.
    """

    load: Float[Tensor, "L N"] | None = None
    share_block: int = 1
    reference: RoutingTrace | None = None


@dataclass(frozen=True)
class Objective:
    """What `objective` returns: the weighted sum of all terms, and the unweighted value of each, by its symbol."""

    total: Float[Tensor, ""]
    values: dict[str, Float[Tensor, ""]]


def objective(
    trace: RoutingTrace, terms: Iterable[Term], context: LossContext | None = None, progress: float = 1.0
) -> Objective:
    """eq:total_loss, eq:total_loss_softhard, eq:full_loss, eq:base. Everything except cross-entropy: Σ weight · term.

    `progress` is the fraction of the training phase that has passed; terms with a warm-up depend on it.
    """
    context = context or LossContext()
    total = trace.g.new_zeros(())
    values: dict[str, Tensor] = {}
    for term in terms:
        value = term.fn(trace, context)
        total = total + term.weighted(value, progress)
        values[term.symbol] = value.mean()
    return Objective(total, values)


def expert_load(trace: RoutingTrace) -> Float[Tensor, "L N"]:
    """f: the fraction of all k selections of the real tokens that each expert gets; sums to 1 in every layer."""
    L, _, _, N = trace.g.shape
    chosen = trace.S[:, trace.mask].flatten(1)  # [L, real·k]
    counts = trace.g.new_zeros(L, N).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=trace.g.dtype))
    return counts / max(chosen.shape[1], 1)


def balance_by_layer(trace: RoutingTrace, *, load: Float[Tensor, "L N"] | None = None) -> Float[Tensor, " L"]:
    """eq:bal_loss. N · Σ_i f_i · p_i, over real tokens."""
    f = expert_load(trace) if load is None else load
    return trace.g.shape[-1] * (f * _real_mean(trace, trace.g)).sum(-1)


def _real_mean(trace: RoutingTrace, x: Float[Tensor, "L B T n"]) -> Float[Tensor, "L n"]:
    return torch.where(trace.mask[..., None], x, 0.0).sum((1, 2)) / trace.mask.sum().clamp(min=1)


def slot_balance_by_layer(
    trace: RoutingTrace, *, capacity: int, load: Float[Tensor, "L N"] | None = None, within: bool = False
) -> Float[Tensor, " L"]:
    """Σ_c F_c·P_c / r_c over the slots c = i mod C, plus the mean over slots of L_bal among the experts of each.

    F and P are the load and the gate weight of a slot. Its target share r_c is proportional to the square root of its
    number of experts: equal use of slots would leave experts of large slots idle, equal use of experts would make
    every token use a large slot. The minimum is 2. With `within` only the second part counts: where no gate chooses
    the slot, F does not depend on P, and the first part would drive P to a single slot.
    """
    f = expert_load(trace) if load is None else load
    N, capacity = trace.g.shape[-1], min(capacity, trace.g.shape[-1])
    slot = torch.arange(N, device=f.device) % capacity
    sizes = slot_sums(f.new_ones(N), capacity)
    target = sizes.sqrt() / sizes.sqrt().sum()
    tiny = torch.finfo(f.dtype).tiny
    G, F = slot_sums(trace.g, capacity), slot_sums(f, capacity)
    p_within = _real_mean(trace, trace.g / G[..., slot].clamp(min=tiny))
    f_within = f / F[:, slot].clamp(min=tiny)
    within_slots = (sizes[slot] * f_within * p_within).sum(-1) / capacity
    return within_slots if within else within_slots + (F * _real_mean(trace, G) / target).sum(-1)


def consistency_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """eq:cons_loss. Mean of ‖g_t − g_{t−1}‖² over the valid pairs of the whole batch."""
    step = (trace.g[:, :, 1:] - trace.g[:, :, :-1]).square().sum(-1)  # [L, B, T-1]
    return _pair_mean(trace, step)


def _pair_mean(trace: RoutingTrace, step: Float[Tensor, "L B steps"]) -> Float[Tensor, " L"]:
    pairs = trace.pairs
    return torch.where(pairs, step, 0.0).sum((1, 2)) / pairs.sum().clamp(min=1)


def anchor_by_layer(trace: RoutingTrace, *, window: int, anchor_gradient: bool = False) -> Float[Tensor, " L"]:
    """eq:hard_loss. Σ (t−s)/W · ‖g_t − g_s‖² over real tokens, s the first token of t's window; divided by real tokens.

    Windows count the real tokens of the document. The anchor is fixed unless `anchor_gradient`.
    """
    require(window >= 1, "window", window, "a whole number ≥ 1")
    L, B, T, N = trace.g.shape
    offset = trace.positions % window  # t − s, in real tokens
    index = torch.arange(T, device=trace.g.device)
    s = torch.where(trace.mask & (offset == 0), index, 0).cummax(1).values  # [B, T]
    anchor = trace.g.gather(2, s[None, ..., None].expand(L, B, T, N))
    if not anchor_gradient:
        anchor = anchor.detach()
    radius = (trace.g - anchor).square().sum(-1)  # [L, B, T]
    ramp = offset / window
    return torch.where(trace.mask, ramp * radius, 0.0).sum((1, 2)) / trace.mask.sum().clamp(min=1)


def cross_layer_loss(trace: RoutingTrace, *, share_block: int | None = None) -> Float[Tensor, ""]:
    """eq:cross_loss. Σ_ℓ ‖g^(ℓ) − g^(ℓ+1)‖² over adjacent layers, mean over real tokens.

    With `share_block` only pairs inside a block of that many layers count: other pairs share no weights.
    """
    step = (trace.g[1:] - trace.g[:-1]).square().sum(-1)  # [L-1, B, T]
    counted: Tensor = trace.mask
    if share_block is not None:
        upper = torch.arange(1, len(trace.g), device=step.device)
        counted = counted & (upper % share_block != 0)[:, None, None]
    return torch.where(counted, step, 0.0).sum() / trace.mask.sum().clamp(min=1)


def boundary_by_layer(trace: RoutingTrace, *, across: float) -> Float[Tensor, " L"]:
    """Σ ω·‖g_t − g_t−1‖² / Σ ω over pairs; ω = `across` where t begins a sentence or paragraph, 1 elsewhere.

    The weights are normalised, so pairs inside a sentence gain what pairs across an end lose. Without boundaries it
    equals eq:cons_loss.
    """
    if trace.boundary is None:
        return consistency_by_layer(trace)
    step = (trace.g[:, :, 1:] - trace.g[:, :, :-1]).square().sum(-1)
    omega = torch.where(trace.pairs, torch.where(trace.boundary[:, 1:], across, 1.0), 0.0)
    return torch.where(omega > 0, omega * step, 0.0).sum((1, 2)) / omega.sum().clamp(min=_SMALL)


def grouped_by_layer(trace: RoutingTrace, *, groups: int, inside: float) -> Float[Tensor, " L"]:
    """(1−δ)·‖G_t − G_t−1‖² + δ·‖g_t − g_t−1‖², mean over pairs; G sums g over a group, δ = `inside`.

    A switch between one-hot gates costs 2 from group to group and 2δ inside one.
    """
    N = trace.g.shape[-1]
    require(groups <= N, "variant.groups", groups, f"at most the {N} experts")
    group = torch.arange(N, device=trace.g.device) * groups // N
    G = trace.g.new_zeros(*trace.g.shape[:-1], groups).index_add(-1, group, trace.g)
    of_groups = (G[:, :, 1:] - G[:, :, :-1]).square().sum(-1)
    of_experts = (trace.g[:, :, 1:] - trace.g[:, :, :-1]).square().sum(-1)
    return _pair_mean(trace, (1 - inside) * of_groups + inside * of_experts)


def dot_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """1 − ⟨g_t, g_t−1⟩, mean over pairs."""
    return _pair_mean(trace, 1 - (trace.g[:, :, 1:] * trace.g[:, :, :-1]).sum(-1))


def replacement_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """r_t·‖g_t − g_t−1‖₁, mean over pairs; r_t = |S_t ∖ S_t−1| / k, without gradient (BlES)."""
    chosen = torch.zeros_like(trace.g, dtype=torch.bool).scatter_(-1, trace.S, True)
    replaced = (chosen[:, :, 1:] & ~chosen[:, :, :-1]).sum(-1).to(trace.g.dtype) / trace.S.shape[-1]
    return _pair_mean(trace, replaced * (trace.g[:, :, 1:] - trace.g[:, :, :-1]).abs().sum(-1))


def adjacent_entropy_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """BCE(g_t, g_t−1), mean over experts and pairs; the earlier token is the fixed target (BlockFFN)."""
    g, target = trace.g[:, :, 1:], trace.g[:, :, :-1].detach()
    active, idle = g.clamp(min=_SMALL).log(), (1 - g).clamp(min=_SMALL).log()
    return _pair_mean(trace, -(target * active + (1 - target) * idle).mean(-1))


def chunk_by_layer(trace: RoutingTrace, *, window: int) -> Float[Tensor, " L"]:
    """1 − Π_t (1 − g_t)^k, mean over experts and chunks of W tokens: the fraction of experts in use (BlockFFN).

    Chunks count the real tokens of the document.
    """
    require(window >= 1, "window", window, "a whole number ≥ 1")
    log_unused = trace.S.shape[-1] * (1 - trace.g).clamp(min=_SMALL).log()
    sums, sizes = _window_sums(trace, log_unused, window)
    used = 1 - sums.exp()
    return used.mean(-1).sum((1, 2)) / sizes.gt(0).sum().clamp(min=1)


def _window_sums(
    trace: RoutingTrace, x: Float[Tensor, "L B T n"], window: int
) -> tuple[Float[Tensor, "L B T n"], Int[Tensor, "B T"]]:
    """Sums of x over windows of W real tokens of a document, and the tokens of each; there are at most T windows."""
    starts = trace.mask & (trace.positions % window == 0)
    index = (starts.cumsum(1) - 1).clamp(min=0)  # [B, T]
    real = torch.where(trace.mask[..., None], x, 0.0)
    sums = torch.zeros_like(x).scatter_add(2, index[None, ..., None].expand(x.shape), real)
    return sums, torch.zeros_like(index).scatter_add(1, index, trace.mask.long())


def reuse_by_layer(trace: RoutingTrace) -> Float[Tensor, " L"]:
    """−log mean_t (1/k)·Σ_{e ∈ S_t−1} g_t(e), over pairs (ReMoE)."""
    k = trace.S.shape[-1]
    kept = trace.g[:, :, 1:].gather(-1, trace.S[:, :, :-1]).sum(-1) / k
    mean = _pair_mean(trace, kept)
    return torch.where(trace.pairs.any(), mean.clamp(min=_SMALL).log().neg(), 0.0)


def lagged_divergence_by_layer(trace: RoutingTrace, *, lags: Sequence[int] = (1, 2, 4, 8, 16)) -> Float[Tensor, " L"]:
    """Mean over lags of KL(g_t ‖ g_t−lag) + KL(g_t−lag ‖ g_t), over tokens of the same document (ReMoE)."""
    logs = trace.g.clamp(min=_SMALL).log()
    position, total = trace.positions, (0 * trace.g).sum((1, 2, 3))  # zeros with gradient, if no lag fits
    for lag in lags:
        if lag >= trace.g.shape[2]:
            continue
        # Two tokens are in one document if their positions differ by the lag.
        both = trace.mask[:, lag:] & trace.mask[:, :-lag] & (position[:, lag:] - position[:, :-lag] == lag)
        step = ((trace.g[:, :, lag:] - trace.g[:, :, :-lag]) * (logs[:, :, lag:] - logs[:, :, :-lag])).sum(-1)
        total = total + torch.where(both, step, 0.0).sum((1, 2)) / both.sum().clamp(min=1)
    return total / len(lags)


def windowed_entropy_by_layer(trace: RoutingTrace, *, window: int) -> Float[Tensor, " L"]:
    """H(mean of g over a window of W tokens) in nats, mean over windows (ReMoE). Windows count real tokens."""
    require(window >= 1, "window", window, "a whole number ≥ 1")
    sums, sizes = _window_sums(trace, trace.g, window)
    mean = sums / sizes[..., None].clamp(min=1)
    H: Tensor = torch.special.entr(mean).sum(-1)
    return H.sum((1, 2)) / sizes.gt(0).sum().clamp(min=1)


def reference_divergence_by_layer(trace: RoutingTrace, reference: RoutingTrace) -> Float[Tensor, " L"]:
    """KL(g_ref ‖ g), mean over real tokens; `reference` is the trace of a frozen model on the same tokens."""
    p = reference.g.detach()
    step = (torch.special.xlogy(p, p) - p * trace.g.clamp(min=_SMALL).log()).sum(-1)
    return torch.where(trace.mask, step, 0.0).sum((1, 2)) / trace.mask.sum().clamp(min=1)


def expected_misses_by_layer(trace: RoutingTrace, *, capacity: int) -> Float[Tensor, " L"]:
    """Σ_i a_i, mean over real tokens: the misses of a soft cache that holds the fraction m_i of expert i, Σ m ≤ C.

    u = min(1, k·g),  a = u·(1−m),  m ← m + a − e;  e evicts what exceeds C, in proportion to m·(1−u).
    The cache is empty at the start of a document.
    """
    k = trace.S.shape[-1]
    require(capacity >= k, "variant.slots", capacity, f"at least the {k} experts of a token")
    start = trace.mask & (trace.positions == 0)
    use = (k * trace.g).clamp(max=1)
    misses: Tensor = _SoftCache.apply(use, trace.mask, start, capacity)  # type: ignore[no-untyped-call]
    return misses.sum((1, 2, 3)) / trace.mask.sum().clamp(min=1)


class _SoftCache(torch.autograd.Function):
    """The misses a [L, B, T, N] of `kernels.soft_cache`, with layers as further sequences."""

    @staticmethod
    def forward(ctx: Any, use: Tensor, mask: Bool[Tensor, "B T"], start: Bool[Tensor, "B T"], capacity: int) -> Tensor:
        u = use.detach().flatten(0, 1).cpu().contiguous().numpy()
        valid, starts = (np.tile(x.cpu().numpy(), (len(use), 1)) for x in (mask, start))
        held, misses = np.empty_like(u), np.empty_like(u)
        kernels.soft_cache(u, valid, starts, float(capacity), held, misses)
        ctx.kept = (u, valid, starts, float(capacity), held)
        return torch.from_numpy(misses).view(use.shape).to(use.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        du = np.empty_like(ctx.kept[0])
        u, valid, starts, capacity, held = ctx.kept
        by_misses = grad.flatten(0, 1).cpu().contiguous().numpy()
        kernels.soft_cache_backward(by_misses, u, valid, starts, capacity, held, du)
        return torch.from_numpy(du).view(grad.shape).to(grad.device), None, None, None


def balance_loss(trace: RoutingTrace) -> Float[Tensor, ""]:
    """eq:bal_loss, mean over layers: 1 where both the load and the mean gate are uniform.

    It is larger if a few experts get most tokens.
    """
    return balance_by_layer(trace).mean()


def consistency_loss(trace: RoutingTrace) -> Float[Tensor, ""]:
    """eq:cons_loss_full. Mean over layers of eq:cons_loss; between 0 and 2.

    It is the squared distance between the gate distributions of adjacent tokens.
    """
    return consistency_by_layer(trace).mean()


def anchor_loss(trace: RoutingTrace, *, window: int, anchor_gradient: bool = False) -> Float[Tensor, ""]:
    """eq:hard_loss, mean over layers.

    It is the squared distance between the gate distribution of a token and that of the first token of its window.
    """
    return anchor_by_layer(trace, window=window, anchor_gradient=anchor_gradient).mean()
