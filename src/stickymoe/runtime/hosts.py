"""Models of transformers whose experts lie elsewhere: build one without experts, and compute experts for it.

n tokens, d width, k experts per token. Layers are counted among those that have experts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from stickymoe.errors import ConfigError, DataError, StickyError
from stickymoe.huggingface.gates import Gate, family_of, find_gates, offer
from stickymoe.reading import read_json, reason
from stickymoe.runtime.formats import ExpertSpec, TensorSpec
from stickymoe.runtime.store import DENSE
from stickymoe.runtime.tensors import entries_of

# Not offered in messages. What is refused is decided by the structure of a model.
NOT_PACKED = ("dbrx", "ernie4_5_vl_moe", "jetmoe", "llama4", "longcat_flash", "step3p7")
_PACK_AGAIN = "Pack the model again."
_IMPLEMENTATION = "stickymoe"  # our name among the experts functions of transformers
_SETTINGS = "stickymoe"  # the attribute of an experts module that has what computes it

Compute = Callable[
    [int, nn.Module, Float[Tensor, "n d"], Int[Tensor, "n k"], Float[Tensor, "n k"]],
    Float[Tensor, "n d"],
]


# Experts modules


def expert_gates(model: PreTrainedModel) -> list[Gate]:
    """The gates of a model whose experts can be computed elsewhere, in the order of its layers; refused otherwise."""
    gates = find_gates(model, command="pack", without=NOT_PACKED)
    for gate in gates:
        given = f"{type(model).__name__} (family {gate.family})"
        experts = gate.experts[0]
        if gate.optional:
            why = "some of its experts are for images"
        elif not hasattr(experts, "has_gate"):  # set by transformers' decorator use_experts_implementation
            why = f"its {type(experts).__name__} does not use the experts functions of transformers"
        else:
            continue
        raise ConfigError(f"pack: got {given}, which is not supported: {why}. {offer(NOT_PACKED)}")
    return gates


def n_experts(module: nn.Module) -> int:
    """The experts of a module."""
    return len(module.down_proj)  # type: ignore[arg-type]


def expert_parameters(module: nn.Module) -> dict[str, str]:
    """The stacks of an experts module with one entry per expert: their names in a store → in the module."""
    own: Any = module
    up = "gate_up_proj" if own.has_gate else "up_proj"
    names = {"up": up, "down": "down_proj"}
    if own.has_bias:
        names |= {"up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    N = n_experts(module)
    stacks = [name for name, p in module.named_parameters(recurse=False) if p.dim() and len(p) == N]
    return names | {name: name for name in stacks if name not in names.values()}


def is_transposed(module: nn.Module, name: str) -> bool:
    """Whether a tensor of a store is a matrix that the module has as [in, out]."""
    return name in ("up", "down") and bool(module.is_transposed)


def expert_spec(module: nn.Module) -> ExpertSpec:
    """The tensors of one expert of a module, matrices as [out, in], and what it computes."""
    tensors = []
    for name, parameter in expert_parameters(module).items():
        shape = tuple(getattr(module, parameter).shape[1:])
        tensors.append(TensorSpec(name, shape[::-1] if is_transposed(module, name) else shape))
    return ExpertSpec(tuple(tensors), _activation(module), bool(module.has_gate))


def _activation(module: nn.Module) -> str | None:
    """The activation that compiled kernels know; None if the expert computes anything more than that."""
    own: Any = module
    simple = not own.has_post_expert_norm and set(expert_parameters(module)) <= {"up", "down", "up_bias", "down_bias"}
    if own.has_gate:
        simple = simple and own.is_concatenated and type(own)._apply_gate is _default_apply_gate
    if not simple or not callable(getattr(own, "act_fn", None)):
        return None
    # By value: transformers has several classes for the same function.
    x = torch.linspace(-6, 6, 193)
    try:
        y = own.act_fn(x)
    except (RuntimeError, TypeError):  # it has parameters or other arguments
        return None
    known = {"silu": F.silu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh"), "relu2": F.relu(x) ** 2}
    return next((name for name, value in known.items() if torch.allclose(y, value, rtol=0, atol=1e-5)), None)


def torch_expert(module: nn.Module, tensors: dict[str, Tensor], x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """One expert as the family's own code computes it, without its combine weight. The reference of every kernel."""
    own: Any = module
    weights = {name: tensor.to(x.dtype) for name, tensor in tensors.items()}
    up, down, up_bias, down_bias = (weights.pop(name, None) for name in ("up", "down", "up_bias", "down_bias"))
    if up is None or down is None or weights:
        raise ConfigError(
            f"{type(module).__name__}: got an expert of the tensors {', '.join(tensors)}, expected up and down, and "
            "biases if any; what the others do is not known."
        )
    h = F.linear(x, up, up_bias)
    h = own._apply_gate(h) if own.has_gate else own.act_fn(h)
    y: Tensor = F.linear(h, down, down_bias)
    return own.post_expert_norm(y) if own.has_post_expert_norm else y


