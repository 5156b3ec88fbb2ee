"""`RoutingTrace`: what the routers of one forward pass decided, stacked over layers.

L layers, B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.locality.table import RouteTable, index_dtype


def top_k_experts(scores: Float[Tensor, "*batch N"], k: int) -> Int[Tensor, "*batch k"]:
    """eq:topk. The k best experts, best first. Ties go to the lowest index, which `torch.topk` does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def combine_weights(g: Float[Tensor, "*batch N"], S: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The gate probabilities of the selected experts, renormalised.

    A rule may choose experts whose softmax underflows to 0; such experts get equal weights.
    """
    chosen = g.gather(-1, S).clamp(min=torch.finfo(g.dtype).tiny)
    return chosen / chosen.sum(-1, keepdim=True)


def slot_sums(x: Float[Tensor, "*batch N"], capacity: int) -> Float[Tensor, "*batch C"]:
    """Sums over the experts i mod C that share a slot."""
    slot = torch.arange(x.shape[-1], device=x.device) % capacity
    return x.new_zeros(*x.shape[:-1], min(capacity, x.shape[-1])).index_add(-1, slot, x)


def token_positions(mask: Bool[Tensor, "B T"], doc: Int[Tensor, "B T"] | None = None) -> Int[Tensor, "B T"]:
    """Zero-based position of every real token in its document; without documents, in its row.

    Only real tokens count, so padding may be on either side. Padding before the first token has position 0.
    """
    real = mask.long().cumsum(1)
    if doc is None:
        return (real - 1).clamp(min=0)
    before = torch.zeros_like(real)  # real tokens before the document
    before[:, 1:] = torch.where(doc[:, 1:] != doc[:, :-1], real[:, :-1], 0)
    return (real - 1 - before.cummax(1).values).clamp(min=0)


@dataclass(frozen=True)
class RoutingTrace:
    """Gate probabilities `g` with gradient, chosen experts `S`, heaviest first, and their combine weights `w`.

    `g` is the router's own score divided by its sum. `w` is what the model multiplies the experts' outputs with.
    `layers` are the indices of these layers in the model. `mask` marks real tokens. `doc` numbers the documents of a
    packed row; no pair, window or cache spans two documents. `boundary` marks the first token of a sentence or
    paragraph. `g_gate` has the values of `g`, but its gradient reaches the weights of the gates alone. The last
    `n_null` classes of `g` are not experts: a token that chooses one loads nothing.
    """

    g: Float[Tensor, "L B T N"]
    S: Int[Tensor, "L B T k"]
    w: Float[Tensor, "L B T k"]
    mask: Bool[Tensor, "B T"]
    doc: Int[Tensor, "B T"] | None = None
    layers: tuple[int, ...] = ()
    boundary: Bool[Tensor, "B T"] | None = None
    g_gate: Float[Tensor, "L B T N"] | None = None
    n_null: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", tuple(range(len(self.g))))
        if len(self.layers) != len(self.g):
            raise ConfigError(f"layers: got {len(self.layers)} indices, expected {len(self.g)}, one for each layer.")

    @classmethod
    def from_logits(
        cls,
        logits: Float[Tensor, "L B T N"],
        top_k: int,
        mask: Shaped[Tensor, "B T"] | None = None,  # bool, or 0 and 1 as tokenizers give it
        doc: Int[Tensor, "B T"] | None = None,
    ) -> RoutingTrace:
        """eq:gate. The trace of a standard top-k router with softmax, from its raw logits."""
        if not 1 <= top_k <= logits.shape[-1]:
            raise ConfigError(f"top_k: got {top_k}, expected 1 … {logits.shape[-1]} (the number of experts).")
        mask = _checked_mask(mask, doc, logits)
        # Logits at padding may be NaN, which would spread to every gradient.
        logits = torch.where(mask[..., None] | logits.isfinite(), logits, 0.0)
        g = logits.float().softmax(-1)
        S = top_k_experts(g.detach(), top_k)
        return cls(g=g, S=S, w=combine_weights(g, S), mask=mask, doc=doc)

    @classmethod
    def from_choice(
        cls,
        g: Float[Tensor, "L B T N"],
        S: Int[Tensor, "L B T k"],
        w: Float[Tensor, "L B T k"],
        mask: Shaped[Tensor, "B T"] | None = None,
        doc: Int[Tensor, "B T"] | None = None,
        *,
        layers: Sequence[int] = (),
        n_null: int = 0,
    ) -> RoutingTrace:
        """The trace of any router: its normalised scores, the experts it chose and the weights it gave them.

        Experts are put in order of weight. At padding, whatever the model computed is replaced: g is uniform, the
        experts are 0 … k−1 with equal weights, and there is no gradient.
        """
        mask = _checked_mask(mask, doc, g)
        if S.shape != w.shape or S.shape[:3] != g.shape[:3]:
            given = f"S {list(S.shape)} and w {list(w.shape)}"
            raise ConfigError(f"choice: got {given}, expected both [L, B, T, k] as g {list(g.shape)}.")
        k, real = S.shape[-1], mask[..., None]
        g = torch.where(real, g, 1.0 / g.shape[-1])
        w = torch.where(real, w, 1.0 / k)
        S = torch.where(real, S, torch.arange(k, device=S.device))
        if S.numel() and not 0 <= int(S.min()) <= int(S.max()) < g.shape[-1]:
            raise ConfigError(f"S: got experts {int(S.min())} … {int(S.max())}, expected 0 … {g.shape[-1] - 1}.")
        order = w.detach().sort(dim=-1, descending=True, stable=True).indices
        S, w = S.gather(-1, order), w.gather(-1, order)
        return cls(g=g, S=S, w=w, mask=mask, doc=doc, layers=tuple(layers), n_null=n_null)

    @property
    def pairs(self) -> Bool[Tensor, "B steps"]:
        """Adjacent tokens that count: both real and in the same document."""
        both = self.mask[:, 1:] & self.mask[:, :-1]
        return both if self.doc is None else both & (self.doc[:, 1:] == self.doc[:, :-1])

    @property
    def positions(self) -> Int[Tensor, "B T"]:
        """Zero-based position of every real token in its document."""
        return token_positions(self.mask, self.doc)

    def gate_entropy_by_layer(self) -> Float[Tensor, " L"]:
        """Mean entropy of g over real tokens, in bits; log₂ N means that the gates do not discriminate."""
        H = -torch.special.xlogy(self.g, self.g).sum(-1) / math.log(2)
        return torch.where(self.mask, H, 0.0).sum((1, 2)) / self.mask.sum()

    def table(self) -> RouteTable:
        """The same decisions without gradient, as NumPy arrays. An expert of weight 0 is not used: it is no access."""
        n_experts = self.g.shape[-1] - self.n_null
        unused = self.S.ge(n_experts) | self.w.detach().eq(0)
        skips = bool(unused.any())
        S = torch.where(unused, n_experts, self.S) if skips else self.S
        return RouteTable(
            S=S.cpu().numpy().astype(index_dtype(n_experts + skips)),
            n_experts=n_experts,
            skips=skips,
            mask=self.mask.cpu().numpy(),
            doc=None if self.doc is None else self.doc.cpu().numpy().astype(np.int32),
            weights=self.w.detach().float().cpu().numpy(),
        )


def _checked_mask(mask: Tensor | None, doc: Tensor | None, scores: Float[Tensor, "L B T N"]) -> Bool[Tensor, "B T"]:
    """The mask as bool, all true if there is none; refused if it or `doc` does not fit the scores."""
    B, T = scores.shape[1:3]
    for name, given in (("mask", mask), ("doc", doc)):
        if given is not None and given.shape != (B, T):
            raise ConfigError(f"{name}: got shape {list(given.shape)}, expected {[B, T]} as the gates [L, B, T, N].")
    if mask is None:
        return torch.ones((B, T), dtype=torch.bool, device=scores.device)
    return mask.bool()
