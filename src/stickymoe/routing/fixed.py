"""Choices that are fixed before training: a gate only sets the weights of the chosen experts.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stickymoe.routing import kernels
from stickymoe.routing.rules import RouterInput, RouterState, ScannedChoice, state_of

_NO_BOUNDARIES = np.empty((0, 0), np.bool_)


_LAYERS = 1 << 10
_KEYS = 1 << 23  # the kernels shift a key by 40 bits


def hash_key(layer: int, salt: int) -> int:
    """The number that makes the hash of a layer differ from those of other layers and of other salts."""
    return (layer + salt * _LAYERS) % _KEYS


@dataclass(frozen=True)
class Hashed(ScannedChoice):
    """S_t = hash(token, key): Roller et al. With k=1 the gate has no influence; with k>1 it sets the weights."""

    key: int

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        kernels.hashed(x.array("tokens"), g, self.key, S)
        return RouterState()


@dataclass(frozen=True)
class Trajectory(ScannedChoice):
    """S_t = hash(span of t), the same in all layers: nothing is loaded inside a span.

    A span is a document, or W tokens of it if `window` is not 0, or a sentence of it if `sentence`. Its key is its
    first token, the only one that is known when the span begins.
    """

    window: int
    sentence: bool

    def choose(self, rank: Any, g: Any, x: RouterInput, state: RouterState, progress: float, S: Any) -> RouterState:
        tokens, position = x.array("tokens"), x.array("position")
        boundaries = x.array("boundary") if self.sentence else _NO_BOUNDARIES
        keys = np.empty_like(position)
        key = state.remembered("key", position, 1, keys.dtype)
        kernels.span_keys(tokens, position, boundaries, self.window, key, keys)
        kernels.hashed(keys, g, 0, S)
        return state_of(key=key)
