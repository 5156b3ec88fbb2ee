"""Convert between tensors and the arrays that compiled loops use."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from stickymoe.routing import kernels


def as_numpy(x: Shaped[Tensor, ...]) -> Shaped[np.ndarray, ...]:
    """The tensor as an array for reading; it shares memory if possible."""
    return np.ascontiguousarray(x.numpy(force=True))


def as_tensor(array: Shaped[np.ndarray, ...], like: Tensor) -> Shaped[Tensor, ...]:
    """The array as a tensor: shared memory on the CPU, a copy on another device."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def softmax(logits: Float[np.ndarray, "B T N"]) -> Float[np.ndarray, "B T N"]:
    """eq:gate, without gradient."""
    g = np.empty_like(logits)
    kernels.softmax(logits, g)
    return g
