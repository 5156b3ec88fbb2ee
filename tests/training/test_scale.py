"""The preset `1b` and the arithmetic of docs/scale.md."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.settings import read_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scale() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "scale_page.py"))


def test_1b_has_a_billion_parameters(scale: dict[str, Any]) -> None:
    config = read_config(preset="1b")
    model = scale["model_of"](config)
    assert {p.device for p in model.parameters()} == {torch.device("meta")}
    size = scale["Size"].of(model)
    assert (config.model.n_layers, config.model.n_experts, config.train.precision) == (16, 32, "bf16")
    assert size.total == pytest.approx(1e9, rel=0.1)
    assert size.active < 0.25 * size.total
    c = config.model
    layer = 4 * c.d_model**2 + 4 * c.d_model + 4 * c.d_model + c.n_experts * c.d_model  # attention, norms, gate
    layer += c.n_experts * (2 * c.d_model * c.d_ff + c.d_ff + c.d_model)
    assert size.block == layer
    assert size.total == c.n_layers * layer + (50_257 + c.seq_len + 2) * c.d_model


def test_flops_are_those_that_torch_counts(scale: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model, forward and backward, with the plain path and torch's own products, which torch can count."""
    from torch.utils.flop_counter import FlopCounterMode

    from stickymoe import products
    from stickymoe.models.gpt import GPT
    from stickymoe.variants import Site

    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    config = RunConfig(model=ModelConfig(d_model=64, n_layers=2, n_heads=4, n_experts=8, top_k=2, d_ff=64, seq_len=32))
    model = GPT(config.model, 300, lambda i: config.variant.parts(Site(i, 64, 8, 2, 300)), fast=False)
    tokens = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).loss.backward()
    expected = scale["flops_per_token"](config, scale["Size"].of(model)) * tokens.numel()
    # Torch counts no biases, norms and embeddings, and attention over the whole square.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.1)


def test_sharded_states_sum_up_to_the_whole(scale: dict[str, Any]) -> None:
    size, states = scale["Size"](total=1000, active=100, experts=900, block=10, root=5), scale["state_bytes"]
    assert (states(size, 1, sharded=False), states(size, 8, sharded=False)) == (16_000, 20_000)
    assert states(size, 4, sharded=True) == 4_000 + 4 * (3 * 10 + 2 * 5)


def test_the_page_follows_from_the_model_and_the_record(scale: dict[str, Any], tmp_path: Path) -> None:
    scale["main"](tmp_path)
    assert (tmp_path / "scale.md").read_text() == (ROOT / "docs" / "scale.md").read_text()
