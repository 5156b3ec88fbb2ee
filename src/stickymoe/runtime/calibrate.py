"""Calibrate a device for one model: what a token and a miss really cost in the engine.

A single read underestimates a miss, which also wakes a reader, pins pages and leaves caches cold. So the engine
generates with two capacities: all experts resident, which gives the time of a token, and few slots, whose additional
time divided by its misses gives the cost of a miss. Both take turns, because the speed of a disk drifts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from stickymoe.errors import ConfigError, require
from stickymoe.locality.devices import Device
from stickymoe.runtime.engine import Engine, Stats, offload, parsed_bytes

ROUNDS = 5


def calibrate(
    model: str | Path,
    *,
    slots: int | None = None,
    tokens: int = 64,
    throttle: str | float | None = None,
    rounds: int = ROUNDS,
    **settings: Any,
) -> Device:
    """The profile of this machine for a model, which `plan` takes; `settings` are those of `offload`.

    `slots` is the smaller of the two capacities, by default the experts of a token.
    """
    require(rounds >= 1, "rounds", rounds, "a whole number ≥ 1")
    require(tokens >= 2, "tokens", tokens, "a whole number ≥ 2")
    with offload(model, throttle=throttle, **settings) as resident:
        if resident.layers is None:
            raise ConfigError(f"{model} has no experts, so it has no misses: there is nothing to calibrate.")
        contents = resident.layers.store.contents
        few = contents.top_k if slots is None else slots
        require(1 <= few < contents.n_experts, "slots", few, f"1 … {contents.n_experts - 1}, fewer than all experts")
        with offload(model, slots=few, throttle=throttle, **settings) as loading:
            most = resident.host.context or tokens + 1
            tokens = min(tokens, most - 1)
            _generate(resident, tokens)  # compiles what is compiled, and fills the slots
            pairs = [(_generate(resident, tokens), _generate(loading, tokens)) for _ in range(rounds)]
        active = contents.top_k * contents.n_layers * resident.expert_bytes + resident.host.dense_bytes
        size = resident.expert_bytes
    token_ms = median(_ms(stats) for stats, _ in pairs)
    costs = [
        (_ms(stats) - _ms(all_resident)) * (stats.tokens - 1) / stats.misses
        for all_resident, stats in pairs
        if stats.misses
    ]
    if not costs:
        raise ConfigError(f"{model}: no expert was missing with {few} slots; choose fewer, or more tokens.")
    miss_ms = max(median(costs), 1e-3)
    bandwidth = 1000 * size / miss_ms
    latency_ms = 0.0
    if throttle is not None:  # the speed of the slow memory is known; the rest is latency
        bandwidth = parsed_bytes("throttle", throttle)
        latency_ms = max(miss_ms - 1000 * size / bandwidth, 0.0)
    return Device(
        name=f"this machine, {contents.name}",
        fast_memory=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        load_bandwidth=bandwidth,
        load_latency_ms=latency_ms,
        compute_bandwidth=1000 * active / token_ms,
        sources=(
            f"compute: {token_ms:.3g} ms for a token of {contents.name} with all experts resident",
            f"load: {miss_ms:.3g} ms for a miss of {size} bytes, from {few} slots per layer; {rounds} rounds of "
            f"{tokens} tokens each" + ("" if throttle is None else f", throttled to {throttle} per second"),
        ),
    )


def _generate(engine: Engine, tokens: int) -> Stats:
    """Decode after a prompt of one token, with slots that are already in use; greedy text of a small model repeats."""
    stats = engine.generate([0], max_new_tokens=tokens, do_sample=True, stop_ids=(), warm=True).stats
    # The prompt's misses are not decoded tokens' misses.
    return replace(stats, misses=stats.misses - stats.prompt_misses)


def _ms(stats: Stats) -> float:
    return 1000 / stats.tokens_per_s
