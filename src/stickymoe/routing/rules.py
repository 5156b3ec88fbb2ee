"""Routing rules: from the logits of any gate to experts and combine weights.

A router is a gate (hidden state → logits) and a rule. The rule works in steps, each an exchangeable part:

    filter    logits → logits          for example an average over the document
    score     logits → p               softmax or sigmoid, with a selection bias and group limits (`Scoring`)
    choice    scores → k experts       top-k, or top-k among resident experts, …
    weights   p at the chosen → w      renormalised or not, scaled (`Scoring`)
    skip      w → w, some of them 0    drop experts that are not worth a load; optional

Rules work on a whole sequence or on its continuation, token by token, with the same result: `RouterState` carries what
the next tokens need. On the CPU and without gradient, parts that have a `scan` do the same in compiled loops over
arrays: for a single token, calls into torch would cost more than the routing itself.

B sequences, T tokens, d width, N experts, k experts per token, M = gates · N logits of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from stickymoe.errors import ConfigError, require
from stickymoe.routing import kernels
from stickymoe.routing.arrays import as_numpy, as_tensor, softmax
from stickymoe.routing.trace import combine_weights, top_k_experts


@dataclass(frozen=True)
class RouterInput:
    """What a router may read. All fields except `h` are optional; a rule that needs a missing field raises an error.

    h: the normalised hidden state, which the experts get too
    attended: the attended values before the output projection of the preceding attention
    tokens: token ids
    position: zero-based position in the document
    doc: document numbers; None for a flat stream
    boundary: the first tokens of sentences and paragraphs
    resident: the experts that the caller's cache holds
    visit: how often each token of the training text has come, from a random number of its own; only in training
    """

    h: Float[Tensor, "B T d"]
    attended: Float[Tensor, "B T d"] | None = None
    tokens: Int[Tensor, "B T"] | None = None
    position: Int[Tensor, "B T"] | None = None
    doc: Int[Tensor, "B T"] | None = None
    boundary: Bool[Tensor, "B T"] | None = None
    resident: Bool[Tensor, "B N"] | None = None
    visit: Int[Tensor, "B T"] | None = None

    def required(self, name: str) -> Shaped[Tensor, "B T ..."]:
        """A field that a rule reads; refused if the caller did not pass it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ConfigError(f"RouterInput: {name} is missing, but this rule reads it; pass {name}.")
        return value

    def array(self, name: str) -> Shaped[np.ndarray, "B T"]:
        """A required field as a contiguous array, for a compiled loop."""
        return as_numpy(self.required(name))


@dataclass(frozen=True)
class RouterState:
    """What a router remembers of the tokens so far: tensors [B, …] by name, on the CPU."""

    values: Mapping[str, Shaped[Tensor, "B ..."]] = field(default_factory=dict)

    @property
    def resident(self) -> Bool[Tensor, "B N"] | None:
        """The experts that the router itself keeps resident; None if it keeps none."""
        return self.values.get("resident")

    def select(self, rows: Int[Tensor, " rows"]) -> RouterState:
        """The state of some rows, in that order, as beam search needs it."""
        return RouterState({name: value[rows.to(value.device)] for name, value in self.values.items()})

    def remembered(
        self, name: str, position: Int[np.ndarray, "B T"], width: int, dtype: Any
    ) -> Shaped[np.ndarray, "B width"]:
        """A copy of a value for a compiled loop to continue with; zeros at the start of a text."""
        if name in self.values:
            value = self.values[name]
            if value.shape[1] != width:
                raise ConfigError(f"RouterState: got '{name}' of width {value.shape[1]}, expected {width}.")
            return value.numpy().copy()
        if position[:, 0].any():
            raise ConfigError(
                f"RouterState: got tokens from position {position[:, 0].max()} without the state of the tokens before "
                "them; pass that state, or start at position 0."
            )
        return np.zeros((len(position), width), dtype)


def kept_by(state: RouterState) -> list[int]:
    """The experts that the router of one text keeps resident; empty if it keeps none."""
    return [] if state.resident is None else state.resident[0].nonzero()[:, 0].tolist()


