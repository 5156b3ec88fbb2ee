"""Find the gates of a model, and check that they work as the table of families says.

A gate is a child named `gate` or `router` beside a child named `experts`: structure, not class names, so wrapped and
renamed classes are found too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stickymoe.errors import ConfigError
from stickymoe.huggingface.families import FAMILIES, REFUSED, Family, Reading, Score, scores, supported_families

_LEAST_SCORE = 1e-6  # scores below it say nothing about the ratio of weights
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 5e-2  # for weights in half precision


@dataclass(frozen=True)
class Gate:
    """A gate, the block that owns it, and the experts that it chooses among."""

    name: str
    layer: int
    module: nn.Module
    block: nn.Module
    experts: tuple[nn.Module, ...]
    family: str
    optional: bool = False  # it may see no token of a text

    @property
    def spec(self) -> Family:
        return FAMILIES[self.family]

    @property
    def inner(self) -> nn.Module:
        """The gate itself, inside what PEFT wraps around it."""
        module = self.module
        while isinstance(getattr(module, "base_layer", None), nn.Module):
            module = module.base_layer  # type: ignore[assignment]
        return module

    @property
    def score(self) -> Score:
        return self.spec.score_of(self.inner)

    @property
    def n_null(self) -> int:
        return self.spec.n_null(self.inner)

    def read(self, output: Any) -> Reading:
        return self.spec.read(self.inner, self.block, output)

    def require_score(self, reading: Reading) -> None:
        """Refuse weights that contradict the score in the table of families."""
        if not self.spec.proportional or reading.indices.shape[-1] < 2:
            return
        score = self.score
        with torch.no_grad():
            p = scores(score, reading.logits).gather(-1, reading.indices)
            ratio = self.unscaled(reading.weights, reading.indices) / p
            known = (p > _LEAST_SCORE) & (ratio > 0)
            known = known.all(-1)
            spread = ratio[known].amax(-1) / ratio[known].amin(-1) - 1
            wrong = bool((spread > _TOLERANCE.get(reading.weights.dtype, _COARSE)).any())
        if wrong:
            raise ConfigError(
                f"{self.name}: the table of families says that {self.family} scores experts by {score}, but the "
                "weights of this gate are not proportional to that; this version of transformers or the model's "
                "config computes them in another way, which is not supported."
            )

    def unscaled(self, weights: Tensor, indices: Tensor) -> Tensor:
        """Weights without a factor that belongs to the expert."""
        factor = getattr(self.inner, "per_expert_scale", None)
        return weights if factor is None else weights / factor[indices]


def find_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers such as PEFT, DDP and torch.compile."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(f"attach: got {type(model).__name__}, expected a transformers model or a wrapper around one.")


def family_of(model: PreTrainedModel) -> str:
    """The family of a model: a folder of transformers, otherwise what its config calls itself."""
    return _family_of(type(model)) or str(getattr(model.config, "model_type", type(model).__name__))


def find_gates(model: PreTrainedModel, *, command: str = "attach", without: Container[str] = ()) -> list[Gate]:
    """The gates of a supported model, in the order of its layers; refused by name otherwise.

    command: who refuses
    without: families that the command refuses, too
    """
    family = family_of(model)
    given = f"{type(model).__name__} (family {family})"
    if family in REFUSED:
        raise ConfigError(f"{command}: got {given}, which is not supported: {REFUSED[family]}. {offer(without)}")
    gates = list(_gates(model, family))
    if not gates:
        raise ConfigError(f"{command}: got {given}, which has no gate and experts. {offer(without)}")
    for gate in gates:
        if gate.family not in FAMILIES:
            raise ConfigError(f"{command}: got {given}, a family that is not known. {offer(without)}")
    return gates


def _gates(model: PreTrainedModel, family: str) -> Iterator[Gate]:
    for name, block in model.named_modules():
        children = dict(block.named_children())
        key = next((key for key in ("gate", "router") if key in children), None)
        if key is None:
            continue
        if "experts" in children:
            experts: tuple[nn.Module, ...] = (children["experts"],)
        elif {"input_linear", "output_linear"} <= set(children) and name.endswith(".mlp"):  # JetMoE's, not attention's
            experts = (children["input_linear"], children["output_linear"])
        else:
            continue
        yield Gate(
            name=f"{name}.{key}",
            layer=next((int(part) for part in reversed(name.split(".")) if part.isdecimal()), 0),
            module=children[key],
            block=block,
            experts=experts,
            family=_family_of(type(block)) or family,
            optional=name.endswith(".vision_moe"),
        )


def _family_of(cls: type) -> str | None:
    """The folder of transformers that a class, or one that it inherits from, is defined in."""
    for base in cls.__mro__:
        folder = base.__module__.split(".")
        if folder[:2] == ["transformers", "models"] and len(folder) > 2:
            return folder[2]
    return None


def offer(without: Container[str] = ()) -> str:
    """The supported families, as the end of a message."""
    return f"Supported families: {', '.join(name for name in supported_families() if name not in without)}."


def expert_bytes(gates: list[Gate], n_experts: int) -> tuple[int, ...]:
    """Bytes of one expert, for each layer."""
    return tuple(sum(p.nbytes for e in gate.experts for p in e.parameters()) // n_experts for gate in gates)


def other_bytes(model: PreTrainedModel, gates: list[Gate]) -> int:
    """Bytes of every parameter outside the routed experts."""
    inside = {id(p) for gate in gates for e in gate.experts for p in e.parameters()}
    return sum(p.nbytes for p in model.parameters() if id(p) not in inside)
