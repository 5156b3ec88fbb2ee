"""Routers: what they read, how they choose, and what decoding must remember.

A router is a gate among three exchangeable parts: a `Source` says what the gate reads, a `Filter` what becomes of its
logits, a `Choice` turns them into gate probabilities and experts. All work on a whole sequence or on its continuation,
token by token, with the same outcome: `state` carries across calls what the next tokens need, and starts as None.

B sequences, T tokens, d width, N experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.routing.trace import combine_weights, top_k_experts

State = dict[str, Tensor]


@dataclass(frozen=True)
class RouterInput:
    """What a router may look at.

    `h` is the normalised hidden state the experts get, `attended` the attended values before the output projection
    of the preceding attention, `position` the place in the document. `doc` is None for a flat stream. `boundary` marks
    the first token of a sentence or paragraph, where that is known. `done` is the share of training that is over, for
    routers that grow stricter; it is 1 wherever nothing trains.
    """

    h: Float[Tensor, "B T d"]
    attended: Float[Tensor, "B T d"]
    tokens: Int[Tensor, "B T"]
    position: Int[Tensor, "B T"]
    doc: Int[Tensor, "B T"] | None = None
    boundary: Bool[Tensor, "B T"] | None = None
    done: float = 1.0


@dataclass(frozen=True)
class Routing:
    """Gate probabilities, chosen experts heaviest first, their combine weights, and the state for what follows.

    `g_gate` equals `g` with gradient to the gate's weights alone, where a variant asks for it.
    """

    g: Float[Tensor, "B T N"]
    S: Int[Tensor, "B T k"]
    w: Float[Tensor, "B T k"]
    state: State
    g_gate: Float[Tensor, "B T N"] | None = None


@runtime_checkable
class Source(Protocol):
    """What the gate reads."""

    def __call__(self, x: RouterInput, state: State) -> tuple[Float[Tensor, "B T d"], State]: ...


@runtime_checkable
class Filter(Protocol):
    """What becomes of the logits before the choice."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]: ...


@runtime_checkable
class Choice(Protocol):
    """How logits become gate probabilities and experts."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]: ...


class Hidden:
    """The hidden state, as in every standard router."""

    def __call__(self, x: RouterInput, state: State) -> tuple[Float[Tensor, "B T d"], State]:
        return x.h, {}


class Attended:
    """Oracle-MoE, simplified: what attention gathered, before its output projection."""

    def __call__(self, x: RouterInput, state: State) -> tuple[Float[Tensor, "B T d"], State]:
        return x.attended, {}


class TopK:
    """eq:gate, eq:topk. Softmax, then the k most probable experts."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        g = logits.softmax(-1)
        return g, top_k_experts(g.detach(), k), {}


@dataclass(frozen=True)
class HardWindow:
    """A bonus β on the logits of every expert in the unbiased top-k of the preceding W tokens of the document.

    The history is detached and does not feed on itself, so a whole sequence is one parallel pass.
    """

    window: int
    beta: float

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        W = self.window
        unbiased = top_k_experts(logits.detach().softmax(-1), k)
        used = torch.zeros_like(logits).scatter_(-1, unbiased, 1.0)  # [B, T, N]
        past = state.get("used", used.new_zeros(used.shape[0], W, used.shape[-1]))
        extended = torch.cat([past, used], dim=1)  # the token at t is at W + t
        recent = self._recent(extended, x.position)
        g = (logits + self.beta * recent).softmax(-1)
        return g, top_k_experts(g.detach(), k), {"used": extended[:, -W:]}

    def _recent(self, used: Float[Tensor, "B reach N"], position: Int[Tensor, "B T"]) -> Bool[Tensor, "B T N"]:
        """Which experts appear in the W tokens before each token, not reaching beyond its document's start."""
        W, T = self.window, position.shape[1]
        seen = F.pad(used.cumsum(1), (0, 0, 1, 0))  # seen[i] counts uses in used[:i]
        end = torch.arange(T, device=used.device) + W
        start = end - position.clamp(max=W)
        index = start[..., None].expand(-1, -1, used.shape[-1])
        return seen[:, W : W + T] - seen.gather(1, index) > 0


class Unfiltered:
    """The logits as they are."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        return logits, {}


class Router(nn.Module):
    """eq:gate. `g = choice(filter(W_g · source))`, in fp32 whatever the model computes in."""

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        *,
        source: Source | None = None,
        filter: Filter | None = None,
        choice: Choice | None = None,
        gate_only: bool = False,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.top_k = top_k
        self.source = source or Hidden()
        self.filter = filter or Unfiltered()
        self.choice = choice or TopK()
        self.gate_only = gate_only

    def forward(self, x: RouterInput, state: State | None = None) -> Routing:
        """Route the tokens of `x`, which continue those that `state` remembers."""
        state = state or {}
        features, source_state = self.source(x, state)
        with torch.autocast(features.device.type, enabled=False):
            W_g = self.gate.weight.to(torch.promote_types(self.gate.weight.dtype, torch.float32))
            features = features.to(W_g.dtype)
            logits, filter_state = self.filter(F.linear(features, W_g), x, state)
            g, S, choice_state = self.choice(logits, self.top_k, x, state)
            g_gate = None
            if self.gate_only:
                x = replace(x, h=x.h.detach(), attended=x.attended.detach())
                logits, _ = self.filter(F.linear(features.detach(), W_g), x, state)
                g_gate, _, _ = self.choice(logits, self.top_k, x, state)
        remembered = {**source_state, **filter_state, **choice_state}
        return Routing(g=g, S=S, w=combine_weights(g, S), state=remembered, g_gate=g_gate)
