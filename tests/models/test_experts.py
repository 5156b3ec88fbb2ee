"""The expert layer against a loop over tokens and slots, with gradients, on the fast path and the plain one."""

from math import erf, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from stickymoe.models import moe
from stickymoe.models.moe import Experts, FeedForward, MoE, Router
from stickymoe.routing.rules import RouterInput, RoutingRule

D, F = 5, 7
TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


@pytest.fixture(params=[1, 4], ids=["unpadded", "padded"], scope="module", autouse=True)
def _unit(request):
    """With and without padding of each expert's rows, whatever this processor prefers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "row_unit", lambda: request.param)
        yield


each_path = pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE.keys(), ids=["fp64", "fp32"])
sizes = st.tuples(st.integers(1, 9), st.integers(1, 8) | st.sampled_from([16, 64]), st.integers(1, 4)).filter(
    lambda s: s[2] <= s[1]
)
seeds = st.integers(0, 10_000)


def layer(N, k, seed, dtype, *, fast):
    """A layer with large random weights and biases."""
    made = MoE(Router(D, N, RoutingRule(k)), Experts(N, D, F, fast=fast)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return made


def hidden(n, seed, dtype):
    h = torch.randn(1, n, D, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return h.to(dtype).requires_grad_()


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / sqrt(2)))


def naive(made, h, k):
    """eq:gate, eq:topk, eq:moe_output. Token by token, slot by slot."""
    gate, experts = made.router.gate.weight, made.experts
    rows = []
    for x in h.flatten(0, 1):
        g = (gate @ x).softmax(0)
        chosen = reference.top_k(g.tolist(), k)
        total = sum(g[e] for e in chosen)
        y = torch.zeros_like(x)
        for e in chosen:
            inner = gelu(experts.up[e] @ x + experts.up_bias[e])
            y = y + g[e] / total * (experts.down[e] @ inner + experts.down_bias[e])
        rows.append(y)
    return torch.stack(rows).view_as(h)


def gradients(made, h, y):
    """Of an uneven sum of y, in the layer's input and every weight."""
    uneven = torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).cos()
    leaves = {"h": h, **dict(made.named_parameters())}
    found = torch.autograd.grad((y * uneven).sum(), list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def assert_naive(made, h, k):
    y, routing = made(RouterInput(h), None)
    expected = naive(made, h, k)
    close = TOLERANCE[h.dtype]
    assert y.dtype == h.dtype
    torch.testing.assert_close(y, expected, **close)
    got, wanted = gradients(made, h, y), gradients(made, h, expected)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], **close, msg=lambda m, name=name: f"{name}: {m}")
    return routing


@each_path
@each_dtype
@settings(deadline=None, max_examples=20)
@given(size=sizes, seed=seeds)
def test_the_layer_is_that_of_the_paper_with_gradients(fast, dtype, size, seed):
    n, N, k = size
    assert_naive(layer(N, k, seed, dtype, fast=fast), hidden(n, seed, dtype), k)


@each_path
def test_idle_experts_change_nothing_and_get_no_gradient(fast):
    made = layer(8, 2, 3, torch.float64, fast=fast)
    h = hidden(1, 4, torch.float64)
    routing = assert_naive(made, h, 2)
    idle = sorted(set(range(8)) - set(routing.S.flatten().tolist()))
    assert len(idle) == 6
    y, _ = made(RouterInput(h), None)
    y.sum().backward()
    for p in made.experts.parameters():
        assert (p.grad[idle] == 0).all()


@each_path
def test_all_tokens_may_go_to_one_expert(fast):
    made = layer(4, 1, 5, torch.float64, fast=fast)
    made.router.gate.weight.data.zero_()  # a tie: the lowest index
    routing = assert_naive(made, hidden(6, 5, torch.float64), 1)
    assert (routing.S == 0).all()


@each_path
def test_batches_are_flattened_and_given_back(fast):
    made = layer(5, 2, 6, torch.float64, fast=fast)
    h = torch.randn(3, 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_naive(made, h, 2)


@each_path
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_layer_gives_the_same(fast, mode):
    made, h = layer(5, 2, 7, torch.float64, fast=fast), hidden(6, 7, torch.float64)
    expected, _ = made(RouterInput(h), None)
    with mode():
        y, _ = made(RouterInput(h), None)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-14)
    assert not y.requires_grad


@each_path
def test_frozen_experts_leave_gradient_to_the_gate(fast):
    """As in the second phase of ReMoE."""
    made, h = layer(5, 2, 8, torch.float64, fast=fast), hidden(6, 8, torch.float64)
    wanted = gradients(made, h, naive(made, h, 2))["router.gate.weight"]
    made.experts.requires_grad_(False)
    y, _ = made(RouterInput(h.detach()), None)
    (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).cos()).sum().backward()
    torch.testing.assert_close(made.router.gate.weight.grad, wanted, rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in made.experts.parameters())


@each_path
def test_the_output_scales_with_the_experts_not_with_the_gates(fast):
    """Weights are renormalised: equal experts give the output of one, whatever the gates."""
    made = layer(4, 3, 9, torch.float64, fast=fast)
    for p in made.experts.parameters():
        p.data[:] = p.data[:1].clone()
    h = hidden(6, 9, torch.float64)
    y, _ = made(RouterInput(h), None)
    e = made.experts
    one = gelu(h @ e.up[0].T + e.up_bias[0]) @ e.down[0].T + e.down_bias[0]
    torch.testing.assert_close(y, one, rtol=1e-9, atol=1e-11)


@each_path
def test_under_bf16_the_layer_stays_near_fp32(fast):
    made, h = layer(4, 2, 10, torch.float32, fast=fast), hidden(8, 10, torch.float32)
    exact, routing = made(RouterInput(h), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, under_bf16 = made(RouterInput(h), None)
        y.float().sum().backward()
    assert torch.equal(under_bf16.S, routing.S)
    assert torch.equal(under_bf16.g, routing.g)
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    for p in made.parameters():
        assert p.grad.dtype == torch.float32
        assert p.grad.isfinite().all()


def test_the_dense_layer_is_one_network():
    dense = FeedForward(D, 2 * F).double()
    h = hidden(4, 11, torch.float64)
    by_hand = gelu(h @ dense.up.weight.T + dense.up.bias) @ dense.down.weight.T + dense.down.bias
    torch.testing.assert_close(dense(h), by_hand, rtol=1e-12, atol=1e-13)


def test_gelu_is_the_exact_one():
    """GPT-2 itself has the tanh form; the two differ by about 5e-4."""
    dense = FeedForward(1, 1).double()
    for p in dense.parameters():
        torch.nn.init.constant_(p, float(p.ndim == 2))
    x = 1.7
    expected = 0.5 * x * (1 + erf(x / sqrt(2)))
    assert dense(torch.tensor([[[x]]], dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-12)
