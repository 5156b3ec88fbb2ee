"""Experts that share a cache slot: which ones, and how far their training is tied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TiedExperts:
    """Expert i uses slot i mod C; the experts of a slot are tied.

    They start with the same weights. The fraction `shared_gradient` of each expert's gradient is replaced by the mean
    over its slot: with 1 the experts of a slot stay equal, with less they diverge. Before the fraction `untie_after`
    of training has passed, they stay equal whatever `shared_gradient` is.
    """

    capacity: int
    shared_gradient: float
    untie_after: float = 0.0

    def shared_at(self, progress: float) -> float:
        """The fraction of the gradient that is shared after the fraction `progress` of training."""
        return 1.0 if progress < self.untie_after else self.shared_gradient
