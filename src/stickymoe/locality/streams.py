"""What each cache of a device is asked, in which order: route tables become streams of requests.

A cache serves one layer, the layers that share their weights, or all layers (`pool`). An entry of a cache is a weight
tensor: where layers share, the same expert is the same entry. Streams are read in blocks, whatever their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, Shaped, UInt

from stickymoe.errors import ConfigError, DataError, require
from stickymoe.locality.kernels import ASK, FETCH, SKIP, repeated
from stickymoe.locality.table import BLOCK, RouteTable, blocks, extremes, release


class Block(NamedTuple):
    """A stretch of a stream: see `kernels`."""

    steps: UInt[np.ndarray, "n width"]
    kind: UInt[np.ndarray, " n"]
    cold: Bool[np.ndarray, " n"]


@dataclass(frozen=True)
class Access:
    """How a device goes through a table.

    order: "layer" takes a sequence (or document) through one layer after another, "decode" takes token by token
        through the layers. It matters only where layers share a cache. Either way a token's experts at a layer are
        one request; the union over tokens that a prefill asks for is not replayed
    pool: one cache for all layers
    share_block: layers that share their weights, in blocks of K; `None` for all of them (full sharing, and the
        universal pool whose table already numbers every expert)
    warm: keep caches over sequences and documents instead of emptying them
    top1: ask for the heaviest expert only, as the paper does
    prefetch: load the previous token's set of the layer ahead of each request, or a predictor's sets
    """

    order: str = "layer"
    pool: bool = False
    share_block: int | None = 1
    warm: bool = False
    top1: bool = False
    prefetch: str | Integer[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        require(self.order in ("layer", "decode"), "order", self.order, "layer or decode")
        ok = self.share_block is None or self.share_block >= 1
        require(ok, "share_block", self.share_block, "a whole number of layers ≥ 1, full or universal")
        if isinstance(self.prefetch, str):
            require(self.prefetch == "previous", "prefetch", self.prefetch, "previous, or a predictor's sets")


@dataclass(frozen=True)
class Stream:
    """The requests to one cache: `S` [layers, tokens, k], where layer i uses entries `offset[i]` + expert."""

    S: Integer[np.ndarray, "layers tokens k"]
    n_entries: int
    offset: Integer[np.ndarray, " layers"]
    length: int  # tokens of a sequence
    mask: Bool[np.ndarray, " tokens"] | None
    doc: Integer[np.ndarray, " tokens"] | None
    access: Access
    ahead: Integer[np.ndarray, "layers tokens p"] | None = None  # a predictor's sets

    @property
    def k(self) -> int:
        return int(self.S.shape[2])

    @property
    def ahead_k(self) -> int:
        """Entries of a prefetch."""
        return self.k if self.ahead is None else int(self.ahead.shape[2])

    @property
    def n_tokens(self) -> int:
        return int(self.S.shape[1])

    @cached_property
    def real_tokens(self) -> int:
        return sum(int(self._mask(span).sum()) for span in blocks(self.n_tokens, BLOCK))

    @property
    def accesses(self) -> int:
        return self.real_tokens * len(self.S) * self.k

    def blocks(self) -> Iterator[Block]:
        first = True
        for layers, span in self._pieces():
            block = self._block(layers, span)
            block.cold[0] |= first
            first = False
            if repeated(block.steps, block.kind, self.k, self.ahead_k):
                raise DataError("requests: got an expert twice in one request, expected k different ones.")
            yield block
            release(self.S)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Layers and tokens of each block."""
        n_layers = len(self.S)
        if n_layers > 1 and self.access.order == "layer":
            borders = [*self._borders(), self.n_tokens]
            for start, stop in pairwise(borders):
                for layer in range(n_layers):
                    for span in blocks(stop - start, BLOCK // self.k + 1):
                        yield slice(layer, layer + 1), slice(start + span.start, start + span.stop)
        else:
            for span in blocks(self.n_tokens, BLOCK // (n_layers * self.k) + 1):
                yield slice(0, n_layers), span

    def _borders(self) -> list[int]:
        """Where sequences and documents begin."""
        found: list[int] = []
        for span in blocks(self.n_tokens, BLOCK):
            found += (np.flatnonzero(self._starts(span)) + span.start).tolist()
        return found

    def _starts(self, span: slice) -> Bool[np.ndarray, " n"]:
        starts = np.zeros(span.stop - span.start, np.bool_)
        starts[-span.start % self.length :: self.length] = True
        if self.doc is not None:
            before = max(span.start - 1, 0)
            starts[span.start == 0 :] |= np.diff(self.doc[before : span.stop]) != 0
        return starts

    def _mask(self, span: slice) -> Bool[np.ndarray, " n"]:
        if self.mask is None:
            return np.ones(span.stop - span.start, np.bool_)
        mask = np.array(self.mask[span])
        release(self.mask)
        return mask

    def _block(self, layers: slice, span: slice) -> Block:
        """The steps of some tokens through some layers, layers innermost."""
        steps = self._entries(self.S[layers, span], layers)
        mask, starts = self._mask(span), self._starts(span)
        kind = np.repeat(mask[:, None], steps.shape[1], axis=1).view(np.uint8)  # SKIP or ASK
        cold = np.zeros(kind.shape, np.bool_)
        if layers.start == 0 and not self.access.warm:
            cold[:, 0] = starts
        if self.access.prefetch is None:
            return Block(steps.reshape(-1, self.k), kind.reshape(-1), cold.reshape(-1))
        if self.ahead is None:
            before = np.maximum(np.arange(span.start, span.stop) - 1, 0)
            expected = self._entries(self.S[layers, before], layers)
            known = ~starts & (True if self.mask is None else self.mask[before])
        else:
            expected, known = self._entries(self.ahead[layers, span], layers), np.ones_like(mask)
        fetch = np.where((kind == ASK) & known[:, None], np.uint8(FETCH), np.uint8(SKIP))
        return _interleave(expected, fetch, steps, kind, cold)

    def _entries(
        self, experts: Integer[np.ndarray, "layers n width"], layers: slice
    ) -> UInt[np.ndarray, "n layers width"]:
        dtype = np.uint8 if self.n_entries <= 1 << 8 else np.uint16 if self.n_entries <= 1 << 16 else np.uint32
        steps: UInt[np.ndarray, "n layers width"] = experts.transpose(1, 0, 2).astype(dtype, order="C")
        if self.offset.any():
            steps += self.offset[layers, None].astype(dtype)
        return steps


def _interleave(
    expected: UInt[np.ndarray, "n layers p"],
    fetch: UInt[np.ndarray, "n layers"],
    steps: UInt[np.ndarray, "n layers k"],
    kind: UInt[np.ndarray, "n layers"],
    cold: Bool[np.ndarray, "n layers"],
) -> Block:
    """Every step after the one that fetches what is expected of it."""
    k, p = steps.shape[2], expected.shape[2]
    both = np.zeros((*kind.shape, 2, max(k, p)), steps.dtype)
    both[:, :, 0, :p] = expected
    both[:, :, 1, :k] = steps
    kinds = np.stack([fetch, kind], axis=2)
    colds = np.stack([cold, np.zeros_like(cold)], axis=2)
    return Block(both.reshape(-1, max(k, p)), kinds.reshape(-1), colds.reshape(-1))


def streams(table: RouteTable, access: Access) -> list[Stream]:
    """One stream per cache."""
    L, _, T, _ = table.S.shape
    share = L if access.share_block is None else access.share_block
    require(share <= L, "share_block", share, f"at most the {L} layers of the trace")
    S = _flat(table.S[..., :1] if access.top1 else table.S)
    ahead = _predicted(access, table)
    span = L if access.pool else share
    found = []
    for first in range(0, L, span):
        layers = slice(first, min(first + span, L))
        offset = np.arange(layers.stop - first) // share * table.n_experts
        found.append(
            Stream(
                S=S[layers],
                n_entries=int(offset[-1]) + table.n_experts,
                offset=offset,
                length=T,
                mask=table.mask.reshape(-1),
                doc=None if table.doc is None else table.doc.reshape(-1),
                access=access,
                ahead=None if ahead is None else ahead[layers],
            )
        )
    return found


def _predicted(access: Access, table: RouteTable) -> Integer[np.ndarray, "L tokens p"] | None:
    sets = access.prefetch
    if not isinstance(sets, np.ndarray):
        return None
    L, B, T, _ = table.S.shape
    if sets.ndim != 4 or sets.shape[:3] != (L, B, T):
        raise ConfigError(f"prefetch: got sets of shape {sets.shape}, expected [{L}, {B}, {T}, …] as in the trace.")
    if sets.size and not 0 <= extremes(sets)[0] <= extremes(sets)[1] < table.n_experts:
        raise ConfigError(f"prefetch: got experts {extremes(sets)}, expected 0 … {table.n_experts - 1}.")
    return _flat(sets)


def _flat(array: Shaped[np.ndarray, "L B T width"]) -> Shaped[np.ndarray, "L tokens width"]:
    """Sequences one after another; a view wherever memory allows."""
    return array.reshape(array.shape[0], -1, array.shape[3])
