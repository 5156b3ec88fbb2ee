"""Choices that are made before training begins: no gate decides who is used, only how the chosen are weighed.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.routing.routers import RouterInput, State
from stickymoe.routing.trace import top_k_experts


def hashed_experts(keys: Int[Tensor, "B T"], n_experts: int, k: int, salt: int = 0) -> Int[Tensor, "B T k"]:
    """k different experts for every key, each as likely as any other and always the same."""
    mixed = keys[..., None] * n_experts + torch.arange(n_experts, device=keys.device) + (salt << 40)
    for multiplier, shift in ((-4658895280553007687, 32), (-7723592293110705685, 29)):  # odd: distinct stay distinct
        mixed = mixed * multiplier
        mixed = mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))
    return mixed.argsort(-1)[..., :k]


def _weigh(logits: Float[Tensor, "B T N"], fixed: Int[Tensor, "B T k"]) -> tuple[Tensor, Tensor]:
    """g = softmax(ℓ), and the fixed experts ordered by it."""
    g = logits.softmax(-1)
    among = torch.zeros_like(g, dtype=torch.bool).scatter_(-1, fixed, True)
    return g, top_k_experts(torch.where(among, g.detach(), -1.0), fixed.shape[-1])


@dataclass(frozen=True)
class Hashed:
    """S_t = hash(token, layer): Roller et al. With k=1 the gate has no say; with more it weighs the chosen."""

    layer: int

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        g, S = _weigh(logits, hashed_experts(x.tokens, logits.shape[-1], k, self.layer))
        return g, S, {}


@dataclass(frozen=True)
class Trajectory:
    """S_t = hash(first token of t's span), the same in all layers: nothing is loaded inside a span.

    A span is a document, or shorter: W tokens of it if `window` is not 0, a sentence of it if `sentence`. Its first
    token is the one thing known of it in time.
    """

    window: int
    sentence: bool

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        starts = x.position % self.window == 0 if self.window else x.position == 0
        if self.sentence:
            if x.boundary is None:
                raise ConfigError("variant.sentence: this text comes without sentence borders, pass boundary.")
            starts = starts | x.boundary
        t = torch.arange(starts.shape[1], device=starts.device)
        first = torch.where(starts, t, -1).cummax(1).values  # −1: the span began in an earlier call
        key = x.tokens.gather(1, first.clamp(min=0))
        if "key" in state:
            key = torch.where(first < 0, state["key"], key)
        g, S = _weigh(logits, hashed_experts(key, logits.shape[-1], k))
        return g, S, {"key": key[:, -1:]}
