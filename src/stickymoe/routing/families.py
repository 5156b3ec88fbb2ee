"""Experts that share a cache slot: the family of an expert, and how much its members learn in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Families:
    """Expert i is of the family i mod C, one family to a slot.

    Members begin as one expert, and of every gradient the share `kin` goes to all of the family alike: with 1 they stay
    one, with less they grow apart. Until the share `apart` of training is over they stay one whatever `kin` is.
    """

    capacity: int
    kin: float
    apart: float = 0.0

    def in_common(self, done: float) -> float:
        """The share that goes to all of a family when the share `done` of training is over."""
        return 1.0 if done < self.apart else self.kin
