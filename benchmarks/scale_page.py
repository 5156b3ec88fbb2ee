"""Write docs/scale.md from the model of the preset `1b` and a record: python benchmarks/scale_page.py."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stickymoe.models.gpt import GPT
from stickymoe.models.moe import MoE
from stickymoe.runs.config import RunConfig
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model

HERE = Path(__file__).parent
PRESET, GPT2 = "1b", 50_257
FP32 = 4
COPIES = 4  # weights, gradients and two moments
UTILISATION = (0.1, 0.2, 0.4)  # assumed shares of a device's peak
TOKEN_BYTES = 10  # in the token cache: token and document of four bytes, and two marks of one


@dataclass(frozen=True)
class Device:
    """Dense bf16 FLOP/s, as the vendor states them."""

    name: str
    peak: float


DEVICES = (
    Device("RTX 4090", 165e12),
    Device("L40S", 362e12),
    Device("A100 80 GB", 312e12),
    Device("H100 SXM", 989e12),
)


@dataclass(frozen=True)
class Size:
    """Parameters of a model. `active` ones multiply a token; the head counts, looking up an embedding does not."""

    total: int
    active: int
    experts: int
    block: int
    root: int

    @classmethod
    def of(cls, model: GPT) -> Size:
        c = model.config
        total = sum(p.numel() for p in model.parameters())
        experts = sum(p.numel() for b in model.blocks for p in _experts(b.ffn))
        idle = experts // c.n_experts * (c.n_experts - c.top_k)
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        return cls(
            total=total,
            active=total - idle - model.position_embedding.weight.numel(),
            experts=experts,
            block=max(blocks),
            root=total - sum(blocks),
        )


def _experts(ffn: Any) -> list[torch.nn.Parameter]:
    return list(ffn.experts.parameters()) if isinstance(ffn, MoE) else []


def model_of(config: RunConfig, vocab_size: int = GPT2) -> GPT:
    """The model of a config without memory for its weights."""
    with torch.device("meta"):
        return build_model(config, vocab_size)


def flops_per_token(config: RunConfig, size: Size) -> int:
    """6 per active parameter, forward and backward; and attention to half of the sequence on average."""
    c = config.model
    return 6 * size.active + 6 * c.n_layers * c.d_model * c.seq_len


def state_bytes(size: Size, processes: int, *, sharded: bool) -> int:
    """Weights, gradients and moments of one process.

    DDP has buckets for gradients besides. FSDP shards all four. While a layer computes, its weights and gradients are
    there whole, and the weights of the next layer; so are the weights and gradients of what is outside the layers.
    """
    if not sharded:
        return (COPIES + (processes > 1)) * FP32 * size.total
    whole = 3 * size.block + 2 * size.root
    return FP32 * (math.ceil(COPIES * size.total / processes) + whole)


def hours(flops: float, device: Device, utilisation: float) -> float:
    return flops / (device.peak * utilisation) / 3600


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measured(record: dict[str, Any]) -> tuple[float, float, float]:
    """Tokens/s of cpu-small with GPT-2's vocabulary on two threads, its FLOP/s, and its share of the bare products."""
    race = next(r for r in record["rivals"] if (r["vocab"], r["threads"]) == (GPT2, 2))
    config = read_config(preset="cpu-small")
    speed = float(race["timings"]["ours"]["tokens_per_s"])
    share = race["timings"]["floor"]["median_s"] / race["timings"]["ours"]["median_s"]
    return speed, speed * flops_per_token(config, Size.of(model_of(config))), share


