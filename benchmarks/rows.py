"""What rows in slow memory cost: python benchmarks/rows.py, on a quiet machine.

Training: whole steps of the training loop with and without rows, on tokens that are as frequent as words.

Decoding: a model of the preset `cpu-small` with the variant `hash+lookup` decodes from slow memory of a given speed,
with its tables in memory and on disk, with and without hot rows. Its weights are those of the first step: they do not
change the speed. The candidates take turns, and every round decodes the same text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness import Timing, Work, median_interval, race, serve, write_record

HERE = Path(__file__).parent
BATCH, LENGTH = 16, 256
TRAINED = {
    "hash": {"name": "hash"},
    "rows by token": {"name": "hash+lookup", "ngrams": []},
    "rows by token and n-gram": {"name": "hash+lookup"},
}
SLOTS, TOKENS, THROTTLE, VOCAB, TARGET, TRAINING_TARGET = 3, 200, "200MB", 4096, 1.05, 1.03
ROWS = {"in memory": "all", "on disk": "0", "on disk, 1 MB hot": "1MB"}


def training(name: str) -> Work:
    """A step of the training loop: forward, backward, clipping, AdamW of weights and rows."""
    import numpy as np
    import torch
    from accelerate import Accelerator

    from stickymoe.data.batches import Batch
    from stickymoe.runs.settings import config_from
    from stickymoe.training.build import build_model
    from stickymoe.training.memory import keep_freed_memory
    from stickymoe.training.update import Updates, spans

    keep_freed_memory()

    class Sampled:
        def batch(self, step: int, *, part: int = 0, parts: int = 1) -> Batch:
            drawn = np.random.default_rng(step).zipf(1.2, (BATCH, LENGTH + 1)) % VOCAB
            tokens = torch.from_numpy(drawn)
            mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
            return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, None)

    config = config_from({"preset": "cpu-small", "variant": TRAINED[name]})
    update = Updates(build_model(config, VOCAB), Sampled(), config, spans(config)[0], Accelerator())
    steps = iter(range(config.train.steps))

    def work() -> None:
        update(next(steps))

    return work


def write_run(folder: Path) -> Path:
    """A run of the untrained model, with a tokenizer that has the tokens of its vocabulary."""
    import torch
    from tokenizers import Tokenizer, models

    from stickymoe.runs.folder import RunFolder
    from stickymoe.runs.settings import read_config
    from stickymoe.training.build import build_model
    from stickymoe.training.checkpoint import Progress, save_checkpoint

    config = read_config([], preset="cpu-small", variant="hash+lookup")
    model, files = build_model(config, VOCAB), RunFolder(folder)
    folder.mkdir(parents=True)
    files.write_config(config)
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")).save(str(files.tokenizer))
    save_checkpoint(files.checkpoints, Progress(step=1), model, torch.optim.AdamW(model.parameters()))
    return folder


def prepare(name: str, store: Path, slots: int) -> Work:
    """Decode a sampled text; words of a language are as frequent as the tokens of a Zipf distribution."""
    import numpy as np

    import stickymoe

    engine = stickymoe.offload(store, slots=slots, rows=ROWS[name], throttle=THROTTLE, policy="lru")
    rng = np.random.default_rng(0)
    prompt = (rng.zipf(1.2, 32) % VOCAB).tolist()
    tokens = iter((rng.zipf(1.2, 1 << 20) % VOCAB).tolist())

    def work() -> dict[str, float]:
        text = engine.begin(prompt, max_new_tokens=TOKENS, warm=True)
        while not text.ended:
            text.step()
            text.tokens[-1] = next(tokens)  # an untrained model would repeat itself
        s = text.stats
        text.close()
        return {
            "seconds": s.decode_s,
            "misses": (s.misses - s.prompt_misses) / (TOKENS - 1),
            "rows": s.rows,
            "row_hits": s.row_hits,
            "row_bytes": s.row_bytes_read,
            "row_stall_s": s.row_stall_s,
            "resident_mb": s.resident_bytes / 1e6,
        }

    return work


def ratio(mine: Timing, reference: Timing) -> dict[str, float]:
    """Times relative to another candidate, from pairs of one round."""
    pairs = zip(mine.seconds, reference.seconds, strict=True)
    low, median, high = median_interval([own / other for own, other in pairs])
    return {"low": round(low, 4), "median": round(median, 4), "high": round(high, 4)}


def compare_training(rounds: int) -> dict[str, Any]:
    """Steps with rows relative to steps without."""
    found = race(Path(__file__), list(TRAINED), threads=1, rounds=rounds, arguments=("-", "0"))
    results: dict[str, Any] = {}
    for timing in found:
        of_hash = ratio(timing, found[0])
        results[timing.name] = {"ms_per_step": round(1000 * timing.median, 2), "ratio": of_hash}
        bounds = f"{of_hash['median']:.3f} ({of_hash['low']:.3f} to {of_hash['high']:.3f})"
        print(f"{timing.name:26} {1000 * timing.median:7.1f} ms/step  {bounds}  (target ≤ {TRAINING_TARGET})")
    return results


def compare(store: Path, slots: int, rounds: int) -> dict[str, Any]:
    """Decoding relative to tables in memory."""
    found = race(Path(__file__), list(ROWS), threads=1, rounds=rounds, arguments=(str(store), str(slots)))
    results: dict[str, Any] = {}
    for timing in found:
        in_memory = ratio(timing, found[0])
        low, median, high = in_memory["low"], in_memory["median"], in_memory["high"]
        numbers = {key: sum(n[key] for n in timing.numbers) / rounds for key in timing.numbers[0]}
        ms = 1000 * timing.median / (TOKENS - 1)
        results[timing.name] = {
            "ms_per_token": round(ms, 4),
            "ratio": in_memory,
            "peak_mb": round(timing.peak_mb, 1),
            **{key: round(value, 4) for key, value in numbers.items()},
        }
        target = "" if timing is found[0] else f"  (target ≤ {TARGET})"
        print(
            f"{slots} slots, {timing.name:18} {ms:7.3f} ms/token  {median:.3f} ({low:.3f} to {high:.3f}){target}  "
            f"{numbers['row_hits'] / max(numbers['rows'], 1):5.1%} hits  {numbers['row_stall_s']:.3f} s stalled  "
            f"{numbers['resident_mb']:.1f} MB resident, peak {timing.peak_mb:.0f} MB"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=3, metavar=("NAME", "STORE", "SLOTS"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "rows.json")
    args = parser.parse_args()
    if args.serve:
        import stickymoe.runtime.engine
        import stickymoe.runtime.gpt  # noqa: F401

        name, store, slots = args.serve
        if name in TRAINED:
            serve(lambda: training(name), warm_up=3)
            return
        serve(lambda: prepare(name, Path(store), int(slots)), warm_up=1)
        return
    from stickymoe.runtime.opening import open_store

    steps = compare_training(2 * args.rounds)
    with tempfile.TemporaryDirectory(dir=HERE) as temporary:
        store = Path(temporary) / "store"
        open_store(write_run(Path(temporary) / "run"), store=store)
        results = {f"{slots} slots": compare(store, slots, args.rounds) for slots in (SLOTS, 4)}
    settings = {"tokens": TOKENS, "throttle": THROTTLE, "rounds": args.rounds, "vocab_size": VOCAB}
    write_record(args.out, {"settings": settings, "training": steps, "decoding": results})


if __name__ == "__main__":
    main()
