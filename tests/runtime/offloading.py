"""Small models on disk, and generation whose logits are kept, for tests of the offload runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import byte_tokenizer
from lively import enliven
from stickymoe.locality.replay import Simulation, simulate
from stickymoe.locality.streams import Access
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.runtime.engine import Engine, Generation
from stickymoe.runtime.sampling import Chooser
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import Progress, load_model, save_checkpoint

VOCAB = 256
SIZES = {"d_model": 32, "n_layers": 4, "n_heads": 2, "n_experts": 5, "top_k": 2, "d_ff": 64, "seq_len": 32}
RUNS: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "hash": (),
    "smooth": (),
    "hysteresis": (),
    "siblings": ("--variant.capacity", "3"),
    "rent": ("--variant.capacity", "3"),
    "lookup": ("--variant.table_rows", "11"),
    "remoe": (),
    "dense": (),
    "delta": ("--variant.rank", "3"),
    "siblings+delta": ("--variant.capacity", "3", "--variant.rank", "3"),
    "deltas shared by two layers": ("--model.share_block", "2", "--variant.rank", "3"),
    "shared by two layers": ("--model.share_block", "2"),
    "one pool": ("--model.universal", "true", "--model.n_experts", "2"),
}
SIMULATED = {"none": None, "previous": "previous", "next_layer": "recorded"}
COUNTED = ("hits", "misses", "evictions", "wasted", "bypassed")


def write_run(folder: Path, name: str = "vanilla", *flags: str) -> Path:
    """A run folder with a checkpoint of large random weights, and a tokenizer of bytes."""
    variant = name if " " not in name else "delta" if name.startswith("deltas") else "vanilla"
    sizes = [part for key, value in SIZES.items() for part in (f"--model.{key}", str(value))]
    config = read_config([*sizes, *RUNS[name], *flags], preset="tiny", variant=variant)
    model = enliven(build_model(config, VOCAB))
    files = RunFolder(folder)
    folder.mkdir(parents=True)
    files.write_config(config)
    byte_tokenizer().backend_tokenizer.save(str(files.tokenizer))
    save_checkpoint(files.checkpoints, Progress(step=1), model, torch.optim.AdamW(model.parameters()))
    return folder


def plain_model(folder: Path) -> GPT:
    """The model of a run, all in memory."""
    model = build_model(read_config(file=folder / "config.yaml"), VOCAB)
    load_model(next((folder / "checkpoints").glob("step-*")), model)
    return model.eval()


@torch.no_grad()
def plain_text(model: GPT, ids: Sequence[int], n: int) -> tuple[list[int], np.ndarray]:
    """Greedy text, and the logits that each token was chosen from."""
    cache = DecodeCache.empty(model.config.n_layers)
    tokens, kept, given = [], [], list(ids)
    for _ in range(n):
        logits = model(torch.tensor([given]), cache=cache).logits[0, -1].numpy()
        kept.append(logits)
        tokens.append(int(logits.argmax()))
        given = tokens[-1:]
    return tokens, np.stack(kept)


def generate(engine: Engine, ids: Any, n: int = 8, **settings: Any) -> tuple[Generation, np.ndarray]:
    """A generation, and the logits that each token was chosen from."""
    kept: list[np.ndarray] = []
    choose = Chooser.__call__

    def keep(self: Chooser, logits: np.ndarray) -> int:
        kept.append(logits.copy())
        return choose(self, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chooser, "__call__", keep)
        out = engine.generate(ids, max_new_tokens=n, **settings)
    return out, np.stack(kept)


def replayed(out: Generation, *, capacity: int, policy: str, prefetch: str, on_miss: str) -> Simulation:
    """The simulation of the trace of a generation."""
    asked = SIMULATED[prefetch]
    if asked == "recorded" and out.table.predicted is None:  # nothing was prefetched
        asked = None
    access = Access(order="decode", prefetch=asked, on_miss=on_miss)
    return simulate(out.table, capacity=capacity, policy=policy, access=access)


def require_predicted(engine: Engine, out: Generation, *, policy: str, prefetch: str, on_miss: str) -> None:
    """The simulator counts what the run counted, and bytes follow from it."""
    found = replayed(out, capacity=engine.slots, policy=policy, prefetch=prefetch, on_miss=on_miss)
    expected = {name: getattr(found, name) for name in COUNTED} | {"prefetched": found.loads - found.misses}
    assert {name: getattr(out.stats, name) for name in expected} == expected
    least, most = (n * engine.expert_bytes for n in (found.misses, found.loads))
    assert least <= out.stats.bytes_read <= most
    assert out.stats.bytes_read % engine.expert_bytes == 0
    if prefetch == "none":
        assert out.stats.bytes_read == least
