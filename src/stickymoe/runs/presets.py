"""Named starting points: settings that differ from the defaults of `RunConfig`."""

from __future__ import annotations

from typing import Any

from stickymoe.errors import ConfigError, unknown

_SMALL = {
    "d_model": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_experts": 4,
    "top_k": 2,
    "d_ff": 512,
    "seq_len": 256,
}
_MEDIUM = {**_SMALL, "d_model": 256, "n_heads": 8, "d_ff": 1024}

# The paper's protocol: WikiText-2 as one flat stream, GPT-2 BPE, 10,000 steps.
_PAPER = {
    "data": {"corpus": "wikitext-2", "tokenizer": "gpt2"},
    "train": {"steps": 10_000, "warmup": 500, "eval_every": 1000, "checkpoint_every": 500},
}
# The same models with a schedule that two cores can run for the whole table.
_CPU = {
    "data": {"corpus": "wikitext-2", "tokenizer": "bpe", "vocab_size": 4096},
    "train": {"steps": 1000, "warmup": 50, "eval_every": 250, "checkpoint_every": 100},
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "data": {"corpus": "factbook", "vocab_size": 512},
        "model": {**_SMALL, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "seq_len": 32},
        "train": {
            "steps": 40,
            "warmup": 4,
            "batch_size": 8,
            "lr": 2e-3,
            "log_every": 1,
            "eval_every": 20,
            "checkpoint_every": 10,
        },
        "eval": {"batch_size": 128},
    },
    "demo": {
        "data": {"corpus": "factbook", "vocab_size": 2048},
        "model": {**_SMALL, "d_model": 64, "d_ff": 256, "seq_len": 128},
        "train": {
            "steps": 300,
            "warmup": 20,
            "batch_size": 16,
            "lr": 2e-3,
            "eval_every": 300,
            "checkpoint_every": 100,
        },
        "eval": {"batch_size": 64},
    },
    "cpu-small": {"model": _SMALL, **_CPU},
    "cpu-medium": {"model": _MEDIUM, **_CPU},
    # Closer to real models: a cache of 4 holds twice the active experts. It has as many active weights as cpu-small.
    "cpu-16": {"model": {**_SMALL, "n_experts": 16}, **_CPU, "eval": {"capacities": [2, 3, 4]}},
    "paper-small": {"model": _SMALL, **_PAPER},
    "paper-medium": {"model": _MEDIUM, **_PAPER},
    # For several GPUs: docs/scale.md says what it needs.
    "1b": {
        "data": {"corpus": "HuggingFaceFW/fineweb-edu:sample-10BT", "tokenizer": "gpt2", "limit": 5_000_000},
        "model": {
            "d_model": 704,
            "n_layers": 16,
            "n_heads": 11,
            "n_experts": 32,
            "top_k": 2,
            "d_ff": 1408,
            "seq_len": 1024,
        },
        "train": {
            "steps": 10_000,
            "warmup": 500,
            "batch_size": 512,
            "accumulate": 8,
            "precision": "bf16",
            "eval_every": 1000,
            "checkpoint_every": 500,
        },
        "eval": {"batch_size": 8, "capacities": [4, 8]},
    },
}

# The recommended router: docs/frontier.md shows what it gains and costs.
RECOMMENDED: dict[str, Any] = {"name": "siblings", "token": True, "hashed": True}
RECOMMENDED_SIZES: dict[str, dict[str, Any]] = {"cpu-16": {"capacity": 4, "budget": 0.1}}  # where it was tested


def preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise ConfigError(unknown("preset", name, PRESETS))
    return PRESETS[name]
