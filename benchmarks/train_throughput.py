"""Training throughput: forward + backward + AdamW on 16×256 tokens, ours beside Hugging Face's Mixtral.

    python benchmarks/train_throughput.py             prints the tables and writes train_throughput.json

Contestants
    ours            the model as `stickymoe train` runs it
    plain           the same model on its plain path, memory handed back as glibc does by default
    hf-eager        Mixtral of the same width, depth, experts and parameters, as transformers runs it
    hf-grouped      the same with transformers' grouped matrix product
    floor           the matrix products of our step alone, at their shapes, into memory that is there already
    -memory, …      ours without one lever
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Timing, Work, race, serve

HERE = Path(__file__)
B = 16


def ours(
    a: argparse.Namespace, *, memory: bool = True, head: bool = True, experts: bool = True, fused: bool = True
) -> Work:

    from stickymoe.models.moe import Experts
    from stickymoe.runs.config import ModelConfig, RunConfig
    from stickymoe.training.build import build_model
    from stickymoe.training.memory import keep_freed_memory
    from stickymoe.variants import variant_class

    if memory:
        keep_freed_memory()
    config = RunConfig(model=ModelConfig(n_experts=a.experts, seq_len=a.length), variant=variant_class(a.variant)())
    model = build_model(config, a.vocab)
    model.fast = head
    for module in model.modules():
        if isinstance(module, Experts):
            module.fast = experts
    terms = config.variant.terms()
    return _step(model, a, lambda x, y: _loss(model, terms, x, y), fused=fused)


def _loss(model: Any, terms: Any, x: Any, y: Any) -> Any:
    from stickymoe.routing.losses import LossContext

    out = model(x, y)
    return out.loss + sum((t.weight * t.fn(out.trace, LossContext())).mean() for t in terms)


def _step(model: Any, a: argparse.Namespace, loss: Callable[[Any, Any], Any], *, fused: bool = True) -> Work:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, a.vocab, (B, a.length + 1), generator=generator)

    def work() -> None:
        loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        optimiser.step()
        optimiser.zero_grad()

    return work


def huggingface(a: argparse.Namespace, *, grouped: bool) -> Work:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=a.vocab,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=a.experts,
        num_experts_per_tok=2,
        max_position_embeddings=a.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm" if grouped else "eager")
    return _step(model, a, lambda x, y: model(input_ids=x, labels=y, shift_labels=y).loss)


def floor(a: argparse.Namespace) -> Work:
    """Every product of one step: forward, by the input, by the weight."""
    import torch

    from stickymoe.models.head import CHUNK_ELEMENTS
    from stickymoe.training.memory import keep_freed_memory

    keep_freed_memory()
    n, d, f, k, heads, L = B * a.length, 128, 512, 2, 4, 4
    products = []

    def linear(rows: int, inner: int, outer: int, times: int) -> None:
        x, w, y = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for _ in range(times):
            products.append(lambda: torch.mm(x, w.t(), out=y))
            products.append(lambda: torch.mm(y, w, out=dx))
            products.append(lambda: torch.mm(y.t(), x, out=dw))

    linear(n, d, 3 * d, L)
    linear(n, d, d, L)
    linear(n * k // a.experts, d, f, L * a.experts)
    linear(n * k // a.experts, f, d, L * a.experts)
    rows = max(CHUNK_ELEMENTS // a.vocab, 1)
    linear(min(rows, n), d, a.vocab, max(n // rows, 1))
    q, s = torch.randn(B * heads, a.length, d // heads), torch.empty(B * heads, a.length, a.length)
    o = torch.empty_like(q)
    for _ in range(L * 3):
        products.append(lambda: torch.bmm(q, q.transpose(1, 2), out=s))
        products.append(lambda: torch.bmm(s, q, out=o))

    def work() -> None:
        for product in products:
            product()

    return work


CONTESTANTS: dict[str, Callable[[argparse.Namespace], Work]] = {
    "ours": ours,
    "plain": lambda a: ours(a, memory=False, head=False, experts=False),
    "hf-eager": lambda a: huggingface(a, grouped=False),
    "hf-grouped": lambda a: huggingface(a, grouped=True),
    "floor": floor,
    "-memory": lambda a: ours(a, memory=False),
    "-head": lambda a: ours(a, head=False),
    "-experts": lambda a: ours(a, experts=False),
    "-fused AdamW": lambda a: ours(a, fused=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=CONTESTANTS)
    parser.add_argument("--vocab", type=int, default=50_257)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--variant", default="vanilla")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="names of contestants, separated by commas, for a quick look without a record")
    parser.add_argument("--threads", type=int, default=2, help="with --only")
    parser.add_argument("-o", "--out", type=Path, default=HERE.with_suffix(".json"))
    a = parser.parse_args()
    if a.serve:
        serve(lambda: CONTESTANTS[a.serve](a), warm_up=2)
        return
    if a.only:
        show(a, race_at(a, a.only.split(","), threads=a.threads))


def race_at(a: argparse.Namespace, names: list[str], *, threads: int) -> list[Timing]:
    settings = ("--vocab", str(a.vocab), "--length", str(a.length), "--experts", str(a.experts), "--variant", a.variant)
    return race(HERE, names, threads=threads, rounds=a.rounds, arguments=settings)


def show(a: argparse.Namespace, timings: list[Timing]) -> None:
    tokens = B * a.length
    for t in timings:
        print(
            f"{t.name:14} {tokens / t.median:10,.0f} tok/s  ±{t.spread:5.1%}  {t.median:7.4f} s  peak {t.peak_mb:6.0f} MB"
        )


if __name__ == "__main__":
    main()
