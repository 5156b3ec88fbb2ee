"""The fused head against the plain one: loss and gradients, ignored targets, extremes, autocast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.models import head
from stickymoe.models.head import linear_cross_entropy, plain_cross_entropy


def inputs(n, d, V, seed, dtype=torch.float64, scale=1.0, ignored=0.0):
    rng = torch.Generator().manual_seed(seed)
    h = (scale * torch.randn(n, d, generator=rng, dtype=dtype)).requires_grad_()
    weight = torch.randn(V, d, generator=rng, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (n,), generator=rng)
    targets[torch.rand(n, generator=rng) < ignored] = -100
    targets[0] = 0  # at least one counts
    return h, weight, targets


def both(h, weight, targets, upstream=1.0):
    out = []
    for way in (plain_cross_entropy, linear_cross_entropy):
        loss = way(h, weight, targets)
        out.append((loss.detach(), *torch.autograd.grad(upstream * loss, (h, weight))))
    return out


@given(
    n=st.integers(1, 20),
    d=st.integers(1, 6),
    V=st.integers(2, 30),
    rows=st.integers(1, 25),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    upstream=st.sampled_from([1.0, 0.25, -3.0]),
    seed=st.integers(0, 99),
)
def test_equals_the_plain_head(n, d, V, rows, ignored, upstream, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "ROWS", rows)
        plain, fused = both(*inputs(n, d, V, seed, ignored=ignored), upstream=upstream)
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 512])
def test_gradients_by_finite_differences(rows, monkeypatch):
    monkeypatch.setattr(head, "ROWS", rows)
    h, weight, targets = inputs(7, 4, 11, seed=0, ignored=0.3)
    assert torch.autograd.gradcheck(lambda h, weight: linear_cross_entropy(h, weight, targets), (h, weight))


def test_a_target_whose_probability_underflows_keeps_its_loss():
    h = torch.tensor([[200.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    targets = torch.tensor([1, 0])
    plain, fused = both(h, weight, targets)
    assert plain[0] > 199
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a)


def test_only_the_gradients_asked_for():
    h, weight, targets = inputs(5, 3, 7, seed=1)
    (dh,) = torch.autograd.grad(linear_cross_entropy(h, weight.detach(), targets), (h,))
    (expected,) = torch.autograd.grad(plain_cross_entropy(h, weight.detach(), targets), (h,))
    torch.testing.assert_close(dh, expected)
    with torch.no_grad():
        loss = linear_cross_entropy(h, weight, targets)
    torch.testing.assert_close(loss, plain_cross_entropy(h, weight, targets).detach())


def test_under_autocast_products_are_bf16_and_the_loss_is_not():
    h, weight, targets = inputs(64, 16, 50, seed=2, dtype=torch.float32)
    exact = both(h, weight, targets)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, weight, targets)
        dh, dweight = torch.autograd.grad(loss, (h, weight))
    assert loss.dtype == dh.dtype == dweight.dtype == torch.float32
    assert loss != exact[0]
    torch.testing.assert_close(loss.detach(), exact[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(dh, exact[1], rtol=0.1, atol=2e-3)
    torch.testing.assert_close(dweight, exact[2], rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("stray", [-1, 7])
def test_a_target_outside_the_vocabulary_is_refused(stray):
    h, weight, targets = inputs(5, 3, 7, seed=1)
    targets[2] = stray
    with pytest.raises(IndexError, match=r"0 … 6"):
        linear_cross_entropy(h, weight, targets)


def test_a_confident_row_keeps_its_small_gradient_under_autocast():
    """p − 1 of a likely target is small: rounding p to bf16 before subtracting would lose it."""
    h, weight, targets = 6 * torch.eye(16), torch.eye(16), torch.arange(16)  # exact in bf16
    h.requires_grad_(), weight.requires_grad_()
    exact = both(h, weight, targets)[0]
    assert exact[0] < 0.04
    with torch.autocast("cpu", torch.bfloat16):
        dh, dweight = torch.autograd.grad(linear_cross_entropy(h, weight, targets), (h, weight))
    assert (dh - exact[1]).norm() < 0.01 * exact[1].norm()
    assert (dweight - exact[2]).norm() < 0.01 * exact[2].norm()


def test_what_is_ignored_may_be_anything():
    h, weight, targets = inputs(5, 3, 7, seed=1)
    targets[2] = -100
    expected = linear_cross_entropy(h, weight, targets)
    with torch.no_grad():
        h[2] = torch.nan
    assert linear_cross_entropy(h, weight, targets) == expected
    torch.testing.assert_close(plain_cross_entropy(h, weight, targets), expected)
