"""Which rows of tables in slow memory a text reads: a row is an object of a cache, as an expert is.

A row is addressed by the last n tokens of the text. Tables that are addressed alike share their rows: their parts lie
next to each other and are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class RowKey:
    """How rows are addressed.

    n: tokens of an address. With n = 1, row i is that of token i; otherwise the tokens are hashed, and the row after
        the others is that of texts with fewer than n tokens
    salt: of the hash
    rows: different values of the hash, or tokens of the vocabulary
    nbytes: bytes of a row, in all tables that share it
    """

    n: int
    salt: int
    rows: int
    nbytes: int

    @property
    def n_rows(self) -> int:
        """All rows, with that of short texts."""
        return self.rows + (self.n > 1)


def key_fields(keys: Sequence[RowKey]) -> Int64[np.ndarray, "keys 3"]:
    """What `row_kernels.find_rows` reads of keys."""
    return np.array([(key.n, key.salt, key.rows) for key in keys], np.int64).reshape(-1, 3)


class SizeClass(NamedTuple):
    """Rows of one size, which share a cache: which keys they have, and for how many rows there is room."""

    nbytes: int
    keys: list[int]
    capacity: int


def size_classes(keys: Sequence[RowKey], tokens: int) -> list[SizeClass]:
    """Caches with room for the rows of so many tokens, and for no more rows than there are."""
    found = []
    for size in sorted({key.nbytes for key in keys}):
        same = [i for i, key in enumerate(keys) if key.nbytes == size]
        most = sum(keys[i].n_rows for i in same)
        found.append(SizeClass(size, same, min(tokens * len(same), most)))
    return found


def first_numbers(keys: Sequence[RowKey]) -> list[int]:
    """Rows of different keys are numbered one key after another: the number of the first row of each."""
    return [sum(other.n_rows for other in keys[:i]) for i in range(len(keys))]
