"""Experts that share a cache slot: the family of an expert, and how long its members stay one expert."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Families:
    """Expert i is of the family i mod C, one family to a slot.

    Members begin as one expert and grow apart: each uses W̃ = τ·mean of the family's W + (1−τ)·W, where τ falls from 1
    to 0 over the share `apart` of training. With `apart` 0 they are different from the start.
    """

    slots: int
    apart: float = 0.0

    def tie(self, done: float) -> float:
        """τ when the share `done` of training is over."""
        return max(0.0, 1 - done / self.apart) if self.apart else 0.0
