"""Router parts in which a token's outcome needs the one before: compiled scans of O(B·T·N) time and memory.

The scans run on the CPU; logits of another device go there and back, which are N numbers a token.
B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stickymoe.errors import require
from stickymoe.routing import kernels
from stickymoe.routing.routers import RouterInput, State
from stickymoe.routing.trace import top_k_experts


class Smooth(nn.Module):
    """s_t = d·s_t−1 + (1−d)·h_t, s_t = h_t at the start of a document: a causal average of what the gate reads.

    The gate is linear, so averaging its logits is averaging its input, at N/d_model of the cost. A learned decay is
    σ(logit(d) + bias), one bias per layer, which starts at 0.
    """

    def __init__(self, decay: float, *, learned: bool = False) -> None:
        super().__init__()
        self.decay = decay
        self.decay_bias = nn.Parameter(torch.zeros(())) if learned else None

    def forward(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        decay = logits.new_tensor(self.decay)
        if self.decay_bias is not None:
            decay = (self.decay_bias.to(logits.dtype) + math.log(self.decay / (1 - self.decay))).sigmoid()
        smooth: Tensor = _Average.apply(  # type: ignore[no-untyped-call]
            logits, x.position == 0, state.get("smooth", logits.new_zeros(logits[:, 0].shape)), decay
        )
        return smooth, {"smooth": smooth[:, -1].detach()}


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, before: Tensor, decay: Tensor) -> Tensor:
        ctx.kept = (_numpy(x), _numpy(start), _numpy(before), float(decay), np.empty_like(_numpy(x)))
        kernels.average(*ctx.kept)
        return torch.from_numpy(ctx.kept[-1]).to(x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, start, before, decay, out = ctx.kept
        dx = np.empty_like(x)
        by_decay = kernels.average_backward(_numpy(grad), x, start, before, decay, out, dx)
        return torch.from_numpy(dx).to(grad.device), None, None, grad.new_tensor(by_decay)


@dataclass(frozen=True)
class Hysteresis:
    """S_t = top-k of ℓ_t + m·1[e ∈ S_t−1], g = softmax(ℓ): what was chosen last is chosen on unless beaten by m."""

    bonus: float

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        chosen = np.empty(logits.shape, np.bool_)
        before = state.get("chosen", _nobody(logits))
        kernels.hysteresis(_numpy(logits), _numpy(x.position == 0), _numpy(before), self.bonus, k, chosen)
        g = logits.softmax(-1)
        among = torch.from_numpy(chosen).to(g.device)
        return g, heaviest(g, among, k), {"chosen": among[:, -1]}


@dataclass(frozen=True)
class Residency:
    """S_t = top-k of g_t among C residents; the best outsider replaces the worst resident if its demand wins by ρ.

    At the start of a document the top-C move in; later at most one expert a token does, before the token chooses.
    Demand is the logit, or with `average` > 0 the running average of g with that decay, in units of g. Of equal
    demands the lowest index is resident. g = softmax(ℓ).
    """

    capacity: int
    margin: float
    average: float

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        N = logits.shape[-1]
        require(k <= self.capacity, "variant.capacity", self.capacity, f"at least the {k} experts of a token")
        g = logits.softmax(-1)
        signal = _numpy(g if self.average else logits)
        demand = _numpy(state.get("demand", torch.zeros_like(logits[:, 0]))).copy()
        before = _numpy(state.get("resident", _nobody(logits)))
        resident = np.empty(logits.shape, np.bool_)
        kernels.residency(
            signal,
            _numpy(x.position == 0),
            demand,
            before,
            min(self.capacity, N),
            self.margin,
            self.average,
            resident,
        )
        among = torch.from_numpy(resident).to(g.device)
        state = {"resident": among[:, -1], "demand": torch.from_numpy(demand).to(g.device)}
        return g, heaviest(g, among, k), state


@dataclass(frozen=True)
class Segment:
    """S = top-k of the mean logits of the W tokens before the segment, for all of its W tokens; g = softmax(ℓ).

    Segments are counted from the start of the document; the first one is decided by its first token.
    """

    window: int

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        total = _numpy(state.get("total", torch.zeros_like(logits[:, 0]))).copy()
        before = _numpy(state.get("chosen", _nobody(logits)))
        chosen = np.empty(logits.shape, np.bool_)
        kernels.segment(_numpy(logits), _numpy(x.position), total, before, self.window, k, chosen)
        g = logits.softmax(-1)
        among = torch.from_numpy(chosen).to(g.device)
        return g, heaviest(g, among, k), {"chosen": among[:, -1], "total": torch.from_numpy(total).to(g.device)}


def heaviest(g: Float[Tensor, "B T N"], among: Bool[Tensor, "B T N"], k: int) -> Int[Tensor, "B T k"]:
    """The k most probable of the experts `among` which to choose, heaviest first."""
    return top_k_experts(torch.where(among, g.detach(), -1.0), k)


def _nobody(logits: Float[Tensor, "B T N"]) -> Bool[Tensor, "B N"]:
    return torch.zeros_like(logits[:, 0], dtype=torch.bool)


def _numpy(x: Shaped[Tensor, ...]) -> Shaped[np.ndarray, ...]:
    array: Shaped[np.ndarray, ...] = x.detach().cpu().contiguous().numpy()
    return array
