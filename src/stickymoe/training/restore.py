"""Evaluate the model of a run from its folder."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

from stickymoe.data.tokens import load_tokens
from stickymoe.errors import RunError
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
) -> RunRecord:
    """The record of a run with new metrics: those of its newest or named checkpoint on `split`."""
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
    model.to(accelerator.device)
    with accelerator.autocast():
        evaluation = evaluate(model, getattr(data, split), config, data.token_bytes, processes=processes)
    return replace(record, status="complete", metrics=evaluation.metrics, per_layer=evaluation.per_layer)
