"""Small models in float64 whose experts differ and whose routing is far from uniform, so that errors show."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.runs.config import ModelConfig
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runs.settings import config_from
from stickymoe.training.build import build_model
from stickymoe.variants import variant_class, variant_names

VOCAB = 23
SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=16)


def kinds_of_router() -> list[str]:
    """One variant for each way to route: losses do not route."""
    kinds: dict[tuple, str] = {}
    for name in ["vanilla", *variant_names()]:
        parts = tuple(getattr(variant_class(name), part) for part in ("routes", "source", "filter", "choice"))
        kinds.setdefault(parts, name)
    return list(kinds.values())


@cache
def lively(variant: str) -> GPT:
    """The model of a variant with large random weights; shared between tests, which must not train it."""
    settings = RECOMMENDED if variant == "recommended" else {"name": variant}
    config = replace(config_from({"variant": settings}), model=SIZES)
    return enliven(build_model(config, VOCAB).double()).requires_grad_(False)


@torch.no_grad()
def enliven(model: GPT) -> GPT:
    """Add large random weights to all parameters."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.add_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def random_tokens(seed: int, B: int, T: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model: GPT, tokens: torch.Tensor, doc: torch.Tensor | None, cuts: list[int]) -> tuple:
    """`(logits, S)` of a pass in pieces that end at `cuts` and at the end; S is None for a dense model.

    Without gradient, as text is generated: routers scan arrays.
    """
    cache = DecodeCache.empty(model.config.n_layers)
    edges = [0, *cuts, tokens.shape[1]]
    pieces = []
    for start, stop in pairwise(edges):
        part = slice(start, stop)
        pieces.append(model(tokens[:, part], doc=None if doc is None else doc[:, part], cache=cache))
    logits = torch.cat([p.logits for p in pieces], dim=1)
    if pieces[0].trace is None:
        return logits, None
    return logits, torch.cat([p.trace.S for p in pieces], dim=2)


def assert_same(got: tuple, expected: tuple) -> None:
    """Logits to 1e-9, choices exactly."""
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-9)
    assert (got[1] is None) == (expected[1] is None)
    if got[1] is not None:
        assert torch.equal(got[1], expected[1])


def full(model: GPT, tokens: torch.Tensor, doc: torch.Tensor | None = None) -> tuple:
    """`(logits, S)` of one pass, as in training: routers work on tensors."""
    out = model(tokens, doc=doc)
    return out.logits, None if out.trace is None else out.trace.S
