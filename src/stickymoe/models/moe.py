"""The expert layer: a router sends every token to k of N feed-forward experts.

n tokens, d width, f expert width, N experts, k experts per token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.routing.routers import Router, RouterInput, Routing, State


class Experts(nn.Module):
    """N feed-forward networks with GELU, their weights stacked."""

    def __init__(self, n_experts: int, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(n_experts, d_ff, d_model))
        self.up_bias = nn.Parameter(torch.empty(n_experts, d_ff))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_ff))
        self.down_bias = nn.Parameter(torch.empty(n_experts, d_model))

    def forward(self, h: Float[Tensor, "n d"], S: Int[Tensor, "n k"], w: Float[Tensor, "n k"]) -> Float[Tensor, "n d"]:
        """eq:moe_output. Expert by expert, as the equation reads."""
        y = torch.zeros_like(h)
        # One unbind: indexing the stack per expert would allocate a full-size gradient for each.
        weights = zip(*(p.unbind() for p in (self.up, self.up_bias, self.down, self.down_bias)), strict=True)
        for i, (up, up_bias, down, down_bias) in enumerate(weights):
            token, slot = S.eq(i).nonzero(as_tuple=True)
            out = F.linear(F.gelu(F.linear(h[token], up, up_bias)), down, down_bias)
            y = y.index_add(0, token, (w[token, slot, None] * out).to(y.dtype))
        return y


class MoE(nn.Module):
    """A router and its experts."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: RouterInput, state: State | None) -> tuple[Float[Tensor, "B T d"], Routing]:
        routing = self.router(x, state)
        y = self.experts(x.h.flatten(0, 1), routing.S.flatten(0, 1), routing.w.flatten(0, 1))
        return y.view_as(x.h), routing


class FeedForward(nn.Module):
    """The dense control: one network as wide as the k experts a token would use."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, h: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        out: Tensor = self.down(F.gelu(self.up(h)))
        return out
