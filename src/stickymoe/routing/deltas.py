"""Experts that differ from a resident base by a small part of their own: how many bases, and how small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deltas:
    """Expert i is the base i mod C plus a difference: a product of rank r for each of its matrices, and its biases.

    The C bases stay in fast memory, so a load reads only the difference.
    """

    bases: int
    rank: int