# Building


def bare_model(
    folder: Path, dtype: torch.dtype | None = None, saved: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a folder in eval mode, with real buffers and every parameter on the meta device; and its type.

    dtype: the type of the model; by default that in its config, and `saved` if there is none
    """
    config, model_class = _config_and_class(folder)
    named = config.dtype if isinstance(config.dtype, torch.dtype) else saved
    dtype = dtype or named
    try:
        with _parameters_on_meta():
            model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    except (ValueError, KeyError, TypeError, ImportError) as e:
        raise ConfigError(f"{folder / 'config.json'}: {model_class.__name__} cannot be built ({reason(e)}).") from e
    model.train(False)
    return model, dtype


def _config_and_class(folder: Path) -> tuple[PreTrainedConfig, Any]:
    """The config of a folder, and the class that it names; without a name, the language model of its type."""
    file = folder / "config.json"
    content = read_json(file, ConfigError)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: expected a mapping.")
    if content.get("model_type") == "stickymoe":
        raise ConfigError(f"{folder} was exported from a run: pass the folder of the run itself.")
    found = next(filter(None, map(_model_class, content.get("architectures") or [])), None)
    try:
        if found is not None:
            config = found.config_class.from_pretrained(folder)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            found = AutoModelForCausalLM._model_mapping[type(config)]
        return config, found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{folder} is not a model that this version of transformers has ({reason(e)}).") from e


def _model_class(name: object) -> Any:
    """The class of transformers with that name, or None."""
    found = getattr(transformers, str(name), None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register every parameter on the meta device.

    Buffers stay real, because most are constants that no checkpoint has: rotary frequencies, for example. Modules that
    other threads build are left alone.
    """
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == thread:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def expert_keys(model: PreTrainedModel) -> dict[str, tuple[int, str]]:
    """The names of all stacks of experts in the state of a model → layer, and name in a store."""
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[gate.experts[0]]}.{parameter}": (layer, name)
        for layer, gate in enumerate(expert_gates(model))
        for name, parameter in expert_parameters(gate.experts[0]).items()
    }


