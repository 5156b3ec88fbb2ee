"""The paper's model: a GPT-2 style decoder in which every feed-forward layer is a mixture of experts.

Pre-norm, learned positions, GELU experts with biases, no dropout, the head tied to the embedding.
B sequences, T tokens, P tokens before them, d width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.errors import ConfigError
from stickymoe.locality.rows import RowKey
from stickymoe.models.head import linear_cross_entropy, plain_cross_entropy
from stickymoe.models.moe import DeltaExperts, Experts, FeedForward, MoE, Router
from stickymoe.products import Linear
from stickymoe.routing.layer import LayerParts, SidePart
from stickymoe.routing.rules import RouterInput, RouterState, Routing
from stickymoe.routing.trace import RoutingTrace, token_positions
from stickymoe.runs.config import ModelConfig


@dataclass
class LayerCache:
    """The state of one layer after the tokens so far."""

    keys: Float[Tensor, "B heads P dh"]
    values: Float[Tensor, "B heads P dh"]
    router: RouterState = field(default_factory=RouterState)
    side: RouterState = field(default_factory=RouterState)

    def select(self, rows: Int[Tensor, " rows"]) -> LayerCache:
        return LayerCache(self.keys[rows], self.values[rows], self.router.select(rows), self.side.select(rows))


@dataclass
class DecodeCache:
    """The state of the model after the tokens so far: keys, values and router state of every layer."""

    layers: list[LayerCache | None]
    position: Int[Tensor, "B P"] | None = None
    doc: Int[Tensor, "B P"] | None = None

    @classmethod
    def empty(cls, n_layers: int) -> DecodeCache:
        return cls(layers=[None] * n_layers)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return 0 if self.position is None else self.position.shape[1]

    def select(self, rows: Int[Tensor, " rows"]) -> DecodeCache:
        """The cache of some rows, in that order, as beam search needs it."""
        position, doc = (None if x is None else x[rows] for x in (self.position, self.doc))
        return DecodeCache([None if c is None else c.select(rows) for c in self.layers], position, doc)

    def append(self, position: Int[Tensor, "B T"], doc: Int[Tensor, "B T"] | None) -> None:
        self.position = position if self.position is None else torch.cat([self.position, position], dim=1)
        if doc is not None:
            self.doc = doc if self.doc is None else torch.cat([self.doc, doc], dim=1)


@dataclass(frozen=True)
class Output:
    """The mean loss if targets were given, otherwise the logits; and the trace, None for the dense control."""

    loss: Float[Tensor, ""] | None
    logits: Float[Tensor, "B T V"] | None
    trace: RoutingTrace | None


@dataclass(frozen=True)
class Context:
    """What every layer reads in addition to the residual stream."""

    tokens: Int[Tensor, "B T"]
    position: Int[Tensor, "B T"]
    doc: Int[Tensor, "B T"] | None
    boundary: Bool[Tensor, "B T"] | None
    attention_mask: Tensor | None
    visit: Int[Tensor, "B T"] | None


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = Linear(d_model, 3 * d_model)
        self.out = Linear(d_model, d_model)

    def forward(
        self, x: Float[Tensor, "B T d"], mask: Tensor | None, past: LayerCache | None
    ) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"], LayerCache]:
        """The layer's output, the attended values before the output projection, and all keys and values."""
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        attended = attended.transpose(1, 2).reshape(B, T, d)
        return self.out(attended), attended, LayerCache(k, v)


class Block(nn.Module):
    """Attention, then experts (or a dense network), then the side part of the variant if it has one."""

    def __init__(self, config: ModelConfig, parts: LayerParts, fast: bool, below: Experts | None) -> None:
        """`below` are the experts of the previous layer if this layer shares them."""
        super().__init__()
        d, N = config.d_model, config.pool_size
        self.attention_norm = nn.LayerNorm(d)
        self.attention = Attention(d, config.n_heads)
        self.ffn_norm = nn.LayerNorm(d)
        self.ffn: MoE | FeedForward
        if parts.rule is None:
            self.ffn = FeedForward(d, config.top_k * config.d_ff)
        else:
            router = Router(d, N, parts.rule, gate_only=parts.gate_only)
            experts = below or _experts(config, parts, fast)
            self.ffn = MoE(router, experts, shared=below is not None)
        self.side = parts.side

    def forward(
        self, x: Float[Tensor, "B T d"], context: Context, past: LayerCache | None
    ) -> tuple[Float[Tensor, "B T d"], Routing | None, LayerCache]:
        """The residual stream after the layer, the routing, and the state for the next tokens."""
        out, attended, cache = self.attention(self.attention_norm(x), context.attention_mask, past)
        x = x + out
        h = self.ffn_norm(x)
        c = context
        seen = RouterInput(h, attended, c.tokens, c.position, c.doc, c.boundary, visit=c.visit)
        y, routing = self._feed_forward(seen, cache, past)
        x = x + y
        if self.side is not None:
            out, cache.side = self.side(seen, None if past is None else past.side)
            x = x + out
        return x, routing, cache

    def _feed_forward(
        self, seen: RouterInput, cache: LayerCache, past: LayerCache | None
    ) -> tuple[Float[Tensor, "B T d"], Routing | None]:
        if isinstance(self.ffn, FeedForward):
            return self.ffn(seen.h), None
        y, routing = self.ffn(seen, None if past is None else past.router)
        cache.router = routing.state
        return y, routing


