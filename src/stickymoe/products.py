"""Matrix products in fp32 on the CPU, by the faster of the two libraries in torch.

torch multiplies fp32 matrices with MKL. On AMD processors MKL does not use AVX-512, and oneDNN, which torch contains
too, does: about 2.4 times the speed on a Zen 5. Elsewhere, and for other types and devices, the product is torch's own.

m rows, k inner, n outer width.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SMALLEST = 1 << 18  # multiplications; below it, starting oneDNN takes longer than the product


@cache
def onednn_is_faster() -> bool:
    """Whether this is an AMD processor with AVX-512, and torch has oneDNN's product for plain tensors."""
    info = Path("/proc/cpuinfo")
    amd = info.exists() and "AuthenticAMD" in info.read_text()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return amd and wide and torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def row_unit() -> int:
    """Numbers of rows that change from product to product should be multiples of this.

    oneDNN compiles a product for each new shape, which takes as long as a tenth to a third of the product.
    """
    return 32 if onednn_is_faster() else 1


def product(
    x: Float[Tensor, "m k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "m n"]:
    """x·weightᵀ + bias, without a gradient."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def product_of_columns(y: Float[Tensor, "m n"], x: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
    """yᵀ·x, without a gradient: the gradient of a weight."""
    # Either is the transpose of the other; oneDNN is faster with more columns than rows in the result.
    return product(x.t(), y.t()).t() if y.shape[1] > x.shape[1] else product(y.t(), x.t())


def add_product_of_columns(total: Float[Tensor, "n k"], y: Float[Tensor, "m n"], x: Float[Tensor, "m k"]) -> None:
    """total += yᵀ·x, where `total` may be wider than the factors."""
    if total.dtype == y.dtype and not _by_onednn(y.t(), x.t()):
        total.addmm_(y.t(), x)
    else:
        total += product_of_columns(y, x)


def linear(x: Float[Tensor, "*rows k"], weight: Float[Tensor, "n k"], bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with its gradients."""
    rows = x.flatten(0, -2)
    if torch.is_autocast_enabled(x.device.type) or not _by_onednn(rows, weight):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """`torch.nn.Linear` with the faster product."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            product(dy, weight.t()) if by_x else None,
            product_of_columns(dy, x) if by_weight else None,
            dy.sum(0) if by_bias else None,
        )


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # inductor takes the product only with constant weights
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and len(x) * weight.numel() >= SMALLEST
        and onednn_is_faster()
    )
