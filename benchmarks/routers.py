"""The cost of a router: its own forward + backward, relative to the vanilla training step and the decode step.

    python benchmarks/routers.py                                   every variant; writes routers.json
    python benchmarks/routers.py --only smooth,residency --rounds 3      a quick look without a record

A variant's own work is the routers of all layers and its loss terms, on given hidden states: 16×256 tokens with
gradient in training, one token after another after a prefix in decoding. If experts are tied, sharing their gradients
is included. A variant adds its own work minus that of vanilla in the same round: median over rounds with its 95 %
interval. In decoding, variants that differ from vanilla only by their losses are skipped, and vanilla runs three times:
the differences between the three are noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Timing, Work, median_interval, race, serve, write_record

HERE = Path(__file__)
B, T, PREFIX, VOCAB = 16, 256, 128, 4096
TOKENS_AT_ONCE = 100  # one decoded token is too short to time
AGAIN = ("vanilla", "vanilla (2)", "vanilla (3)")
COMBINED = ("residency+smooth", "hysteresis+smooth", "smooth+soft")


def config_of(a: argparse.Namespace, variant: str) -> Any:
    from stickymoe.runs.presets import RECOMMENDED
    from stickymoe.runs.settings import config_from

    settings = RECOMMENDED if variant == "recommended" else {"name": variant}
    return config_from({"model": {"n_experts": a.experts}, "variant": settings})


def step(a: argparse.Namespace) -> Work:
    """The vanilla training step, AdamW included."""
    import torch

    from stickymoe.routing.losses import balance_loss
    from stickymoe.training.build import build_model
    from stickymoe.training.optimiser import adamw

    config = config_of(a, "vanilla")
    model = build_model(config, VOCAB)
    optimiser = adamw(list(model.named_parameters()), config.train)
    tokens = torch.randint(0, VOCAB, (B, T + 1), generator=torch.Generator().manual_seed(0))

    def work() -> None:
        out = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        torch.autograd.backward(out.loss + 0.01 * balance_loss(out.trace))
        optimiser.step()
        optimiser.zero_grad()

    return work


def decode_step(a: argparse.Namespace) -> Work:
    """Tokens decoded one by one by the vanilla model, after a prefix."""
    import torch

    from stickymoe.models.gpt import DecodeCache
    from stickymoe.training.build import build_model

    config = config_of(a, "vanilla")
    model = build_model(config, VOCAB)
    tokens = torch.randint(0, VOCAB, (1, PREFIX + TOKENS_AT_ONCE), generator=torch.Generator().manual_seed(0))
    cache = DecodeCache.empty(config.model.n_layers)
    with torch.no_grad():
        model(tokens[:, :PREFIX], cache=cache)

    @torch.no_grad()
    def work() -> None:
        now = DecodeCache(layers=list(cache.layers), position=cache.position, doc=cache.doc)
        for t in range(PREFIX, PREFIX + TOKENS_AT_ONCE):
            model(tokens[:, t : t + 1], cache=now)

    return work


def _routers(a: argparse.Namespace, variant: str) -> list[Any]:
    import torch

    from stickymoe.models.moe import Router
    from stickymoe.variants import Site

    torch.manual_seed(0)
    config = config_of(a, variant)
    c = config.model
    sites = [Site(layer, c.d_model, c.n_experts, c.top_k, VOCAB) for layer in range(c.n_layers)]
    parts = [config.variant.parts(site) for site in sites]
    return [Router(c.d_model, c.n_experts, part.rule, gate_only=part.gate_only) for part in parts]


def _inputs(rows: int, length: int) -> Any:
    import torch

    from stickymoe.routing.rules import RouterInput

    rng = torch.Generator().manual_seed(1)
    h, attended = (torch.randn(rows, length, 128, generator=rng) for _ in range(2))
    tokens = torch.randint(0, VOCAB, (rows, length), generator=rng)
    position = torch.arange(length).expand(rows, -1)
    return RouterInput(h, attended, tokens, position, boundary=torch.rand(rows, length, generator=rng) < 0.04)


def own_training(a: argparse.Namespace, variant: str) -> Work:
    import torch

    from stickymoe.models.gpt import _stack
    from stickymoe.models.moe import _SharedGradient
    from stickymoe.routing.losses import objective

    routers, x = _routers(a, variant), _inputs(B, T)
    x.h.requires_grad_()
    x.attended.requires_grad_()
    mask = torch.ones(B, T, dtype=torch.bool)
    config = config_of(a, variant)
    terms = config.variant.phases()[-1].terms
    ties, stacks = config.variant.ties(), _stacks(config)

    def work() -> None:
        routed = [router(x) for router in routers]
        loss = torch.stack([routing.w[..., 0].sum() for routing in routed]).sum()
        trace = _stack(routed, mask, None, x.boundary)
        torch.autograd.backward(loss + objective(trace, terms).total)
        for stack, gradient in stacks:
            torch.autograd.backward(_SharedGradient.apply(stack, ties.capacity, ties.shared_gradient), gradient)
            stack.grad = None

    return work


def _stacks(config: Any) -> list[tuple[Any, Any]]:
    """Expert weights whose gradients are shared, with such gradients; none if no experts are tied."""
    import torch

    c = config.model
    if config.variant.ties() is None:
        return []
    sizes = [(c.n_experts, c.d_ff, c.d_model), (c.n_experts, c.d_model, c.d_ff)] * c.n_layers
    return [(torch.zeros(size, requires_grad=True), torch.ones(size)) for size in sizes]


def own_decoding(a: argparse.Namespace, variant: str) -> Work:
    from dataclasses import replace

    import torch

    routers, text = _routers(a, variant), _inputs(1, PREFIX + TOKENS_AT_ONCE)

    def part(start: int, stop: int) -> Any:
        cut = {name: getattr(text, name)[:, start:stop] for name in ("h", "attended", "tokens", "position", "boundary")}
        return replace(text, **cut)

    with torch.no_grad():
        states = [router(part(0, PREFIX)).state for router in routers]
    tokens = [part(t, t + 1) for t in range(PREFIX, PREFIX + TOKENS_AT_ONCE)]

    @torch.no_grad()
    def work() -> None:
        now = list(states)
        for x in tokens:
            now = [router(x, state).state for router, state in zip(routers, now, strict=True)]

    return work


def candidate(name: str) -> Callable[[argparse.Namespace], Work]:
    kind, _, variant = name.removesuffix(" (2)").removesuffix(" (3)").partition(" ")
    if kind == "step":
        return step
    if kind == "decode":
        return decode_step
    own = own_training if kind == "training" else own_decoding
    return lambda a: own(a, variant)


def added(timings: list[Timing], whole: str, kind: str) -> dict[str, dict[str, float]]:
    """The seconds of each variant's own work, and the share of `whole` that it adds to vanilla in the same round."""
    by_name = {t.name.removeprefix(f"{kind} "): t for t in timings}
    step = by_name.pop(whole).median
    vanilla = [by_name[name].seconds for name in AGAIN if name in by_name]
    base = [statistics.mean(together) for together in zip(*vanilla, strict=True)]
    table = {}
    for variant, t in by_name.items():
        low, median, high = median_interval([(own - plain) / step for own, plain in zip(t.seconds, base, strict=True)])
        table[variant] = {
            "own_s": round(t.median, 6),
            "of_the_step": round(t.median / step, 4),
            "added": round(median, 4),
            "low": round(low, 4),
            "high": round(high, 4),
        }
    return table


