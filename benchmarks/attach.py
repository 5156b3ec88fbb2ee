"""What `attach` costs a transformers model: python benchmarks/attach.py, on a machine that does nothing else.

A Mixtral of 4 layers with 8 experts, batches of 4 × 256 tokens, fp32, two threads; profiles are of 16,384 tokens. Each
candidate has its own process; they take turns. Ratios are of the same round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from harness import Work, median_interval, race, serve, write_record

HERE = Path(__file__).parent
B, T, VOCAB, THREADS = 4, 256, 4096, 2
TEXT = 64  # rows that are profiled
TRAIN = ("bare", "soft")
READ = ("bare_forward", "profile")
LAYERS = 48


def mixtral(layers: int, width: int) -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=T,
    )
    return MixtralForCausalLM(config)


def prepare(name: str) -> Work:
    import torch

    import stickymoe
    from stickymoe.huggingface.text import score_text

    model = mixtral(4, 256)
    rows = list(torch.randint(VOCAB, (TEXT, T), generator=torch.Generator().manual_seed(1)))
    ids = torch.stack(rows[:B])
    if name == "soft":
        stickymoe.attach(model, "soft", lam=0.1)
    if name in TRAIN:

        def step() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()

        return step
    model.eval()
    if name == "bare_forward":

        def forward() -> None:
            with torch.no_grad():
                for batch in torch.stack(rows).split(B):
                    model(input_ids=batch, labels=batch)

        return forward
    attached = stickymoe.attach(model)
    place, number = Path(tempfile.mkdtemp()), count()
    return lambda: score_text(attached, rows, batch_size=B, folder=place / str(next(number))) and None


def compare(names: tuple[str, str], rounds: int) -> dict[str, Any]:
    """The time of the second candidate relative to the first, and both records."""
    first, second = race(Path(__file__), list(names), threads=THREADS, rounds=rounds)
    ratios = [b / a for a, b in zip(first.seconds, second.seconds, strict=True)]
    low, middle, high = median_interval(ratios)
    return {
        "ratio": {"low": round(low, 4), "median": round(middle, 4), "high": round(high, 4)},
        "memory": round(second.peak_mb / first.peak_mb, 4),
        "timings": {timing.name: timing.as_dict() for timing in (first, second)},
    }


def attach_ms(rounds: int) -> dict[str, float]:
    """Milliseconds to attach to a model of 48 layers and to detach again."""
    import stickymoe

    model, attach, seconds = mixtral(LAYERS, 16), stickymoe.attach, []  # its import is not part of the time
    for _ in range(rounds):
        start = time.perf_counter()
        attached = attach(model, "soft")
        seconds.append(time.perf_counter() - start)
        attached.detach()
    low, middle, high = (round(1000 * x, 2) for x in median_interval(seconds))
    return {"low": low, "median": middle, "high": high, "first": round(1000 * seconds[0], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    if args.serve:
        import stickymoe.huggingface.text  # noqa: F401  imports are not part of the memory that is compared

        serve(lambda: prepare(args.serve), warm_up=3)
        return
    train, read = compare(TRAIN, args.rounds), compare(READ, args.rounds)
    attach = attach_ms(args.rounds)
    speed = 1 / read["ratio"]["median"]
    print(f"attached : bare, forward + backward   {train['ratio']['median']:.3f}  (target ≤ 1.03)")
    print(f"memory                                {train['memory']:.3f}  (target ≤ 1.02)")
    print(f"profile : bare forward, tokens/s      {speed:.3f}  (target ≥ 0.95)")
    print(f"attach to {LAYERS} layers                   {attach['median']:.1f} ms  (target ≤ 50)")
    write_record(HERE / "attach.json", {"train": train, "profile": read, "attach_ms": attach})


if __name__ == "__main__":
    main()
