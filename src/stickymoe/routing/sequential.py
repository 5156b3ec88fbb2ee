"""Router parts in which a token's outcome needs the one before: compiled scans, of O(B·T·N) memory.

The scans run on the CPU; logits of another device go there and back, which are N numbers a token.
B sequences, T tokens, N experts, k experts per token, M logits of a token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stickymoe.errors import require
from stickymoe.routing import kernels
from stickymoe.routing.routers import RouterInput, Scanned, State
from stickymoe.routing.scan import as_numpy, as_tensor, remembered

_NO_KEYS = np.empty((0, 0), np.int64)
_FOREVER = 2.0**31  # tokens that no sequence has


class Smooth:
    """s_t = d·s_t−1 + (1−d)·h_t, s_t = h_t at the start of a document: a causal average of what the gate reads.

    The gate is linear, so averaging its logits is averaging its input, at N/d_model of the cost. Of several decays each
    is that of an equal part of the logits.
    """

    gates = 1

    def __init__(self, *decay: float, name: str = "smooth") -> None:
        """`name` is that of the average in the router's state."""
        self.decay = np.array(decay)
        self.name = name

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State, decay: Float[Tensor, ""] | None = None
    ) -> tuple[Float[Tensor, "B T N"], State]:
        """`decay` is the same number as a tensor, if that is to have a gradient."""
        values = as_numpy(logits)
        before = remembered(state, self.name, x.position, values.shape[-1], values.dtype)
        out, state = self.scan(values, x, state)
        arrays = values, x.position, before, self.decay, out
        return _Average.apply(logits, decay, as_tensor(out, logits), arrays), state  # type: ignore[no-untyped-call]

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        last = remembered(state, self.name, x.position, logits.shape[-1], logits.dtype)
        out = np.empty_like(logits)
        kernels.average(logits, x.position, last, self.decay, out)
        return out, {self.name: last}


