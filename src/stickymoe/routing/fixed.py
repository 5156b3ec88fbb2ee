"""Choices that are made before training begins: no gate decides who is used, only how the chosen are weighed.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.routing import kernels
from stickymoe.routing.routers import RouterInput, State
from stickymoe.routing.scan import as_numpy, as_tensor


def _weigh(
    logits: Float[Tensor, "B T N"], keys: Int[np.ndarray, "B T"], k: int, salt: int = 0
) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"]]:
    """g = softmax(ℓ), and k different experts for every key, each as likely as any other, ordered by g."""
    g = logits.softmax(-1)
    S = np.empty((*keys.shape, k), np.int64)
    kernels.hashed(keys, as_numpy(g), salt, S)
    return g, as_tensor(S, g)


@dataclass(frozen=True)
class Hashed:
    """S_t = hash(token, layer): Roller et al. With k=1 the gate has no say; with more it weighs the chosen."""

    layer: int

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        return *_weigh(logits, as_numpy(x.tokens), k, self.layer), {}


@dataclass(frozen=True)
class Trajectory:
    """S_t = hash(t's span), the same in all layers: nothing is loaded inside a span.

    A span is a document, or shorter: W tokens of it if `window` is not 0, a sentence of it if `sentence`. It is known
    by its first token, the one thing known of it in time.
    """

    window: int
    sentence: bool

    def __call__(
        self, logits: Float[Tensor, "B T N"], k: int, x: RouterInput, state: State
    ) -> tuple[Float[Tensor, "B T N"], Int[Tensor, "B T k"], State]:
        position = as_numpy(x.position)
        starts = position % self.window == 0 if self.window else position == 0
        if self.sentence:
            if x.boundary is None:
                raise ConfigError("variant.sentence: this text comes without sentence borders, pass boundary.")
            starts = starts | as_numpy(x.boundary)
        keys = np.empty_like(position)
        before = as_numpy(state["key"]) if "key" in state else keys[:, :1]  # at its start a text has a span's start
        kernels.carried(as_numpy(x.tokens), starts, before, keys)
        return *_weigh(logits, keys, k), {"key": as_tensor(keys[:, -1:].copy(), logits)}