def _experts(config: ModelConfig, parts: LayerParts, fast: bool) -> Experts:
    N, d, f = config.pool_size, config.d_model, config.d_ff
    if parts.deltas is None:
        return Experts(N, d, f, fast=fast, ties=parts.ties)
    return DeltaExperts(N, d, f, parts.deltas, fast=fast, ties=parts.ties)


class GPT(nn.Module):
    """The model. `make_parts(layer)` returns the parts of each layer: its rule, or none for the dense control.

    `fast=False` uses the plain path for experts and head, which is the reference for the fast path.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, make_parts: Callable[[int], LayerParts], *, fast: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.fast = fast
        self.token_embedding = nn.Embedding(vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layers):
            below = self.blocks[-1].ffn if layer % config.layers_per_pool else None
            shared = below.experts if isinstance(below, MoE) else None
            self.blocks.append(Block(config, make_parts(layer), fast, shared))
        # The units that accelerate shards: experts that several layers use are gathered for each of them.
        kinds = {type(m).__name__ for m in self.modules() if isinstance(m, Experts)}
        self._no_split_modules = ("Block", *sorted(kinds)) if config.layers_per_pool > 1 else ("Block",)
        self.final_norm = nn.LayerNorm(config.d_model)
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02); projections into the residual stream scaled by 1/√(2L); biases 0, norms 1.

        The first factor of a low-rank difference keeps the size of what it reads.
        """
        residual = ("attention.out.weight", "experts.down", "experts.down_out", "ffn.down.weight")
        for name, p in self.named_parameters():
            if "norm" in name or "bias" in name:
                nn.init.constant_(p, float("norm.weight" in name))
            else:
                scale = math.sqrt(2 * self.config.n_layers) if name.endswith(residual) else 1.0
                first = name.endswith(("experts.up_in", "experts.down_in"))
                nn.init.normal_(p, std=p.shape[-1] ** -0.5 if first else 0.02 / scale)
        for module in self.modules():
            if isinstance(module, Experts):
                module.tie()
        for side in self._sides():
            side.initialise()

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"] | None = None,
        mask: Tensor | None = None,
        doc: Int[Tensor, "B T"] | None = None,
        cache: DecodeCache | None = None,
        boundary: Bool[Tensor, "B T"] | None = None,
        visit: Int[Tensor, "B T"] | None = None,
    ) -> Output:
        """One pass over `tokens`, which continue those in `cache`; the cache is updated in place.

        `mask` marks real tokens (bool, or 0 and 1), which come first in a row. `doc` keeps attention, positions and
        routing inside documents. `boundary` marks the first tokens of sentences. In training, `visit` counts how
        often a token of the text has come. Targets of −100 are ignored.
        """
        mask = None if mask is None else mask.bool()
        _require_supported(tokens, mask, doc, cache)
        position = self._positions(tokens, doc, cache)
        context = Context(tokens, position, doc, boundary, _attention_mask(tokens, doc, cache), visit)
        x = self.token_embedding(tokens) + self.position_embedding(position)
        routed: list[Routing | None] = []
        for i, block in enumerate(self.blocks):
            x, routing, layer_cache = block(x, context, None if cache is None else cache.layers[i])
            routed.append(routing)
            if cache is not None:
                cache.layers[i] = layer_cache
        if cache is not None:
            cache.append(position, doc)
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        trace = _stack(routed, mask, doc, boundary)
        x = self.final_norm(x)
        if targets is None:
            return Output(loss=None, logits=F.linear(x, self.token_embedding.weight), trace=trace)
        cross_entropy = linear_cross_entropy if self.fast else plain_cross_entropy
        loss = cross_entropy(x.flatten(0, 1), self.token_embedding.weight, targets.flatten())
        return Output(loss=loss, logits=None, trace=trace)

    def set_progress(self, progress: float) -> None:
        """Tell the model which fraction of the training phase has passed; some rules and ties are annealed by it.

        It counts while the model trains (`model.train()`); in evaluation everything is at its final strength.
        """
        for module in self.modules():
            if isinstance(module, Router | Experts):
                module.progress = progress

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        """The weights of all gates."""
        for module in self.modules():
            if isinstance(module, Router):
                yield from module.gate.parameters()

    def expert_bytes(self) -> list[int]:
        """Bytes of one expert, for each layer that has experts."""
        return [block.ffn.experts.expert_bytes for block in self.blocks if isinstance(block.ffn, MoE)]

    def other_bytes(self) -> int:
        """Bytes of what stays in fast memory beside the experts in slots.

        These are embeddings, attention, norms, gates, dense layers, and bases of experts.
        """
        elsewhere = {id(p) for m in self.modules() if isinstance(m, Experts) for p in m.stacks().values()}
        elsewhere |= {id(p) for p in self.slow_parameters()}
        return sum(p.nbytes for p in self.parameters() if id(p) not in elsewhere)

    def slow_parameters(self) -> dict[nn.Parameter, float]:
        """Tables of rows that stay in slow memory, with their relative learning rates."""
        return {p: side.lr_scale for side in self._sides() for p in side.slow_parameters()}

    def row_bytes(self) -> int:
        """Bytes of rows that a token reads from slow memory, over all layers."""
        return sum(side.bytes_per_token for side in self._sides())

    def row_keys(self) -> tuple[RowKey, ...]:
        """How the rows of a token are addressed. Rows with the same address are one, over all layers."""
        nbytes: dict[tuple[int, int, int], int] = {}
        for side in self._sides():
            for key in side.row_keys():
                address = key.n, key.salt, key.rows
                nbytes[address] = nbytes.get(address, 0) + key.nbytes
        return tuple(RowKey(*address, size) for address, size in nbytes.items())

    def sizes(self) -> dict[str, int | list[int]]:
        """Bytes by where they are needed, for the record of a run."""
        sizes: dict[str, int | list[int]] = {"expert_bytes": self.expert_bytes(), "other_bytes": self.other_bytes()}
        tables = self.slow_parameters()
        if tables:
            sizes |= {"row_bytes": self.row_bytes(), "table_bytes": sum(p.nbytes for p in tables)}
        return sizes

    def _sides(self) -> Iterator[SidePart]:
        return (module for module in self.modules() if isinstance(module, SidePart))

    def _positions(
        self, tokens: Int[Tensor, "B T"], doc: Int[Tensor, "B T"] | None, cache: DecodeCache | None
    ) -> Int[Tensor, "B T"]:
        """Position in the document, continued from the cache."""
        position = token_positions(torch.ones_like(tokens, dtype=torch.bool), doc)
        if cache is not None and cache.position is not None:
            continues = position == torch.arange(tokens.shape[1], device=tokens.device)  # no new document so far
            if doc is not None and cache.doc is not None:
                continues = continues & (doc[:, :1] == cache.doc[:, -1:])
            position = torch.where(continues, position + cache.position[:, -1:] + 1, position)
        longest = tokens.shape[1] + (0 if cache is None else cache.length)
        if longest > self.config.seq_len and int(position.max()) >= self.config.seq_len:
            given = int(position.max()) + 1
            raise ConfigError(f"tokens: got {given} in a row, expected at most seq_len={self.config.seq_len}.")
        return position


