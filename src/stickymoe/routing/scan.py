"""Between tensors and the arrays that compiled loops work on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.routing import kernels


def as_numpy(x: Shaped[Tensor, ...]) -> Shaped[np.ndarray, ...]:
    """The tensor's own memory where that is possible, for reading."""
    return np.ascontiguousarray(x.numpy(force=True))


def as_tensor(array: Shaped[np.ndarray, ...], like: Tensor) -> Shaped[Tensor, ...]:
    """The array's own memory on the CPU, a copy on another device."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def remembered(
    state: dict[str, NDArray[Any]], name: str, position: Int[np.ndarray, "B T"], width: int, dtype: Any
) -> Shaped[np.ndarray, "B width"]:
    """A copy of what `state` knows under that name, for a kernel to go on with; zeros where a text begins."""
    if name in state:
        if state[name].shape[1] != width:
            raise ConfigError(f"Router: got a state '{name}' of width {state[name].shape[1]}, expected {width}.")
        return state[name].copy()
    if position[:, 0].any():
        raise ConfigError(
            f"Router: got tokens from position {position[:, 0].max()} on without the state of those before them; "
            "pass it, or begin at 0."
        )
    return np.zeros((len(position), width), dtype)


def softmax(logits: Float[np.ndarray, "B T N"]) -> Float[np.ndarray, "B T N"]:
    """eq:gate, without gradient."""
    g = np.empty_like(logits)
    kernels.softmax(logits, g)
    return g
