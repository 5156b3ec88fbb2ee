"""Small random routing for property tests: gates, route tables and requests; padding, holes, documents.

Shapes, masks and borders are Hypothesis's to shrink; the many numbers come from one drawn seed.
"""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stickymoe.locality.table import RouteTable, index_dtype
from stickymoe.routing.trace import RoutingTrace

# A first call compiles, so no deadline.
thorough = settings(deadline=None, max_examples=80)
costly = settings(deadline=None, max_examples=30)


class Gates(NamedTuple):
    """Router logits and what `RoutingTrace.from_logits` needs beside them."""

    logits: torch.Tensor
    top_k: int
    mask: torch.Tensor
    doc: torch.Tensor | None

    def trace(self, logits: torch.Tensor | None = None) -> RoutingTrace:
        logits = self.logits if logits is None else logits
        return RoutingTrace.from_logits(logits, self.top_k, self.mask, self.doc)

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """`(g, S, mask, doc)` of the trace, as the reference reads them."""
        trace = self.trace()
        doc = None if self.doc is None else self.doc.numpy()
        return trace.g.double().numpy(), trace.S.numpy(), self.mask.numpy(), doc


class Requests(NamedTuple):
    """Requests [sequences, steps, k] and the caches they are for."""

    S: np.ndarray
    n_experts: int
    mask: np.ndarray | None
    doc: np.ndarray | None


def seeds() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def masks(draw: st.DrawFn, B: int, T: int) -> np.ndarray:
    """Every token real; padding at one end; or holes anywhere."""
    kind = draw(st.sampled_from(["full", "right padding", "left padding", "holes"]))
    if kind == "full":
        return np.ones((B, T), dtype=bool)
    if kind == "holes":
        return draw(hnp.arrays(bool, (B, T), elements=st.booleans(), fill=st.nothing()))
    lengths = np.array(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    padded = np.arange(T) < lengths[:, None]
    return padded if kind == "right padding" else padded[:, ::-1].copy()


@st.composite
def documents(draw: st.DrawFn, B: int, T: int) -> np.ndarray:
    """Runs of document numbers; a number may come back after another, which is a new document."""
    doc = np.zeros((B, T), dtype=np.int64)
    for b in range(B):
        for t in draw(st.lists(st.integers(1, T), max_size=3)):
            doc[b, t:] += 1
    return doc % draw(st.integers(2, 4))


@st.composite
def gates(draw: st.DrawFn, max_T: int = 9) -> Gates:
    L, B, T = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, max_T))
    N = draw(st.integers(1, 6))
    scale = draw(st.sampled_from([1.0, 0.1, 5.0]))
    logits = scale * draw(seeds()).standard_normal((L, B, T, N))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    doc = draw(st.none() | documents(B, T))
    return Gates(
        logits=torch.tensor(logits, dtype=torch.float32),
        top_k=draw(st.integers(1, N)),
        mask=torch.tensor(draw(masks(B, T))),
        doc=None if doc is None else torch.tensor(doc),
    )


def sticky_choices(rng: np.random.Generator, shape: tuple[int, ...], n_experts: int, *, stay: float):
    """Distinct experts [..., T, k]; a step repeats the one before it with probability `stay`."""
    *outer, T, k = shape
    S = rng.permuted(np.broadcast_to(np.arange(n_experts), (*outer, T, n_experts)), axis=-1)[..., :k]
    for t in range(1, T):
        S[..., t, :] = np.where(rng.random((*outer, 1)) < stay, S[..., t - 1, :], S[..., t, :])
    return S


@st.composite
def tables(draw: st.DrawFn) -> RouteTable:
    L, B, T = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    N = draw(st.integers(1, 6))
    k = draw(st.integers(1, N))
    S = sticky_choices(draw(seeds()), (L, B, T, k), N, stay=draw(st.sampled_from([0.0, 0.5, 0.9])))
    return RouteTable(
        S=S.astype(index_dtype(N)),
        n_experts=N,
        mask=draw(masks(B, T)),
        doc=draw(st.none() | documents(B, T)),
    )


@st.composite
def requests(draw: st.DrawFn, max_k: int = 6, max_T: int = 15) -> Requests:
    B, T, N = draw(st.integers(1, 3)), draw(st.integers(1, max_T)), draw(st.integers(1, 6))
    k = draw(st.integers(1, min(N, max_k)))
    return Requests(
        S=sticky_choices(draw(seeds()), (B, T, k), N, stay=draw(st.sampled_from([0.0, 0.5]))),
        n_experts=N,
        mask=draw(st.none() | masks(B, T)),
        doc=draw(st.none() | documents(B, T)),
    )
