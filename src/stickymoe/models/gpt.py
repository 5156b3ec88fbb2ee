"""The paper's model: a GPT-2 style decoder in which every feed-forward layer is a mixture of experts.

Pre-norm, learned positions, GELU experts with biases, no dropout, the head tied to the embedding.
B sequences, T tokens, P tokens before them, d width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.errors import ConfigError
from stickymoe.models.head import linear_cross_entropy, plain_cross_entropy
from stickymoe.models.moe import Experts, FeedForward, MoE
from stickymoe.routing.families import Families
from stickymoe.routing.routers import Router, RouterInput, Routing, State
from stickymoe.routing.scan import as_numpy
from stickymoe.routing.trace import RoutingTrace, document_positions
from stickymoe.runs.config import ModelConfig


@dataclass
class LayerCache:
    """What one layer remembers of the tokens so far."""

    keys: Float[Tensor, "B heads P dh"]
    values: Float[Tensor, "B heads P dh"]
    router: State


@dataclass
class DecodeCache:
    """What the model remembers of the tokens so far: keys, values and router state of every layer."""

    layers: list[LayerCache | None]
    position: Int[Tensor, "B P"] | None = None
    doc: Int[Tensor, "B P"] | None = None

    @classmethod
    def empty(cls, n_layers: int) -> DecodeCache:
        return cls(layers=[None] * n_layers)


@dataclass(frozen=True)
class Output:
    """Of a forward pass: the mean loss if targets were given, else logits; and the trace if anything was routed."""

    loss: Float[Tensor, ""] | None
    logits: Float[Tensor, "B T V"] | None
    trace: RoutingTrace | None


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self, x: Float[Tensor, "B T d"], mask: Tensor | None, past: LayerCache | None
    ) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"], Tensor, Tensor]:
        """The layer's output, the attended values before the output projection, and all keys and values."""
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        attended = attended.transpose(1, 2).reshape(B, T, d)
        return self.out(attended), attended, k, v


