"""Small random experts for property tests, and the plain computation of one."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from stickymoe.runtime.formats import ACTIVATIONS, ExpertLayout, ExpertSpec, TensorSpec
from tests.strategies import seeds

PLAIN_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda h: F.relu(h).square(),
}


def expert_spec(d: int, f: int, *, activation: str = "gelu", gated: bool = False, biases: bool = True) -> ExpertSpec:
    m = 2 * f if gated else f
    tensors = [TensorSpec("up", (m, d)), TensorSpec("down", (d, f))]
    if biases:
        tensors.insert(1, TensorSpec("up_bias", (m,)))
        tensors.append(TensorSpec("down_bias", (d,)))
    return ExpertSpec(tuple(tensors), activation, gated)


def random_tensors(spec: ExpertSpec, rng: np.random.Generator, scale: float = 1.0) -> list[np.ndarray]:
    """Normal numbers; matrices are scaled so that results stay near 1."""
    return [(scale * rng.standard_normal(t.shape) / np.sqrt(t.shape[-1])).astype(np.float32) for t in spec.tensors]


@st.composite
def specs(draw: st.DrawFn) -> ExpertSpec:
    """Widths below, at and beyond a group of int4, odd ones too."""
    width = st.integers(1, 5) | st.sampled_from([31, 32, 33, 63, 64, 65, 97, 128, 131])
    return expert_spec(
        draw(width),
        draw(width),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        gated=draw(st.booleans()),
        biases=draw(st.booleans()),
    )


@st.composite
def weights(draw: st.DrawFn) -> tuple[ExpertSpec, list[np.ndarray]]:
    """An expert with ordinary, huge, tiny or mixed weights, some rows and runs of columns zero."""
    spec, rng = draw(specs()), draw(seeds())
    tensors = random_tensors(spec, rng, draw(st.sampled_from([1.0, 1e37, 1e-30, 1e-44])))
    if draw(st.booleans()):  # of any magnitude
        tensors = [t * np.float32(10) ** rng.integers(-30, 1, t.shape).astype(np.float32) for t in tensors]
    for t in tensors:
        t[rng.random(len(t)) < 0.2] = 0
        if draw(st.booleans()):
            t[..., :64] = 0
    return spec, tensors


def plain_expert(layout: ExpertLayout, buffer: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The expert's result in fp64, from its decoded tensors; and its size if no terms cancelled, to judge errors by."""
    names = [tensor.name for tensor in layout.spec.tensors]
    decoded = (torch.tensor(tensor, dtype=torch.float64) for tensor in layout.decode(buffer))
    tensors = dict(zip(names, decoded, strict=True))
    activation = PLAIN_ACTIVATIONS[layout.spec.activation]
    bound = torch.square if layout.spec.activation == "relu2" else torch.abs  # |activation(h)| ≤ bound(h)
    token = torch.tensor(x, dtype=torch.float64)
    absolute = {name: tensor.abs() for name, tensor in tensors.items()}
    return (
        _plain(tensors, activation, layout.spec.gated, token).numpy(),
        _plain(absolute, bound, layout.spec.gated, token.abs()).numpy(),
    )


def _plain(tensors, activation, gated, x):
    h = F.linear(x, tensors["up"], tensors.get("up_bias"))
    if gated:
        gate, up = h.chunk(2)
        h = activation(gate) * up
    else:
        h = activation(h)
    return F.linear(h, tensors["down"], tensors.get("down_bias"))
