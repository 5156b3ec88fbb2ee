"""A folder of transformers, opened for packing.

It has one tensor per expert and matrix, or stacks, and other names than the model: transformers' own conversions are
applied, to the tensors of one expert at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AutoHfQuantizer

from stickymoe import files
from stickymoe.errors import ConfigError, DataError
from stickymoe.huggingface.gates import Gate
from stickymoe.reading import read_json, read_text
from stickymoe.runtime.checkpoints import Checkpoint, copy_file
from stickymoe.runtime.formats import ExpertSpec
from stickymoe.runtime.hosts import (
    bare_model,
    expert_gates,
    expert_keys,
    expert_spec,
    is_transposed,
    n_experts,
    require_complete,
)
from stickymoe.runtime.tensors import Entry, find_entries, fingerprint

_DEQUANTISED = ("fp8", "mxfp4")  # how DeepSeek-V3 and GPT-OSS are published
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass
class _Source:
    """The tensors of a checkpoint that one conversion turns into one or more tensors of the model."""

    converter: WeightConverter | None  # None: the tensor is used as it is
    keys: dict[str, list[str]] = field(default_factory=dict)  # pattern of the converter → names in the checkpoint

    @property
    def merges(self) -> bool:
        """Whether it makes a stack of one tensor per expert."""
        return self.converter is not None and any(isinstance(op, MergeModulelist) for op in self.converter.operations)

    @property
    def separable(self) -> bool:
        """Whether it treats every expert alone."""
        return self.converter is None or all(map(_keeps_experts_apart, self.converter.operations))

    def names(self, first: str) -> list[str]:
        """The names in the model, of which `first` is the first."""
        if self.converter is None:
            return [first]
        patterns = self.converter.target_patterns
        return [first.replace(patterns[0], pattern) for pattern in patterns]

    def convert(self, name: str, tensors: dict[str, list[Tensor]], model: Any, config: Any) -> dict[str, Tensor]:
        """The tensors of the model, from those of the checkpoint."""
        if self.converter is None:
            ((tensor,),) = tensors.values()
            return {name: tensor}
        converter = deepcopy(self.converter)
        for pattern, group in tensors.items():
            for tensor in group:
                converter.add_tensor(name, pattern, pattern, tensor)  # type: ignore[arg-type]
        converted = converter.convert(name, model=model, config=config)
        return {key: (value[0] if isinstance(value, list) else value).detach() for key, value in converted.items()}


class TransformersCheckpoint(Checkpoint):
    """A folder that `save_pretrained` wrote, or one published in the same form."""

    kind = "transformers"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        quantizer = _quantizer(folder)
        self._model, _ = bare_model(folder)
        gates = expert_gates(self._model)
        self._modules = [gate.experts[0] for gate in gates]
        self.name = folder.resolve().name
        self.n_layers, self.top_k = len(gates), _top_k(gates[0])
        self.spec, self.n_experts = _common_spec(gates)
        self._entries = find_entries(folder)
        self._sources = _sources(self._model, self._entries, quantizer)
        self._experts = self._expert_sources()
        self._require_dense()
        self.fingerprint = fingerprint(self._entries, read_text(folder / "config.json", ConfigError))
        self._stacks: tuple[int, dict[str, Tensor]] = -1, {}  # the layer read last, and what was converted of it

    def expert(self, layer: int, e: int) -> list[Tensor]:
        self._require_expert(layer, e)
        tensors = []
        for t in self.spec.tensors:
            name, first = self._experts[layer, t.name]
            separable = self._sources[first].separable
            tensor = self._one(name, first, e) if separable else self._stack(layer, name, first)[e]
            if is_transposed(self._modules[layer], t.name):
                tensor = tensor.T
            if tuple(tensor.shape) != t.shape:
                given, expected = list(tensor.shape), list(t.shape)
                raise DataError(f"{self._folder}: {name} has experts of shape {given}, expected {expected}.")
            tensors.append(tensor.contiguous())
        return tensors

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        stacks = {first for _, first in self._experts.values()}
        for first, source in self._sources.items():
            if first not in stacks:
                yield from self._whole(first, source).items()

    def copy_config(self, folder: Path) -> None:
        """Copy every file of the folder that has no weights, and its additional chat templates."""
        templates = self._folder / "additional_chat_templates"
        for file in [*sorted(self._folder.iterdir()), *sorted(templates.glob("*"))]:
            weights = file.name.endswith(_WEIGHTS) or file.name.endswith(".index.json")
            if file.is_file() and not weights and not file.name.startswith("."):
                copy_file(file, folder / file.parent.relative_to(self._folder))
        config = read_json(self._folder / "config.json", ConfigError)
        if _quantization(config) is not None:  # the weights are dequantised
            for part in (config, config.get("text_config") or {}):
                part.pop("quantization_config", None)
            files.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")

    def _expert_sources(self) -> dict[tuple[int, str], tuple[str, str]]:
        """Layer and tensor of an expert → name of its stack in the model, and first name of its conversion."""
        made_by = {name: first for first, source in self._sources.items() for name in source.names(first)}
        found = {}
        for name, (layer, tensor) in expert_keys(self._model).items():
            if name not in made_by:
                raise DataError(f"{self._folder} has no tensors for {name!r}; its shards may be incomplete.")
            found[layer, tensor] = (name, made_by[name])
        for first in {first for _, first in found.values()}:
            self._require_all_experts(first, self._sources[first])
        return found

    def _require_all_experts(self, first: str, source: _Source) -> None:
        """Refuse a conversion that lacks a matrix, or some of its experts."""
        patterns = [] if source.converter is None else source.converter.source_patterns
        # Scales may be absent: some layers of a quantised model are not quantised.
        counts = {pattern: 0 for pattern in patterns if "_scale" not in pattern}
        if source.merges:
            counts |= {pattern: len(keys) for pattern, keys in source.keys.items()}
        elif source.separable:
            counts |= {pattern: self._entries[keys[0]].shape[0] for pattern, keys in source.keys.items()}
        else:
            return
        for pattern, n in counts.items():
            if n != self.n_experts:
                raise DataError(
                    f"{self._folder}: got {n} experts of {pattern!r} for {first!r}, expected {self.n_experts}; its "
                    "shards may be incomplete."
                )

    def _require_dense(self) -> None:
        """Refuse a checkpoint that lacks a tensor, before anything is packed."""
        made = {name for first, source in self._sources.items() for name in source.names(first)}
        tied: dict[str, set[str]] = {}  # one of each set is enough
        for target, source in self._model.all_tied_weights_keys.items():
            tied.setdefault(source, {source}).add(target)
        given = made.union(*(names for names in tied.values() if names & made))
        require_complete(self._model, set(self._model.state_dict()) - given, str(self._folder))

    def _one(self, name: str, first: str, e: int) -> Tensor:
        """One expert of a stack, converted alone."""
        source = self._sources[first]
        tensors = {
            pattern: [self._entries[keys[e]].read() if source.merges else self._entries[keys[0]].row(e)]
            for pattern, keys in source.keys.items()
        }
        return source.convert(first, tensors, _OneExpert(self._model), self._model.config)[name][0]

    def _stack(self, layer: int, name: str, first: str) -> Tensor:
        """A whole stack. Those of one layer are kept, because experts are read in order."""
        if self._stacks[0] != layer:
            self._stacks = layer, {}
        stacks = self._stacks[1]
        if name not in stacks:
            stacks |= self._whole(first, self._sources[first])
        return stacks[name]

    def _whole(self, first: str, source: _Source) -> dict[str, Tensor]:
        tensors = {pattern: [self._entries[key].read() for key in keys] for pattern, keys in source.keys.items()}
        return source.convert(first, tensors, self._model, self._model.config)


class _OneExpert:
    """A model whose stacks have one expert: conversions that look at the shape of a parameter see that of a part."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def get_parameter(self, name: str) -> Tensor:
        return self._model.get_parameter(name)[:1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _keeps_experts_apart(operation: ConversionOps) -> bool:
    """Whether an operation on stacks [N, …] does the same to every expert."""
    if isinstance(operation, MergeModulelist):
        return bool(operation.dim == 0)
    if isinstance(operation, Chunk | Concatenate | Interleave):
        return bool(operation.dim >= 1)
    if isinstance(operation, Transpose):
        return bool(min(operation.dim0, operation.dim1) >= 1)
    return isinstance(operation, Fp8Dequantize | Mxfp4Dequantize)


def _quantization(content: Any) -> dict[str, Any] | None:
    """The settings of quantised weights in a config, which may lie in the part for text."""
    if not isinstance(content, dict):
        return None
    found = content.get("quantization_config") or _quantization(content.get("text_config"))
    return found if isinstance(found, dict) else None


def _quantizer(folder: Path) -> Any:
    """What adds dequantisation to the conversions of transformers; None if the weights are not quantised."""
    settings = _quantization(read_json(folder / "config.json", ConfigError))
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method not in _DEQUANTISED:
        raise ConfigError(
            f"{folder} is quantised by {method}, expected weights in fp32, bf16 or fp16, or quantised by "
            f"{' or '.join(_DEQUANTISED)}; dequantise it with transformers, and save it."
        )
    return AutoHfQuantizer.from_config({**settings, "dequantize": True}, pre_quantized=True)


def _sources(model: PreTrainedModel, entries: dict[str, Entry], quantizer: Any) -> dict[str, _Source]:
    """What makes each tensor of the model, as `from_pretrained` decides it; names that it ignores are left out."""
    conversions = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, _Source] = {}
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # it has the names of the model already
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            source = sources.setdefault(name, _Source(by_pattern[pattern] if pattern is not None else None))
            source.keys.setdefault(pattern or key, []).append(key)
    return sources


def _top_k(gate: Gate) -> int:
    inner: Any = gate.inner
    k = getattr(inner, "top_k", None)
    return int(inner.config.top_k_experts if k is None else k)


def _common_spec(gates: list[Gate]) -> tuple[ExpertSpec, int]:
    """The spec and the number of experts, which all layers must have in common."""
    specs = [(expert_spec(gate.experts[0]), n_experts(gate.experts[0])) for gate in gates]
    for gate, other in zip(gates, specs, strict=True):
        if other != specs[0]:
            raise ConfigError(
                f"pack: the experts of {gate.name.rpartition('.')[0]} differ in number or shape from those of "
                f"{gates[0].name.rpartition('.')[0]}, which is not supported: expected the same in all layers."
            )
    return specs[0]
