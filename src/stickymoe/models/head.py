"""The output head: cross-entropy of the logits of the tied embedding, without all logits in memory.

With 50,257 tokens and a width of 128 this is most of a training step. `linear_cross_entropy` computes the logits of a
few rows at a time, so that they stay in cache, and turns them into gradients at once. It needs three matrix products,
as many as the plain path, and no tensor with the size of all logits.

n rows, d width, V vocabulary, c rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stickymoe.products import add_product_of_columns, product

IGNORED = -100  # a target with this value is ignored
ROWS = 512  # per chunk: with fewer, products are too small; with more, logits take memory and leave the cache


def plain_cross_entropy(
    h: Float[Tensor, "n d"], weight: Float[Tensor, "V d"], targets: Int[Tensor, " n"]
) -> Float[Tensor, ""]:
    """The reference: all logits at once. Mean over the targets that are not ignored; NaN without any."""
    logits = F.linear(h, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, ignore_index=IGNORED)


def linear_cross_entropy(
    h: Float[Tensor, "n d"], weight: Float[Tensor, "V d"], targets: Int[Tensor, " n"]
) -> Float[Tensor, ""]:
    """`plain_cross_entropy`, chunk by chunk; products in autocast's type if it is on, the rest in fp32 or wider."""
    device = h.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(h, weight.to(h.dtype), targets)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are computed in the forward pass, where the logits of each chunk are available."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        by_h, by_weight, _ = ctx.needs_input_grad
        with torch.autocast(h.device.type, enabled=False):
            loss, *gradients = _loss_and_gradients(h, weight, targets, by_h=by_h, by_weight=by_weight)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = (None if d is None else d * upstream.to(d.dtype) for d in ctx.saved_tensors)
        return dh, dweight, None


def _loss_and_gradients(
    h: Tensor, weight: Tensor, targets: Tensor, *, by_h: bool, by_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean loss, and its gradients with respect to `h` and `weight` if requested.

    The gradient with respect to the logits of a row is p − 1[target], where p is the softmax; it overwrites the logits.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    (n, d), V = h.shape, weight.shape[0]
    counts = targets != IGNORED
    if bool(((targets < 0) & counts).any()) or bool((targets >= V).any()):
        raise IndexError(f"targets must be in 0 … {V - 1}, or {IGNORED} to be ignored")
    scale = (counts.to(wide) / counts.sum())[:, None]  # 1 / number of targets, 0 for ignored rows
    safe = targets.clamp(min=0)[:, None]
    rows = min(ROWS, n)
    nats = torch.empty(n, 1, dtype=wide, device=h.device)
    dh = torch.empty_like(h) if by_h else None
    dweight = torch.zeros(d, V, dtype=wide, device=h.device) if by_weight else None  # transposed
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        hc, target, share = h[part], safe[part], scale[part]
        nats[part], error = _losses_and_errors(product(hc, weight).to(wide), target)
        error = error.to(h.dtype)
        if dh is not None:
            dh[part] = product(error, weight.t()) * share
        if dweight is not None:
            weighted = (hc * share).to(h.dtype)
            add_product_of_columns(dweight, weighted, error)
    lost = nats.isinf().squeeze(1)
    if bool(lost.any()):  # p of the target underflowed in these few rows: use log-softmax
        exact = torch.mm(h[lost], weight.t()).to(wide).log_softmax(1)
        nats[lost] = -exact.gather(1, safe[lost])
    return (
        torch.where(counts[:, None], nats * scale, scale).sum(),
        dh,
        None if dweight is None else dweight.t().to(weight.dtype).contiguous(),
    )


def _losses_and_errors(
    logits: Float[Tensor, "m V"], targets: Int[Tensor, "m 1"]
) -> tuple[Float[Tensor, "m 1"], Float[Tensor, "m V"]]:
    """−log p of the targets, and p − 1[target], which overwrites the logits."""
    p = torch.softmax(logits, dim=1, out=logits)
    nats = -p.gather(1, targets).log()
    return nats, p.scatter_add_(1, targets, torch.full_like(nats, -1))
