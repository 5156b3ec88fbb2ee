"""The learning rate at every step, and which weights decay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stickymoe.runs.config import RunConfig, TrainConfig
from stickymoe.training.build import build_model
from stickymoe.training.optimiser import adamw, learning_rate
from stickymoe.variants import variant_names


class TestLearningRate:
    def test_is_the_papers_at_its_corners(self) -> None:
        paper = TrainConfig(steps=10_000, warmup=500, lr=3e-4, final_lr=0.1)
        assert learning_rate(0, paper) == pytest.approx(3e-4 / 500)
        assert learning_rate(499, paper) == pytest.approx(3e-4)
        middle = 500 + 9500 // 2 - 1
        assert learning_rate(middle, paper) == pytest.approx(3e-4 * (0.1 + 0.9 * 0.5))
        assert learning_rate(9_999, paper) == pytest.approx(3e-5)

    def test_without_warm_up_starts_just_below_the_peak(self) -> None:
        config = TrainConfig(steps=1000, warmup=0, lr=1.0)
        assert 0.999 < learning_rate(0, config) <= 1.0

    @given(steps=st.integers(1, 300), warmup=st.integers(0, 400), final=st.floats(0, 1))
    def test_rises_then_falls_and_never_leaves_its_range(self, steps: int, warmup: int, final: float) -> None:
        config = TrainConfig(steps=steps, warmup=warmup, lr=2.0, final_lr=final)
        rates = [learning_rate(step, config) for step in range(steps)]
        assert all(0 <= rate <= 2.0 for rate in rates)
        rising, falling = rates[:warmup], rates[max(warmup - 1, 0) :]
        assert all(a < b for a, b in pairwise(rising))
        assert all(a >= b for a, b in pairwise(falling))
        if steps > warmup:
            assert rates[-1] == pytest.approx(2.0 * final, abs=1e-12)


@pytest.fixture(params=variant_names())
def model(request: pytest.FixtureRequest, small: Callable[..., RunConfig]) -> nn.Module:
    return build_model(small(variant=request.param), vocab_size=300)


class TestAdamW:
    def test_decays_matrices_and_embeddings_only(self, model: nn.Module) -> None:
        """Seen from its effect: with no gradient, only decay moves a weight."""
        config = TrainConfig(lr=0.5, weight_decay=0.1)
        for p in model.parameters():
            nn.init.ones_(p)
            p.grad = torch.zeros_like(p)
        adamw(model.named_parameters(), config).step()

        shrunk = {name for name, p in model.named_parameters() if bool((p < 1).all())}
        kept = {name for name, p in model.named_parameters() if bool((p == 1).all())}
        assert shrunk | kept == {name for name, _ in model.named_parameters()}
        assert all(torch.all(p == 0.95) for name, p in model.named_parameters() if name in shrunk)

        norms = {
            f"{module}.{name}"
            for module, m in model.named_modules()
            if isinstance(m, nn.LayerNorm)
            for name, _ in m.named_parameters()
        }
        biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
        assert kept == norms | biases
        assert {"token_embedding.weight", "position_embedding.weight"} <= shrunk

    def test_spares_the_stacked_biases_of_the_experts(self, small: Callable[..., RunConfig]) -> None:
        experts = build_model(small(), vocab_size=300)
        groups = adamw(experts.named_parameters(), TrainConfig()).param_groups
        plain = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
        stacked = {n: p for n, p in experts.named_parameters() if n.endswith(("up_bias", "down_bias"))}
        assert len(stacked) == 2 * 2  # both, in both layers
        assert all(p.ndim == 2 and id(p) in plain for p in stacked.values())

    def test_has_the_protocols_settings(self, small: Callable[..., RunConfig]) -> None:
        optimiser = adamw(
            build_model(small(), vocab_size=300).named_parameters(),
            TrainConfig(lr=0.02, beta1=0.7, beta2=0.8, weight_decay=0.3),
        )
        assert {g["betas"] for g in optimiser.param_groups} == {(0.7, 0.8)}
        assert {g["lr"] for g in optimiser.param_groups} == {0.02}
        assert sorted(g["weight_decay"] for g in optimiser.param_groups) == [0.0, 0.3]