def state_of(**arrays: Shaped[np.ndarray, "B ..."]) -> RouterState:
    """A state from the arrays that compiled loops updated."""
    return RouterState({name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass(frozen=True)
class Routing:
    """Normalised scores, chosen experts heaviest first, their combine weights, and the state for the next tokens.

    `g_gate` equals `g` with gradient to the weights of the gate alone, where a variant asks for it.
    """

    g: Float[Tensor, "B T N"]
    S: Int[Tensor, "B T k"]
    w: Float[Tensor, "B T k"]
    state: RouterState
    g_gate: Float[Tensor, "B T N"] | None = None


@dataclass(frozen=True)
class Scoring:
    """How logits become scores and scores become combine weights, as data.

    score: softmax over the experts, or sigmoid of each
    bias: added to the scores for the choice, not for the weights (DeepSeek-V3)
    groups: number of equal groups of adjacent experts; only the best `groups_kept` can be chosen from
    group_score: a group is as good as its best expert (max), or as the sum of its best two (top2)
    renormalise: divide the weights of the chosen experts by their sum
    scale: factor on the weights
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: Float[Tensor, " N"] | None = None
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        require(1 <= self.groups_kept <= self.groups, "groups_kept", self.groups_kept, f"1 … {self.groups} (groups)")

    def require_fit(self, n_experts: int, top_k: int) -> None:
        """Refuse groups and biases that do not fit the experts of a layer."""
        if self.bias is not None:
            require(len(self.bias) == n_experts, "bias", list(self.bias.shape), f"one number for each of {n_experts}")
        require(n_experts % self.groups == 0, "groups", self.groups, f"a divisor of the {n_experts} experts")
        size = n_experts // self.groups
        if self.groups_kept < self.groups and self.group_score == "top2":
            require(size >= 2, "groups", self.groups, f"groups of at least 2 of the {n_experts} experts for top2")
        room = self.groups_kept * size
        require(top_k <= room, "groups_kept", self.groups_kept, f"groups with at least {top_k} experts, not {room}")

    @property
    def plain(self) -> bool:
        """Whether the order of the logits decides the choice, and the weights are a renormalised softmax."""
        return self.score == "softmax" and self.ranks_by_logits and self.renormalise and self.scale == 1.0

    @property
    def ranks_by_logits(self) -> bool:
        """Whether the order of the logits decides the choice."""
        return self.bias is None and self.groups_kept == self.groups

    def scores(self, logits: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """eq:gate. The scores p that the weights come from."""
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def normalised(self, p: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """g: the scores divided by their sum over the experts."""
        return p if self.score == "softmax" else p / p.sum(-1, keepdim=True)

    def ranking(self, p: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """What the choice ranks experts by: scores with the bias; −∞ in groups that cannot be chosen from."""
        ranked = p if self.bias is None else p + self.bias
        if self.groups_kept == self.groups:
            return ranked
        grouped = ranked.view(*ranked.shape[:-1], self.groups, -1)
        best = grouped.amax(-1) if self.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, top_k_experts(best, self.groups_kept), True)
        return torch.where(kept[..., None], grouped, -torch.inf).flatten(-2)

    def demand(self, ranking: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        """The ranking as shares that sum to 1, 0 in groups that cannot be chosen from."""
        lowest = torch.where(ranking.isfinite(), ranking, torch.inf).amin(-1, keepdim=True).clamp(max=0)
        shares = torch.where(ranking.isfinite(), ranking - lowest, 0.0)
        return shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)

    def weights(self, p: Float[Tensor, "B T N"], S: Int[Tensor, "B T k"]) -> Float[Tensor, "B T k"]:
        """The combine weights of the chosen experts."""
        w = combine_weights(p, S) if self.renormalise else p.gather(-1, S)
        return w if self.scale == 1.0 else w * self.scale


@runtime_checkable
class Filter(Protocol):
    """A change of the logits before they are scored.

    A filter reads `gates` logits of each expert, M = gates · N of a token: first those of one gate, then those of the
    next. All gates are one matrix and need one product.
    """

    gates: int

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], RouterState]: ...


@dataclass(frozen=True)
class ChoiceInput:
    """What a choice reads: the logits after the filter, how they are scored, and the progress of training.

    `progress` is the fraction of the training phase that has passed; it is 1 wherever nothing trains.
    """

    logits: Float[Tensor, "B T N"]
    top_k: int
    scoring: Scoring = field(default_factory=Scoring)
    progress: float = 1.0


@runtime_checkable
class Choice(Protocol):
    """A choice of experts: returns the scores p that weights come from, the experts heaviest first, and the state."""

    def __call__(
        self, given: ChoiceInput, x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], RouterState]: ...


def heaviest_first(p: Float[Tensor, "B T N"], S: Int[Tensor, "B T k"]) -> Int[Tensor, "B T k"]:
    """The chosen experts in the order of their scores."""
    order = p.detach().gather(-1, S).sort(dim=-1, descending=True, stable=True).indices
    return S.gather(-1, order)


@runtime_checkable
class Skip(Protocol):
    """Sets the weights of experts that are not worth a load to 0; the sum of a token's weights stays the same."""

    def __call__(
        self, S: Int[Tensor, "B T k"], w: Float[Tensor, "B T k"], x: RouterInput, state: RouterState, n_experts: int
    ) -> tuple[Float[Tensor, "B T k"], RouterState]: ...


class ScannedChoice(ABC):
    """A choice made by a compiled loop; p is the plain score of the logits.

    Subclasses implement `choose`. Subclasses that override one of `__call__` and `scan` must override both.
    """

    def __call__(
        self, given: ChoiceInput, x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], RouterState]:
        p = given.scoring.scores(given.logits)
        S = np.empty((*p.shape[:2], given.top_k), np.int64)
        if given.scoring.ranks_by_logits:
            g = given.scoring.normalised(p)
            state = self.choose(as_numpy(given.logits), as_numpy(g), x, state, given.progress, S)
            return p, as_tensor(S, p), state
        ranking = given.scoring.ranking(p.detach())
        demand = given.scoring.demand(ranking)
        state = self.choose(as_numpy(ranking), as_numpy(demand), x, state, given.progress, S)
        return p, heaviest_first(p, as_tensor(S, p)), state

    def scan(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: RouterState, progress: float
    ) -> tuple[Float[np.ndarray, "B T N"], Int[np.ndarray, "B T k"], RouterState]:
        """The same on arrays, for plain scoring."""
        g = softmax(logits)
        S = np.empty((*g.shape[:2], k), np.int64)
        return g, S, self.choose(logits, g, x, state, progress, S)

    @abstractmethod
    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        """Write the chosen experts to `S` [B, T, k], heaviest first; returns what the next tokens need.

        `rank` [B, T, N] is what experts are ranked by, −∞ where they cannot be chosen; `g` the same as shares that sum
        to 1. These are the logits and normalised scores; with a selection bias or group limits, the biased scores.
        """


class TopK(ScannedChoice):
    """eq:topk. The k experts with the highest scores."""

    def __call__(
        self, given: ChoiceInput, x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], RouterState]:
        p = given.scoring.scores(given.logits)
        if given.scoring.plain:
            return p, top_k_experts(p.detach(), given.top_k), RouterState()
        S = top_k_experts(given.scoring.ranking(p.detach()), given.top_k)
        return p, heaviest_first(p, S), RouterState()

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        kernels.top_k(g, S)
        return RouterState()


