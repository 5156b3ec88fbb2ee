"""One pass over a split: every target predicted once, and the routing of every token measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer

from stickymoe.data.batches import NO_TARGET, eval_batches, n_eval_chunks
from stickymoe.data.tokens import TokenSplit
from stickymoe.errors import DataError
from stickymoe.locality import coherence, figures
from stickymoe.locality import metrics as m
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable, index_dtype
from stickymoe.models.gpt import GPT
from stickymoe.routing.losses import LossContext, objective
from stickymoe.routing.terms import Term
from stickymoe.routing.trace import RoutingTrace
from stickymoe.runs.config import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """`metrics` and `per_layer` are JSON-ready: what is not a number is None. No table for the dense control.

    `nats` is the mean loss, whatever it is.
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

    The terms are those of the variant's last phase unless given; one is the mean of its values on the batches, by
    their tokens.
    """
    T, k = config.model.seq_len, config.model.top_k
    device = model.token_embedding.weight.device
    n_chunks = n_eval_chunks(split, T)
    nats, n_targets, n_bytes = 0.0, 0, 0
    recorder: _Recorder | None = None
    terms = config.variant.phases()[-1].terms if terms is None else terms
    losses = dict.fromkeys((term.symbol for term in terms), 0.0)
    context = LossContext(share_block=config.model.layers_per_pool)
    row = 0
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
                if recorder is None:
                    N = config.model.pool_size
                    recorder = _Recorder((out.trace.g.shape[0], n_chunks, T, k), N, batch.doc is not None)
                recorder.add(row, batch.tokens, out.trace)
                for symbol, value in objective(out.trace, terms, context).values.items():
                    losses[symbol] += float(value) * int(batch.mask.sum())
            row += len(batch.tokens)

    if n_targets == 0:
        raise DataError("Nothing to evaluate: no token of the text has a successor in its document.")
    values: dict[str, Any] = {
        "ppl": math.exp(nats / n_targets) if nats / n_targets < 700 else None,
        "bits_per_byte": _number(nats / math.log(2) / n_bytes),
        "targets": n_targets,
        "ce": _number(nats / n_targets),
    }
    if recorder is None:
        return Evaluation(nats / n_targets, values, {}, None)
    table = recorder.table()
    gate_entropy = recorder.gate_entropy()
    per_layer = {
        "switch_rate": m.switch_rate_by_layer(table),
        "set_switch_rate": m.set_switch_rate_by_layer(table),
        "cache_hit_rate": m.cache_hit_rate_by_layer(table),
        **{f"cache_hit_rate_all_c{C}": m.cache_hit_rate_all_by_layer(table, C) for C in config.eval.capacities},
        "utilisation_entropy": m.utilisation_entropy_by_layer(table),
        "gate_entropy": gate_entropy,
        "run_length": figures.mean_run_length_by_layer(table),
        "word_specialisation": figures.peak_specialisation_by_layer(figures.vocabulary_specialisation(table)[1], k),
    }
    if any(topic is not None for topic in split.topics):
        topics = coherence.topics_of_chunks(split.doc, split.topics, table.mask.shape)
        per_layer["topic_information"] = coherence.topic_information_above_chance_by_layer(table, topics)
    values |= {name: _number(layers.mean()) for name, layers in per_layer.items()}
    values |= {
        **{symbol: _number(total / table.mask.sum()) for symbol, total in losses.items()},
        **{f"pool_hit_rate_c{C}": _number(_pool_hit_rate(table, C, config)) for C in config.eval.capacities},
        "effective_experts": _number(m.effective_experts(table)),
        "neglected_experts": m.neglected_experts(table),
    }
    utilisation = m.utilisation_by_layer(table)
    shares = {f"utilisation_{i}": utilisation[:, i] for i in range(utilisation.shape[1])}
    return Evaluation(
        nats=nats / n_targets,
        metrics=values,
        per_layer={name: [_number(x) for x in layers] for name, layers in (per_layer | shares).items()},
        table=table,
    )


@contextlib.contextmanager
def _evaluation_mode(model: GPT) -> Iterator[None]:
    """Rules and ties at their final strength, whatever the progress of training."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _pool_hit_rate(table: RouteTable, capacity: int, config: RunConfig) -> float:
    """Over all slots, in one LRU cache of `capacity` per layer for the whole model, token by token through the layers.

    Where layers share their experts, a shared tensor is one entry: so models that share are held against others.
    """
    access = Access(order="decode", pool=True, share_block=config.model.layers_per_pool)
    return 1 - simulate(table, capacity=capacity * table.n_layers, access=access).miss_rate


class _Recorder:
    """Collects what the metrics need from each batch's trace, which is then dropped."""

    def __init__(self, shape: tuple[int, int, int, int], n_experts: int, documents: bool) -> None:
        L, B, T, _ = shape
        self.n_experts = n_experts
        self.S = np.zeros(shape, index_dtype(n_experts))
        self.mask = np.zeros((B, T), np.bool_)
        self.tokens = np.zeros((B, T), np.int32)
        self.doc = np.full((B, T), -1, np.int32) if documents else None
        self.entropy = np.zeros(L)

    def add(self, row: int, tokens: torch.Tensor, trace: RoutingTrace) -> None:
        rows = slice(row, row + len(tokens))
        self.S[:, rows] = trace.S.cpu().numpy()
        self.mask[rows] = trace.mask.cpu().numpy()
        self.tokens[rows] = tokens.numpy()
        if self.doc is not None and trace.doc is not None:
            self.doc[rows] = trace.doc.cpu().numpy()
        self.entropy += (trace.gate_entropy_by_layer().double() * trace.mask.sum()).cpu().numpy()

    def gate_entropy(self) -> Float[np.ndarray, " L"]:
        return np.asarray(self.entropy / self.mask.sum())

    def table(self) -> RouteTable:
        return RouteTable(S=self.S, n_experts=self.n_experts, mask=self.mask, doc=self.doc, tokens=self.tokens)


def _number(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