class Block(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        router: Router | None,
        fast: bool,
        below: Experts | None,
        families: Families | None,
    ) -> None:
        """`below` are the experts of the layer below, if this one uses the same."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config.d_model, config.n_heads)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn: MoE | FeedForward
        if router is None:
            self.ffn = FeedForward(config.d_model, config.top_k * config.d_ff)
        else:
            experts = below or Experts(config.pool_size, config.d_model, config.d_ff, fast=fast, families=families)
            self.ffn = MoE(router, experts, shared=below is not None)


class GPT(nn.Module):
    """The model is handed its routers: `make_router(layer)`, or None from it for the dense control.

    `fast=False` takes the plain path through experts and head, the reference of the fast one. `families` are experts
    that begin as one.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        make_router: Callable[[int], Router | None],
        *,
        fast: bool = True,
        families: Families | None = None,
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
            self.blocks.append(Block(config, make_router(layer), fast, shared, families))
        self.final_norm = nn.LayerNorm(config.d_model)
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02); projections into the residual stream scaled by 1/√(2L); biases 0, norms 1."""
        residual = ("attention.out.weight", "experts.down", "ffn.down.weight")
        for name, p in self.named_parameters():
            if "norm" in name or "bias" in name:
                nn.init.constant_(p, float("norm.weight" in name))
            else:
                scale = math.sqrt(2 * self.config.n_layers) if name.endswith(residual) else 1.0
                nn.init.normal_(p, std=0.02 / scale)
        for module in self.modules():
            if isinstance(module, Experts):
                module.join_families()

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"] | None = None,
        mask: Tensor | None = None,
        doc: Int[Tensor, "B T"] | None = None,
        cache: DecodeCache | None = None,
        boundary: Bool[Tensor, "B T"] | None = None,
        done: float = 1.0,
    ) -> Output:
        """One pass over `tokens`, which continue those in `cache`; the cache is brought up to date in place.

        `mask` marks real tokens (bool, or 0 and 1), which come first in a row; `doc` keeps attention, positions and
        routing inside documents; `boundary` marks the first tokens of sentences; `done` is the share of training that
        is over. Targets of −100 do not count.
        """
        mask = None if mask is None else mask.bool()
        _require_whole(tokens, mask, doc, cache)
        position = self._positions(tokens, doc, cache)
        attention_mask = _attention_mask(tokens, doc, cache)
        x = self.token_embedding(tokens) + self.position_embedding(position)
        routed: list[Routing] = []
        ids, places = as_numpy(tokens), as_numpy(position)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            past = cache.layers[i] if cache is not None else None
            out, attended, keys, values = block.attention(block.attention_norm(x), attention_mask, past)
            x = x + out
            h = block.ffn_norm(x)
            state: State = {}
            if isinstance(block.ffn, MoE):
                seen = RouterInput(h, attended, ids, places, doc, boundary, done)
                y, routing = block.ffn(seen, past.router if past is not None else None)
                routed.append(routing)
                state = routing.state
            else:
                y = block.ffn(h)
            x = x + y
            if cache is not None:
                cache.layers[i] = LayerCache(keys, values, state)
        if cache is not None:
            cache.position = position if cache.position is None else torch.cat([cache.position, position], dim=1)
            if doc is not None:
                cache.doc = doc if cache.doc is None else torch.cat([cache.doc, doc], dim=1)

        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        trace = _stack(routed, mask, doc, boundary)
        x = self.final_norm(x)
        if targets is None:
            return Output(loss=None, logits=F.linear(x, self.token_embedding.weight), trace=trace)
        cross_entropy = linear_cross_entropy if self.fast else plain_cross_entropy
        loss = cross_entropy(x.flatten(0, 1), self.token_embedding.weight, targets.flatten())
        return Output(loss=loss, logits=None, trace=trace)

    def _positions(
        self, tokens: Int[Tensor, "B T"], doc: Int[Tensor, "B T"] | None, cache: DecodeCache | None
    ) -> Int[Tensor, "B T"]:
        """Place in the document, continued from the cache."""
        B, T = tokens.shape
        position = document_positions(doc, B, T).to(tokens.device)
        if cache is not None and cache.position is not None:
            goes_on = position == torch.arange(T, device=tokens.device)  # no border since the first new token
            if doc is not None and cache.doc is not None:
                goes_on = goes_on & (doc[:, :1] == cache.doc[:, -1:])
            position = torch.where(goes_on, position + cache.position[:, -1:] + 1, position)
        if int(position.max()) >= self.config.seq_len:
            raise ConfigError(
                f"The model sees at most seq_len={self.config.seq_len} tokens, got {int(position.max()) + 1}."
            )
        return position


def _require_whole(tokens: Tensor, mask: Tensor | None, doc: Tensor | None, cache: DecodeCache | None) -> None:
    """Refuse what would be routed and attended to as something else."""
    if tokens.numel() == 0:
        raise ConfigError(f"tokens: got {list(tokens.shape)}, expected at least one sequence of one token.")
    if mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ConfigError("mask: got padding before real tokens, which would be attended to; pad on the right.")
    if cache is None:
        return
    if mask is not None and not bool(mask.all()):
        raise ConfigError("mask: got padding with a cache, which would be gone on from; decode rows of equal length.")
    if cache.position is not None and (doc is None) != (cache.doc is None):
        given, before = ("no documents", "with") if doc is None else ("documents", "without")
        raise ConfigError(f"doc: got {given} after a cache {before} them; pass doc always or never.")


def _stack(routed: list[Routing], mask: Tensor, doc: Tensor | None, boundary: Tensor | None) -> RoutingTrace | None:
    """The layers' routings as one trace; None where nothing was routed."""
    if not routed:
        return None
    gate_only = [r.g_gate for r in routed if r.g_gate is not None]
    return RoutingTrace(
        g=torch.stack([r.g for r in routed]),
        S=torch.stack([r.S for r in routed]),
        mask=mask,
        doc=doc,
        boundary=boundary,
        g_gate=torch.stack(gate_only) if gate_only else None,
    )


def _attention_mask(
    tokens: Int[Tensor, "B T"], doc: Int[Tensor, "B T"] | None, cache: DecodeCache | None
) -> Tensor | None:
    """Which earlier tokens each token may attend to [B or 1, 1, T, P+T]; None for plain causal attention."""
    T = tokens.shape[1]
    P = cache.position.shape[1] if cache is not None and cache.position is not None else 0
    if doc is None and P == 0:
        return None
    causal = torch.ones(T, P + T, dtype=torch.bool, device=tokens.device).tril(P)
    if doc is None:
        return causal[None, None]
    known = doc if cache is None or cache.doc is None else torch.cat([cache.doc, doc], dim=1)
    border = F.pad(known[:, 1:] != known[:, :-1], (1, 0))
    document = border.cumsum(1)  # counted anew: a number that comes back is another document
    return (causal & (document[:, P:, None] == document[:, None, :]))[:, None]
