"""Rule parts in which the result of a token depends on the token before: compiled scans of O(B·T·N) memory.

The scans run on the CPU. Logits of another device are copied there and back: N numbers per token.
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
from stickymoe.routing.arrays import as_numpy, as_tensor
from stickymoe.routing.rules import RouterInput, RouterState, ScannedChoice, state_of

_NO_KEYS = np.empty((0, 0), np.int64)
_FOREVER = 2.0**31  # more tokens than any sequence has


class Smooth:
    """s_t = d·s_t−1 + (1−d)·h_t, s_t = h_t at the start of a document: a causal average of what the gate reads.

    The gate is linear, so averaging its logits equals averaging its input, at N/d_model of the cost. With several
    decays, each belongs to an equal part of the logits.
    """

    gates = 1

    def __init__(self, *decay: float, name: str = "smooth") -> None:
        """`name` is the name of the average in the router's state."""
        self.decay = np.array(decay)
        self.name = name

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: RouterState, decay: Float[Tensor, ""] | None = None
    ) -> tuple[Float[Tensor, "B T N"], RouterState]:
        """`decay` is the same number as a tensor, if it needs a gradient."""
        values, position = as_numpy(logits), x.array("position")
        before = state.remembered(self.name, position, values.shape[-1], values.dtype)
        out, state = self.scan(values, x, state)
        arrays = values, position, before, self.decay, out
        return _Average.apply(logits, decay, as_tensor(out, logits), arrays), state  # type: ignore[no-untyped-call]

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        position = x.array("position")
        last = state.remembered(self.name, position, logits.shape[-1], logits.dtype)
        out = np.empty_like(logits)
        kernels.average(logits, position, last, self.decay, out)
        return out, state_of(**{self.name: last})


class LearnedSmooth(nn.Module):
    """Smooth with the decay σ(logit(d) + bias), one bias per layer, initialised to 0."""

    gates = 1

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.start = math.log(decay / (1 - decay))
        self.decay_bias = nn.Parameter(torch.zeros(()))

    def forward(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], RouterState]:
        decay = self.decay()
        return Smooth(decay.item())(logits, x, state, decay)

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        return Smooth(self.decay().item()).scan(logits, x, state)

    def decay(self) -> Float[Tensor, ""]:
        bias = self.decay_bias.to(torch.promote_types(self.decay_bias.dtype, torch.float32))
        return (bias + self.start).sigmoid()