def _require_supported(tokens: Tensor, mask: Tensor | None, doc: Tensor | None, cache: DecodeCache | None) -> None:
    """Refuse input that routing or attention would treat wrongly."""
    if tokens.numel() == 0:
        raise ConfigError(f"tokens: got {list(tokens.shape)}, expected at least one sequence of one token.")
    if mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ConfigError("mask: got padding before real tokens, which attention would read; pad on the right.")
    if cache is None:
        return
    if mask is not None and not bool(mask.all()):
        raise ConfigError("mask: padding is not supported with a decode cache; decode rows of equal length.")
    if cache.length and (doc is None) != (cache.doc is None):
        given, before = ("no documents", "with") if doc is None else ("documents", "without")
        raise ConfigError(f"doc: got {given} after a cache {before} them; pass doc always or never.")


def _stack(
    routed: list[Routing | None], mask: Bool[Tensor, "B T"], doc: Tensor | None, boundary: Tensor | None
) -> RoutingTrace | None:
    """The routing of all layers as one trace; None if no layer routes."""
    layers = [(layer, r) for layer, r in enumerate(routed) if r is not None]
    if not layers:
        return None
    gate_only = [r.g_gate for _, r in layers if r.g_gate is not None]
    return RoutingTrace(
        g=torch.stack([r.g for _, r in layers]),
        S=torch.stack([r.S for _, r in layers]),
        w=torch.stack([r.w for _, r in layers]),
        mask=mask,
        doc=doc,
        layers=tuple(layer for layer, _ in layers),
        boundary=boundary,
        g_gate=torch.stack(gate_only) if gate_only else None,
    )


def _attention_mask(
    tokens: Int[Tensor, "B T"], doc: Int[Tensor, "B T"] | None, cache: DecodeCache | None
) -> Tensor | None:
    """Which earlier tokens each token may attend to [B or 1, 1, T, P+T]; None for plain causal attention."""
    T = tokens.shape[1]
    P = 0 if cache is None else cache.length
    if doc is None and P == 0:
        return None
    causal = torch.ones(T, P + T, dtype=torch.bool, device=tokens.device).tril(P)
    if doc is None:
        return causal[None, None]
    known = doc if cache is None or cache.doc is None else torch.cat([cache.doc, doc], dim=1)
    changes = F.pad(known[:, 1:] != known[:, :-1], (1, 0))
    document = changes.cumsum(1)  # renumbered: the same number later in the row is another document
    return (causal & (document[:, P:, None] == document[:, None, :]))[:, None]
