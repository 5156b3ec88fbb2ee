"""Evaluation: one pass over a split that predicts every target once and measures the routing of every token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer

from stickymoe.data.batches import NO_TARGET, Batch, eval_batch, n_eval_batches
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
from stickymoe.training.processes import Processes


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation. `metrics` and `per_layer` are JSON-ready: None if not finite.

    `nats` is the mean loss, which may be infinite or NaN. The dense control has no table, and with several processes
    only the main one has it.
    """

    nats: float
    metrics: dict[str, Any]
    per_layer: dict[str, list[float | None]]
    table: RouteTable | None


@dataclass(frozen=True)
class _BatchResult:
    """Sums over one batch: nats over its targets, the rest over its tokens."""

    nats: float
    targets: int
    bytes: int
    table: RouteTable | None
    entropy: Float[np.ndarray, " layers"] | None
    losses: dict[str, float]


def evaluate(
    model: GPT,
    split: TokenSplit,
    config: RunConfig,
    token_bytes: Integer[np.ndarray, " vocab"],
    *,
    terms: tuple[Term, ...] | None = None,
    processes: Processes | None = None,
) -> Evaluation:
    """Perplexity, bits per byte, every locality metric and the unweighted loss `terms` of `model` on `split`.

    By default the terms are those of the last phase. The value of a term is its mean over batches, weighted by tokens.

    Several `processes` take batches in turns. The main process sums up their results in the order of the text, so the
    numbers are exactly those of one process.
    """
    terms = config.variant.phases()[-1].terms if terms is None else terms
    if processes is None:
        results = _results(model, split, config, token_bytes, terms, part=0, parts=1)
        return _summary(results, model, split, config, terms)
    parts = processes.gathered(
        _results(model, split, config, token_bytes, terms, part=processes.index, parts=processes.count)
    )
    whole: list[Evaluation] = []

    def summarise() -> Evaluation:
        in_order = [result for turn in zip_longest(*parts) for result in turn if result is not None]
        whole.append(_summary(in_order, model, split, config, terms))
        return replace(whole[0], table=None)

    elsewhere = processes.in_main(summarise)
    return whole[0] if whole else elsewhere


@torch.no_grad()
def _results(
    model: GPT,
    split: TokenSplit,
    config: RunConfig,
    token_bytes: Integer[np.ndarray, " vocab"],
    terms: tuple[Term, ...],
    *,
    part: int,
    parts: int,
) -> list[_BatchResult]:
    """The results of every `parts`-th batch, beginning with number `part`.

    All processes do the same number of forward passes, because a sharded model needs all of them for each.
    """
    T, B = config.model.seq_len, config.eval.batch_size
    n_batches = n_eval_batches(split, seq_len=T, batch_size=B)
    rounds = -(-n_batches // parts)
    results = []
    with _evaluation_mode(model):
        for index in range(part, rounds * parts, parts):
            here = min(index, n_batches - 1)
            batch = eval_batch(split, here, seq_len=T, batch_size=B, documents=config.data.documents)
            result = _result(model, batch, config, token_bytes, terms)
            if index == here:
                results.append(result)
    return results


def _result(
    model: GPT, batch: Batch, config: RunConfig, token_bytes: Integer[np.ndarray, " vocab"], terms: tuple[Term, ...]
) -> _BatchResult:
    counted = batch.targets != NO_TARGET
    here = batch.to(model.token_embedding.weight.device)
    out = model(here.tokens, here.targets, mask=here.mask, doc=here.doc, boundary=here.boundary)
    n = int(counted.sum())
    nats = float(out.loss) * n if n else 0.0
    n_bytes = int(token_bytes[batch.targets[counted].numpy()].sum())
    if out.trace is None:
        return _BatchResult(nats, n, n_bytes, None, None, {})
    context = LossContext(share_block=config.model.layers_per_pool)
    real = int(batch.mask.sum())
    return _BatchResult(
        nats,
        n,
        n_bytes,
        table=replace(out.trace.table(), weights=None, tokens=batch.tokens.numpy().astype(np.int32)),
        entropy=(out.trace.gate_entropy_by_layer().double() * out.trace.mask.sum()).cpu().numpy(),
        losses={name: float(x) * real for name, x in objective(out.trace, terms, context).values.items()},
    )


def _summary(
    results: list[_BatchResult], model: GPT, split: TokenSplit, config: RunConfig, terms: tuple[Term, ...]
) -> Evaluation:
    nats, n_targets, n_bytes = 0.0, 0, 0
    recorder, entropy = Recorder(), np.zeros(config.model.n_layers)
    losses = dict.fromkeys((term.symbol for term in terms), 0.0)
    for result in results:
        nats += result.nats
        n_targets += result.targets
        n_bytes += result.bytes
        if result.table is not None and result.entropy is not None:
            recorder.add(result.table)
            entropy += result.entropy
            for symbol, value in result.losses.items():
                losses[symbol] += value
    if n_targets == 0:
        raise DataError("Nothing to evaluate: every document of the text has fewer than 2 tokens.")
    values: dict[str, Any] = {
        "ppl": math.exp(nats / n_targets) if nats / n_targets < 700 else None,
        "bits_per_byte": _number(nats / math.log(2) / n_bytes),
        "targets": n_targets,
        "ce": _number(nats / n_targets),
    }
    if results[-1].table is None:
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
