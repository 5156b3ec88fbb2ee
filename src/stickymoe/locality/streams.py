"""From a route table to the requests that each cache of a device gets, in order.

A cache serves one layer, the layers that share their weights, or all layers (`pool`). An entry of a cache is a set of
expert weights: where layers share weights, the same expert is the same entry. A request is what one forward pass asks
of one layer: the experts of a token, heaviest first, or the union over the tokens of a prompt or batch.

Streams are read in blocks, whatever their length. L layers, B sequences, T tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped, UInt

from stickymoe.errors import ConfigError, DataError, require
from stickymoe.locality.kernels import repeated, write_requests
from stickymoe.locality.policies import OnMiss, require_on_miss
from stickymoe.locality.serving import ASK, PREFETCH, SKIP
from stickymoe.locality.table import BLOCK, RouteTable, blocks, extremes, release, starts_in


class Rows(NamedTuple):
    """Requests of one size: the first k entries of a row, or the first p of a prefetch. See `serving`."""

    steps: UInt[np.ndarray, "n width"]
    kind: UInt[np.ndarray, " n"]
    cold: Bool[np.ndarray, " n"]


class Requests(NamedTuple):
    """Requests of any size: request i is entries[bounds[i]:bounds[i + 1]].

    `set_of` are the layer and the token whose resident set the router of the request has, −1 for a prefetch; empty if
    the stream has no resident sets.
    """

    entries: Int64[np.ndarray, " entries"]
    bounds: Int64[np.ndarray, " borders"]
    kind: UInt[np.ndarray, " n"]
    cold: Bool[np.ndarray, " n"]
    set_of: Int64[np.ndarray, "n_sets 2"]


def join(parts: Iterable[Requests]) -> Requests:
    """Several blocks of requests as one."""
    entries, bounds, kind, cold, set_of = zip(*parts, strict=True)
    ends = np.cumsum([0, *(len(part) for part in entries)])
    shifted = [part[:-1] + end for part, end in zip(bounds, ends, strict=False)]
    return Requests(
        np.concatenate(entries),
        np.append(np.concatenate(shifted), ends[-1]),
        np.concatenate(kind),
        np.concatenate(cold),
        np.concatenate(set_of),
    )


@dataclass(frozen=True)
class Access:
    """How a device runs through a table.

    Attributes:
        order: "layer" runs a sequence (or document) through one layer after another, "decode" runs each token through
            all layers before the next token. The order matters only if layers share a cache
        pool: one cache for all layers
        share_block: adjacent layers that use the same weights; None for what the table says, "full" for all layers
        warm: keep the content of caches between sequences and documents
        top1: request only the heaviest expert, as the paper does
        batch: all sequences run in lockstep through the same caches. Their tokens at one step are one forward pass
        prefetch: directly before the request of a decoded token in a layer, load the set of the token before it in that
            layer ("previous"), what the table says a runtime prefetched ("recorded"), or predicted sets [L, B, T, p],
            in which n_experts marks an empty place. "previous" takes the last token of a prompt for the first decoded
            one, and nothing if the token before is padding or of another text. Prompts are not prefetched
        on_miss: "load" admits every missing expert to the cache; "bypass" uses it from scratch memory if the expert
            that it would evict was requested more often lately
    """

    order: Literal["layer", "decode"] = "layer"
    pool: bool = False
    share_block: int | Literal["full"] | None = None
    warm: bool = False
    top1: bool = False
    batch: bool = False
    prefetch: Literal["previous", "recorded"] | Integer[np.ndarray, ...] | None = None
    on_miss: OnMiss = "load"

    def __post_init__(self) -> None:
        require(self.order in ("layer", "decode"), "order", self.order, "layer or decode")
        require_on_miss(self.on_miss)
        share = self.share_block
        ok = share is None or share == "full" or (isinstance(share, int) and share >= 1)
        require(ok, "share_block", share, "a whole number of layers ≥ 1, or full")
        if isinstance(self.prefetch, str):
            known = self.prefetch in ("previous", "recorded")
            require(known, "prefetch", self.prefetch, "previous, recorded, or predicted sets")
        if self.batch and self.prefetch is not None:
            raise ConfigError("prefetch: not supported for a batch in lockstep; omit batch or prefetch.")

    def layers_per_tensor(self, table: RouteTable) -> int:
        """Adjacent layers that use the same weights."""
        if self.share_block is None:
            return table.share_block
        share = table.n_layers if self.share_block == "full" else self.share_block
        require(share <= table.n_layers, "share_block", share, f"at most the {table.n_layers} layers of the trace")
        return share

    def layers_per_cache(self, table: RouteTable) -> int:
        """Adjacent layers that use the same cache."""
        return table.n_layers if self.pool else self.layers_per_tensor(table)


@dataclass(frozen=True)
class Passes:
    """The forward passes of a table that has prompts or a batch, over its flat tokens.

    tokens: real tokens in the order of their passes
    first: where each pass begins in `tokens`; the last value is the number of tokens
    opens: passes that begin a text
    decodes: passes of one decoded token, which can be prefetched
    """

    tokens: Int64[np.ndarray, " real"]
    first: Int64[np.ndarray, " borders"]
    opens: Bool[np.ndarray, " passes"]
    decodes: Bool[np.ndarray, " passes"]


def forward_passes(table: RouteTable, access: Access, *, routed: bool = False) -> Passes | None:
    """The forward passes of a table; None if every pass has one token that uses and prefetches all its places.

    With `routed` they are always given, because the resident sets of routers belong to passes.

    Consecutive prefill tokens of a text are one pass; every other token is a pass. In a batch, the tokens of a step are
    in the same pass, consecutive steps with only prefill tokens are one pass, and a text begins where all sequences
    begin one. Padding is in no pass. A pass of one token requests its experts, heaviest first; a pass of several tokens
    requests their union.
    """
    real = np.asarray(table.mask)
    prompt = np.zeros_like(real) if table.phase is None else real & (table.phase == 0)
    several = access.batch or prompt.any() or table.skips or _has_empty_places(access, table)
    if not real.any() or not (routed or several):
        return None
    token = np.arange(real.size).reshape(real.shape)
    step, text = token, table.starts.reshape(-1).cumsum().reshape(real.shape)
    if access.batch:  # tokens in the order of their steps
        by_step = (np.arange(real.shape[1]), table.starts.all(0).cumsum(), (prompt | ~real).all(0))
        step, text, prompt = (np.broadcast_to(values, real.shape).T for values in by_step)
        token, real = token.T, real.T
    token, step, text, prompt = token[real], step[real], text[real], prompt[real]
    opens = np.diff(text, prepend=0) > 0
    begins = opens | (np.diff(step, prepend=-1) != 0)
    begins[1:] &= opens[1:] | ~(prompt[1:] & prompt[:-1])
    first = np.flatnonzero(begins)
    borders = np.append(first, len(token))
    return Passes(token, borders, opens[first], (np.diff(borders) == 1) & ~prompt[first])


@dataclass(frozen=True)
class Stream:
    """The requests to one cache: `S` [layers, tokens, k], where layer i uses entries `offset[i]` + expert.

    `residents` are there for a policy that knows the resident sets of routers.
    """

    S: Integer[np.ndarray, "layers tokens k"]
    n_experts: int
    n_entries: int
    offset: Integer[np.ndarray, " layers"]
    length: int  # tokens of a sequence
    mask: Bool[np.ndarray, " tokens"] | None
    doc: Integer[np.ndarray, " tokens"] | None
    access: Access
    predicted: Integer[np.ndarray, "layers tokens p"] | None = None
    passes: Passes | None = None
    residents: Integer[np.ndarray, "layers tokens C"] | None = None

    @property
    def k(self) -> int:
        return int(self.S.shape[2])

    @property
    def prefetch_size(self) -> int:
        return self.k if self.predicted is None else int(self.predicted.shape[2])

    @property
    def n_tokens(self) -> int:
        return int(self.S.shape[1])

    @cached_property
    def real_tokens(self) -> int:
        return sum(int(self._mask(span).sum()) for span in blocks(self.n_tokens, BLOCK))

    @cached_property
    def accesses(self) -> int:
        """Number of requested experts, without prefetches."""
        if self.passes is None:
            return self.real_tokens * len(self.S) * self.k
        sizes = (np.diff(block.bounds)[block.kind != PREFETCH].sum() for block in self.requests())
        return int(sum(sizes))

    def rows(self) -> Iterator[Rows]:
        """All requests, if every forward pass has one token."""
        first = True
        for layers, span in self._pieces():
            block = self._rows(layers, span)
            block.cold[0] |= first
            first = False
            if repeated(block.steps, block.kind, self.k, self.prefetch_size):
                raise _twice()
            yield block
            release(self.S)

    def requests(self) -> Iterator[Requests]:
        """All requests, where a forward pass has several tokens; layer by layer, a block is at least one text."""
        assert self.passes is not None
        n_passes = len(self.passes.opens)
        limit = max(BLOCK // (self.k * len(self.S)), 1)
        if self._layer_by_layer:
            texts = np.append(np.flatnonzero(self.passes.opens), n_passes)
            borders = texts[np.unique(np.searchsorted(texts, [*range(0, n_passes, limit), n_passes]))].tolist()
        else:
            borders = [*range(0, n_passes, limit), n_passes]
        for first, last in pairwise(borders):
            yield self._requests(self.passes, first, last)

    def _requests(self, passes: Passes, first: int, last: int) -> Requests:
        """The requests of some forward passes."""
        n_layers, n = len(self.S), last - first
        sizes = np.minimum(np.diff(passes.first[first : last + 1]) * self.k, max(self.n_experts, self.k))
        prefetches = self.access.prefetch is not None
        entries = np.empty(n_layers * int(sizes.sum() + prefetches * n * self.prefetch_size), np.int64)
        bounds = np.zeros(n_layers * n * (1 + prefetches) + 1, np.int64)
        kind = np.empty(len(bounds) - 1, np.uint8)
        cold = np.zeros(len(kind), np.bool_)
        set_of = np.empty((0 if self.residents is None else len(kind), 2), np.int64)
        no_sets = np.empty((0, 0, 0), self.S.dtype)
        written = write_requests(
            self.S,
            no_sets if self.predicted is None else self.predicted,
            self.offset,
            self.n_experts,
            passes.tokens,
            passes.first,
            passes.opens,
            passes.decodes,
            first,
            last,
            self._layer_by_layer,
            self.access.warm,
            prefetches,
            entries,
            bounds,
            kind,
            cold,
            set_of,
        )
        if written < 0:
            raise _twice()
        cold[0] |= first == 0
        return Requests(
            entries[: bounds[written]], bounds[: written + 1], kind[:written], cold[:written], set_of[:written]
        )

    @property
    def _layer_by_layer(self) -> bool:
        """Whether a whole text passes one layer before the next."""
        return len(self.S) > 1 and self.access.order == "layer"

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Layers and tokens of each block."""
        n_layers = len(self.S)
        if self._layer_by_layer:
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
        return starts_in(self.doc, self.length, span)

    def _mask(self, span: slice) -> Bool[np.ndarray, " n"]:
        if self.mask is None:
            return np.ones(span.stop - span.start, np.bool_)
        mask = np.array(self.mask[span])
        release(self.mask)
        return mask

    def _rows(self, layers: slice, span: slice) -> Rows:
        """The requests of some tokens in some layers, layers innermost."""
        steps = self._entries(self.S[layers, span], layers)
        mask, starts = self._mask(span), self._starts(span)
        kind = np.where(mask[:, None], np.uint8(ASK), np.uint8(SKIP)).repeat(steps.shape[1], axis=1)
        cold = np.zeros(kind.shape, np.bool_)
        if layers.start == 0 and not self.access.warm:
            cold[:, 0] = starts
        if self.access.prefetch is None:
            return Rows(steps.reshape(-1, self.k), kind.reshape(-1), cold.reshape(-1))
        if self.predicted is None:
            before = np.maximum(np.arange(span.start, span.stop) - 1, 0)
            expected = self._entries(self.S[layers, before], layers)
            known = ~starts & (True if self.mask is None else self.mask[before])
        else:
            expected, known = self._entries(self.predicted[layers, span], layers), np.ones_like(mask)
        fetch = np.where((kind == ASK) & known[:, None], np.uint8(PREFETCH), np.uint8(SKIP))
        return _interleave(expected, fetch, steps, kind, cold)

    def _entries(
        self, experts: Integer[np.ndarray, "layers n width"], layers: slice
    ) -> UInt[np.ndarray, "n layers width"]:
        dtype = np.uint8 if self.n_entries <= 1 << 8 else np.uint16 if self.n_entries <= 1 << 16 else np.uint32
        steps: UInt[np.ndarray, "n layers width"] = experts.transpose(1, 0, 2).astype(dtype, order="C")
        if self.offset.any():
            steps += self.offset[layers, None].astype(dtype)
        return steps


