"""Checkpoints for packing: the experts and the rest are what the model has, in bounded memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from packing import UNSUPPORTED, pack
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Mxfp4Config, PreTrainedModel

from checkpoints import byte_tokenizer
from stickymoe.errors import ConfigError, DataError, RunError
from stickymoe.models.gpt import GPT
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.runtime import foreign_checkpoints
from stickymoe.runtime.checkpoints import Checkpoint, open_checkpoint
from stickymoe.runtime.hosts import build_without_experts, expert_gates, expert_parameters
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import Progress, save_checkpoint
from tests.huggingface.tiny import FAMILIES, tiny

SUPPORTED = [family for family in FAMILIES if family not in UNSUPPORTED]
FORMATS: dict[str, dict[str, Any]] = {"published": {}, "stacked": {"save_original_format": False}}


def require_same(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Compare every tensor with those of the model."""
    rest = model.state_dict()
    names = {module: name for name, module in model.named_modules()}
    modules = [gate.experts[0] for gate in expert_gates(model)]
    assert checkpoint.n_layers == len(modules)
    for layer, module in enumerate(modules):
        stacks = {name: rest.pop(f"{names[module]}.{stack}") for name, stack in expert_parameters(module).items()}
        assert list(stacks) == [t.name for t in checkpoint.spec.tensors]
        for e in range(checkpoint.n_experts):
            for spec, tensor in zip(checkpoint.spec.tensors, checkpoint.expert(layer, e), strict=True):
                expected = stacks[spec.name][e]
                assert torch.equal(tensor, expected.T if tensor.dim() == 2 and module.is_transposed else expected)
                assert tuple(tensor.shape) == spec.shape
                assert tensor.is_contiguous()
    dense = list(checkpoint.dense())
    assert len(dense) == len(dict(dense))
    assert rest.keys() - dict(dense).keys() <= model.all_tied_weights_keys.keys()
    for name, tensor in dense:
        assert torch.equal(tensor.to(rest[name].dtype), rest[name]), name  # transformers keeps some in fp32


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_family_is_read_as_its_model_has_it(family, form, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path / "saved", **FORMATS[form])
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert (checkpoint.kind, checkpoint.name) == ("transformers", "saved")
    require_same(checkpoint, model)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_vl_moe"])
def test_shards_are_read_as_one_file(family, form, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB", **FORMATS[form])
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    require_same(open_checkpoint(tmp_path), model)


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "qwen3_vl_moe"])
def test_a_conversion_that_mixes_experts_is_applied_to_whole_stacks(family, tmp_path, monkeypatch):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(foreign_checkpoints, "_keeps_experts_apart", lambda operation: False)
    require_same(open_checkpoint(tmp_path), model)