@dataclass(frozen=True)
class HardWindow:
    """A bonus β on the logits of every expert in the unbiased top-k of the preceding W tokens of the document.

    The history is detached, and the bonus does not influence it.
    """

    window: int
    beta: float

    def __call__(
        self, given: ChoiceInput, x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], RouterState]:
        bonus, state = self._bonus(as_numpy(given.logits), given.top_k, x, state)
        biased = ChoiceInput(given.logits + as_tensor(bonus, given.logits), given.top_k, given.scoring)
        p, S, _ = TopK()(biased, x, state)
        return p, S, state

    def scan(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: RouterState, progress: float
    ) -> tuple[Float[np.ndarray, "B T N"], Int[np.ndarray, "B T k"], RouterState]:
        bonus, state = self._bonus(logits, k, x, state)
        g, S, _ = TopK().scan(logits + bonus, k, x, state, progress)
        return g, S, state

    def _bonus(
        self, logits: Float[np.ndarray, "B T N"], k: int, x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        position = x.array("position")
        left = state.remembered("left", position, logits.shape[-1], np.int64)
        bonus = np.empty_like(logits)
        kernels.window_bonus(softmax(logits), position, left, k, self.window, self.beta, bonus)
        return bonus, state_of(left=left)


class Unfiltered:
    """The logits of one gate, unchanged."""

    gates = 1

    def __call__(
        self, logits: Float[Tensor, "B T N"], x: RouterInput, state: RouterState
    ) -> tuple[Float[Tensor, "B T N"], RouterState]:
        return logits, RouterState()

    def scan(
        self, logits: Float[np.ndarray, "B T N"], x: RouterInput, state: RouterState
    ) -> tuple[Float[np.ndarray, "B T N"], RouterState]:
        return logits, RouterState()


@dataclass(frozen=True)
class RoutingRule:
    """filter → score → choice → weights → skip, on the logits of any gate.

    `source` names the field of `RouterInput` that the gate reads.
    """

    top_k: int
    filter: Filter = field(default_factory=Unfiltered)
    scoring: Scoring = field(default_factory=Scoring)
    choice: Choice = field(default_factory=TopK)
    source: Literal["h", "attended"] = "h"
    skip: Skip | None = None

    @property
    def standard(self) -> bool:
        """Whether it changes nothing of the scoring's own top-k."""
        return type(self.filter) is Unfiltered and type(self.choice) is TopK and self.skip is None

    def __call__(
        self, logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState | None = None, progress: float = 1.0
    ) -> Routing:
        """Route the tokens of `x`, which continue those that `state` remembers, by the logits of a gate."""
        state = state or RouterState()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self.require_fit(logits.shape[-1] // self.filter.gates)
        _require_rows(logits, x, state)
        if logits.is_cpu and not torch.is_grad_enabled() and self.scoring.plain and self._scannable:
            return self._scan(logits, x, state, progress)
        filtered, filter_state = self.filter(logits, x, state)
        given = ChoiceInput(filtered, self.top_k, self.scoring, progress)
        p, S, choice_state = self.choice(given, x, state)
        w, values = self.scoring.weights(p, S), {**filter_state.values, **choice_state.values}
        if self.skip is not None:
            w, skip_state = self.skip(S, w, x, state, p.shape[-1])
            values |= skip_state.values
        return Routing(self.scoring.normalised(p), S, w, RouterState(values))

    def require_fit(self, n_experts: int) -> None:
        """Refuse to choose from fewer experts than a token needs."""
        require(1 <= self.top_k <= n_experts, "top_k", self.top_k, f"1 … {n_experts} (the number of experts)")
        if not self.scoring.plain:
            self.scoring.require_fit(n_experts, self.top_k)

    @property
    def _scannable(self) -> bool:
        return hasattr(self.filter, "scan") and hasattr(self.choice, "scan") and self.skip is None

    def _scan(self, logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState, progress: float) -> Routing:
        """The same in compiled loops."""
        filtered, filter_state = self.filter.scan(as_numpy(logits), x, state)  # type: ignore[attr-defined]
        g, S, choice_state = self.choice.scan(filtered, self.top_k, x, state, progress)  # type: ignore[attr-defined]
        w = np.empty(S.shape, g.dtype)
        kernels.combine(g, S, w)
        values = {**filter_state.values, **choice_state.values}
        return Routing(torch.from_numpy(g), torch.from_numpy(S), torch.from_numpy(w), RouterState(values))


def _require_rows(logits: Float[Tensor, "B T M"], x: RouterInput, state: RouterState) -> None:
    """Refuse shapes that do not fit: compiled loops do not check where they write."""
    B, T = logits.shape[:2]
    for name in ("tokens", "position", "doc", "boundary"):
        value: Tensor | None = getattr(x, name)
        if value is not None and value.shape != (B, T):
            raise ConfigError(f"RouterInput: got {name} of shape {list(value.shape)}, expected {[B, T]} as the logits.")
    if x.resident is not None and len(x.resident) != B:
        raise ConfigError(f"RouterInput: got resident of {len(x.resident)} rows, expected {B} as the logits.")
    for name, value in state.values.items():
        if len(value) != B:
            raise ConfigError(f"RouterState: got '{name}' of {len(value)} rows, expected {B} as the logits.")
