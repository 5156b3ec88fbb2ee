"""Perplexity, bits per byte and gate entropy against a computation chunk by chunk, without padding or batches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import stickymoe
from stickymoe.data.tokens import TokenSplit
from stickymoe.errors import DataError
from stickymoe.locality.metrics import switch_rate
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.models.gpt import GPT
from stickymoe.routing.losses import anchor_loss, balance_loss, consistency_loss
from stickymoe.runs.config import EvalConfig, RunConfig
from stickymoe.training.build import build_model
from stickymoe.training.evaluate import evaluate

ROOT = Path(__file__).parents[2]
V, T = 300, 16
BYTES = np.random.default_rng(3).integers(1, 9, V)


def split(n: int, *, doc_length: int | None = None) -> TokenSplit:
    tokens = np.random.default_rng(n).integers(0, V, n).astype(np.int32)
    doc = np.zeros(n, np.int32) if doc_length is None else (np.arange(n) // doc_length).astype(np.int32)
    topics = tuple(None for _ in range(int(doc[-1]) + 1)) if n else ()
    return TokenSplit(tokens=tokens, doc=doc, topics=topics, row_start=np.zeros(n, np.bool_))


def model_of(config: RunConfig) -> GPT:
    """Random weights large enough that gates and predictions are not uniform."""
    model = build_model(config, V)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model


class Naive(NamedTuple):
    nats: float
    targets: list[int]
    entropies: list[list[float]]  # of every token, by layer


@torch.no_grad()
def naive(model: GPT, text: TokenSplit, *, documents: bool = False) -> Naive:
    """One chunk at a time, every probability looked up by hand."""
    nats, targets = 0.0, []
    entropies: list[list[float]] = [[], []]
    n = len(text.tokens)
    for start in range(0, n - 1, T):
        end = min(start + T, n - 1)
        tokens = torch.tensor(text.tokens[start:end].astype(np.int64))[None]
        doc = torch.tensor(text.doc[start:end].astype(np.int64))[None] if documents else None
        out = model(tokens, doc=doc)
        p = out.logits[0].double().softmax(-1)
        for t in range(start, end):
            if documents and text.doc[t] != text.doc[t + 1]:
                continue
            target = int(text.tokens[t + 1])
            targets.append(target)
            nats -= math.log(float(p[t - start, target]))
        if out.trace is not None:
            for layer, g in enumerate(out.trace.g[:, 0].double()):
                entropies[layer] += [-sum(float(x) * math.log2(float(x)) for x in row) for row in g]
    return Naive(nats, targets, entropies)


@pytest.mark.parametrize("variant", ["vanilla", "hard_window", "dense"])
@pytest.mark.parametrize("n", [2, 16, 17, 18, 100])
def test_every_target_is_predicted_once(small: Callable[..., RunConfig], variant: str, n: int) -> None:
    config = replace(small(variant=variant), eval=EvalConfig(batch_size=3))
    model, text = model_of(config), split(n)
    got, expected = evaluate(model, text, config, BYTES).metrics, naive(model, text)
    assert got["targets"] == len(expected.targets) == n - 1
    assert got["ppl"] == pytest.approx(math.exp(expected.nats / (n - 1)), rel=1e-5)
    n_bytes = sum(int(BYTES[target]) for target in expected.targets)
    assert got["bits_per_byte"] == pytest.approx(expected.nats / math.log(2) / n_bytes, rel=1e-5)


@pytest.mark.parametrize("n", [17, 100])
def test_gate_entropy_is_of_real_tokens(small: Callable[..., RunConfig], n: int) -> None:
    config = replace(small(variant="soft"), eval=EvalConfig(batch_size=4))
    model, text = model_of(config), split(n)
    got, expected = evaluate(model, text, config, BYTES), naive(model, text)
    by_layer = [float(np.mean(layer)) for layer in expected.entropies]
    assert got.per_layer["gate_entropy"] == pytest.approx(by_layer, rel=1e-5)
    assert got.metrics["gate_entropy"] == pytest.approx(np.mean(by_layer), rel=1e-5)
    assert all(0.01 < h < 1.99 for h in by_layer)


def test_documents_are_kept_apart(small: Callable[..., RunConfig]) -> None:
    config = small("--data.documents", "true")
    model, text = model_of(config), split(100, doc_length=7)
    got, expected = evaluate(model, text, config, BYTES), naive(model, text, documents=True)
    assert got.metrics["targets"] == len(expected.targets) == 99 - 14
    assert got.metrics["ppl"] == pytest.approx(math.exp(expected.nats / len(expected.targets)), rel=1e-5)
    assert got.table is not None
    assert got.table.doc is not None
    flat = evaluate(model, text, small(), BYTES).metrics
    assert flat["ppl"] != pytest.approx(got.metrics["ppl"], rel=1e-3)


def test_batches_do_not_matter(small: Callable[..., RunConfig]) -> None:
    config = small(variant="oracle")
    model, text = model_of(config), split(300)
    one, many = (
        evaluate(model, text, replace(config, eval=EvalConfig(batch_size=size)), BYTES).metrics for size in (1, 64)
    )
    assert one.pop("bal") == pytest.approx(many.pop("bal"), rel=0.05)  # f · p is of one batch, as in training
    unknown = {name for name, value in one.items() if value is None}
    assert unknown == {name for name, value in many.items() if value is None}
    short = {"warm_loads_c2", "warm_loads_c3"}  # the text ends before the caches are warm
    assert unknown == {"word_specialisation", "working_set_64", *short}  # no frequent word, no sequence as long
    known = {name: value for name, value in many.items() if value is not None}
    assert {name: one[name] for name in known} == pytest.approx(known, rel=1e-5)


def test_loss_terms_are_those_of_the_variant(small: Callable[..., RunConfig]) -> None:
    config = replace(small(variant="soft_hard"), eval=EvalConfig(batch_size=64))
    model, text = model_of(config), split(81)
    got = evaluate(model, text, config, BYTES).metrics
    with torch.no_grad():
        trace = model(torch.from_numpy(text.tokens[:80].astype(np.int64)).view(5, T)).trace
    expected = {"bal": balance_loss(trace), "cons": consistency_loss(trace), "hard": anchor_loss(trace, window=4)}
    assert {name: got[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)
    assert got["ce"] == pytest.approx(math.log(got["ppl"]))


def test_the_table_holds_every_token_and_its_metrics(small: Callable[..., RunConfig]) -> None:
    config = replace(small(), eval=EvalConfig(batch_size=2, capacities=(1, 4)))
    model, text = model_of(config), split(50)
    got = evaluate(model, text, config, BYTES)
    assert got.table is not None
    assert got.table.S.shape == (2, 4, T, 2)
    assert got.table.tokens is not None
    assert got.table.tokens[got.table.mask].tolist() == text.tokens[:-1].tolist()
    assert got.metrics["switch_rate"] == pytest.approx(switch_rate(got.table))
    assert got.metrics["cache_hit_rate_all_c4"] > got.metrics["cache_hit_rate_all_c1"]
    assert "cache_hit_rate_all_c2" not in got.metrics
    shares = [got.per_layer[f"utilisation_{i}"] for i in range(4)]
    assert np.sum(shares, axis=0) == pytest.approx([1.0, 1.0])


def test_the_metrics_of_published_records_keep_their_names(small: Callable[..., RunConfig]) -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "results/paper").glob("*/*/record.json")]
    routed = [record for record in records if record["per_layer"]]
    assert len(routed) > 10
    losses_and_loop = {"bal", "cons", "hard", "best_ppl", "best_step"}
    config = replace(small(), eval=EvalConfig(batch_size=2))
    got = evaluate(model_of(config), split(50), config, BYTES)
    for record in routed:
        assert set(record["metrics"]) - losses_and_loop <= set(got.metrics)
        assert set(record["per_layer"]) <= set(got.per_layer)


def test_evaluation_measures_what_measure_does(small: Callable[..., RunConfig]) -> None:
    config = replace(small(), eval=EvalConfig(batch_size=3, capacities=(2, 3)))
    got = evaluate(model_of(config), split(60), config, BYTES)
    assert got.table is not None
    measured = stickymoe.measure(got.table)
    for name, value in measured.values.items():
        assert got.metrics[name] == (None if math.isnan(value) else value)
    for name, layers in measured.per_layer.items():
        assert got.per_layer[name] == [None if math.isnan(value) else value for value in layers.tolist()]


@pytest.mark.parametrize("variant", ["vanilla", "siblings", "two_speed"])
def test_the_table_has_the_bytes_of_the_parameters(small: Callable[..., RunConfig], variant: str) -> None:
    """Whatever a router brings: siblings have three gates for each layer."""
    config = small(variant=variant)
    model = model_of(config)
    got = evaluate(model, split(40), config, BYTES).table
    assert got is not None
    assert got.expert_bytes is not None
    assert got.other_bytes is not None
    in_all = sum(p.numel() * p.element_size() for p in model.parameters())
    experts = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name)
    assert got.other_bytes == in_all - experts
    assert sum(got.expert_bytes) * config.model.pool_size == experts


def test_the_dense_control_routes_nothing(small: Callable[..., RunConfig]) -> None:
    config = small(variant="dense")
    got = evaluate(model_of(config), split(40), config, BYTES)
    assert got.table is None
    assert set(got.metrics) == {"ppl", "bits_per_byte", "targets", "ce"}


def test_a_perplexity_beyond_any_float_is_none(small: Callable[..., RunConfig]) -> None:
    config = small(variant="dense")
    model = model_of(config)
    with torch.no_grad():
        model.token_embedding.weight.mul_(1e4)
    assert evaluate(model, split(40), config, BYTES).metrics["ppl"] is None


def test_gradients_are_left_alone(small: Callable[..., RunConfig]) -> None:
    config = small()
    model = model_of(config)
    evaluate(model, split(40), config, BYTES)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_predict_is_refused(small: Callable[..., RunConfig], n: int) -> None:
    config = small()
    with pytest.raises(DataError, match=f"has {n} tokens, expected at least 2"):
        evaluate(model_of(config), split(n), config, BYTES)


def test_topics_words_runs_and_the_pooled_cache_are_measured(small: Callable[..., RunConfig]) -> None:
    """Two topics with tokens of their own, and a router that hashes tokens: experts show the topic."""
    config = small(variant="hash")
    config = replace(config, model=replace(config.model, n_experts=4, share_block=2))
    rng = np.random.default_rng(1)
    doc = (np.arange(2001) // 100).astype(np.int32)
    tokens = (rng.integers(0, 5, 2001) + 5 * (doc % 2)).astype(np.int32)
    text = TokenSplit(tokens=tokens, doc=doc, topics=("a", "b") * 10 + ("a",), row_start=np.zeros(2001, np.bool_))
    measured = evaluate(model_of(config), text, config, BYTES)
    assert measured.metrics["topic_information"] > 0.01
    assert measured.metrics["word_specialisation"] == pytest.approx(2.0), "each word has its two of four experts"
    assert measured.metrics["run_length"] == pytest.approx(1 / measured.metrics["switch_rate"], rel=0.1)
    assert measured.table is not None
    access = Access(order="decode", pool=True, share_block=2)
    pooled = simulate(measured.table, capacity=2 * config.model.n_layers, access=access)
    assert measured.metrics["pool_hit_rate_c2"] == pytest.approx(1 - pooled.miss_rate)
    assert "topic_information" not in evaluate(model_of(config), split(100), config, BYTES).metrics
