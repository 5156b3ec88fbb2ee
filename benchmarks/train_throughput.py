"""Training throughput: forward + backward + AdamW on 16×256 tokens, compared with Hugging Face's Mixtral.

    python benchmarks/train_throughput.py                       everything; writes train_throughput.json
    python benchmarks/train_throughput.py --only ours,hf-eager --vocab 4096 --threads 2      a quick look

Candidates (each in its own process, taking turns)
    ours            our model, loss and balance term, as the training loop computes them
    plain           the same model on its plain path, with the default memory settings of glibc
    hf-eager        Mixtral of the same width, depth, experts and parameters, as transformers runs it
    hf-grouped      the same with transformers' grouped matrix product
    floor           the matrix products of our step alone, with the same shapes, each by the faster library
    without …       ours without one optimisation
    with compile    ours through torch.compile
    with compiled softmax       ours with the softmax of the head in numba loops
    with passive    ours with OMP_WAIT_POLICY=passive, threads that sleep instead of spinning
    experts …       the expert layer alone, forward + backward: rows sorted by expert, the plain loop, a padded batched
                    product, torch's grouped product
    terms           forward + backward of consistency and anchor loss on a trace, alone
    eval, eval bare evaluation with every metric, and perplexity alone
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Candidate, Timing, Work, race, serve, write_record

HERE = Path(__file__)
B, D, F, K, HEADS, L = 16, 128, 512, 2, 4, 4  # the paper's small model


def our_model(a: argparse.Namespace) -> Any:
    from stickymoe.runs.config import ModelConfig, RunConfig
    from stickymoe.training.build import build_model

    return build_model(RunConfig(model=ModelConfig(n_experts=a.experts, seq_len=a.length)), a.vocab)


def ours(
    a: argparse.Namespace,
    *,
    memory: bool = True,
    head: bool = True,
    experts: bool = True,
    fused: bool = True,
    compiled: bool = False,
) -> Work:
    import torch

    from stickymoe.models.moe import Experts
    from stickymoe.routing.losses import balance_loss
    from stickymoe.training.memory import keep_freed_memory

    if memory:
        keep_freed_memory()
    model = our_model(a)
    model.fast = head
    for module in model.modules():
        if isinstance(module, Experts):
            module.fast = experts

    forward = torch.compile(model) if compiled else model

    def loss(x: Any, y: Any) -> Any:
        out = forward(x, y)
        return out.loss + 0.01 * balance_loss(out.trace)

    return step(model, a, loss, fused=fused)


def compiled_softmax(a: argparse.Namespace) -> Work:
    from compiled_softmax import losses_and_errors

    from stickymoe.models import head

    head._losses_and_errors = losses_and_errors
    return ours(a)


def torchs_products(a: argparse.Namespace) -> Work:
    from stickymoe import products

    products.onednn_is_faster = lambda: False  # type: ignore[assignment]
    return ours(a)


def step(model: Any, a: argparse.Namespace, loss: Callable[[Any, Any], Any], *, fused: bool = True) -> Work:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    tokens = torch.randint(0, a.vocab, (B, a.length + 1), generator=torch.Generator().manual_seed(0))

    def work() -> None:
        loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        optimiser.step()
        optimiser.zero_grad()

    return work


def huggingface(a: argparse.Namespace, *, grouped: bool) -> Work:
    """Mixtral with gated experts of width 344: as many parameters as ours with width 512."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=a.vocab,
        hidden_size=D,
        intermediate_size=344,
        num_hidden_layers=L,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=a.experts,
        num_experts_per_tok=K,
        max_position_embeddings=a.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm" if grouped else "eager")
    return step(model, a, lambda x, y: model(input_ids=x, labels=y, shift_labels=y).loss)


