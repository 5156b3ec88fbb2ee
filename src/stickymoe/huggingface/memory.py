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
from jaxtyping import Float, Int
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.routing.rules import RouterInput, RouterState, RoutingRule

STEPS_KEPT = 64  # forward passes that a cache can be cropped back to


@dataclass
class Step:
    """What one forward pass gave to the rules, by layer; `start` is the length of the cache before it."""

    start: int
    seen: Int[Tensor, " B"]
    states: dict[str, RouterState]
    given: dict[str, tuple[RoutingRule, Float[Tensor, "B T N"], RouterInput]]

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.seen = self.seen[rows]
        self.states = {name: state.select(rows) for name, state in self.states.items()}
        self.given = {
            name: (rule, logits[rows], _rows(x, logits[rows], rows)) for name, (rule, logits, x) in self.given.items()
        }

    def first(self, n: int) -> tuple[Int[Tensor, " B"], dict[str, RouterState]]:
        """The real tokens, and the states, after the first `n` tokens of the pass."""
        states, seen = {}, self.seen
        with torch.no_grad():
            for name, (rule, logits, x) in self.given.items():
                cut = _tokens(x, logits[:, :n], n)
                states[name] = rule(logits[:, :n], cut, self.states.get(name)).state
                assert cut.position is not None
                seen = cut.position[:, -1] + 1
        return seen, states


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
    states: dict[str, RouterState] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    def add(self, step: Step, n_tokens: int, seen: Tensor, states: Mapping[str, RouterState]) -> None:
        self.steps.append(step)
        self.length, self.seen, self.states = step.start + n_tokens, seen, dict(states)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.cpu()
        self.seen = self.seen[rows]
        self.states = {name: state.select(rows) for name, state in self.states.items()}
        for step in self.steps:
            step.select(rows)

    def crop(self, length: int) -> None:
        while self.length > length and self.steps:
            step = self.steps.pop()
            self.length, self.seen, self.states = step.start, step.seen, step.states
            if step.start < length:
                self.seen, self.states = step.first(length - step.start)
                self.length = length
                step.given = {name: (r, z[:, : length - step.start], x) for name, (r, z, x) in step.given.items()}
                self.steps.append(step)


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


def memory_of(past: Any, length: int, batch: int) -> RouterMemory:
    """The state that a KV cache holds; refused if it was filled without the rule."""
    memory: RouterMemory | None = getattr(past, "router_memory", None)
    if memory is None and length == 0:
        return RouterMemory(0, torch.zeros(batch, dtype=torch.long))
    if memory is None or memory.length != length:
        known = 0 if memory is None else memory.length
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
