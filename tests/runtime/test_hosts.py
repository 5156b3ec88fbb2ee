"""Every supported family: its experts are read as its model has them, and computing them elsewhere changes nothing."""

from __future__ import annotations

import pytest
import torch

from stickymoe.runtime.checkpoints import open_checkpoint
from stickymoe.runtime.hosts import build_without_experts, expert_gates, expert_parameters, install
from tests.huggingface.tiny import FAMILIES, batch, tiny
from tests.runtime.packing import UNSUPPORTED, FromCheckpoint, pack

SUPPORTED = [family for family in FAMILIES if family not in UNSUPPORTED]


@pytest.mark.parametrize("family", SUPPORTED)
@torch.no_grad()
def test_a_family_runs_without_its_experts(family, tmp_path):
    original = tiny(family)
    original.save_pretrained(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")

    state = original.state_dict()
    modules = [gate.experts[0] for gate in expert_gates(original)]
    names = {module: name for name, module in original.named_modules()}
    assert checkpoint.n_layers == len(modules)
    for layer, module in enumerate(modules):
        stacks = expert_parameters(module)
        for e in range(checkpoint.n_experts):
            for spec, tensor in zip(checkpoint.spec.tensors, checkpoint.expert(layer, e), strict=True):
                expected = getattr(module, stacks[spec.name])[e]
                expected = expected.T if spec.name in ("up", "down") and module.is_transposed else expected
                assert spec.shape == tuple(tensor.shape)
                assert tensor.is_contiguous()
                assert torch.equal(tensor, expected)
        for stack in stacks.values():
            del state[f"{names[module]}.{stack}"]

    dense = dict(checkpoint.dense())
    assert state.keys() - dense.keys() <= original.all_tied_weights_keys.keys()
    assert dense.keys() <= state.keys()
    for name, tensor in dense.items():
        assert torch.equal(tensor, state[name]), name

    packed = build_without_experts(pack(checkpoint, tmp_path / "packed"))
    assert not packed.training
    on_meta = {name for name, p in packed.state_dict().items() if p.is_meta}
    assert on_meta == original.state_dict().keys() - state.keys()
    inputs = batch(original)
    inputs.pop("labels", None)
    original.set_experts_implementation("eager")
    expected = original(**inputs)[0]
    experts = FromCheckpoint(checkpoint)
    with install(packed, experts) as installed:
        assert torch.allclose(packed(**inputs)[0], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert installed.calls == [1] * len(modules)
        assert experts.widths == {checkpoint.top_k}
        if original.can_generate():
            generate = {"max_new_tokens": 3, "do_sample": False}
            assert torch.equal(packed.generate(**inputs, **generate), original.generate(**inputs, **generate))
    with install(packed, FromCheckpoint(checkpoint, swapped=True)):
        assert not torch.allclose(packed(**inputs)[0], expected, rtol=1e-3)
