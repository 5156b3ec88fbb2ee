"""Pack a model with a chosen precision, and measure what it costs: perplexity on a sample, before and after.

With `mixed`, the experts that matter most keep more bits: their importance is the sum of their routing weights on the
sample. All experts begin with four bits, and the most important ones get eight, then sixteen, while the budget lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from torch.nn import functional as F

from stickymoe.data.corpora import load_corpus
from stickymoe.errors import ConfigError, DataError, require
from stickymoe.locality.plan import bytes_text
from stickymoe.reading import read_text
from stickymoe.runs.config import DataConfig
from stickymoe.runtime.checkpoints import Checkpoint, open_checkpoint
from stickymoe.runtime.engine import Host, parsed_bytes
from stickymoe.runtime.experts import Bases, Kernel, Order, Plain, Predict, whole
from stickymoe.runtime.formats import PRECISIONS, ExpertLayout, Precision
from stickymoe.runtime.opening import Progress, open_host
from stickymoe.runtime.pack import Plan, contents_of, default_precision, pack, planned_bytes, uniform
from stickymoe.runtime.store import DENSE, Contents, Store
from stickymoe.runtime.stored_rows import StoredRows

LEVELS: tuple[Precision, ...] = ("int4", "int8", "bf16")  # of mixed precision, fewest bits first
_ROW = 256  # tokens that are scored at a time
_KEPT_BYTES = 256 << 20  # experts that are kept in memory while a sample is scored


@dataclass(frozen=True)
class Cost:
    """Perplexity on a sample with the weights as they were saved, and as they were packed."""

    before: float
    after: float
    tokens: int

    @property
    def message(self) -> str:
        change = self.after / self.before - 1
        return (
            f"perplexity on {self.tokens:,} tokens: {self.before:.2f} as saved, {self.after:.2f} packed ({change:+.2%})"
        )


@dataclass(frozen=True)
class Packed:
    """A new store, and what its precision costs; None where nothing is lost."""

    store: Store
    cost: Cost | None


def pack_model(
    model: Path,
    folder: Path,
    *,
    experts: str | None = None,
    budget: str | float | None = None,
    text: Path | None = None,
    tokens: int = 4096,
    progress: Progress | None = None,
) -> Packed:
    """Pack `model` into the new store `folder`. The cost is measured on `tokens` tokens of `text`, or of the embedded
    corpus; it needs no measurement if the precision is that of the checkpoint.
    """
    require((budget is not None) == (experts == "mixed"), "budget", budget, "bytes with experts=mixed, only with it")
    require(tokens >= 2, "tokens", tokens, "a whole number ≥ 2")
    source = open_checkpoint(model)
    precision = experts or default_precision(source)
    known = (*PRECISIONS, "mixed")
    require(precision in known, "experts", precision, f"one of {', '.join(known)}")
    plan: Any = uniform(source, precision) if precision != "mixed" else None
    exact = precision in ("fp32", default_precision(source)) and text is None
    sample = None if exact else Sample(source, text, tokens)
    if plan is None:
        assert sample is not None
        limit = parsed_bytes("budget", budget)  # type: ignore[arg-type]
        _require_budget(source, limit)

        def plan(partial: Path) -> Plan:
            return mixed(source, sample.importance(partial), limit)

    total = source.n_layers * source.n_experts
    if progress is None:
        store = pack(source, folder, plan)
    else:
        with progress(f"pack {source.name}", total) as advance:
            store = pack(source, folder, plan, progress=advance)
    return Packed(store, None if sample is None else sample.cost(store))


def mixed(source: Checkpoint, importance: Float[np.ndarray, "pools experts"], budget: float) -> Plan:
    """More bits for the most important experts, until all of them take `budget` bytes."""
    sizes = [ExpertLayout(source.spec, level).nbytes for level in LEVELS]
    plan: Plan = uniform(source, LEVELS[0])
    left = budget - planned_bytes(source, plan)
    order = np.argsort(-importance, axis=None, kind="stable")
    n = len(order)
    for level in range(1, len(LEVELS)):
        step = sizes[level] - sizes[level - 1]
        n = min(n, int(left // step)) if step > 0 else n  # small experts can take whole pages alike
        left -= n * step
        for at in order[:n]:
            pool, e = divmod(int(at), source.n_experts)
            plan[pool][e] = LEVELS[level]
    return plan


def _require_budget(source: Checkpoint, budget: float) -> None:
    least = planned_bytes(source, uniform(source, LEVELS[0]))
    if budget < least:
        raise ConfigError(
            f"--budget: got {bytes_text(budget)}, expected at least {bytes_text(least)}: all experts in {LEVELS[0]}."
        )


class Sample:
    """A text on which a model is scored before and after packing."""

    def __init__(self, source: Checkpoint, text: Path | None, tokens: int) -> None:
        self.source = source
        self._text = _sample_text(text, 16 * tokens)
        self._most = tokens
        self._before: float | None = None

    def importance(self, partial: Path) -> Float[np.ndarray, "pools experts"]:
        """The sum of the routing weights of every expert, with the weights as they were saved."""
        layers = SourceLayers(self.source, partial / DENSE)
        self._before, _ = self._score(open_host(partial, layers, 1))
        return layers.importance

    def cost(self, store: Store) -> Cost:
        """Score both. Weights as they were saved are read from the checkpoint, one expert at a time."""
        if self._before is None:
            saved = SourceLayers(self.source, store.require_dense())
            self._before, _ = self._score(open_host(store.folder, saved, 1))
        packed = SourceLayers(StoredExperts(store), store.require_dense())
        after, n = self._score(open_host(store.folder, packed, 1))
        return Cost(self._before, after, n)

    def _score(self, host: Host) -> tuple[float, int]:
        ids = host.encode(self._text, chat=False)[: self._most]
        if len(ids) < 2:
            raise DataError("The text to measure on has fewer than 2 tokens.")
        nats, n = 0.0, 0
        row = min(_ROW, host.context or _ROW)
        for first in range(0, len(ids) - 1, row):
            part = ids[first : first + row]
            if len(part) > 1:
                logits = host.logits(part)[:-1].float()
                nats += float(F.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum"))
                n += len(part) - 1
        return (math.exp(nats / n) if nats / n < 700 else math.inf), n


def _sample_text(path: Path | None, characters: int) -> str:
    if path is not None:
        return read_text(path, DataError)[:characters]
    rows: Iterator[str] = (row for document in load_corpus(DataConfig()).valid for row in document.rows)
    found: list[str] = []
    while sum(map(len, found)) < characters and (row := next(rows, None)) is not None:
        found.append(row)
    return "\n".join(found)


class StoredExperts:
    """The experts of a store as a checkpoint reads them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        c = store.contents
        self.spec, self.n_layers, self.n_experts, self.top_k = c.spec, c.n_pools, c.n_experts, c.top_k
        self.contents = c

    def expert(self, pool: int, e: int) -> list[Tensor]:
        return [torch.from_numpy(a) for a in self._store.read(pool, e)]

    def table_rows(self, name: str, first: int, stop: int) -> Tensor:
        return torch.from_numpy(self._tables[name][first:stop])

    @cached_property
    def _tables(self) -> dict[str, Float32[np.ndarray, "rows width"]]:
        return self._store.tables()