def same_router(a: argparse.Namespace, variant: str) -> bool:
    """Whether a variant differs from vanilla only by its losses."""
    from stickymoe.routing.rules import TopK, Unfiltered

    rule = _routers(a, variant)[0].rule
    return (rule.source, type(rule.filter), type(rule.choice)) == ("h", Unfiltered, TopK)


def measure(a: argparse.Namespace, variants: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"experts": a.experts, "threads": a.threads, "batch": [B, T], "tokens": TOKENS_AT_ONCE}
    others = [variant for variant in variants if not same_router(a, variant)]
    for kind, whole, compared, rounds, at_once in (
        ("training", "step", variants, 2 * a.rounds, 1),
        ("decoding", "decode", [*AGAIN, *others], 10 * a.rounds, TOKENS_AT_ONCE),
    ):
        names = [whole, *(f"{kind} {variant}" for variant in compared)]
        timings = race(
            HERE, names, threads=a.threads, rounds=rounds, arguments=("--experts", str(a.experts)), together=True
        )
        table = added(timings, whole, kind)
        step = 1e3 * timings[0].median / at_once
        print(f"\n{kind}, {a.experts} experts: a step takes {step:.2f} ms ±{timings[0].spread:.1%}")
        print(f"{'':24} {'own ms':>9} {'of the step':>12} {'added':>8}  95 % interval")
        for variant, row in table.items():
            own = 1e3 * row["own_s"] / at_once
            added_by = f"{row['added']:+8.2%}  {row['low']:+.2%} to {row['high']:+.2%}"
            print(f"{variant:24} {own:9.3f} {row['of_the_step']:12.2%} {added_by}")
        result[kind] = {"added": table, "timings": {t.name: t.as_dict() for t in timings}}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="comma-separated variants, for a quick look without a record")
    parser.add_argument("-o", "--out", type=Path, default=HERE.with_suffix(".json"))
    a = parser.parse_args()
    if a.serve:
        from stickymoe.training import loop  # noqa: F401  imported first, so that imports do not count as memory
        from stickymoe.training.memory import keep_freed_memory

        keep_freed_memory()
        serve(lambda: candidate(a.serve)(a), warm_up=2)
    elif a.only:
        measure(a, ["vanilla", *(name for name in a.only.split(",") if name != "vanilla")])
    else:
        from stickymoe.variants import variant_names

        routed = [name for name in variant_names() if name not in ("dense", "vanilla", "remoe")]
        variants = ["vanilla", *routed, *COMBINED, "recommended"]
        results = []
        for a.experts in (4, 16):
            results.append(measure(a, variants))
        write_record(a.out, {"routers": results})


if __name__ == "__main__":
    main()
