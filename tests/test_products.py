"""The faster matrix products against torch's own, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stickymoe import products


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def library(request, monkeypatch):
    """Both libraries, whatever this processor prefers, for products of any size."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "SMALLEST", 0)


def factors(m, n, k):
    rng = torch.Generator().manual_seed(m * n + k)
    return torch.randn(m, k, generator=rng), torch.randn(n, k, generator=rng), torch.randn(n, generator=rng)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (16, 64, 8), (33, 2, 65)])
def test_products_equal_those_of_torch(m, n, k):
    x, weight, bias = factors(m, n, k)
    y = x @ weight.t()
    torch.testing.assert_close(products.product(x, weight), y)
    torch.testing.assert_close(products.product(x, weight, bias), y + bias)
    torch.testing.assert_close(products.product(y, weight.t()), y @ weight)
    torch.testing.assert_close(products.product_of_columns(y, x), y.t() @ x)
    for dtype in (torch.float32, torch.float64):
        total = torch.ones(n, k, dtype=dtype)
        products.add_product_of_columns(total, y, x)
        torch.testing.assert_close(total, 1 + (y.t() @ x).to(dtype), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3)])
def test_a_linear_layer_has_the_gradients_of_torch(shape, bias):
    layer = products.Linear(5, 4, bias=bias)
    x = torch.randn(*shape, 5, requires_grad=True)
    upstream = torch.randn(*shape, 4)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x), inputs, upstream)
    theirs = torch.autograd.grad(F.linear(x, layer.weight, layer.bias), inputs, upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_small_products_and_other_types_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    x, weight, bias = factors(4, 3, 2)
    torch.testing.assert_close(products.linear(x, weight, bias), F.linear(x, weight, bias))
    monkeypatch.setattr(products, "SMALLEST", 0)
    wide = [t.double() for t in (x, weight, bias)]
    torch.testing.assert_close(products.linear(*wide), F.linear(*wide))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16


def test_a_compiled_product_is_torchs_own(monkeypatch):
    """Inductor cannot lower oneDNN's product of weights that change."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    x, weight, bias = factors(512, 64, 64)
    calls = []
    monkeypatch.setattr(products.torch.ops.mkldnn, "_linear_pointwise", lambda *given: calls.append(given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(products.linear(x, weight, bias), x @ weight.t() + bias)
    assert not calls
