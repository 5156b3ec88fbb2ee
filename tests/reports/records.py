"""Run folders as training would leave them, made up in moments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from stickymoe.locality.formats import save_table
from stickymoe.locality.table import RouteTable
from stickymoe.reports.collection import Run
from stickymoe.runs.folder import RunFolder, run_id
from stickymoe.runs.record import RunRecord
from stickymoe.runs.settings import config_from

METRICS = {
    "ppl": 100.0,
    "bits_per_byte": 1.5,
    "ce": 4.6,
    "switch_rate": 0.7,
    "set_switch_rate": 0.8,
    "cache_hit_rate": 0.5,
    "cache_hit_rate_all_c2": 0.55,
    "cache_hit_rate_all_c3": 0.75,
    "utilisation_entropy": 1.98,
    "gate_entropy": 1.7,
    "effective_experts": 3.9,
    "neglected_experts": 0,
    "best_ppl": 100.0,
    "best_step": 1000,
}


def a_run(
    variant: dict[str, Any] | str = "vanilla",
    *,
    seed: int = 42,
    status: str = "complete",
    fingerprint: str = "f" * 64,
    settings: dict[str, Any] | None = None,
    **metrics: float | None,
) -> Run:
    """A record of the cpu-small preset; `metrics` are over plausible ones."""
    named = {"name": variant} if isinstance(variant, str) else variant
    config = config_from({"preset": "cpu-small", "variant": named, "seed": seed, **(settings or {})}, [])
    dense = named["name"] == "dense"
    kept = ("ppl", "bits_per_byte", "ce", "best_ppl", "best_step")
    values = {k: v for k, v in {**METRICS, **metrics}.items() if not dense or k in kept}
    layers = {k: [values[k]] * 4 for k in values if k.startswith(("switch", "cache", "set", "utilisation", "gate"))}
    shares = {f"utilisation_{i}": [0.25] * 4 for i in range(4)}
    done = status == "complete"
    record = RunRecord(
        run_id=run_id(config, fingerprint),
        status=status,  # type: ignore[arg-type]
        config=config.as_dict(),
        data={"fingerprint": fingerprint, "vocab_size": 4096, "tokens": {"train": 10, "valid": 10, "test": 10}},
        environment={"commit": "c" * 40, "packages": {"torch": "2.13.0", "stickymoe": "0.1.0"}, "processor": "a CPU"},
        metrics=values if done else {},
        per_layer={} if dense or not done else layers | shares,
        failure="The loss became nan at step 7." if status == "failed" else None,
    )
    return Run.of(record)


def write(run: Run, root: Path, *, words: tuple[str, ...] | None = None) -> Path:
    """The run's folder under `root`: record and metrics, and with `words` a text and its routing."""
    folder = RunFolder(root / f"{run.config.variant.key}-s{run.config.seed}-{run.record.run_id[:8]}")
    folder.path.mkdir(parents=True)
    run.record.write(folder.record)
    lines = [
        {"step": step, "train": {"loss": 9 / step, "ce": 8 / step, "bal": 1.0, "switch_rate": 0.5, "grad_norm": 1.0}}
        for step in range(10, 1001, 10)
    ]
    lines += [{"step": step, "valid": {"ce": 8 / step, "bal": 1.0, "ppl": 3.0}} for step in (500, 1000)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if words is not None and run.record.per_layer:
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder.tokenizer))
        rng = np.random.default_rng(run.config.seed + len(run.config.variant.key))
        S = np.stack([rng.permuted(np.arange(4))[:2] for _ in range(4 * 2 * 64)]).reshape(4, 2, 64, 2)
        tokens = np.resize(np.arange(len(words), dtype=np.int32), (2, 64))
        save_table(
            RouteTable(S=S.astype(np.uint8), n_experts=4, mask=np.ones((2, 64), bool), tokens=tokens), folder.routes
        )
    return folder.path


def failed(variant: str) -> Run:
    return a_run(variant, status="failed")


def of_paper(run: Run) -> Run:
    """The same run under the paper's own protocol."""
    config = config_from({"preset": "paper-small", "variant": run.record.config["variant"], "seed": 42}, [])
    data = {**run.record.data, "vocab_size": 50_257, "tokens": {"train": 1, "valid": 242_643, "test": 1}}
    return Run.of(replace(run.record, config=config.as_dict(), data=data))