class TwoSpeed:
    """ℓ_t + smooth(ℓ')_t: one gate reads the token, the other the average of its document so far."""

    gates = 2

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.slow = Smooth(decay, name="slow")

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], RouterState]:
        now, average = logits.chunk(2, dim=-1)
        slow, state = self.slow(average, x, state)
        return now + slow, state

    def scan(
        self, logits: Float[np.ndarray, "B T M"], x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        B, T, M = logits.shape
        position = x.array("position")
        slow = state.remembered("slow", position, M // 2, logits.dtype)
        out = np.empty((B, T, M // 2), logits.dtype)
        kernels.two_speed(logits, position, slow, self.decay, out)
        return out, state_of(slow=slow)


class SlotGates:
    """a_c + b_i for expert i of slot c = i mod C: one gate for the slots, a slower one for the experts within a slot.

    a is the mean over the slot of the first gate's logits, smoothed with decay d; b are the second gate's logits,
    smoothed with decay s. With `token` the first gate reads the token alone, and the mean of a third gate's logits,
    smoothed with d, is added.
    """

    def __init__(self, capacity: int, *, fast: float, slow: float, token: bool = False) -> None:
        self.gates = 3 if token else 2
        self.settings = capacity, fast, slow
        self.averages = Smooth(fast, slow, name="averages")

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], RouterState]:
        first, own, *context = logits.chunk(self.gates, dim=-1)
        slots = self._slot_mean(context[0] if context else first)
        averages, state = self.averages(torch.cat([slots, own], dim=-1), x, state)
        a, b = averages.chunk(2, dim=-1)
        return (a + self._slot_mean(first) + b if context else a + b), state

    def scan(
        self, logits: Float[np.ndarray, "B T M"], x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        B, T, M = logits.shape
        N = M // self.gates
        position = x.array("position")
        averages = state.remembered("averages", position, 2 * N, logits.dtype)
        out = np.empty((B, T, N), logits.dtype)
        kernels.slot_logits(logits, position, averages, *self.settings, out)
        return out, state_of(averages=averages)

    def _slot_mean(self, logits: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """Each expert's mean over its slot."""
        slot = torch.arange(logits.shape[-1], device=logits.device) % self.settings[0]
        same = (slot[:, None] == slot).to(logits.dtype)
        return logits @ (same / same.sum(0))


class _Average(torch.autograd.Function):
    """Adds the gradient to `kernels.average`; `arrays` are its inputs, then its output."""

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
class Hysteresis(ScannedChoice):
    """S_t = top-k of ℓ_t + m·1[e ∈ S_t−1]: an expert stays chosen unless another beats it by m."""

    bonus: float

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        position = x.array("position")
        chosen = state.remembered("chosen", position, g.shape[-1], np.bool_)
        kernels.hysteresis(rank, g, position, chosen, self.bonus, S)
        return state_of(chosen=chosen)


@dataclass(frozen=True, kw_only=True)
class ResidentChoice(ScannedChoice):
    """A choice among C resident experts; at most one is loaded per token, before the choice.

    During the fraction `free` of training all experts can be chosen. Over the following fraction `anneal`, the
    resistance to loads is annealed from none to its full strength.
    """

    capacity: int
    free: float = 0.0
    anneal: float = 0.0

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        require_room(self.capacity, S)
        strength = self.strength(progress)
        if strength == 0.0:
            kernels.top_k(g, S)
            return RouterState()
        return self.choose_resident(rank, g, x, state, strength, S)

    def strength(self, progress: float) -> float:
        if progress >= self.free + self.anneal:
            return 1.0
        return max(0.0, (progress - self.free) / self.anneal) if self.anneal else 0.0

    @abstractmethod
    def choose_resident(
        self, rank: Any, g: Any, x: RouterInput, state: RouterState, strength: float, S: Any
    ) -> RouterState:
        """`choose` with the fraction `strength` of the full resistance to loads."""


def require_room(capacity: int, S: Any) -> None:
    """Refuse fewer slots than a token has experts."""
    if S.shape[-1] > capacity:
        require(False, "variant.capacity", capacity, f"at least the {S.shape[-1]} experts of a token")


@dataclass(frozen=True, kw_only=True)
class Residency(ResidentChoice):
    """S_t = top-k of g_t among C residents; the best non-resident replaces the worst resident if it wins by ρ.

    Experts are compared by their demand: the logit, or with `average` > 0 the running average of g with that decay. A
    document starts with the top-C experts resident. Ties in demand go to the lowest index. The first `pinned` experts
    are never evicted. Annealing scales ρ, and the memory of the average.
    """

    margin: float
    average: float
    pinned: int = 0

    def choose_resident(
        self, rank: Any, g: Any, x: RouterInput, state: RouterState, strength: float, S: Any
    ) -> RouterState:
        # Experts that cannot be chosen rank at −∞, which would stay in the average for ever.
        signal = g if self.average else np.maximum(rank, np.finfo(rank.dtype).min)
        position, N = x.array("position"), g.shape[-1]
        demand = state.remembered("demand", position, N, g.dtype)
        resident = state.remembered("resident", position, N, np.bool_)
        decay = 1 - (1 - self.average) ** strength  # log of the memory 1/(1−d) grows linearly
        capacity = min(self.capacity, N)
        margin = strength * self.margin
        kernels.residency(signal, g, position, demand, resident, capacity, self.pinned, margin, decay, S)
        return state_of(demand=demand, resident=resident)


@dataclass(frozen=True, kw_only=True)
class Rent(ResidentChoice):
    """S_t = top-k of g_t among C residents; a non-resident is loaded when the weight it missed adds up to the price θ.

    At each token, a non-resident misses the part of its g above the smallest g of the chosen experts. It is loaded only
    at a token that would choose it. If several qualify, the one that missed most is loaded. It replaces the least
    recently used resident; among experts last used at the same token, the one with the lowest weight; among experts
    never used, the one with the lowest g, then the highest index. So an LRU cache of C slots loads no more experts than
    this rule. A document starts with the top-C experts resident. Annealing scales θ.
    """

    price: float

    def choose_resident(
        self, rank: Any, g: Any, x: RouterInput, state: RouterState, strength: float, S: Any
    ) -> RouterState:
        position, N = x.array("position"), g.shape[-1]
        missed = state.remembered("missed", position, N, g.dtype)
        unused = state.remembered("unused", position, N, np.int64)
        resident = state.remembered("resident", position, N, np.bool_)
        kernels.rent(g, position, missed, unused, resident, min(self.capacity, N), strength * self.price, S)
        return state_of(missed=missed, unused=unused, resident=resident)


@dataclass(frozen=True)
class SlotChoice(ScannedChoice):
    """S_t = top-k of g_t among C residents, one for each slot i mod C; an expert is loaded if it wins its slot by ρ.

    Experts of a slot are compared by their fraction of the slot's gate weight. The largest win is loaded (ties: the
    first slot), if the last load was at least 1/B tokens ago, rounded up: in n tokens after the first load, at most
    1 + B·n loads. A document starts with the heaviest expert of each slot resident.

    With `hashed`, the key of a hash, the k slots of a token come from hash(token, key), and the gate only sets weights.
    Slots with more experts are drawn more often: in proportion to their number of experts for the first of the k, and
    likewise among the remaining slots for each next one.
    """

    capacity: int
    margin: float
    budget: float = 1.0
    hashed: int | None = None

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        require_room(self.capacity, S)
        position, N = x.array("position"), g.shape[-1]
        resident = state.remembered("resident", position, N, np.bool_)
        age = state.remembered("age", position, N, np.int64)
        keys, salt = (_NO_KEYS, 0) if self.hashed is None else (x.array("tokens"), self.hashed)
        kernels.slot_choice(g, keys, salt, position, resident, age, self.capacity, *self.limits, S)
        return state_of(resident=resident, age=age)

    @cached_property
    def limits(self) -> tuple[float, int]:
        """The margin, and the number of tokens between two loads. With budget 0 the margin is infinite."""
        rest = 1 / self.budget if self.budget else math.inf
        return (self.margin, math.ceil(round(rest, 6))) if rest < _FOREVER else (math.inf, 1)


@dataclass(frozen=True)
class Segment(ScannedChoice):
    """S = top-k of the mean logits of the W tokens before the segment, for all W tokens of the segment.

    Segments are counted from the start of the document; the first one is decided by its first token.
    """

    window: int

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        position = x.array("position")
        total = state.remembered("total", position, g.shape[-1], g.dtype)
        chosen = state.remembered("chosen", position, g.shape[-1], np.bool_)
        kernels.segment(rank, g, position, total, chosen, self.window, S)
        return state_of(total=total, chosen=chosen)