class SourceLayers:
    """Expert layers that read every expert they need, and keep few: slow, and in bounded memory."""

    def __init__(self, source: Any, dense: Path) -> None:
        self.contents: Contents = getattr(source, "contents", None) or contents_of(source)
        self.kernel: Kernel = "torch"
        self.prefetch = "none"
        self.predict: Predict | None = None
        self.rows: StoredRows | None = None
        self._bases: Sequence[Bases] | None = None
        self._dense = dense
        self._source = source
        self._kept: dict[tuple[int, int], list[Tensor]] = {}
        self._room = _KEPT_BYTES
        self.importance = np.zeros((self.contents.n_pools, self.contents.n_experts))

    def set_bases(self, bases: Sequence[Bases]) -> None:
        self._bases = bases

    def dense(self) -> Path:
        return self._dense

    def tables(self) -> dict[str, Tensor]:
        shapes = self.contents.row_layout.shapes
        return {name: self._source.table_rows(name, 0, rows) for name, (rows, _) in shapes.items()}

    def begin(self) -> None:
        """Nothing is noted of a forward pass."""

    def _expert(self, pool: int, e: int) -> list[Tensor]:
        if (pool, e) in self._kept:
            return self._kept[pool, e]
        tensors: list[Tensor] = self._source.expert(pool, e)
        size = sum(t.nbytes for t in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[pool, e] = tensors
        return tensors

    def compute(
        self,
        layer: int,
        x: Float[Tensor, "n d"],
        S: Int[Tensor, "n k"],
        w: Float[Tensor, "n k"],
        plain: Plain,
        order: Order,
        residents: Sequence[int] = (),
    ) -> Float[Tensor, "n d"]:
        pool, names = layer // self.contents.layers_per_pool, [t.name for t in self.contents.spec.tensors]
        y = torch.zeros_like(x)
        for e in range(self.contents.n_experts):
            token, place = S.eq(e).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            tensors = (t.to(x.dtype) for t in self._expert(pool, e))
            bases = None if self._bases is None else self._bases[pool]
            out = plain(whole(dict(zip(names, tensors, strict=True)), e, bases), x[token])
            y.index_add_(0, token, (out * w[token, place, None]).to(y.dtype))
            self.importance[pool, e] += float(w[token, place].sum())
        return y