class LearnedSmooth(nn.Module):
    """Smooth with the decay σ(logit(d) + bias), one bias per layer, which starts at 0."""

    gates = 1

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.start = math.log(decay / (1 - decay))
        self.decay_bias = nn.Parameter(torch.zeros(()))

    def forward(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        decay = self._decay()
        return Smooth(decay.item())(logits, x, state, decay)

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        return Smooth(self._decay().item()).scan(logits, x, state)

    def _decay(self) -> Float[Tensor, ""]:
        bias = self.decay_bias.to(torch.promote_types(self.decay_bias.dtype, torch.float32))
        return (bias + self.start).sigmoid()


class TwoSpeed:
    """ℓ_t + smooth(ℓ')_t: of the two gates one reads the token, the other the average of its document so far."""

    gates = 2

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.slow = Smooth(decay, name="slow")

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        now, average = logits.chunk(2, dim=-1)
        slow, state = self.slow(average, x, state)
        return now + slow, state

    def scan(
        self, logits: Float[np.ndarray, "B T M"], x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        B, T, M = logits.shape
        slow = remembered(state, "slow", x.position, M // 2, logits.dtype)
        out = np.empty((B, T, M // 2), logits.dtype)
        kernels.two_speed(logits, x.position, slow, self.decay, out)
        return out, {"slow": slow}


class SiblingGates:
    """a_c + b_i for expert i of family c: one gate for the families, a slower one to tell siblings apart.

    a is the mean over the family of the first gate's logits, smoothed with decay d; b are the second's, with decay s.
    With `token` the first gate reads the token alone, and the mean of a third's, smoothed with d, is added.
    """

    def __init__(self, capacity: int, *, fast: float, slow: float, token: bool = False) -> None:
        self.gates = 3 if token else 2
        self.terms = capacity, fast, slow
        self.averages = Smooth(fast, slow, name="averages")

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], State]:
        first, own, *context = logits.chunk(self.gates, dim=-1)
        families = self._mean(context[0] if context else first)
        averages, state = self.averages(torch.cat([families, own], dim=-1), x, state)
        a, b = averages.chunk(2, dim=-1)
        return (a + self._mean(first) + b if context else a + b), state

    def scan(
        self, logits: Float[np.ndarray, "B T M"], x: RouterInput, state: State
    ) -> tuple[Float[np.ndarray, "B T N"], State]:
        B, T, M = logits.shape
        N = M // self.gates
        averages = remembered(state, "averages", x.position, 2 * N, logits.dtype)
        out = np.empty((B, T, N), logits.dtype)
        kernels.sibling_logits(logits, x.position, averages, *self.terms, out)
        return out, {"averages": averages}

    def _mean(self, logits: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """Over the family of each expert."""
        family = torch.arange(logits.shape[-1], device=logits.device) % self.terms[0]
        same = (family[:, None] == family).to(logits.dtype)
        return logits @ (same / same.sum(0))


class _Average(torch.autograd.Function):
    """Gives a finished kernels.average its gradient; `arrays` are what went in, and last what came out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, decay: Tensor | None, smooth: Tensor, arrays: tuple[Any, ...]) -> Tensor:
        ctx.arrays = arrays
        return smooth.view_as(smooth)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, position, before, decay, out = ctx.arrays
        dx = np.empty_like(x)
        by_decay = kernels.average_backward(as_numpy(grad), x, position, before, decay, out, dx)
        return as_tensor(dx, grad), grad.new_tensor(by_decay) if ctx.needs_input_grad[1] else None, None, None


@dataclass(frozen=True)
class Hysteresis(Scanned):
    """S_t = top-k of ℓ_t + m·1[e ∈ S_t−1], g = softmax(ℓ): what was chosen last is chosen on unless beaten by m."""

    bonus: float

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        chosen = remembered(state, "chosen", x.position, g.shape[-1], np.bool_)
        kernels.hysteresis(logits, g, x.position, chosen, self.bonus, S)
        return {"chosen": chosen}


@dataclass(frozen=True, kw_only=True)
class _Resident(Scanned):
    """A choice among C experts that move in and out, at most one a token and before it chooses.

    For the share `free` of training all experts can be chosen; over the share `rise` after it the residents grow from
    following every token to full inertia.
    """

    capacity: int
    free: float = 0.0
    rise: float = 0.0

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        _require_room(self.capacity, S)
        strength = self._strength(x.done)
        if strength == 0.0:
            kernels.top_k(g, S)
            return {}
        return self._scan_residents(logits, g, x, strength, state, S)

    def _strength(self, done: float) -> float:
        if done >= self.free + self.rise:
            return 1.0
        return max(0.0, (done - self.free) / self.rise) if self.rise else 0.0

    @abstractmethod
    def _scan_residents(self, logits: Any, g: Any, x: RouterInput, strength: float, state: State, S: Any) -> State:
        """The same, with that share of the inertia."""


def _require_room(capacity: int, S: Any) -> None:
    if S.shape[-1] > capacity:
        require(False, "variant.capacity", capacity, f"at least the {S.shape[-1]} experts of a token")


@dataclass(frozen=True, kw_only=True)
class Residency(_Resident):
    """S_t = top-k of g_t among C residents; the best outsider replaces the worst resident if its demand wins by ρ.

    At the start of a document the top-C move in. Demand is the logit, or with `average` > 0 the running average of g
    with that decay, in units of g. Of equal demands the lowest index is resident. The first experts are `pinned`, and
    never leave. g = softmax(ℓ). Inertia grows with ρ from 0 and with the average's memory from none.
    """

    margin: float
    average: float
    pinned: int = 0

    def _scan_residents(self, logits: Any, g: Any, x: RouterInput, strength: float, state: State, S: Any) -> State:
        signal = g if self.average else logits
        demand = remembered(state, "demand", x.position, g.shape[-1], g.dtype)
        resident = remembered(state, "resident", x.position, g.shape[-1], np.bool_)
        decay = 1 - (1 - self.average) ** strength  # the logarithm of the memory 1/(1−d) grows evenly
        capacity = min(self.capacity, g.shape[-1])
        margin = strength * self.margin
        kernels.residency(signal, g, x.position, demand, resident, capacity, self.pinned, margin, decay, S)
        return {"demand": demand, "resident": resident}


@dataclass(frozen=True, kw_only=True)
class Rent(_Resident):
    """S_t = top-k of g_t among C residents; an outsider moves in when the weight it missed adds up to the price θ.

    What an outsider misses at a token is what its g has above the least of the k chosen. It moves in where it is
    chosen at once, of several the one that missed most, and the resident that was chosen longest ago goes (of one
    token's the lightest, of those never chosen the least g, the highest index): so an LRU cache of C loads no more than
    what moves in. At the start of a document the top-C move in. g = softmax(ℓ). Inertia grows with θ from 0.
    """

    price: float

    def _scan_residents(self, logits: Any, g: Any, x: RouterInput, strength: float, state: State, S: Any) -> State:
        missed = remembered(state, "missed", x.position, g.shape[-1], g.dtype)
        unused = remembered(state, "unused", x.position, g.shape[-1], np.int64)
        resident = remembered(state, "resident", x.position, g.shape[-1], np.bool_)
        capacity = min(self.capacity, g.shape[-1])
        kernels.rent(g, x.position, missed, unused, resident, capacity, strength * self.price, S)
        return {"missed": missed, "unused": unused, "resident": resident}


@dataclass(frozen=True)
class Siblings(Scanned):
    """S_t = top-k of g_t among C residents, one of each family of experts i mod C; a sibling moves in if it wins by ρ.

    What wins is an expert's share in the gate weight of its family. The largest win moves in (of equals the first
    slot), if the last load was 1/B tokens ago, rounded up: n tokens after the first load at most 1 + B·n experts. At
    the start of a document the heaviest of each family is resident. g = softmax(ℓ).

    With a layer to hash for, the k families of a token are those of hash(token, layer), as in `Hashed`, and the gate
    only weighs them. Where families differ in size, a larger one is drawn more often: by its size for the first of the
    k, and again for each next among those that are left.
    """

    capacity: int
    margin: float
    budget: float = 1.0
    hashed: int | None = None

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        _require_room(self.capacity, S)
        resident = remembered(state, "resident", x.position, g.shape[-1], np.int64)
        keys, salt = (_NO_KEYS, 0) if self.hashed is None else (x.tokens, self.hashed)
        kernels.siblings(g, keys, salt, x.position, resident, self.capacity, *self._terms, S)
        return {"resident": resident}

    @cached_property
    def _terms(self) -> tuple[float, int]:
        """The margin, and the tokens from one load to the next. Without a budget none can win by enough."""
        rest = 1 / self.budget if self.budget else math.inf
        return (self.margin, math.ceil(round(rest, 6))) if rest < _FOREVER else (math.inf, 1)


@dataclass(frozen=True)
class Segment(Scanned):
    """S = top-k of the mean logits of the W tokens before the segment, for all of its W tokens; g = softmax(ℓ).

    Segments are counted from the start of the document; the first one is decided by its first token.
    """

    window: int

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        total = remembered(state, "total", x.position, g.shape[-1], g.dtype)
        chosen = remembered(state, "chosen", x.position, g.shape[-1], np.bool_)
        kernels.segment(logits, g, x.position, total, chosen, self.window, S)
        return {"total": total, "chosen": chosen}
