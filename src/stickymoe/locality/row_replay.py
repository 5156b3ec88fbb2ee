"""Replay the rows that a text reads from tables in slow memory, by the code that replays its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from stickymoe.errors import DataError
from stickymoe.locality.cache import CacheStats
from stickymoe.locality.replay import replay_stream
from stickymoe.locality.row_kernels import find_rows
from stickymoe.locality.rows import SizeClass, first_numbers, key_fields, size_classes
from stickymoe.locality.streams import Access, Stream, forward_passes
from stickymoe.locality.study import finite
from stickymoe.locality.table import RouteTable

ROW_POLICIES = ("lru", "sieve")  # the others need a look at every slot for each row that is missing
SHARES = (0.01, 0.05, 0.2)  # of all rows


@dataclass(frozen=True)
class RowSimulation:
    """Hits and misses of the caches of rows, one for each size of rows. `n_tokens` of the trace are real."""

    policy: str
    caches: tuple[tuple[SizeClass, CacheStats], ...]
    n_tokens: int

    @property
    def memory(self) -> int:
        """Bytes of all slots."""
        return sum(size.nbytes * size.capacity for size, _ in self.caches)

    @property
    def hits(self) -> int:
        return sum(stats.hits for _, stats in self.caches)

    @property
    def misses(self) -> int:
        return sum(stats.misses for _, stats in self.caches)

    @property
    def hit_rate(self) -> float:
        requested = self.hits + self.misses
        return self.hits / requested if requested else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        values = {name: finite(getattr(self, name)) for name in ("hit_rate", "bytes_per_token")}
        return {"policy": self.policy, "memory": self.memory, "hits": self.hits, "misses": self.misses, **values}

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the rows that are read for a token. A device that reads whole blocks reads more."""
        read = sum(size.nbytes * stats.misses for size, stats in self.caches)
        return read / self.n_tokens if self.n_tokens else float("nan")


def rows_of(table: RouteTable) -> Int64[np.ndarray, "tokens keys"]:
    """The rows that every token of a table reads, by their numbers. N-grams do not cross the borders of documents."""
    if table.tokens is None or not table.row_keys:
        raise DataError("The route table has no token ids or no row keys: record it again to replay its rows.")
    keys, (B, T) = table.row_keys, table.mask.shape
    token = np.arange(B * T)
    position = token - np.maximum.accumulate(np.where(table.starts.reshape(-1), token, 0))
    found = np.empty((B * T, len(keys)), np.int64)
    find_rows(table.tokens.reshape(-1).astype(np.int64), position, 0, key_fields(keys), found)
    found += np.array(first_numbers(keys))
    return found


def simulate_rows(
    table: RouteTable, *, tokens: int, policy: str = "lru", access: Access | None = None
) -> RowSimulation:
    """Replay the rows of a table, with room for those of so many tokens.

    The token stream decides the rows, so nothing but the token ids and the keys must be recorded.
    """
    access = access or Access(order="decode")
    rows, passes = rows_of(table), forward_passes(table, access)
    found = []
    for size in size_classes(table.row_keys, tokens):
        used, entries = np.unique(rows[:, size.keys], return_inverse=True)  # the order of the rows stays
        stream = Stream(
            S=entries.reshape(1, len(rows), -1),
            n_experts=len(used),
            n_entries=len(used),
            offset=np.zeros(1, np.int64),
            length=max(table.mask.shape[1], 1),
            mask=table.mask.reshape(-1),
            doc=None if table.doc is None else table.doc.reshape(-1),
            access=access,
            passes=passes,
        )
        found.append((size, replay_stream(stream, policy=policy, capacity=size.capacity)))
    return RowSimulation(policy, tuple(found), int(table.mask.sum()))


def study_rows(table: RouteTable, policies: Sequence[str], access: Access) -> dict[float, list[RowSimulation]]:
    """Simulations of all `policies`, by the share of rows for which there is memory. Hot rows stay between texts."""
    access = replace(access, warm=True, prefetch=None, on_miss="load")
    tokens = {share: tokens_of_share(table, share) for share in SHARES}
    return {
        share: [simulate_rows(table, tokens=n, policy=name, access=access) for name in policies]
        for share, n in tokens.items()
    }


def tokens_of_share(table: RouteTable, share: float) -> int:
    """Tokens whose rows take a share of all rows, at least one."""
    slots = sum(key.nbytes for key in table.row_keys)
    total = sum(key.nbytes * key.n_rows for key in table.row_keys)
    return max(int(share * total / slots), 1)
