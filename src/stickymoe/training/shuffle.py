"""Does it matter which expert of a slot is resident? Replace every resident by another expert of its slot."""

from __future__ import annotations

import torch

from stickymoe.errors import RunError
from stickymoe.models.gpt import GPT
from stickymoe.models.moe import MoE
from stickymoe.routing.sequential import SlotChoice


def shuffle_residents(model: GPT, *, seed: int = 0) -> None:
    """Give every expert the weights of a random other expert of its slot, so gates choose as before but find another.

    An expert that is alone in its slot keeps its weights. Experts that several layers share are shuffled once.
    """
    generator, done = torch.Generator().manual_seed(seed), set()
    for block in model.blocks:
        if not isinstance(block.ffn, MoE) or not isinstance(block.ffn.router.rule.choice, SlotChoice):
            continue
        experts, capacity = block.ffn.experts, block.ffn.router.rule.choice.capacity
        if id(experts) not in done and capacity < model.config.pool_size:
            done.add(id(experts))
            experts.reorder(_others(model.config.pool_size, capacity, generator))
    if not done:
        raise RunError(
            "--shuffle_residents: got a run in which no experts share a slot, expected one of siblings with fewer "
            "slots (--variant.capacity) than experts."
        )


def _others(n_experts: int, capacity: int, generator: torch.Generator) -> list[int]:
    """For every expert a random other one of its slot: each slot is one random cycle."""
    order = list(range(n_experts))
    for slot in range(capacity):
        members = range(slot, n_experts, capacity)
        cycle = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
        for i, expert in enumerate(cycle):
            order[expert] = cycle[i - 1]
    return order
