"""Compute the experts of a layer from slots, and note what was requested.

One token asks for its experts, heaviest first. A prompt asks for one union per layer. Outputs are added in a fixed
order, whatever the order in which the experts arrive, so the text does not depend on the cache.

n tokens, d width, k experts per token, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.locality.rows import RowKey
from stickymoe.locality.table import RouteTable, index_dtype
from stickymoe.runtime import kernels
from stickymoe.runtime.formats import FIELD_D, FIELD_DOWN_BASE, FIELD_F, FIELD_UP_BASE
from stickymoe.runtime.slots import Pool, Resident
from stickymoe.runtime.store import Contents, Store
from stickymoe.runtime.stored_rows import StoredRows

Kernel = Literal["torch", "compiled"]
Order = Literal["expert", "weight"]  # outputs are added by ascending expert, or heaviest first
Plain = Callable[[dict[str, Tensor], Tensor], Tensor]  # tensors of an expert, rows → rows
Bases = tuple[Tensor, Tensor]  # of a pool whose experts are differences: up [C, f, d] and down [C, d, f]
Predict = Callable[[int, Tensor], list[int] | None]  # layer, its hidden state → experts of the next layer

PREFILL, DECODE = 0, 1


def whole(tensors: dict[str, Tensor], e: int, bases: Bases | None) -> dict[str, Tensor]:
    """The tensors of expert e as the model computes it: a difference is added to its base."""
    if bases is None:
        return tensors
    found = {name: tensors[name] for name in ("up_bias", "down_bias")}
    for name, base in zip(("up", "down"), bases, strict=True):
        inner = tensors[f"{name}_in"]
        found[name] = torch.addmm(base[e % len(base)].to(inner.dtype), tensors[f"{name}_out"], inner)
    return found


def _descending(ranked: tuple[float, int, Any]) -> float:
    return -ranked[0]


@dataclass
class Notes:
    """What every forward pass requested: for each pass and layer the experts and weights, and what was prefetched.

    `residents` are the experts that the router kept after the last token of the pass.
    """

    n_layers: int
    n_experts: int
    top_k: int
    S: list[list[Any]] = field(default_factory=list)
    w: list[list[Any]] = field(default_factory=list)
    predicted: list[list[list[int]]] = field(default_factory=list)
    residents: list[list[list[int]]] = field(default_factory=list)

    def begin(self) -> None:
        """A forward pass begins."""
        self.S.append([None] * self.n_layers)
        self.w.append([None] * self.n_layers)
        self.predicted.append([[] for _ in range(self.n_layers)])
        self.residents.append([[] for _ in range(self.n_layers)])

    def table(
        self,
        tokens: Sequence[int],
        *,
        expert_bytes: int,
        other_bytes: int,
        share_block: int,
        row_keys: tuple[RowKey, ...],
    ) -> RouteTable | None:
        """The routes of one text; `tokens` are those that were given to the model. None if no pass is complete."""
        if self.S and any(S is None for S in self.S[-1]):  # interrupted
            for passes in (self.S, self.w, self.predicted, self.residents):
                passes.pop()
        if not self.S:
            return None
        N, dtype = self.n_experts, index_dtype(self.n_experts + 1)
        S = np.stack([np.concatenate([p[layer] for p in self.S]) for layer in range(self.n_layers)])
        w = np.stack([np.concatenate([p[layer] for p in self.w]) for layer in range(self.n_layers)])
        n = S.shape[1]
        phase = np.full((1, n), DECODE, np.uint8)
        phase[:, : len(self.S[0][0])] = PREFILL
        return RouteTable(
            S=S[:, None].astype(dtype),
            n_experts=N,
            mask=np.ones((1, n), np.bool_),
            weights=w[:, None].astype(np.float32),
            phase=phase,
            tokens=np.array(tokens[:n], np.int64)[None],
            expert_bytes=(expert_bytes,) * self.n_layers,
            other_bytes=other_bytes,
            share_block=share_block,
            row_bytes=sum(key.nbytes for key in row_keys),
            row_keys=row_keys,
            skips=bool((S == N).any()),
            predicted=self._sets(self.predicted, dtype),
            residents=self._sets(self.residents, dtype),
        )

    def _sets(self, passes: list[list[list[int]]], dtype: Any) -> Any:
        """Sets of passes, at their last token [L, 1, T, width]; N marks an empty place. None if all are empty."""
        width = max((len(experts) for by_layer in passes for experts in by_layer), default=0)
        if width == 0:
            return None
        last = np.cumsum([len(S[0]) for S in self.S]) - 1
        sets = np.full((self.n_layers, 1, last[-1] + 1, width), self.n_experts, dtype)
        for token, by_layer in zip(last, passes, strict=True):
            for layer, experts in enumerate(by_layer):
                sets[layer, 0, token, : len(experts)] = experts
        return sets


@runtime_checkable
class Layers(Protocol):
    """The expert layers of a model, as its host uses them."""

    contents: Contents
    kernel: Kernel
    prefetch: str
    predict: Predict | None

    rows: StoredRows | None  # what reads tables of rows that stay on disk

    def set_bases(self, bases: Sequence[Bases]) -> None:
        """The bases of every pool, if experts are differences; called before the first forward pass."""

    def dense(self) -> Path:
        """The file of the dense part."""

    def tables(self) -> dict[str, Tensor]:
        """Tables of rows that are kept in memory and are not in the dense part, by their names in the model."""

    def begin(self) -> None:
        """A forward pass begins."""

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
        """Σ w·expert(x) for every token, as the model itself computes it."""


class Placed(NamedTuple):
    """The experts of a token in slots, as `kernels.experts` reads them; `which` is −1 for an expert of weight 0."""

    slots: UInt8[np.ndarray, "C bytes"]
    specs: Int[np.ndarray, "k fields"]
    which: Int[np.ndarray, " k"]


class ExpertLayers:
    """The expert layers of a model whose experts are in slots."""

    def __init__(
        self,
        store: Store,
        pools: Sequence[Pool],
        *,
        kernel: Kernel,
        threads: int,
        prefetch: str = "none",
        rows: StoredRows | None = None,
    ) -> None:
        self.store = store
        self.pools = pools
        self.kernel = kernel
        self.prefetch = prefetch
        self.predict: Predict | None = None
        self.rows = rows
        self.contents = contents = store.contents
        self.notes = self.new_notes()
        self.shared = contents.layers_per_pool > 1
        self._expert = kernels.expert_parallel if threads > 1 else kernels.expert
        self._bases: Sequence[Bases] | None = None
        # The specs of a kernel for the experts of each pool, and of a token's experts if all have the same.
        self._specs: list[Int[np.ndarray, "N fields"]] = []
        self._uniform = None
        if contents.spec.activation is not None:
            by_precision = {p: layout.spec_array() for p, layout in store.layouts.items()}
            self._specs = [np.stack([by_precision[entry.precision] for entry in pool]) for pool in store.entries]
            if store.precision != "mixed" and not contents.spec.rank:
                self._uniform = self._specs[0][:1].repeat(contents.top_k, axis=0)
        self._hidden = np.empty(contents.spec.hidden * (2 if contents.spec.gated else 1), np.float32)
        if kernel == "compiled":
            if contents.spec.activation is None:
                raise ConfigError(f"kernel: {contents.name} has experts that only its own code computes; choose torch.")
            self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernel, or load it from the disk, before a text is timed."""
        layout = self.store.layouts["fp32"]
        spec = layout.spec_array()
        d, f = spec[FIELD_D], spec[FIELD_F]
        x, base = np.zeros(d, np.float32), np.zeros(d * f, np.float32)
        spec[[FIELD_UP_BASE, FIELD_DOWN_BASE]] = base.ctypes.data
        self._expert(np.zeros(layout.nbytes, np.uint8), spec, x, self._hidden, np.empty_like(x))

    def set_bases(self, bases: Sequence[Bases]) -> None:
        """Keep the bases of every pool, and tell the kernels where they lie."""
        self._bases = [(up.float().contiguous(), down.float().contiguous()) for up, down in bases]
        for specs, pair in zip(self._specs, self._bases, strict=True):
            for place, base in zip((FIELD_UP_BASE, FIELD_DOWN_BASE), pair, strict=True):
                specs[:, place] = [base[e % len(base)].data_ptr() for e in range(len(specs))]

    def dense(self) -> Path:
        """The file of the dense part, after its checksum was compared."""
        return self.store.require_dense()

    def tables(self) -> dict[str, Tensor]:
        """Tables of rows that are kept in memory and are not in the dense part."""
        stored = self.store.tables() if self.rows is None else {}
        return {name: torch.from_numpy(table) for name, table in stored.items()}

    def new_notes(self) -> Notes:
        """The notes of a new text. While a text runs, `notes` are its notes."""
        c = self.contents
        return Notes(c.n_layers, c.n_experts, c.top_k)

    def table(self, notes: Notes, tokens: Sequence[int], *, other_bytes: int) -> RouteTable | None:
        """The routes of a text so far."""
        return notes.table(
            tokens,
            expert_bytes=self.store.slot_bytes,
            other_bytes=other_bytes,
            share_block=self.contents.layers_per_pool,
            row_keys=() if self.rows is None else tuple(group.key for group in self.contents.rows),
        )

    def pool_of(self, layer: int) -> Pool:
        return self.pools[layer // self.store.contents.layers_per_pool]

    def begin(self) -> None:
        """A forward pass begins. The sets of the previous token are prefetched in all layers at once."""
        before = self.notes.S[-1] if self.notes.S else None
        self.notes.begin()
        if self.prefetch == "previous" and before is not None and not self.shared:
            for layer in range(self.notes.n_layers):
                self._prefetch(layer, self._of_last_token(before, layer))

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
        """Σ w·expert(x) for every token, as the model itself computes it.

        `residents` are the experts that the router keeps after the last token.
        """
        self.notes.residents[-1][layer] = list(residents)
        if len(x) == 1:
            return self._token(layer, x, S, w, plain, order)
        S, w = self._heaviest_first(S, w)
        self.notes.S[-1][layer] = S.numpy()
        self.notes.w[-1][layer] = w.float().numpy()
        return self._tokens(layer, x, S, w, plain, order)

    def place(
        self,
        layer: int,
        S: Int[np.ndarray, " k"],
        w: Float[np.ndarray, " k"],
        h: Float[np.ndarray, " d"],
        residents: Sequence[int] = (),
    ) -> Placed | Float[np.ndarray, " d"]:
        """Bring the experts of one token into slots, for a kernel that computes them all at once.

        `residents` are the experts that the router keeps.

        Where they do not fit all together, they are computed here, one after another: then the result is Σ w·expert(h).
        """
        N, pool = self.notes.n_experts, self.pool_of(layer)
        asked = S.tolist()
        if not w.all():
            S = np.where(w == 0, N, S)
            asked = [e for e in S.tolist() if e < N]
        self.notes.S[-1][layer] = S[None].copy()
        self.notes.w[-1][layer] = w[None].copy()
        self.notes.residents[-1][layer] = list(residents)
        self.before_request(layer)
        # In a shared pool, a prefetch may evict experts of this layer that the kernel has not computed yet.
        evicts = self.shared and self.prefetch == "next_layer"
        if len(asked) > pool.cache.capacity or pool.bypasses or evicts:
            return self._one_by_one(layer, asked, dict(zip(S.tolist(), w.tolist(), strict=True)), h)
        arriving = pool.bring_all(asked)
        slots = arriving if isinstance(arriving, dict) else {}
        if self.prefetch == "next_layer":
            first = None if isinstance(arriving, dict) else next(arriving)  # demands are queued before prefetches
            self.after_request(layer, torch.from_numpy(h)[None])
            if first is not None:
                slots[first.expert] = first.slot
        if not isinstance(arriving, dict):
            slots |= {found.expert: found.slot for found in arriving}
        which = np.array([slots.get(e, -1) for e in S.tolist()])
        if self._uniform is not None:
            return Placed(pool.region.slots, self._uniform, which)
        return Placed(pool.region.slots, self._specs[pool.number][np.minimum(S, N - 1)], which)

    def _one_by_one(
        self, layer: int, asked: list[int], weight: dict[int, float], h: Float[np.ndarray, " d"]
    ) -> Float[np.ndarray, " d"]:
        pool, outputs = self.pool_of(layer), {}
        for found in pool.bring(asked):
            out = outputs[found.expert] = np.empty_like(h)
            spec = self._specs[pool.number][found.expert]
            self._expert(found.data, spec, h, self._hidden, out)
        self.after_request(layer, torch.from_numpy(h)[None])
        y = np.zeros_like(h)
        for e in asked:
            kernels.add_weighted(np.float32(weight[e]), outputs[e], y)
        return y

    def before_request(self, layer: int) -> None:
        """The router has run. Where layers share a pool, a prefetch must wait until the layers before are computed."""
        if self.prefetch == "previous" and self.shared and len(self.notes.S) > 1:
            self._prefetch(layer, self._of_last_token(self.notes.S[-2], layer))
        self.pool_of(layer).set_residents(layer, self.notes.residents[-1][layer])

    def after_request(self, layer: int, x: Float[Tensor, "1 d"]) -> None:
        """Prefetch what the router of the next layer says about the hidden state of this one; not for a prompt."""
        decodes = len(self.notes.S) > 1
        if self.prefetch == "next_layer" and decodes and self.predict is not None and layer + 1 < self.notes.n_layers:
            expected = self.predict(layer + 1, x)
            if expected:
                self._prefetch(layer + 1, expected)

    def _prefetch(self, layer: int, experts: list[int]) -> None:
        self.notes.predicted[-1][layer] = experts
        self.pool_of(layer).prefetch(experts)

    def _of_last_token(self, S: list[Any], layer: int) -> list[int]:
        return [e for e in S[layer][-1].tolist() if e < self.notes.n_experts]

    def _heaviest_first(
        self, S: Int[Tensor, "n k"], w: Float[Tensor, "n k"]
    ) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Experts by weight. Those of weight 0 and those that stand for none (index ≥ N) are marked by N."""
        w = w.masked_fill(self.notes.n_experts <= S, 0)
        w, at = w.sort(dim=-1, descending=True, stable=True)
        return S.gather(-1, at).masked_fill(w == 0, self.notes.n_experts).long(), w

    def _token(self, layer: int, x: Tensor, S: Tensor, w: Tensor, plain: Plain, order: Order) -> Tensor:
        """`_tokens` of one token; its few numbers are sorted as Python's, since a call of torch takes longer."""
        N = self.notes.n_experts
        # A tensor of a lower precision is multiplied by a tensor: by a number, it would be rounded differently.
        factors = w[0].tolist() if x.dtype == torch.float32 else w[0]
        triples = zip(w[0].tolist(), S[0].tolist(), factors, strict=True)
        ranked = sorted(((v, e, f) if v and e < N else (0.0, N, 0.0) for v, e, f in triples), key=_descending)
        self.notes.S[-1][layer] = np.array([[e for _, e, _ in ranked]])
        self.notes.w[-1][layer] = np.array([[v for v, _, _ in ranked]], np.float32)
        factor = {e: f for _, e, f in ranked if e < N}
        pool, overlap = self.pool_of(layer), not self.shared
        self.before_request(layer)
        arriving = pool.bring(list(factor))
        outputs: dict[int, Tensor] = {}
        if overlap and self.prefetch == "next_layer":
            first = next(arriving, None)  # demands are queued before prefetches
            self.after_request(layer, x)
            if first is not None:
                outputs[first.expert] = self._compute(pool, first, x, plain)
        for found in arriving:
            outputs[found.expert] = self._compute(pool, found, x, plain)
        if not overlap:
            self.after_request(layer, x)
        y = torch.zeros_like(x)
        for expert in sorted(outputs) if order == "expert" else factor:
            y += (outputs[expert] * factor[expert]).to(y.dtype)
        return y

    def _tokens(self, layer: int, x: Tensor, S: Tensor, w: Tensor, plain: Plain, order: Order) -> Tensor:
        N = self.notes.n_experts
        pool = self.pool_of(layer)
        # Rows in the order of transformers' own loop, which decides the last bit: by place among the k, then by token.
        places = {e: (S.t() == e).nonzero(as_tuple=True) for e in np.unique(S[S < N]).tolist()}
        outputs: dict[int, Tensor] = {}
        pool.set_residents(layer, self.notes.residents[-1][layer])
        for found in pool.bring(list(places), union=True):
            _, token = places[found.expert]
            outputs[found.expert] = self._compute(pool, found, x[token], plain)
        y = torch.zeros_like(x)
        if order == "expert":
            for e in sorted(outputs):
                place, token = places[e]
                y.index_add_(0, token, (outputs[e] * w[token, place, None]).to(y.dtype))
            return y
        by_place = x.new_zeros(S.shape[1], *x.shape)
        for e, (place, token) in places.items():
            by_place[place, token] = outputs[e].to(x.dtype)
        for place, out in enumerate(by_place):
            y.addcmul_(out, w[:, place, None].to(y.dtype))
        return y

    def _compute(self, pool: Pool, found: Resident, x: Float[Tensor, "m d"], plain: Plain) -> Float[Tensor, "m d"]:
        """One expert for some rows: by a compiled kernel for a single row, otherwise as one product per matrix."""
        if self.kernel == "compiled" and len(x) == 1:
            out = np.empty(x.shape[1], np.float32)
            spec = self._specs[pool.number][found.expert]
            self._expert(found.data, spec, x[0].float().numpy(), self._hidden, out)
            return torch.from_numpy(out)[None]
        layout = self.store.layouts[self.store.entries[pool.number][found.expert].precision]
        names = (t.name for t in self.store.contents.spec.tensors)
        tensors = (torch.from_numpy(a).to(x.dtype) for a in layout.decode(found.data[: layout.nbytes]))
        bases = None if self._bases is None else self._bases[pool.number]
        return plain(whole(dict(zip(names, tensors, strict=True)), found.expert, bases), x)