def build_without_experts(
    folder: Path, dtype: torch.dtype | None = None, *, dense: Path | None = None
) -> PreTrainedModel:
    """The model of a packed folder in eval mode, its experts on the meta device.

    Parameters require gradients, as after `from_pretrained`: torch chooses other convolutions if they do not.

    dense: the file of the other weights; by default that of the folder
    dtype: of everything that transformers does not keep in fp32; by default as `from_pretrained` chooses
    """
    file = dense or folder / DENSE
    entries = entries_of(file)
    saved = next((e.dtype for e in entries.values() if e.dtype.is_floating_point), torch.float32)
    model, dtype = bare_model(folder, dtype, saved)
    expected, experts = model.state_dict(), expert_keys(model)
    surplus = sorted(name for name in entries if name not in expected or name in experts)
    if surplus:
        raise DataError(
            f"{file} has {surplus[0]!r}, which is not a part of {_named(model)} without its experts. {_PACK_AGAIN}"
        )
    fp32 = model._get_dtype_plan(dtype)
    tensors = {}
    for name, entry in entries.items():
        # As from_pretrained does: a type that the model's code fixed wins over the type asked for.
        kept = next((kind for key, kind in fp32.items() if re.search(key.replace("*", ".*"), name)), None)
        tensors[name] = entry.read().to(kept or expected[name].dtype)
    try:
        missing = set(model.load_state_dict(tensors, strict=False, assign=True).missing_keys) - set(experts)
    except RuntimeError as e:
        raise DataError(f"{file} does not fit {_named(model)} ({reason(e)}). {_PACK_AGAIN}") from e
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    require_complete(model, missing, str(file))
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def require_complete(model: PreTrainedModel, missing: set[str], source: str) -> None:
    """Refuse weights without the tensors in `missing`, except buffers that the family allows to be absent."""
    buffers = {name for name, _ in model.named_buffers()}
    allowed = model._keys_to_ignore_on_load_missing or []
    lacking = sorted(
        name for name in missing if name not in buffers or not any(re.search(key, name) for key in allowed)
    )
    if lacking:
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise DataError(f"{source} has no {lacking[0]!r}{others}, which {_named(model)} needs.")


def _named(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (family {family_of(model)})"


# Installing


class Installed:
    """Experts of one model that are computed by a function of ours; `uninstall` ends it.

    calls: how often the experts of each layer were computed since `install`
    """

    def __init__(self, model: PreTrainedModel, compute: Compute) -> None:
        self.model, self.compute = model, compute
        self.modules = [gate.experts[0] for gate in expert_gates(model)]
        taken = next((m for m in self.modules if hasattr(m, _SETTINGS)), None)
        if taken is not None:
            raise ConfigError(
                f"install: the experts of this {type(model).__name__} are replaced already: uninstall first."
            )
        self.calls = [0] * len(self.modules)
        self._before = list(self.calls)
        self._implementation = model.get_experts_implementation()
        for layer, module in enumerate(self.modules):
            module.__dict__[_SETTINGS] = (self, layer)
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _experts_forward)
        model.set_experts_implementation(_IMPLEMENTATION)
        self._hooks = [
            model.register_forward_pre_hook(self._start),
            model.register_forward_hook(self._require_calls),
        ]

    def uninstall(self) -> None:
        """Let the model compute its experts as before."""
        for hook in self._hooks:
            hook.remove()
        for module in self.modules:
            module.__dict__.pop(_SETTINGS, None)
        self.model.set_experts_implementation(self._implementation)

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def _start(self, model: nn.Module, args: Any) -> None:
        self._before = list(self.calls)

    def _require_calls(self, model: nn.Module, args: Any, output: Any) -> None:
        """Some families accept an experts function and do not call it: their output would be another model's."""
        idle = [layer for layer, (a, b) in enumerate(zip(self._before, self.calls, strict=True)) if a == b]
        if idle:
            raise StickyError(
                f"{_named(self.model)} did not call the experts of layer {idle[0]} through the experts functions of "
                "transformers: this version or these settings of the model are not supported."
            )


def install(model: PreTrainedModel, compute: Compute) -> Installed:
    """Compute the experts of a model by `compute(layer, module, hidden, indices, weights)` until `uninstall`.

    An index may be ≥ the number of experts, which stands for no expert, and a weight may be 0.
    """
    return Installed(model, compute)


def _experts_forward(
    module: nn.Module,
    hidden_states: Float[Tensor, "n d"],
    top_k_index: Int[Tensor, "n k"],
    top_k_weights: Float[Tensor, "n k"],
) -> Float[Tensor, "n d"]:
    settings = getattr(module, _SETTINGS, None)
    if settings is None:
        raise ConfigError(
            f"{type(module).__name__}: its experts implementation is {_IMPLEMENTATION!r}, but nothing was installed "
            "on this model; its config may be shared with another model. Call install, or give it its own config."
        )
    installed, layer = settings
    installed.calls[layer] += 1
    result: Tensor = installed.compute(layer, module, hidden_states, top_k_index, top_k_weights)
    return result
