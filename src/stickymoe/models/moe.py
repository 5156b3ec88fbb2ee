"""The expert layer: a router sends every token to k of N feed-forward experts.

n tokens, d width, f expert width, N experts, k experts per token, m ≥ n·k rows sorted by expert, C bases, rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stickymoe.errors import require
from stickymoe.products import Linear, product, product_of_columns, row_unit
from stickymoe.routing.deltas import Deltas
from stickymoe.routing.rules import RouterInput, RouterState, Routing, RoutingRule
from stickymoe.routing.ties import TiedExperts


class Router(nn.Module):
    """eq:gate. A gate and a rule. The gate computes in fp32 or wider, also if the model computes in bf16."""

    def __init__(self, d_model: int, n_experts: int, rule: RoutingRule, *, gate_only: bool = False) -> None:
        super().__init__()
        rule.require_fit(n_experts)
        self.rule = rule
        self.gate_only = gate_only
        self.progress = 1.0  # fraction of the training phase that has passed
        if isinstance(rule.filter, nn.Module):
            self.filter = rule.filter  # its parameters are the router's
        self.gate = nn.Linear(d_model, rule.filter.gates * n_experts, bias=False)

    def forward(self, x: RouterInput, state: RouterState | None = None) -> Routing:
        """Route the tokens of `x`, which continue those that `state` remembers."""
        features = x.required(self.rule.source)
        progress = self.progress if self.training else 1.0
        with _without_autocast(features.device.type):
            routing = self.rule(self._logits(features), x, state, progress)
            if self.gate_only:
                alone = self.rule(self._logits(features.detach()), x, state, progress)
                routing = replace(routing, g_gate=alone.g)
        return routing

    def _logits(self, features: Float[Tensor, "B T d"]) -> Float[Tensor, "B T M"]:
        W = self.gate.weight
        W = W.to(torch.promote_types(W.dtype, torch.float32))
        return F.linear(features.to(W.dtype), W)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast. If autocast is off, it does nothing: switching costs more than routing one token."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Experts(nn.Module):
    """N feed-forward networks with GELU, their weights stacked."""

    def __init__(
        self, n_experts: int, d_model: int, d_ff: int, *, fast: bool = True, ties: TiedExperts | None = None
    ) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(n_experts, d_ff, d_model))
        self.up_bias = nn.Parameter(torch.empty(n_experts, d_ff))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_ff))
        self.down_bias = nn.Parameter(torch.empty(n_experts, d_model))
        self.fast = fast
        self.progress = 1.0  # fraction of the training phase that has passed
        self.ties = ties if ties is not None and ties.capacity < n_experts else None  # with N slots nothing is shared

    def forward(self, h: Float[Tensor, "n d"], S: Int[Tensor, "n k"], w: Float[Tensor, "n k"]) -> Float[Tensor, "n d"]:
        """eq:moe_output, on the fast path or the plain one; both give the same result, up to rounding."""
        weights = self.weights()
        if self.ties is not None and torch.is_grad_enabled():
            C, shared = self.ties.capacity, self.ties.shared_at(self.progress if self.training else 1.0)
            weights = [_SharedGradient.apply(p, C, shared) for p in weights]  # type: ignore[no-untyped-call]
        return sorted_experts(h, S, w, *weights) if self.fast else plain_experts(h, S, w, *weights)

    def weights(self) -> list[Tensor]:
        """The weights of all experts, stacked: up, its biases, down, its biases."""
        return [self.up, self.up_bias, self.down, self.down_bias]

    def stacks(self) -> dict[str, nn.Parameter]:
        """The parameters of which every expert has a row of its own, which a load reads."""
        return dict(self.named_parameters())

    @torch.no_grad()
    def tie(self) -> None:
        """Give the experts of each slot the weights of its first expert."""
        if self.ties is not None:
            self._repeat_first(self.ties.capacity)

    def _repeat_first(self, capacity: int) -> None:
        self.reorder([e % capacity for e in range(len(self.up_bias))])

    @torch.no_grad()
    def reorder(self, order: Sequence[int]) -> None:
        """Give every expert e what expert `order[e]` has of its own."""
        for p in self.stacks().values():
            p.copy_(p[torch.tensor(order, device=p.device)])

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as a load reads it."""
        return sum(p.nbytes // p.shape[0] for p in self.stacks().values())


class DeltaExperts(Experts):
    """Experts that are a base and a difference: up_i = up[i mod C] + up_out_i·up_in_i, and down_i likewise.

    Biases are part of the difference. Each forward pass computes the weights of all experts once.
    """

    def __init__(
        self,
        n_experts: int,
        d_model: int,
        d_ff: int,
        deltas: Deltas,
        *,
        fast: bool = True,
        ties: TiedExperts | None = None,
    ) -> None:
        super().__init__(n_experts, d_model, d_ff, fast=fast, ties=ties)
        r, widest = deltas.rank, min(d_model, d_ff)
        require(r <= widest, "variant.rank", r, f"at most {widest}, the rank of an expert's matrices")
        self.deltas = deltas
        self.up = nn.Parameter(torch.empty(deltas.bases, d_ff, d_model))
        self.up_in = nn.Parameter(torch.empty(n_experts, r, d_model))
        self.up_out = nn.Parameter(torch.empty(n_experts, d_ff, r))
        self.down = nn.Parameter(torch.empty(deltas.bases, d_model, d_ff))
        self.down_in = nn.Parameter(torch.empty(n_experts, r, d_ff))
        self.down_out = nn.Parameter(torch.empty(n_experts, d_model, r))

    def weights(self) -> list[Tensor]:
        base = torch.arange(len(self.up_in), device=self.up.device) % self.deltas.bases
        up = torch.baddbmm(self.up.index_select(0, base), self.up_out, self.up_in)
        down = torch.baddbmm(self.down.index_select(0, base), self.down_out, self.down_in)
        return [up, self.up_bias, down, self.down_bias]

    def stacks(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if name not in ("up", "down")}

    @torch.no_grad()
    def tie(self) -> None:
        """Give the experts of each base the difference of its first expert."""
        self._repeat_first(self.deltas.bases)


class _SharedGradient(torch.autograd.Function):
    """The identity; a fraction of each expert's gradient is replaced by the mean over the experts of its slot."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, capacity: int, shared: float) -> Tensor:
        ctx.settings = capacity, shared
        return stack.view_as(stack)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        C, shared = ctx.settings
        out = torch.empty_like(grad)
        for slot in range(min(C, len(grad))):
            members = grad[slot::C]
            torch.lerp(members, members.mean(0, keepdim=True), shared, out=out[slot::C])
        return out, None, None


def plain_experts(
    h: Float[Tensor, "n d"],
    S: Int[Tensor, "n k"],
    w: Float[Tensor, "n k"],
    up: Float[Tensor, "N f d"],
    up_bias: Float[Tensor, "N f"],
    down: Float[Tensor, "N d f"],
    down_bias: Float[Tensor, "N d"],
) -> Float[Tensor, "n d"]:
    """eq:moe_output. The reference: one expert after another, as in the equation."""
    y = torch.zeros_like(h)
    # One unbind: indexing the stack per expert would allocate a full-size gradient for each.
    weights = zip(*(p.unbind() for p in (up, up_bias, down, down_bias)), strict=True)
    for i, (up_i, up_bias_i, down_i, down_bias_i) in enumerate(weights):
        token, slot = S.eq(i).nonzero(as_tuple=True)
        out = F.linear(F.gelu(F.linear(h[token], up_i, up_bias_i)), down_i, down_bias_i)
        y = y.index_add(0, token, (w[token, slot, None] * out).to(y.dtype))
    return y


def sorted_experts(
    h: Float[Tensor, "n d"],
    S: Int[Tensor, "n k"],
    w: Float[Tensor, "n k"],
    up: Float[Tensor, "N f d"],
    up_bias: Float[Tensor, "N f"],
    down: Float[Tensor, "N d f"],
    down_bias: Float[Tensor, "N d"],
) -> Float[Tensor, "n d"]:
    """eq:moe_output. The fast path: rows sorted by expert, one product per expert and matrix."""
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, w, up, up_bias, down, down_bias = (x.to(dtype) for x in (h, w, up, up_bias, down, down_bias))
    with torch.autocast(h.device.type, enabled=False):
        y: Tensor = _SortedExperts.apply(  # type: ignore[no-untyped-call]
            h, S, w.to(h.dtype), up, up_bias, down, down_bias
        )
    return y


class _SortedExperts(torch.autograd.Function):
    """Gradients of the stacks are written once, expert by expert; nothing is accumulated or zeroed."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, S: Tensor, w: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        n, k, N = len(h), S.shape[1], len(up)
        place, rows = _places(S, N)
        token = place.new_zeros(sum(rows)).index_copy_(0, place, torch.arange(n * k, device=h.device) // k)
        place = place.view(n, k)
        x = torch.split(h.index_select(0, token), rows)
        a = [product(x[i], up[i], up_bias[i]) for i in range(N)]
        z = [F.gelu(part) for part in a]
        out = torch.cat([product(z[i], down[i], down_bias[i]) for i in range(N)])
        ctx.save_for_backward(out, w, token, place, up, down, *x, *a, *z)
        y = torch.zeros_like(h)
        for slot in range(k):
            y.addcmul_(out.index_select(0, place[:, slot]), w[:, slot, None])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        out, w, token, place, up, down, *groups = ctx.saved_tensors
        k, N = w.shape[1], len(up)
        x, a, z = groups[:N], groups[N : 2 * N], groups[2 * N :]
        by_up, by_up_bias, by_down, by_down_bias = ctx.needs_input_grad[3:]
        dw = torch.stack([(out.index_select(0, place[:, slot]) * dy).sum(1) for slot in range(k)], dim=1)
        weight = w.new_zeros(len(token)).index_copy_(0, place.flatten(), w.flatten())  # 0 for padding
        dout = dy.index_select(0, token).mul_(weight[:, None])
        dx_parts = []
        dup, dup_bias = torch.empty_like(up) if by_up else None, up.new_empty(up.shape[:2]) if by_up_bias else None
        ddown = torch.empty_like(down) if by_down else None
        ddown_bias = down.new_empty(down.shape[:2]) if by_down_bias else None
        for i, dout_i in enumerate(torch.split(dout, [len(part) for part in x])):
            if ddown is not None:
                ddown[i] = product_of_columns(dout_i, z[i])
            if ddown_bias is not None:
                torch.sum(dout_i, 0, out=ddown_bias[i])
            da = torch.ops.aten.gelu_backward(product(dout_i, down[i].t()), a[i])
            if dup is not None:
                dup[i] = product_of_columns(da, x[i])
            if dup_bias is not None:
                torch.sum(da, 0, out=dup_bias[i])
            dx_parts.append(product(da, up[i].t()))
        dx = torch.cat(dx_parts)
        dh = dx.index_select(0, place[:, 0])
        for slot in range(1, k):
            dh += dx.index_select(0, place[:, slot])
        return dh, None, dw, dup, dup_bias, ddown, ddown_bias


def _places(S: Int[Tensor, "n k"], n_experts: int) -> tuple[Int[Tensor, " nk"], list[int]]:
    """The row of each choice when rows are sorted by expert, and the rows of each expert, with padding."""
    chosen, unit = S.flatten(), row_unit()
    counts = chosen.bincount(minlength=n_experts)
    rows = (counts + unit - 1) // unit * unit
    order = chosen.argsort(stable=True)
    # Sorted choices follow each other, apart from the padding of the experts before theirs.
    padding = (rows - counts).cumsum(0) - (rows - counts)
    sorted_places = torch.arange(len(chosen), device=S.device) + padding.index_select(0, chosen.index_select(0, order))
    return torch.empty_like(order).index_copy_(0, order, sorted_places), rows.tolist()


class MoE(nn.Module):
    """A router and its experts. `shared` experts belong to an earlier layer, which owns their parameters."""

    experts: Experts

    def __init__(self, router: Router, experts: Experts, *, shared: bool = False) -> None:
        super().__init__()
        self.router = router
        if shared:
            self.__dict__["experts"] = experts  # not registered, so not owned
        else:
            self.experts = experts

    def forward(self, x: RouterInput, state: RouterState | None) -> tuple[Float[Tensor, "B T d"], Routing]:
        routing = self.router(x, state)
        y = self.experts(x.h.flatten(0, 1), routing.S.flatten(0, 1), routing.w.flatten(0, 1))
        return y.view_as(x.h), routing


class FeedForward(nn.Module):
    """The dense control: one network as wide as the k experts a token would use."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = Linear(d_model, d_ff)
        self.down = Linear(d_ff, d_model)

    def forward(self, h: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        out: Tensor = self.down(F.gelu(self.up(h)))
        return out
