"""Round the experts of a model in memory to a precision of the store, to measure what it costs."""

from __future__ import annotations

import torch

from stickymoe.errors import RunError
from stickymoe.models.gpt import GPT
from stickymoe.models.moe import Experts, MoE
from stickymoe.runtime.checkpoints import gpt_expert
from stickymoe.runtime.formats import ExpertLayout, Precision


@torch.no_grad()
def round_experts(model: GPT, precision: Precision) -> list[int]:
    """Give every expert the weights that a store of this precision would hold.

    Returns the bytes of one expert for each layer that has experts.
    """
    stacks = [block.ffn.experts for block in model.blocks if isinstance(block.ffn, MoE)]
    if not stacks:
        raise RunError("--experts: this model is dense, so it has no experts to round. Omit --experts.")
    layout = ExpertLayout(gpt_expert(stacks[0]), precision)
    for experts in {id(stack): stack for stack in stacks}.values():  # layers may share a stack
        _round(experts, layout)
    return [layout.content_bytes] * len(stacks)


def _round(experts: Experts, layout: ExpertLayout) -> None:
    tensors = [getattr(experts, tensor.name) for tensor in layout.spec.tensors]
    for e in range(len(tensors[0])):
        rounded = layout.decode(layout.encode([stack[e] for stack in tensors]))
        for stack, weights in zip(tensors, rounded, strict=True):
            stack[e] = torch.from_numpy(weights)