def test_half_precision_is_kept(tmp_path):
    model = tiny("mixtral").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    require_same(checkpoint, model)
    tensors = [*checkpoint.expert(0, 0), *dict(checkpoint.dense()).values()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def quantised(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Mark a folder as quantised, with these tensors."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


def require_unquantised_copy(checkpoint: Checkpoint, reference: PreTrainedModel, folder: Path) -> None:
    packed = build_without_experts(pack(checkpoint, folder))
    assert not hasattr(packed.config, "quantization_config")
    for name, p in packed.state_dict().items():
        assert p.is_meta or torch.equal(p, reference.state_dict()[name])


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_weights_in_fp8_are_dequantised(family, tmp_path):
    model = tiny(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        rows, columns = (size // 8 for size in tensors[key].shape)
        tensors[key] = (tensors[key] * 16).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.rand(rows, columns) + 0.5
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    quantised(tmp_path / "saved", settings, tensors)
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert all(tensor.dtype == torch.bfloat16 for tensor in checkpoint.expert(0, 0))
    reference = type(model).from_pretrained(tmp_path / "saved")
    require_same(checkpoint, reference)
    require_unquantised_copy(checkpoint, reference, tmp_path / "packed")


def test_weights_in_mxfp4_are_dequantised(tmp_path):
    model = tiny("gpt_oss", intermediate_size=32).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        N, columns, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.randint(256, (N, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 128, (N, rows, columns // 32), dtype=torch.uint8)
    quantised(tmp_path / "saved", {"quant_method": "mxfp4"}, tensors)
    checkpoint = open_checkpoint(tmp_path / "saved")
    reference = type(model).from_pretrained(tmp_path / "saved", quantization_config=Mxfp4Config(dequantize=True))
    require_same(checkpoint, reference)
    require_unquantised_copy(checkpoint, reference, tmp_path / "packed")


def test_weights_quantised_otherwise_are_refused(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path)
    quantised(tmp_path, {"quant_method": "awq"}, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match=r"is quantised by awq, expected .* or quantised by fp8 or mxfp4"):
        open_checkpoint(tmp_path)


def test_weights_of_the_model_without_its_head_are_not_enough(tmp_path):
    model = tiny("mixtral")
    model.model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(DataError, match=r"has no 'lm_head.weight', which MixtralForCausalLM .family mixtral. needs"):
        open_checkpoint(tmp_path)


def test_tensors_that_the_model_has_not_are_left_out(tmp_path):
    model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.9.other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    require_same(open_checkpoint(tmp_path), model)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    tiny("mixtral").save_pretrained(tmp_path / "mixtral", max_shard_size="20KB")
    byte_tokenizer().save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral"


def change(folder: Path, key: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor, or leave it out."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = folder / content["weight_map"][key]
    tensors = load_file(file)
    if tensor is None:
        del tensors[key], content["weight_map"][key]
    else:
        tensors[key] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    index.write_text(json.dumps(content))


EXPERT = "model.layers.1.block_sparse_moe.experts.5.w3.weight"


def test_a_missing_expert_is_named(mixtral):
    change(mixtral, EXPERT, None)
    with pytest.raises(
        DataError, match=r"got 7 experts of .*w3.* for 'model.layers.1.mlp.experts.gate_up_proj', expected 8"
    ):
        open_checkpoint(mixtral)


def test_a_missing_matrix_is_named(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    without = {key: tensor for key, tensor in tensors.items() if "layers.1" not in key or "w3" not in key}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"got 0 experts of .*w3.* for 'model.layers.1.mlp.experts.gate_up_proj'"):
        open_checkpoint(tmp_path)


def test_a_missing_dense_tensor_is_named(mixtral):
    change(mixtral, "model.layers.1.block_sparse_moe.gate.weight", None)
    with pytest.raises(DataError, match=r"has no 'model.layers.1.mlp.gate.weight'"):
        open_checkpoint(mixtral)


def test_an_expert_of_another_shape_is_named(mixtral):
    change(mixtral, EXPERT, torch.ones(9, 32))
    with pytest.raises(DataError, match=r"gate_up_proj has experts of shape \[25, 32\], expected \[32, 32\]"):
        open_checkpoint(mixtral).expert(1, 5)


def test_a_missing_shard_is_named(mixtral):
    (shard := sorted(mixtral.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(DataError, match=f"{shard.name} cannot be read"):
        open_checkpoint(mixtral)


@pytest.mark.parametrize(("layer", "e"), [(3, 0), (-1, 0), (0, 8), (0, -1)])
def test_an_expert_that_does_not_exist_is_refused(mixtral, layer, e):
    with pytest.raises(DataError, match=f"got layer {layer} and expert {e}, expected layer < 3 and expert < 8"):
        open_checkpoint(mixtral).expert(layer, e)


def test_other_files_than_safetensors_are_refused(mixtral):
    for file in mixtral.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, mixtral / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"found pytorch_model.bin, expected model.safetensors"):
        open_checkpoint(mixtral)


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"neither config.yaml nor config.json"):
        open_checkpoint(tmp_path)


def test_layers_of_different_experts_are_refused(mixtral, monkeypatch):
    real = foreign_checkpoints.expert_spec
    seen: list[object] = []

    def other_after_first(module):
        seen.append(module)
        spec = real(module)
        return spec if len(seen) < 2 else type(spec)(spec.tensors, "gelu", spec.gated)

    monkeypatch.setattr(foreign_checkpoints, "expert_spec", other_after_first)
    with pytest.raises(ConfigError, match=r"experts of model.layers.1.mlp differ .* from those of model.layers.0.mlp"):
        open_checkpoint(mixtral)


def test_everything_but_weights_is_copied(mixtral, tmp_path):
    (mixtral / "chat_template.jinja").write_text("{{ messages }}")
    (mixtral / "additional_chat_templates").mkdir()
    (mixtral / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    open_checkpoint(mixtral).copy_config(tmp_path / "out")
    copied = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert copied == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        "additional_chat_templates/tools.jinja",
    }


def test_a_fingerprint_follows_the_weights_and_not_the_folder(mixtral, tmp_path):
    before = open_checkpoint(mixtral).fingerprint
    copy = shutil.copytree(mixtral, tmp_path / "copy")
    assert open_checkpoint(copy).fingerprint == before
    change(copy, EXPERT, torch.ones(16, 32))
    assert open_checkpoint(copy).fingerprint != before


@pytest.mark.parametrize("form", FORMATS)
def test_memory_is_bounded_by_a_few_experts(form, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_local_experts": 8}
    small = {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **small))
    model.save_pretrained(tmp_path, **FORMATS[form])
    del model
    checkpoint = open_checkpoint(tmp_path)
    one = sum(t.nbytes for t in checkpoint.expert(0, 0))
    process = psutil.Process()
    before, most, total = process.memory_info().rss, 0, 0
    for layer in range(checkpoint.n_layers):
        for e in range(checkpoint.n_experts):
            tensors = checkpoint.expert(layer, e)
            most = max(most, process.memory_info().rss - before)
            total += sum(t.nbytes for t in tensors)
    assert total == 32 * one > 190e6
    assert most < 8 * one


# Our own runs


def run(folder: Path, *flags: str, variant: str = "vanilla") -> GPT:
    """A run folder with a checkpoint of untrained weights, in which biases are not zero."""
    small = ("--model.d_model", "16", "--model.d_ff", "24", "--model.seq_len", "32", "--model.n_layers", "4")
    config = read_config([*small, *flags], preset="tiny", variant=variant)
    model = build_model(config, 300)
    for name, p in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p)
    files = RunFolder(folder)
    folder.mkdir()
    files.write_config(config)
    files.tokenizer.write_text("{}")
    save_checkpoint(files.checkpoints, Progress(step=3), model, torch.optim.AdamW(model.parameters()))
    return model


@pytest.mark.parametrize(
    ("flags", "n_layers", "n_experts"),
    [
        ((), 4, 4),
        (("--model.share_block", "2"), 2, 4),
        (("--model.universal", "true"), 1, 16),
    ],
    ids=["own experts", "shared by two layers", "one pool"],
)
def test_a_run_is_read_as_its_model_has_it(flags, n_layers, n_experts, tmp_path):
    model = run(tmp_path / "run", *flags)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert (checkpoint.kind, checkpoint.name) == ("run", "run")
    assert (checkpoint.n_layers, checkpoint.n_experts, checkpoint.top_k) == (n_layers, n_experts, 2)
    assert (checkpoint.spec.activation, checkpoint.spec.gated) == ("gelu", False)
    state = model.state_dict()
    for layer in range(n_layers):
        block = layer * (4 // n_layers)
        for e in range(n_experts):
            for spec, tensor in zip(checkpoint.spec.tensors, checkpoint.expert(layer, e), strict=True):
                assert tuple(tensor.shape) == spec.shape
                assert torch.equal(tensor, state[f"blocks.{block}.ffn.experts.{spec.name}"][e])
    dense = dict(checkpoint.dense())
    assert dense.keys() == {name for name in state if ".experts." not in name}
    assert all(torch.equal(tensor, state[name]) for name, tensor in dense.items())
    checkpoint.copy_config(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.yaml", "tokenizer.json"}


def test_tables_of_rows_are_apart_from_the_dense_part(tmp_path):
    model = run(tmp_path / "run", variant="lookup")
    tables = {name: p for name, p in model.named_parameters() if p in model.slow_parameters()}
    assert tables
    checkpoint = open_checkpoint(tmp_path / "run")
    assert dict(checkpoint.dense()).keys() == {
        name for name in model.state_dict() if ".experts." not in name and name not in tables
    }
    assert {table.name for group in checkpoint.rows for table in group.tables} == tables.keys()
    for name, table in tables.items():
        assert torch.equal(checkpoint.table_rows(name, 1, 4), table[1:4])


def test_the_fingerprint_of_a_run_follows_its_weights(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", "--seed", "7")
    shutil.copyfile(tmp_path / "a" / "config.yaml", tmp_path / "b" / "config.yaml")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    a, b, c = (open_checkpoint(tmp_path / name).fingerprint for name in "abc")
    assert a == c != b


def test_a_dense_run_is_refused(tmp_path):
    run(tmp_path / "run", variant="dense")
    with pytest.raises(RunError, match="run has no experts: its variant is dense, a dense model"):
        open_checkpoint(tmp_path / "run")


def test_a_run_without_checkpoint_is_refused(tmp_path):
    run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(RunError, match="has no checkpoint to pack: resume or repeat the run first"):
        open_checkpoint(tmp_path / "run")


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path):
    run(tmp_path / "run")
    config = RunFolder(tmp_path / "run").config
    config.write_text(config.read_text().replace("d_ff: 24", "d_ff: 25"))
    with pytest.raises(RunError, match=r"does not fit the config of its run .experts of block 0."):
        open_checkpoint(tmp_path / "run")