def _twice() -> DataError:
    return DataError("requests: got an expert twice in one request, expected k different ones.")


def _interleave(
    expected: UInt[np.ndarray, "n layers p"],
    fetch: UInt[np.ndarray, "n layers"],
    steps: UInt[np.ndarray, "n layers k"],
    kind: UInt[np.ndarray, "n layers"],
    cold: Bool[np.ndarray, "n layers"],
) -> Rows:
    """Insert each prefetch before its request."""
    k, p = steps.shape[2], expected.shape[2]
    both = np.zeros((*kind.shape, 2, max(k, p)), steps.dtype)
    both[:, :, 0, :p] = expected
    both[:, :, 1, :k] = steps
    kinds = np.stack([fetch, kind], axis=2)
    colds = np.stack([cold, np.zeros_like(cold)], axis=2)
    return Rows(both.reshape(-1, max(k, p)), kinds.reshape(-1), colds.reshape(-1))


def streams(table: RouteTable, access: Access, *, routed: bool = False) -> list[Stream]:
    """One stream per cache; with the resident sets of the routers if `routed`."""
    if routed and table.residents is None:
        raise no_residents()
    if routed and access.batch:
        raise ConfigError(
            "policy: router is not supported for a batch in lockstep; omit batch or choose another policy."
        )
    L, _, T, _ = table.S.shape
    share = access.layers_per_tensor(table)
    S = _flat(table.S[..., :1] if access.top1 else table.S)
    predicted = _predicted(access, table)
    passes = forward_passes(table, access, routed=routed)
    residents = _flat(table.residents) if routed and table.residents is not None else None
    layers_per_cache = access.layers_per_cache(table)
    found = []
    for first in range(0, L, max(layers_per_cache, 1)):
        layers = slice(first, min(first + layers_per_cache, L))
        offset = np.arange(layers.stop - first) // share * table.n_experts
        found.append(
            Stream(
                S=S[layers],
                n_experts=table.n_experts,
                n_entries=int(offset[-1]) + table.n_experts,
                offset=offset,
                length=max(T, 1),
                mask=table.mask.reshape(-1),
                doc=None if table.doc is None else table.doc.reshape(-1),
                access=access,
                predicted=None if predicted is None else predicted[layers],
                passes=passes,
                residents=None if residents is None else residents[layers],
            )
        )
    return found


