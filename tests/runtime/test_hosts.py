"""Models without their experts: every supported family computes the same, and every mistake is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packing import UNSUPPORTED, FromCheckpoint, pack
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stickymoe.errors import ConfigError, DataError, StickyError
from stickymoe.runtime.checkpoints import open_checkpoint
from stickymoe.runtime.hosts import build_without_experts, expert_gates, expert_spec, install, torch_expert
from stickymoe.runtime.store import DENSE
from tests.huggingface.tiny import FAMILIES, batch, tiny

SUPPORTED = [family for family in FAMILIES if family not in UNSUPPORTED]
# None: the module's own code is needed.
OTHER_ACTIVATION = {
    **dict.fromkeys(("gpt_oss", "openai_privacy_filter", "glm5_next", "hy_v4", "beam", "minimax_m3_vl")),
    **dict.fromkeys(("muse_spark", "deepseek_v4")),
    "nemotron_h": "relu2",
    "gemma4": "gelu_tanh",
    "diffusion_gemma": "gelu_tanh",
}


def saved(family: str, folder: Path) -> Path:
    tiny(family).save_pretrained(folder)
    return folder


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in batch(model).items() if key != "labels"}


@pytest.mark.parametrize("family", SUPPORTED)
@torch.no_grad()
def test_a_family_computes_the_same_without_its_experts(family, tmp_path):
    original = tiny(family)
    original.save_pretrained(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")
    packed = build_without_experts(pack(checkpoint, tmp_path / "packed"))
    inputs = inputs_of(original)
    original.set_experts_implementation("eager")
    expected = original(**inputs)[0]
    scale = float(expected.abs().max())
    before = packed.get_experts_implementation()

    experts = FromCheckpoint(checkpoint)
    with install(packed, experts) as installed:
        assert (packed(**inputs)[0] - expected).abs().max() <= 1e-5 * scale
        assert installed.calls == [1] * checkpoint.n_layers
        assert experts.widths == {checkpoint.top_k}
        if original.can_generate():
            settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(packed.generate(**inputs, **settings), original.generate(**inputs, **settings))
    with install(packed, FromCheckpoint(checkpoint, swapped=True)):
        assert (packed(**inputs)[0] - expected).abs().max() > 1e-3 * scale
    assert packed.get_experts_implementation() == before


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_family_is_built_as_from_pretrained_builds_it(family, tmp_path):
    """In half precision, which shows what stays in fp32. Buffers that are not saved are compared, too."""
    original = tiny(family)
    original.save_pretrained(tmp_path / "saved")
    reference = type(original).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    packed = build_without_experts(pack(open_checkpoint(tmp_path / "saved"), tmp_path / "packed"), torch.bfloat16)
    assert not packed.training
    experts = {id(p) for gate in expert_gates(packed) for p in gate.experts[0].parameters(recurse=False)}
    assert all(p.is_meta == (id(p) in experts) for p in packed.parameters())
    found = dict([*packed.named_parameters(remove_duplicate=False), *packed.named_buffers(remove_duplicate=False)])
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        assert found[name].dtype == expected.dtype, name
        assert id(found[name]) in experts or torch.equal(found[name], expected), name
    for name, p in original.named_parameters():
        assert found[name].requires_grad == p.requires_grad, name
    for target, source in reference.all_tied_weights_keys.items():
        assert found[target] is found[source]


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_activation_of_a_family_is_known(family):
    spec = expert_spec(expert_gates(tiny(family))[0].experts[0])
    assert spec.activation == OTHER_ACTIVATION.get(family, "silu")
    assert spec.gated == (family != "nemotron_h")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "tanh", "quick_gelu"])
def test_activations_are_told_apart(activation):
    spec = expert_spec(expert_gates(tiny("mixtral", hidden_act=activation))[0].experts[0])
    known = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu2": "relu2",
    }
    assert spec.activation == known.get(activation)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_other_families_are_refused_by_name(family, tmp_path):
    with pytest.raises(ConfigError, match=f"pack: got .*family {family}.*{UNSUPPORTED[family]}") as refused:
        open_checkpoint(saved(family, tmp_path))
    _, offered = str(refused.value).rstrip(".").split("Supported families: ")
    assert offered.split(", ") == sorted(SUPPORTED)


# What a packed folder may lack


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return pack(open_checkpoint(saved("mixtral", tmp_path / "saved")), tmp_path / "packed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "has no 'model.norm.weight', which MixtralForCausalLM .* needs"),
        (
            lambda t: t.update(other=torch.ones(1)),
            "has 'other', which is not a part of MixtralForCausalLM .family mixtral. without its experts",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            "does not fit MixtralForCausalLM .*model.norm.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(8, 32, 16)}),
            "has 'model.layers.0.mlp.experts.down_proj', which is not a part of .* without its experts",
        ),
    ],
    ids=["missing", "surplus", "shape", "an expert"],
)
def test_a_dense_part_that_does_not_fit_is_refused(mixtral, change, message):
    tensors = load_file(mixtral / DENSE)
    change(tensors)
    save_file(tensors, mixtral / DENSE)
    with pytest.raises(DataError, match=message):
        build_without_experts(mixtral)


def test_a_damaged_dense_part_is_refused(mixtral):
    content = (mixtral / DENSE).read_bytes()
    (mixtral / DENSE).write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"dense.safetensors is damaged: the header entry of .* does not fit the file"):
        build_without_experts(mixtral)
    (mixtral / DENSE).write_bytes(content[:50])
    with pytest.raises(DataError, match="expected a safetensors file with a header"):
        build_without_experts(mixtral)
    (mixtral / DENSE).unlink()
    with pytest.raises(DataError, match=r"cannot be read .No such file"):
        build_without_experts(mixtral)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "stickymoe"}, "was exported from a run: pass the folder of the run itself"),
        ({"architectures": ["Other"], "model_type": "other"}, "is not a model that this version of transformers has"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(mixtral, settings, message):
    file = mixtral / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match=message):
        build_without_experts(mixtral)


def test_generation_settings_are_read(mixtral):
    (mixtral / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    assert build_without_experts(mixtral).generation_config.max_new_tokens == 7


def test_the_type_is_the_saved_one_if_the_config_has_none(tmp_path):
    tiny("mixtral").to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}))
    packed = build_without_experts(pack(open_checkpoint(tmp_path / "saved"), tmp_path / "packed"))
    assert packed.dtype == torch.bfloat16


# Computing experts elsewhere


def zeros(layer: int, module: nn.Module, h: Tensor, S: Tensor, w: Tensor) -> Tensor:
    return torch.zeros_like(h)


@torch.no_grad()
def test_two_models_have_their_own_functions():
    first, second = tiny("mixtral"), tiny("mixtral")
    inputs = inputs_of(first)
    expected = first(**inputs).logits
    layers: list[int] = []

    def record(layer: int, *rest: Tensor) -> Tensor:
        layers.append(layer)
        return zeros(layer, *rest)

    with install(first, zeros) as a, install(second, record) as b:
        without = first(**inputs).logits
        assert a.calls == [1, 1, 1]
        assert b.calls == [0, 0, 0]
        assert torch.equal(second(**inputs).logits, without)
    assert layers == [0, 1, 2]
    assert not torch.equal(without, expected)
    assert torch.equal(first(**inputs).logits, expected)
    assert torch.equal(second(**inputs).logits, expected)


def test_uninstalling_leaves_nothing():
    model = tiny("qwen3_vl_moe")
    before = model.get_experts_implementation()
    modules = [set(vars(module)) for module in model.modules()]
    with install(model, zeros):
        assert model.get_experts_implementation() != before
    assert model.get_experts_implementation() == before
    assert [set(vars(module)) for module in model.modules()] == modules
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_installing_twice_is_refused():
    model = tiny("mixtral")
    with install(model, zeros), pytest.raises(ConfigError, match="are replaced already"):
        install(model, zeros)


@torch.no_grad()
def test_experts_that_are_not_called_are_noticed():
    model = tiny("mixtral")
    with install(model, zeros):
        model.config._experts_implementation_internal = "eager"
        with pytest.raises(
            StickyError, match=r"MixtralForCausalLM \(family mixtral\) did not call the experts of layer 0"
        ):
            model(**inputs_of(model))


@torch.no_grad()
def test_a_config_shared_with_another_model_is_noticed():
    model = tiny("mixtral")
    other = type(model)(model.config).eval()
    with install(model, zeros), pytest.raises(ConfigError, match="nothing was installed on this model"):
        other(**inputs_of(model))


@torch.no_grad()
def test_indices_without_expert_and_zero_weights_arrive_as_they_are(tmp_path):
    checkpoint = open_checkpoint(saved("mixtral", tmp_path))
    model = tiny("mixtral")
    experts = expert_gates(model)[1].experts[0]
    h = torch.randn(3, 32)
    S, w = torch.tensor([[0, 8], [3, 3], [8, 8]]), torch.tensor([[0.5, 0.5], [0.0, 0.25], [1.0, 0.0]])
    with install(model, FromCheckpoint(checkpoint)):
        y = experts(h, S, w)
    names = [t.name for t in checkpoint.spec.tensors]
    expert = {e: dict(zip(names, checkpoint.expert(1, e), strict=True)) for e in (0, 3)}
    assert torch.allclose(y[0], 0.5 * torch_expert(experts, expert[0], h[:1])[0])
    assert torch.allclose(y[1], 0.25 * torch_expert(experts, expert[3], h[1:2])[0])
    assert torch.equal(y[2], torch.zeros(32))


def test_an_expert_with_unknown_tensors_is_refused():
    experts = expert_gates(tiny("mixtral"))[0].experts[0]
    tensors = {"up": torch.ones(32, 32), "down": torch.ones(32, 16), "scale": torch.ones(1)}
    with pytest.raises(ConfigError, match="expert of the tensors up, down, scale, expected up and down"):
        torch_expert(experts, tensors, torch.ones(1, 32))


def test_further_stacks_of_a_module_belong_to_its_experts():
    experts = expert_gates(tiny("mixtral"))[0].experts[0]
    experts.scale = nn.Parameter(torch.ones(8, 5))
    experts.common = nn.Parameter(torch.ones(3))
    spec = expert_spec(experts)
    assert [(t.name, t.shape) for t in spec.tensors] == [("up", (32, 32)), ("down", (32, 16)), ("scale", (5,))]
    assert spec.activation is None
