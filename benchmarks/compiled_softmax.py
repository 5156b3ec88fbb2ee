"""A rival of torch's softmax in the head: numba loops that turn a row of logits into its loss and its gradient.

It reads a row three times while the row is in cache: for the maximum, the exponentials with their sum, and the scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange, set_num_threads

from stickymoe.runtime.kernels import _exp

_LOOSE = {"reassoc", "contract", "nsz", "nnan", "ninf"}  # the sum and the maximum as vectors


@njit(nogil=True, error_model="numpy", fastmath=_LOOSE)
def _row(row: Any, target: int) -> float:
    most = row[0]
    for j in range(len(row)):
        most = max(most, row[j])
    at_target = row[target]
    total = np.float32(0)
    for j in range(len(row)):
        row[j] = _exp(row[j] - most)
        total += row[j]
    scale = np.float32(1) / total
    for j in range(len(row)):
        row[j] *= scale
    row[target] -= np.float32(1)
    return math.log(total) + most - at_target


@njit(nogil=True, parallel=True)
def _rows(logits: Any, targets: Any, nats: Any) -> None:
    for i in prange(len(logits)):
        nats[i] = _row(logits[i], targets[i])


@njit(nogil=True)
def _rows_alone(logits: Any, targets: Any, nats: Any) -> None:
    for i in range(len(logits)):
        nats[i] = _row(logits[i], targets[i])


def losses_and_errors(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_losses_and_errors` of models/head.py."""
    nats = torch.empty(len(logits), 1)
    threads = torch.get_num_threads()
    if threads > 1 and get_num_threads() != threads:
        set_num_threads(threads)
    loop = _rows if threads > 1 else _rows_alone
    loop(logits.numpy(), targets[:, 0].numpy(), nats[:, 0].numpy())
    return nats, logits
