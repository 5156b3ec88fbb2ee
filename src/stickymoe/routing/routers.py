"""Routers: what they read, how they choose, and what decoding must remember.

A router is a gate among three exchangeable parts: a `Source` says what the gate reads, a `Filter` what becomes of its
logits, a `Choice` turns them into gate probabilities and experts. All work on a whole sequence or on its continuation,
token by token, with the same outcome: `state` carries across calls what the next tokens need, and starts as None.

On the CPU and without gradient, filters and choices that have a `scan` do the same on arrays, in compiled loops: for
one token, calls into torch would cost more than the routing.

B sequences, T tokens, d width, N experts, k experts per token, M logits of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.errors import ConfigError, require
from stickymoe.routing import kernels
from stickymoe.routing.scan import as_numpy, as_tensor, remembered, softmax
from stickymoe.routing.trace import combine_weights, top_k_experts

State = dict[str, NDArray[Any]]  # each [B, …]


@dataclass(frozen=True)
class RouterInput:
    """What a router may look at.

    `h` is the normalised hidden state the experts get, `attended` the attended values before the output projection
    of the preceding attention, `tokens` are ids and `position` places in the document, arrays as compiled loops read
    them. `doc` is None for a flat stream. `boundary` marks the first token of a sentence or paragraph, where that is
    known. `done` is the share of the training phase that is over, for routers that grow stricter; it is 1 wherever
    nothing trains.
    """

    h: Float[Tensor, "B T d"]
    attended: Float[Tensor, "B T d"]
    tokens: Int[np.ndarray, "B T"]
    position: Int[np.ndarray, "B T"]
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

    def __call__(self, x: RouterInput) -> Float[Tensor, "B T d"]: ...


@runtime_checkable
class Filter(Protocol):
    """What becomes of the logits before the choice.

    It reads as many logits of an expert as it has `gates`, M = gates · N of a token: first those of one gate, then
    those of the next. All gates are one matrix, hence one product.
    """

    gates: int

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]: ...


@runtime_checkable
class Choice(Protocol):
    """How logits become gate probabilities and experts."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]: ...


class Hidden:
    """The hidden state, as in every standard router."""

    def __call__(self, x: RouterInput) -> Float[Tensor, "B T d"]:
        return x.h


class Attended:
    """Oracle-MoE, simplified: what attention gathered, before its output projection."""

    def __call__(self, x: RouterInput) -> Float[Tensor, "B T d"]:
        return x.attended


class Scanned(ABC):
    """g = softmax(ℓ), and a choice of experts that comes from a compiled loop, on tensors or on arrays.

    Who overrides one of `__call__` and `scan` overrides both.
    """

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        g = logits.softmax(-1)
        S = np.empty((*g.shape[:2], k), np.int64)
        state = self._scan(as_numpy(logits), as_numpy(g), x, state, S)
        return g, as_tensor(S, g), state

    def scan(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], Int[np.ndarray, "B T k"], State]:
        g = softmax(logits)
        S = np.empty((*g.shape[:2], k), np.int64)
        return g, S, self._scan(logits, g, x, state, S)

    @abstractmethod
    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        """Write the chosen experts to `S`; answers what the next tokens need."""


class TopK(Scanned):
    """eq:gate, eq:topk. Softmax, then the k most probable experts."""

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        g = logits.softmax(-1)
        return g, top_k_experts(g.detach(), k), {}

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        kernels.top_k(g, S)
        return {}


@dataclass(frozen=True)
class HardWindow:
    """A bonus β on the logits of every expert in the unbiased top-k of the preceding W tokens of the document.

    The history is detached and does not feed on itself.
    """

    window: int
    beta: float

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        bonus, state = self._bonus(as_numpy(logits), k, x, state)
        return *TopK()(logits + as_tensor(bonus, logits), k, x, state)[:2], state

    def scan(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], Int[np.ndarray, "B T k"], State]:
        bonus, state = self._bonus(logits, k, x, state)
        return *TopK().scan(logits + bonus, k, x, state)[:2], state

    def _bonus(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        left = remembered(state, "left", x.position, logits.shape[-1], np.int64)
        bonus = np.empty_like(logits)
        kernels.window_bonus(softmax(logits), x.position, left, k, self.window, self.beta, bonus)
        return bonus, {"left": left}


class Unfiltered:
    """The logits as they are."""

    gates = 1

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        return logits, {}

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        return logits, {}


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Nothing where there is none to begin with, which spares a decoded token much of its routing."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _gated(h: Float[Tensor, "B T d"], gate: nn.Linear) -> Float[Tensor, "B T M"]:
    """W·h, in fp32 at least."""
    W = gate.weight
    if W.dtype not in (torch.float32, torch.float64):
        W = W.float()
    return F.linear(h if h.dtype == W.dtype else h.to(W.dtype), W)


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
        require(1 <= top_k <= n_experts, "top_k", top_k, f"1 … {n_experts} (the number of experts)")
        self.source = source or Hidden()
        self.filter = filter or Unfiltered()
        self.choice = choice or TopK()
        self.gate = nn.Linear(d_model, self.filter.gates * n_experts, bias=False)
        self.top_k = top_k
        self.gate_only = gate_only

    def forward(self, x: RouterInput, state: State | None = None) -> Routing:
        """Route the tokens of `x`, which continue those that `state` remembers."""
        state = state or {}
        _require_rows(x, state)
        features, filter, choice = self.source(x), self.filter, self.choice
        with _without_autocast(features.device.type):
            logits = _gated(features, self.gate)
            compiled = logits.is_cpu and not torch.is_grad_enabled()
            if compiled and hasattr(filter, "scan") and hasattr(choice, "scan"):
                values, filter_state = filter.scan(as_numpy(logits), x, state)
                g, S, choice_state = choice.scan(values, self.top_k, x, state)
                return self._routing(g, S, {**filter_state, **choice_state})
            logits, filter_state = filter(logits, x, state)
            g, S, choice_state = choice(logits, self.top_k, x, state)
            g_gate = None
            if self.gate_only:
                logits, _ = filter(_gated(features.detach(), self.gate), x, state)
                g_gate, _, _ = choice(logits, self.top_k, x, state)
        return Routing(g=g, S=S, w=combine_weights(g, S), state={**filter_state, **choice_state}, g_gate=g_gate)

    def _routing(self, g: Float[np.ndarray, "B T N"], S: Int[np.ndarray, "B T k"], state: State) -> Routing:
        """What a scan found, as tensors."""
        w = np.empty(S.shape, g.dtype)
        kernels.combine(g, S, w)
        gates = torch.from_numpy(g)
        return Routing(
            g=gates,
            S=torch.from_numpy(S),
            w=torch.from_numpy(w),
            state=state,
            g_gate=gates if self.gate_only else None,
        )


def _require_rows(x: RouterInput, state: State) -> None:
    """Compiled loops do not look where they write."""
    B, T = x.h.shape[:2]
    for name, array in (("positions", x.position), ("tokens", x.tokens), ("boundary", x.boundary)):
        if array is not None and array.shape != (B, T):
            shape = list(array.shape)
            raise ConfigError(f"Router: got {name} of shape {shape}, expected {[B, T]} as the hidden states.")
    for name, array in state.items():
        if len(array) != B:
            rows = f"{B} rows of tokens with a state '{name}' of {len(array)} rows"
            raise ConfigError(f"Router: got {rows}, expected {B}.")
