"""`RoutingTrace`: what the routers of one forward pass decided, stacked over layers.

L layers, B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from stickymoe.errors import ConfigError
from stickymoe.locality.table import RouteTable, index_dtype


def top_k_experts(scores: Float[Tensor, "*batch N"], k: int) -> Int[Tensor, "*batch k"]:
    """eq:topk. The k best experts, best first; of equal ones the lowest index, which `torch.topk` does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def combine_weights(g: Float[Tensor, "*batch N"], S: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The gate probabilities of the selected experts, renormalised.

    A router may choose experts so far below the best that the softmax gives them 0; they share alike.
    """
    chosen = g.gather(-1, S).clamp(min=torch.finfo(g.dtype).tiny)
    return chosen / chosen.sum(-1, keepdim=True)


def family_sums(x: Float[Tensor, "*batch N"], capacity: int) -> Float[Tensor, "*batch C"]:
    """Over the experts i mod C, each sum one family."""
    family = torch.arange(x.shape[-1], device=x.device) % capacity
    return x.new_zeros(*x.shape[:-1], min(capacity, x.shape[-1])).index_add(-1, family, x)


@dataclass(frozen=True)
class RoutingTrace:
    """Gate probabilities `g` with gradient and chosen experts `S`, heaviest first.

    `mask` marks real tokens. `doc` numbers the documents of a packed row: nothing couples tokens across a border.
    `boundary` marks the first token of a sentence or paragraph. `g_gate` has the values of `g`, but its gradient
    reaches the gates' weights alone.
    """

    g: Float[Tensor, "L B T N"]
    S: Int[Tensor, "L B T k"]
    mask: Bool[Tensor, "B T"]
    doc: Int[Tensor, "B T"] | None = None
    boundary: Bool[Tensor, "B T"] | None = None
    g_gate: Float[Tensor, "L B T N"] | None = None

    @classmethod
    def from_logits(
        cls,
        logits: Float[Tensor, "L B T N"],
        top_k: int,
        mask: Shaped[Tensor, "B T"] | None = None,  # bool, or 0 and 1 as tokenizers give it
        doc: Int[Tensor, "B T"] | None = None,
    ) -> RoutingTrace:
        """eq:gate. The trace of a standard top-k router, from its raw logits."""
        if not 1 <= top_k <= logits.shape[-1]:
            raise ConfigError(f"top_k: got {top_k}, expected 1 … {logits.shape[-1]} (the number of experts).")
        for name, given in (("mask", mask), ("doc", doc)):
            if given is not None and given.shape != logits.shape[1:3]:
                B, T = logits.shape[1:3]
                raise ConfigError(
                    f"{name}: got shape {list(given.shape)}, expected {[B, T]} as the logits [L, B, T, N]."
                )
        if mask is None:
            mask = torch.ones(logits.shape[1:3], dtype=torch.bool, device=logits.device)
        else:  # what attention left at padding may be NaN, which would spread to every gradient
            mask = mask.bool()
            logits = torch.where(mask[..., None] | logits.isfinite(), logits, 0.0)
        g = logits.float().softmax(-1)
        return cls(g=g, S=top_k_experts(g.detach(), top_k), mask=mask, doc=doc)

    @property
    def pairs(self) -> Bool[Tensor, "B steps"]:
        """Adjacent tokens that count: both real and in the same document."""
        both = self.mask[:, 1:] & self.mask[:, :-1]
        return both if self.doc is None else both & (self.doc[:, 1:] == self.doc[:, :-1])

    def gate_entropy_by_layer(self) -> Float[Tensor, " L"]:
        """Mean entropy of g over real tokens, in bits: log₂ N means gates that do not decide."""
        H = -torch.special.xlogy(self.g, self.g).sum(-1) / math.log(2)
        return torch.where(self.mask, H, 0.0).sum((1, 2)) / self.mask.sum()

    def table(self) -> RouteTable:
        """The same decisions without gradient, as NumPy arrays."""
        n_experts = self.g.shape[-1]
        return RouteTable(
            S=self.S.cpu().numpy().astype(index_dtype(n_experts)),
            n_experts=n_experts,
            mask=self.mask.cpu().numpy(),
            doc=None if self.doc is None else self.doc.cpu().numpy(),
            weights=combine_weights(self.g.detach(), self.S).cpu().numpy(),
        )


def document_positions(doc: Int[Tensor, "B T"] | None, B: int, T: int) -> Int[Tensor, "B T"]:
    """Zero-based position of every token in its document; without documents, in its row."""
    t = torch.arange(T, device=None if doc is None else doc.device).expand(B, T)
    if doc is None:
        return t
    starts = torch.zeros_like(t)
    starts[:, 1:] = torch.where(doc[:, 1:] != doc[:, :-1], t[:, 1:], 0)
    return t - starts.cummax(dim=1).values
