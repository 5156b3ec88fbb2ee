"""The Pareto front: the one place that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def dominates(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether a point is at least as low in every coordinate and lower in one."""
    pairs = list(zip(ours, theirs, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def pareto_front(items: Sequence[T], beats: Callable[[T, T], bool]) -> list[T]:
    """The items that no other item beats, in the given order; `beats(a, b)` says whether a is better than b."""
    return [item for item in items if not any(beats(other, item) for other in items if other is not item)]