def no_residents() -> ConfigError:
    """The error of a policy that needs resident sets."""
    return ConfigError(
        "policy: got router, but the trace has no resident sets (residents.npy): choose another policy, or record the "
        "trace of a run whose router keeps some (siblings, residency, rent) with generate."
    )


def _predicted(access: Access, table: RouteTable) -> Integer[np.ndarray, "L tokens p"] | None:
    sets = _sets(access, table)
    if sets is None:
        return None
    L, B, T, _ = table.S.shape
    if sets.ndim != 4 or sets.shape[:3] != (L, B, T):
        raise ConfigError(f"prefetch: got sets of shape {sets.shape}, expected [{L}, {B}, {T}, …] as in the trace.")
    if sets.size and not 0 <= extremes(sets)[0] <= extremes(sets)[1] <= table.n_experts:
        raise ConfigError(
            f"prefetch: got experts {extremes(sets)}, expected 0 … {table.n_experts - 1}, "
            f"or {table.n_experts} for an empty place."
        )
    return _flat(sets)


def _sets(access: Access, table: RouteTable) -> Integer[np.ndarray, ...] | None:
    """The predicted sets, if the prefetch has some."""
    if isinstance(access.prefetch, np.ndarray):
        return access.prefetch
    if access.prefetch != "recorded":
        return None
    if table.predicted is None:
        raise ConfigError("prefetch: got recorded, but the trace has no prefetches (predicted.npy); omit prefetch.")
    return table.predicted


def _has_empty_places(access: Access, table: RouteTable) -> bool:
    sets = _sets(access, table)
    return sets is not None and sets.size > 0 and extremes(sets)[1] == table.n_experts


def _flat(array: Shaped[np.ndarray, "L B T width"]) -> Shaped[np.ndarray, "L tokens width"]:
    """Sequences one after another; a view wherever memory allows."""
    return array.reshape(array.shape[0], -1, array.shape[3])