def page(record: dict[str, Any]) -> str:
    config = read_config(preset=PRESET)
    c, t, size = config.model, config.train, Size.of(model_of(config))
    per_token = flops_per_token(config, size)
    tokens = t.steps * t.batch_size * c.seq_len
    speed, flops, share = measured(record)
    rows = t.batch_size // t.accumulate
    memory = [[name, f"{state_bytes(size, n, sharded=False) / 1e9:.1f}"] for name, n in (("1", 1), ("any with DDP", 2))]
    memory += [[f"{n} with FSDP2", f"{state_bytes(size, n, sharded=True) / 1e9:.1f}"] for n in (2, 4, 8, 16)]
    cost = [
        [
            device.name,
            f"{device.peak / 1e12:,.0f}",
            *(f"{hours(per_token * tokens, device, u):,.0f}" for u in UTILISATION),
        ]
        for device in DEVICES
    ]
    days = per_token * tokens / flops / 3600 / 24
    return f"""\
# Scale

`python benchmarks/scale_page.py` writes this page from the model of the preset `{
        PRESET
    }`, which it builds without memory
for its weights, and from [the record](../benchmarks/train_throughput.json) of `docs/performance.md`.

**This model was not trained.** There was no GPU and no second machine. Hours are arithmetic with an assumed
utilisation, not measurements. [What was not tried](#what-was-not-tried) has the list.

    accelerate launch --config_file fsdp.yaml -m stickymoe.cli train --preset {PRESET} --out runs/1b

The [guide](guide.md#12-several-processes-and-machines) shows `fsdp.yaml`.

## Parameters

{c.n_layers} layers of width {c.d_model} with {c.n_heads} heads, {c.n_experts} experts of width {c.d_ff} per layer,
{c.top_k} per token, sequences of {c.seq_len:,} tokens, GPT-2's vocabulary of {GPT2:,}.

{
        table(
            ["", "parameters"],
            [
                ["all", f"{size.total:,}"],
                ["in experts", f"{size.experts:,}"],
                ["active for a token", f"{size.active:,}"],
                ["of one layer", f"{size.block:,}"],
                ["outside the layers", f"{size.root:,}"],
            ],
        )
    }
"Active" are the {c.top_k} experts, gates, attention, norms and the output head, which is tied to the embedding.

## Memory of a process

Gigabytes of weights, gradients and the two moments of AdamW, all in fp32: products are in bf16, states are not.
Activations come on top. They depend on the sequences of a micro-batch: the preset splits a step into {t.accumulate}
micro-batches, which have {rows} sequences with one process and {rows // 8} with eight. A larger `--train.accumulate`
makes them smaller.

{table(["processes", "GB each"], memory)}
DDP keeps a second copy of the gradients. With FSDP2 each process has its share of weights, gradients and moments. In
addition it has the whole weights and gradients of one layer at a time, the weights of the next one, and weights and
gradients outside the layers.

- A process first builds the whole model in the memory of its CPU: {FP32 * size.total / 1e9:.1f} GB.
- A checkpoint has {3 * FP32 * size.total / 1e9:.1f} GB, of which each process writes its part; the two newest are kept.
- The token cache is mapped, so it needs disk and not memory: {TOKEN_BYTES} bytes per token, or
  {TOKEN_BYTES * tokens / 1e9:.0f} GB if every token is seen once.

## Compute

A token costs 6 FLOPs per active parameter, and 6 · layers · width · length for causal attention:
{per_token / 1e9:.2f} GFLOPs. The preset trains {t.steps:,} steps of {t.batch_size} sequences. This is
{tokens / 1e9:.2f} billion tokens, {tokens / size.active:.0f} per active parameter, and {per_token * tokens:.2e} FLOPs.

Hours of one device at an assumed share of its peak. Multiply by your price of an hour. Several devices divide the time
by their number only if communication is hidden.

{table(["device", "dense bf16 peak, TFLOP/s", *(f"at {u:.0%}" for u in UTILISATION)], cost)}
- Peaks are those of the vendors; utilisations are assumptions. Experts are small ({c.d_model} × {c.d_ff}) and are
  computed one after another, without a fused kernel, so expect the low end.
- Measured was a CPU: `cpu-small` with this vocabulary trains {speed:,.0f} tokens/s on two threads. By the same count
  this is {flops / 1e9:.0f} GFLOP/s, {share:.0%} of what its matrix products alone reach there. At that rate the preset
  would take {days:.0f} days.

## What was not tried

- A GPU, NCCL, or more than one machine. Training over two processes, DDP and FSDP2, was tested on a CPU with gloo.
- A forward pass of this model. A test builds it without weights; smaller models of the same code are trained in tests.
- Expert parallelism: all experts of a layer are gathered for each micro-batch, idle ones too. With more experts or more
  machines, this traffic will dominate. Tensor, pipeline and context parallelism are not there either.
- Streaming the corpus from the hub. A folder was streamed by the same code.
- The hyper-parameters: they are the paper's, for models a hundred times smaller.
"""


def main(docs: Path = HERE.parent / "docs") -> None:
    record = json.loads((HERE / "train_throughput.json").read_text())
    (docs / "scale.md").write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
