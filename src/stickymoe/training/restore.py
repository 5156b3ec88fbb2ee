"""Evaluate the model of a run from its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from stickymoe.data.tokens import load_tokens
from stickymoe.errors import RunError
from stickymoe.models.gpt import GPT
from stickymoe.runs.folder import RunFolder, run_id
from stickymoe.runs.record import RunRecord
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model, make_accelerator
from stickymoe.training.checkpoint import find_checkpoint, load_model
from stickymoe.training.evaluate import evaluate
from stickymoe.training.processes import Processes


def evaluate_run(
    run: Path,
    *,
    split: Literal["valid", "test"] = "valid",
    checkpoint: str | None = None,
    data_path: str | None = None,
    prepare: Callable[[GPT], None] | None = None,
) -> RunRecord:
    """The record of a run with new metrics: those of its newest or named checkpoint on `split`.

    `prepare` changes the model before it is measured.
    """
    folder = RunFolder(run)
    record = RunRecord.read(folder.record)
    config = read_config(file=folder.config)
    if data_path is not None:
        config = replace(config, data=replace(config.data, path=data_path))
    chosen = find_checkpoint(folder.checkpoints, checkpoint)
    if chosen is None:
        raise RunError(f"{run} has no checkpoint to evaluate (status {record.status}): resume or repeat the run first.")
    accelerator = make_accelerator(config)
    processes = Processes(accelerator)
    data = processes.main_first(lambda: load_tokens(config.data))
    if data.fingerprint != record.data["fingerprint"]:
        raise RunError(
            f"{run} was trained on data with fingerprint {record.data['fingerprint'][:12]}, but the data found now has "
            f"{data.fingerprint[:12]}. Pass the original corpus with --data.path."
        )
    if run_id(config, data.fingerprint) != record.run_id:
        raise RunError(
            f"{folder.config} does not match the run id {record.run_id} of {run}: the file was changed, or this "
            "version computes such runs differently. Train the run again."
        )
    if record.status != "complete":
        logging.getLogger(__name__).warning("%s is %s, evaluated at %s", run, record.status, chosen.name)
    model = build_model(config, data.vocab_size)
    load_model(chosen, model)
    if prepare is not None:
        prepare(model)
    model.to(accelerator.device)
    with accelerator.autocast():
        evaluation = evaluate(model, getattr(data, split), config, data.token_bytes, processes=processes)
    return replace(record, status="complete", metrics=evaluation.metrics, per_layer=evaluation.per_layer)


def require_new_evaluation(run: Path, name: str) -> None:
    """Refuse to measure what the record of a run has already: a test split is looked at once."""
    record = RunRecord.read(RunFolder(run).record)
    if record.status != "complete":
        raise RunError(f"{run} is {record.status}: --save needs a complete run. Resume it first.")
    if name in record.evaluations:
        ppl = record.evaluations[name]["ppl"]
        raise RunError(
            f"{run} already has '{name}' in its record (perplexity {ppl:.2f}). To measure again, omit --save."
        )


def save_evaluation(run: Path, name: str, measured: RunRecord, expert_bytes: list[int]) -> None:
    """Add a measurement of the final model to the record of its run."""
    folder = RunFolder(run)
    with folder.lock():
        require_new_evaluation(run, name)
        record = RunRecord.read(folder.record)
        found = {key: measured.metrics[key] for key in ("ppl", "bits_per_byte", "targets")}
        found["expert_bytes"] = expert_bytes
        replace(record, evaluations=record.evaluations | {name: found}).write(folder.record)