def floor(a: argparse.Namespace) -> Work:
    """Every matrix product of one step: forward, gradient of the input, gradient of the weight."""
    import torch

    from stickymoe.models.head import ROWS
    from stickymoe.products import product, product_of_columns
    from stickymoe.training.memory import keep_freed_memory

    keep_freed_memory()
    n = B * a.length
    products: list[Callable[[], object]] = []

    def linear(rows: int, inner: int, outer: int, times: int) -> None:
        x, w, y = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        for _ in range(times):
            products.append(lambda: product(x, w))
            products.append(lambda: product(y, w.t()))
            products.append(lambda: product_of_columns(y, x))

    linear(n, D, 3 * D, L)
    linear(n, D, D, L)
    linear(n * K // a.experts, D, F, L * a.experts)
    linear(n * K // a.experts, F, D, L * a.experts)
    rows = min(ROWS, n)
    linear(rows, D, a.vocab, n // rows)
    if n % rows:
        linear(n % rows, D, a.vocab, 1)
    q = torch.randn(B * HEADS, a.length, D // HEADS)
    scores, mixed = torch.empty(B * HEADS, a.length, a.length), torch.empty_like(q)
    for _ in range(L * 3):
        products.append(lambda: torch.bmm(q, q.transpose(1, 2), out=scores))
        products.append(lambda: torch.bmm(scores, q, out=mixed))

    def work() -> None:
        for one in products:
            one()

    return work


def expert_layer(a: argparse.Namespace, method: str) -> Work:
    import torch

    from stickymoe.models.moe import plain_experts, sorted_experts
    from stickymoe.training.memory import keep_freed_memory

    keep_freed_memory()
    torch.manual_seed(0)
    n, N = B * a.length, a.experts
    shapes = ((n, D), (n, K), (N, F, D), (N, F), (N, D, F), (N, D))
    h, w, *weights = (torch.randn(shape).requires_grad_() for shape in shapes)
    S = torch.rand(n, N).argsort(-1)[:, :K]
    layers = {
        "sorted": sorted_experts,
        "plain": plain_experts,
        "batched": batched_experts,
        "grouped": grouped_experts,
    }

    def work() -> None:
        torch.autograd.backward(layers[method](h, S, w, *weights).sum())

    return work


def batched_experts(h: Any, S: Any, w: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    """Rows padded to the busiest expert, one batched product per matrix."""
    import torch
    from torch.nn import functional

    (n, d), N, k = h.shape, up.shape[0], S.shape[1]
    order = S.flatten().argsort(stable=True)
    counts = S.flatten().bincount(minlength=N)
    expert = S.flatten()[order]
    place = torch.arange(n * k) - (counts.cumsum(0) - counts)[expert] + expert * counts.max()
    x = h.new_zeros(N * int(counts.max()), d).index_copy(0, place, h[order // k]).view(N, -1, d)
    z = functional.gelu(torch.baddbmm(up_bias[:, None], x, up.transpose(1, 2)))
    out = torch.baddbmm(down_bias[:, None], z, down.transpose(1, 2)).view(-1, d)[place]
    return torch.zeros_like(h).index_add(0, order // k, out * w.flatten()[order, None])


def grouped_experts(h: Any, S: Any, w: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    """torch's grouped product over rows sorted by expert."""
    import torch
    from torch.nn import functional

    k = S.shape[1]
    order = S.flatten().argsort(stable=True)
    ends = S.flatten().bincount(minlength=up.shape[0]).cumsum(0).to(torch.int32)
    expert = S.flatten()[order]
    a = functional.grouped_mm(h[order // k], up.transpose(1, 2), offs=ends) + up_bias[expert]
    out = functional.grouped_mm(functional.gelu(a), down.transpose(1, 2), offs=ends) + down_bias[expert]
    return torch.zeros_like(h).index_add(0, order // k, out * w.flatten()[order, None])


def terms(a: argparse.Namespace) -> Work:
    import torch

    from stickymoe import RoutingTrace, anchor_loss, consistency_loss

    logits = torch.randn(L, B, a.length, a.experts)
    base = RoutingTrace.from_logits(logits, K)

    def work() -> None:
        trace = replace(base, g=base.g.detach().requires_grad_())
        (0.1 * consistency_loss(trace) + anchor_loss(trace, window=4)).backward()

    return work


def evaluation(a: argparse.Namespace, *, bare: bool) -> Work:
    import numpy as np
    import torch

    from stickymoe.data.batches import eval_batches
    from stickymoe.data.tokens import TokenSplit
    from stickymoe.runs.config import ModelConfig, RunConfig
    from stickymoe.training.evaluate import evaluate
    from stickymoe.training.memory import keep_freed_memory

    keep_freed_memory()
    model = our_model(a)
    n = 20 * B * a.length
    tokens = np.random.default_rng(0).integers(0, a.vocab, n).astype(np.int32)
    split = TokenSplit(tokens, np.zeros(n, np.int32), (None,), np.zeros(n, np.bool_))
    config = RunConfig(model=ModelConfig(n_experts=a.experts, seq_len=a.length))
    if not bare:
        return lambda: evaluate(model, split, config, np.ones(a.vocab, np.int64))

    @torch.no_grad()
    def perplexity() -> float:
        nats = 0.0
        for batch in eval_batches(split, seq_len=a.length, batch_size=B, documents=False):
            nats += float(model(batch.tokens, batch.targets).loss) * int((batch.targets != -100).sum())
        return nats

    return perplexity


CANDIDATES: dict[str, Callable[[argparse.Namespace], Work]] = {
    "ours": ours,
    "plain": lambda a: ours(a, memory=False, head=False, experts=False),
    "hf-eager": lambda a: huggingface(a, grouped=False),
    "hf-grouped": lambda a: huggingface(a, grouped=True),
    "floor": floor,
    "without kept memory": lambda a: ours(a, memory=False),
    "without fused head": lambda a: ours(a, head=False),
    "without sorted experts": lambda a: ours(a, experts=False),
    "without oneDNN": torchs_products,
    "without fused AdamW": lambda a: ours(a, fused=False),
    "with passive": ours,
    "with compiled softmax": compiled_softmax,
    "with compile": lambda a: ours(a, compiled=True),
    "experts sorted": lambda a: expert_layer(a, "sorted"),
    "experts plain": lambda a: expert_layer(a, "plain"),
    "experts batched": lambda a: expert_layer(a, "batched"),
    "experts grouped": lambda a: expert_layer(a, "grouped"),
    "terms": terms,
    "eval": lambda a: evaluation(a, bare=False),
    "eval bare": lambda a: evaluation(a, bare=True),
}
MODELS = ["ours", "plain", "hf-eager", "hf-grouped", "floor"]
OPTIMISATIONS = [
    "ours",
    "without kept memory",
    "without fused head",
    "without sorted experts",
    "without oneDNN",
    "without fused AdamW",
    "with passive",
    "with compiled softmax",
]
EXPERT_METHODS = ["experts sorted", "experts plain", "experts batched", "experts grouped"]


def run(names: list[str], *, threads: int = 2, rounds: int = 7, **sizes: int) -> dict[str, Any]:
    """Time `names` side by side at the given sizes; print and return the timings with tokens per second."""
    sizes = {"vocab": 50_257, "length": 256, "experts": 4} | sizes
    arguments = tuple(part for key, value in sizes.items() for part in (f"--{key}", str(value)))
    timings = race(HERE, names, threads=threads, rounds=rounds, arguments=arguments)
    print("\n" + "  ".join(f"{key} {value:,}" for key, value in {**sizes, "threads": threads}.items()))
    show(timings, sizes["length"])
    tokens = B * sizes["length"]
    return {
        **sizes,
        "threads": threads,
        "timings": {t.name: t.as_dict() | {"tokens_per_s": round(tokens / t.median)} for t in timings},
    }


def show(timings: list[Timing], length: int) -> None:
    for t in timings:
        speed = f"{B * length / t.median:10,.0f} tok/s"
        print(f"{t.name:24} {speed}  ±{t.spread:5.1%}  {t.median:8.4f} s  {t.peak_mb:6.0f} MB", flush=True)


def two_processes(rounds: int) -> dict[str, Any]:
    """One process with two threads and two processes with one thread each, in turns."""
    arguments = ("--vocab", "4096", "--length", "256", "--experts", "4")
    alone = Candidate(HERE, "ours", threads=2, arguments=arguments)
    pair = [Candidate(HERE, "ours", threads=1, arguments=arguments) for _ in range(2)]
    for candidate in (alone, *pair):
        candidate.ready()
    one, two = [], []
    for _ in range(rounds):
        alone.go()
        one.append(alone.wait())
        for candidate in pair:
            candidate.go()
        two.append(max(candidate.wait() for candidate in pair))
    for candidate in (alone, *pair):
        candidate.end()
    timings = [Timing("one process, two threads", one, 0.0), Timing("two processes, one thread each", two, 0.0)]
    tokens = {timings[0].name: B * 256, timings[1].name: 2 * B * 256}
    result = {t.name: t.as_dict() | {"tokens_per_s": round(tokens[t.name] / t.median)} for t in timings}
    for name, timing in result.items():
        print(f"{name:32} {timing['tokens_per_s']:10,} tok/s in total  ±{timing['spread']:5.1%}", flush=True)
    return result


PARTS = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn::_linear_pointwise"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "GELU": ("gelu", "gelu_backward"),
    "gathering rows": ("index_select", "index", "gather", "scatter_", "scatter_add_", "embedding_dense_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
    "layer norm": ("native_layer_norm", "native_layer_norm_backward"),
    "sums, copies, other elementwise": (
        "sum",
        "copy_",
        "cat",
        "stack",
        "add",
        "add_",
        "mul",
        "mul_",
        "fill_",
        "addcmul_",
    ),
    "AdamW": ("_fused_adamw_",),
}


def breakdown(vocab: int) -> dict[str, float]:
    """The share of each kind of operation in the time of our step, from the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    work = ours(argparse.Namespace(vocab=vocab, length=256, experts=4))
    for _ in range(3):
        work()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            work()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    whole = sum(times.values())
    shares = {
        part: round(sum(times.get(f"aten::{name}", times.get(name, 0.0)) for name in names) / whole, 4)
        for part, names in PARTS.items()
    }
    shares["the rest, Python included"] = round(1 - sum(shares.values()), 4)
    print(f"\nvocabulary {vocab:,}, {torch.get_num_threads()} threads\n{shares}", flush=True)
    return shares


def everything(out: Path, rounds: int) -> None:
    results = {
        "rivals": [
            run(MODELS, threads=threads, vocab=vocab, rounds=rounds) for vocab in (50_257, 4096) for threads in (2, 1)
        ],
        "levers": [
            run(OPTIMISATIONS, vocab=50_257, rounds=rounds + 2),
            run([*OPTIMISATIONS, "with compile"], vocab=4096, rounds=2 * rounds + 1),
        ],
        "experts": [run(EXPERT_METHODS, experts=experts, rounds=rounds) for experts in (4, 16, 64)],
        "terms": run(["ours", "terms"], vocab=50_257, rounds=rounds),
        "terms, small vocabulary": run(["ours", "terms"], vocab=4096, rounds=rounds),
        "evaluation": run(["eval", "eval bare"], vocab=4096, rounds=rounds),
        "processes": two_processes(rounds=2 * rounds + 1),
        "breakdown": {str(vocab): breakdown(vocab) for vocab in (50_257, 4096)},
        "growth": [
            *(run(["ours"], vocab=4096, length=length, rounds=3) for length in (128, 256, 512, 1024, 2048)),
            *(run(["ours"], vocab=4096, experts=experts, rounds=3) for experts in (8, 16, 32, 64)),
            *(run(["ours"], vocab=vocab, rounds=3) for vocab in (8192, 16384, 32768, 65536, 131072)),
        ],
    }
    write_record(out, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=CANDIDATES)
    parser.add_argument("--vocab", type=int, default=50_257)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="comma-separated candidates, for a quick look without a record")
    parser.add_argument("-o", "--out", type=Path, default=HERE.with_suffix(".json"))
    a = parser.parse_args()
    if a.serve:
        if a.serve == "with passive":
            os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch loads its threads
        importlib.import_module("transformers" if a.serve.startswith("hf") else "stickymoe.training.loop")
        serve(lambda: CANDIDATES[a.serve](a), warm_up=2)
    elif a.only:
        sizes = {"vocab": a.vocab, "length": a.length, "experts": a.experts}
        run(a.only.split(","), threads=a.threads, rounds=a.rounds, **sizes)
    else:
        everything(a.out, a.rounds)


if __name__ == "__main__":
    main()
