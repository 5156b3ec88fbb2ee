"""The state of routing rules while a model generates. It lives in the KV cache, and follows what happens to it.

B sequences, N experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.routing.rules import RouterInput, RouterState, RoutingRule

STEPS_KEPT = 64  # forward passes that a cache can be cropped back to


@dataclass
class Step:
    """What one forward pass gave to the rules, by gate; `start` is the length of the cache before it."""

    start: int
    mask: Bool[Tensor, "B T"]
    seen: Int[Tensor, " B"]
    states: dict[str, RouterState]
    given: dict[str, tuple[RoutingRule, Float[Tensor, "B T N"], RouterInput]]

    @classmethod
    def after(cls, memory: RouterMemory, mask: Bool[Tensor, "B T"]) -> Step:
        return cls(memory.length, mask, memory.seen, dict(memory.states), {})

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.mask, self.seen = self.mask[rows], self.seen[rows]
        self.states = {name: state.select(rows) for name, state in self.states.items()}
        self.given = {
            name: (rule, logits[rows], _rows(x, logits[rows], rows)) for name, (rule, logits, x) in self.given.items()
        }

    def crop(self, n: int) -> dict[str, RouterState]:
        """Keep the first `n` tokens of the pass; returns the states after them."""
        self.mask = self.mask[:, :n]
        self.given = {name: (rule, z[:, :n], _tokens(x, z[:, :n], n)) for name, (rule, z, x) in self.given.items()}
        with torch.no_grad():
            return {name: rule(z, x, self.states.get(name)).state for name, (rule, z, x) in self.given.items()}


def _rows(x: RouterInput, h: Tensor, rows: Tensor) -> RouterInput:
    parts = {name: _or_none(getattr(x, name), rows) for name in ("tokens", "position", "doc")}
    return replace(x, h=h, **parts)


def _tokens(x: RouterInput, h: Tensor, n: int) -> RouterInput:
    parts = {name: _or_none(getattr(x, name), (slice(None), slice(None, n))) for name in ("tokens", "position", "doc")}
    return replace(x, h=h, **parts)


def _or_none(value: Tensor | None, index: Any) -> Tensor | None:
    return None if value is None else value[index]


@dataclass
class RouterMemory:
    """The state of every rule after `length` tokens; `seen` are the real ones of each row."""

    length: int
    seen: Int[Tensor, " B"]
    owner: Any = None  # whose rules these are
    states: dict[str, RouterState] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    padded: Bool[Tensor, ...] = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))  # rows that end so

    def add(self, step: Step, states: Mapping[str, RouterState]) -> None:
        self.steps.append(step)
        self._end(step, states)

    def _end(self, step: Step, states: Mapping[str, RouterState]) -> None:
        """Be in the state after a step."""
        self.length = step.start + step.mask.shape[1]
        self.seen, self.states = step.seen + step.mask.sum(1), dict(states)
        self.padded = ~step.mask[:, -1] & (self.seen > 0)

    def require_continued(self, mask: Bool[Tensor, "B T"]) -> None:
        """Refuse padding between the real tokens of a row: a rule would take it for tokens."""
        real = (mask.cumsum(1) > 0) | (self.seen > 0)[:, None]
        holes = mask[:, 1:] & ~mask[:, :-1] & real[:, :-1]
        if bool(holes.any()) or bool((self.padded & mask.any(1)).any()):
            raise ConfigError(
                "attach: padding between real tokens is not supported with a variant that replaces the choice of "
                "experts; pad on the left."
            )

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.cpu()
        self.seen = self.seen[rows]
        self.padded = self.padded[rows] if self.padded.ndim else self.padded
        self.states = {name: state.select(rows) for name, state in self.states.items()}
        for step in self.steps:
            step.select(rows)

    def crop(self, length: int) -> None:
        while self.length > length and self.steps:
            step = self.steps.pop()
            self.length, self.seen, self.states = step.start, step.seen, step.states
            before = self.steps[-1].mask[:, -1] if self.steps else torch.ones((), dtype=torch.bool)
            self.padded = ~before & (self.seen > 0)
            if step.start < length:
                self.add(step, step.crop(length - step.start))


class _Remembering:
    """A KV cache with the state of the rules; everything that changes its rows or length changes the state too."""

    router_memory: RouterMemory | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.router_memory is not None:
            self._select(torch.arange(len(self.router_memory.seen)).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)  # type: ignore[misc]
        if self.router_memory is not None:
            self.router_memory.crop(int(self.get_seq_length()))  # type: ignore[attr-defined]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.router_memory = None

    def _select(self, rows: Tensor) -> None:
        if self.router_memory is not None:
            self.router_memory.select(rows)


@cache
def _remembering(cls: type) -> type:
    return type(cls.__name__, (_Remembering, cls), {})


def memory_of(past: Any, length: int, batch: int, owner: Any) -> RouterMemory:
    """The state that a KV cache holds; refused if it was filled without the rule."""
    memory: RouterMemory | None = getattr(past, "router_memory", None)
    if memory is None and length == 0:
        return RouterMemory(0, torch.zeros(batch, dtype=torch.long), owner)
    if memory is None or memory.length != length or memory.owner is not owner:
        known = 0 if memory is None or memory.owner is not owner else memory.length
        raise ConfigError(
            f"attach: the KV cache holds {length} tokens, but the routing rule has seen {known} of them; start with an "
            "empty cache after attaching."
        )
    return memory


def remember(past: Any, memory: RouterMemory) -> None:
    """Put the state into a KV cache."""
    if past is None or not hasattr(past, "get_seq_length"):
        return
    if not isinstance(past, _Remembering):
        past.__class__ = _remembering(type(past))  # type: ignore[arg-type]
    past.router_memory = memory
