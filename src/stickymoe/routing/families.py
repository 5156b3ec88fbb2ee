"""Experts that share a cache slot: the family of an expert, and how much its members learn in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Families:
    """Expert i is of the family i mod C, one family to a slot.

    Members begin as one expert, and of every gradient the share `kin` goes to all of the family alike: with 1 they stay
    one, with less they grow apart.
    """

    capacity: int
    kin: float
