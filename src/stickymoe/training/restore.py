"""A finished or unfinished run taken up again from its folder, to measure its model."""

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


def evaluate_run(
    run: Path,
    *,
    split: Literal["valid", "test"] = "valid",
    checkpoint: str | None = None,
    data_path: str | None = None,
) -> RunRecord:
    """The run's record with the metrics of its newest or named checkpoint on `split`, measured now."""
    folder = RunFolder(run)
    record = RunRecord.read(folder.record)
    config = read_config(file=folder.config)
    if data_path is not None:
        config = replace(config, data=replace(config.data, path=data_path))
    chosen = find_checkpoint(folder.checkpoints, checkpoint)
    if chosen is None:
        raise RunError(f"{run} has no checkpoint yet (status {record.status}).")
    data = load_tokens(config.data)
    if data.fingerprint != record.data["fingerprint"]:
        raise RunError(
            f"{run} was trained on other data than is found now (fingerprint {record.data['fingerprint'][:12]}, "
            f"here {data.fingerprint[:12]}). Pass its corpus with --data.path."
        )
    if run_id(config, data.fingerprint) != record.run_id:
        raise RunError(
            f"{folder.config} is not the config that {run} was trained with (run id {record.run_id}): it was altered "
            "since, or this version computes such runs differently. Train it again."
        )
    if record.status != "complete":
        logging.getLogger(__name__).warning("%s is %s, measured at %s", run, record.status, chosen.name)
    accelerator = make_accelerator(config)
    model = build_model(config, data.vocab_size)
    load_model(chosen, model)
    model.to(accelerator.device)
    with accelerator.autocast():
        evaluation = evaluate(model, getattr(data, split), config, data.token_bytes)
    return replace(record, status="complete", metrics=evaluation.metrics, per_layer=evaluation.per_layer)
