"""Between tensors and the arrays that compiled loops work on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor


def as_numpy(x: Shaped[Tensor, ...]) -> Shaped[np.ndarray, ...]:
    """The tensor's own memory where that is possible, for reading."""
    return np.ascontiguousarray(x.numpy(force=True))


def as_tensor(array: Shaped[np.ndarray, ...], like: Tensor) -> Shaped[Tensor, ...]:
    """The array's own memory on the CPU, a copy on another device."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def remembered(state: dict[str, Tensor], name: str, logits: Tensor, dtype: Any = None) -> Shaped[np.ndarray, "B N"]:
    """A copy of what `state` knows under that name, for a kernel to go on with; zeros at first."""
    if name in state:
        return state[name].cpu().numpy().copy()
    B, _, N = logits.shape
    return np.zeros((B, N), dtype or torch.zeros((), dtype=logits.dtype).numpy().dtype)
