"""Evaluation: one pass over a split that predicts every target once and measures the routing of every token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer

from stickymoe.data.batches import NO_TARGET, eval_batches
from stickymoe.data.tokens import TokenSplit
from stickymoe.errors import DataError
from stickymoe.locality import coherence
from stickymoe.locality.measure import measure
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.table import RouteTable
from stickymoe.models.gpt import GPT
from stickymoe.routing.losses import LossContext, objective
from stickymoe.routing.terms import Term
from stickymoe.runs.config import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation. `metrics` and `per_layer` are JSON-ready: None if not finite.

    `nats` is the mean loss, which may be infinite or NaN. The dense control has no table.
    """

    nats: float
    metrics: dict[str, Any]
    per_layer: dict[str, list[float | None]]
    table: RouteTable | None


@torch.no_grad()
def evaluate(
    model: GPT,
    split: TokenSplit,
    config: RunConfig,
    token_bytes: Integer[np.ndarray, " vocab"],
    *,
    terms: tuple[Term, ...] | None = None,
) -> Evaluation:
    """Perplexity, bits per byte, every locality metric and the unweighted loss `terms` of `model` on `split`.

    By default the terms are those of the last phase. The value of a term is its mean over batches, weighted by tokens.
    """
    T = config.model.seq_len
    device = model.token_embedding.weight.device
    nats, n_targets, n_bytes = 0.0, 0, 0
    recorder, entropy = Recorder(), np.zeros(config.model.n_layers)
    terms = config.variant.phases()[-1].terms if terms is None else terms
    losses = dict.fromkeys((term.symbol for term in terms), 0.0)
    context = LossContext(share_block=config.model.layers_per_pool)
    with _evaluation_mode(model):
        for batch in eval_batches(split, seq_len=T, batch_size=config.eval.batch_size, documents=config.data.documents):
            counted = batch.targets != NO_TARGET
            here = batch.to(device)
            out = model(here.tokens, here.targets, mask=here.mask, doc=here.doc, boundary=here.boundary)
            n = int(counted.sum())
            nats += float(out.loss) * n if n else 0.0
            n_targets += n
            n_bytes += int(token_bytes[batch.targets[counted].numpy()].sum())
            if out.trace is not None:
                recorder.add(replace(out.trace.table(), weights=None, tokens=batch.tokens.numpy().astype(np.int32)))
                entropy += (out.trace.gate_entropy_by_layer().double() * out.trace.mask.sum()).cpu().numpy()
                for symbol, value in objective(out.trace, terms, context).values.items():
                    losses[symbol] += float(value) * int(batch.mask.sum())

    if n_targets == 0:
        raise DataError("Nothing to evaluate: every document of the text has fewer than 2 tokens.")
    values: dict[str, Any] = {
        "ppl": math.exp(nats / n_targets) if nats / n_targets < 700 else None,
        "bits_per_byte": _number(nats / math.log(2) / n_bytes),
        "targets": n_targets,
        "ce": _number(nats / n_targets),
    }
    if out.trace is None:
        return Evaluation(nats / n_targets, values, {}, None)
    table = recorder.finish(
        expert_bytes=tuple(model.expert_bytes()),
        other_bytes=model.other_bytes(),
        share_block=config.model.layers_per_pool,
        row_bytes=model.row_bytes(),
        row_keys=model.row_keys(),
    )
    measured = measure(table, capacities=config.eval.capacities, topics=_topics(split, table))
    per_layer = {**measured.per_layer, "gate_entropy": entropy / table.mask.sum()}
    totals = {symbol: total / table.mask.sum() for symbol, total in losses.items()}
    routed = {**measured.values, **totals, "gate_entropy": per_layer["gate_entropy"].mean()}
    return Evaluation(
        nats=nats / n_targets,
        metrics=values | {name: _number(value) for name, value in routed.items()},
        per_layer={name: [_number(x) for x in layers] for name, layers in per_layer.items()},
        table=table,
    )


def _topics(split: TokenSplit, table: RouteTable) -> Integer[np.ndarray, "B T"] | None:
    """The topic of every token, where the corpus has topics."""
    if all(topic is None for topic in split.topics):
        return None
    return coherence.topics_of_chunks(split.doc, split.topics, table.mask.shape)


@contextlib.contextmanager
def _evaluation_mode(model: GPT) -> Iterator[None]:
    """Rules and ties at their final strength, whatever the progress of training."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _number(x: float | int) -> float | int | None:
    return None if not math.isfinite(x) else x if isinstance(x, int) else float(x)
