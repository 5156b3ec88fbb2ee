"""Choices that are made before training begins: no gate decides who is used, only how the chosen are weighed.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stickymoe.errors import ConfigError
from stickymoe.routing import kernels
from stickymoe.routing.routers import RouterInput, Scanned, State
from stickymoe.routing.scan import as_numpy, remembered

_NONE = np.empty((0, 0), np.bool_)


@dataclass(frozen=True)
class Hashed(Scanned):
    """S_t = hash(token, layer): Roller et al. With k=1 the gate has no say; with more it weighs the chosen."""

    layer: int

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        kernels.hashed(x.tokens, g, self.layer, S)
        return {}


@dataclass(frozen=True)
class Trajectory(Scanned):
    """S_t = hash(t's span), the same in all layers: nothing is loaded inside a span.

    A span is a document, or shorter: W tokens of it if `window` is not 0, a sentence of it if `sentence`. It is known
    by its first token, the one thing known of it in time.
    """

    window: int
    sentence: bool

    def _scan(self, logits: Any, g: Any, x: RouterInput, state: State, S: Any) -> State:
        borders = _NONE
        if self.sentence:
            if x.boundary is None:
                raise ConfigError("variant.sentence: this text comes without sentence borders, pass boundary.")
            borders = as_numpy(x.boundary)
        keys = np.empty_like(x.position)
        key = remembered(state, "key", x.position, 1, keys.dtype)
        kernels.carried(x.tokens, x.position, borders, self.window, key, keys)
        kernels.hashed(keys, g, 0, S)
        return {"key": key}
