"""`measure`: every locality metric of a route table, per layer and averaged. Nothing else computes them.

The equations are in `metrics` (the paper's metrics and load), `figures` (reuse, working sets, specialisation) and
`coherence` (topics). Names are those of run records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Integer

from stickymoe.locality import coherence, figures
from stickymoe.locality import metrics as m
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable

LAGS = (1, 8)
WINDOWS = (16, 64)
SEGMENT = 16  # tokens of a segment for the segment metrics
COLD_TOKENS = 2048  # tokens after which a stream counts as warm


@dataclass(frozen=True)
class Measurement:
    """What `measure` returns; `measurement["switch_rate"]` is a value. A metric over nothing is NaN.

    Attributes:
        per_layer: for each metric the values of the layers
        values: their means, and metrics that are one number per model
    """

    per_layer: Mapping[str, Float[np.ndarray, " L"]]
    values: Mapping[str, float | int]

    def __getitem__(self, name: str) -> float | int:
        return self.values[name]


def measure(
    table: RouteTable, *, capacities: Sequence[int] = (2, 3), topics: Integer[np.ndarray, "B T"] | None = None
) -> Measurement:
    """Measure a table. `capacities` are slots for the hit rates over all k experts; `topics` number each token's topic.

    - `switch_rate`, `set_switch_rate`: how often the heaviest expert, or the set of experts, changes between tokens
    - `cache_hit_rate`: the paper's: LRU, 2 slots, heaviest expert only, cold for every sequence
    - `cache_hit_rate_all_cC`: the same over all k experts with C slots, which is what a device pays
    - `pool_hit_rate_cC`: one LRU cache of C slots per layer for the whole model, in decode order
    - `warm_loads_cC`: experts that all layers together load per token: LRU, C slots per layer, kept from one sequence
      to the next, after the first 2,048 tokens
    - `cold_loads_cC`: the same over the first 2,048 tokens, from empty slots
    - `utilisation_entropy`, `utilisation_i`, `effective_experts`, `neglected_experts`: how evenly experts are used
    - `run_length`: tokens for which the heaviest expert stays
    - `reuse_n`: fraction of a token's experts that were chosen n tokens earlier
    - `working_set_n`: different experts that n adjacent tokens use
    - `segment_routing_16`, `segment_cache_16`: SRP and SCH of Liang et al. (arXiv 2505.16056)
    - `document_specialisation`, `word_specialisation`, `topic_information`: if the table has documents or token ids, or
      topics are given
    """
    per_layer = {
        "switch_rate": m.switch_rate_by_layer(table),
        "set_switch_rate": m.set_switch_rate_by_layer(table),
        "cache_hit_rate": m.cache_hit_rate_by_layer(table),
        **{f"cache_hit_rate_all_c{C}": m.cache_hit_rate_all_by_layer(table, C) for C in capacities},
        "utilisation_entropy": m.utilisation_entropy_by_layer(table),
        "effective_experts": m.effective_experts_by_layer(table),
        **_figures(table),
    }
    if topics is not None:
        per_layer["topic_information"] = coherence.topic_information_above_chance_by_layer(table, topics)
    values: dict[str, float | int] = {name: float(layers.mean()) for name, layers in per_layer.items()}
    values |= {f"pool_hit_rate_c{C}": _pool_hit_rate(table, C) for C in capacities}
    for C in capacities:
        values[f"cold_loads_c{C}"], values[f"warm_loads_c{C}"] = loads_per_token(table, C)
    values["neglected_experts"] = m.neglected_experts(table)
    shares = m.utilisation_by_layer(table)
    return Measurement(per_layer | {f"utilisation_{i}": shares[:, i] for i in range(shares.shape[1])}, values)


def _figures(table: RouteTable) -> dict[str, Float[np.ndarray, " L"]]:
    k = table.top_k
    reuse, in_use = figures.reuse_by_lag(table, LAGS), figures.working_set(table, WINDOWS)
    found = {
        "run_length": figures.mean_run_length_by_layer(table),
        **{f"reuse_{lag}": reuse[:, i] for i, lag in enumerate(LAGS)},
        **{f"working_set_{window}": in_use[:, i] for i, window in enumerate(WINDOWS)},
        f"segment_routing_{SEGMENT}": figures.segment_routing_by_layer(table, SEGMENT),
        f"segment_cache_{SEGMENT}": figures.segment_cache_by_layer(table, SEGMENT, min(2 * k, table.n_experts)),
    }
    if table.doc is not None:
        by_document = figures.domain_specialisation(table)
        found["document_specialisation"] = figures.peak_specialisation_by_layer(by_document, k)
    if table.tokens is not None:
        by_word = figures.vocabulary_specialisation(table)[1]
        found["word_specialisation"] = figures.peak_specialisation_by_layer(by_word, k)
    return found


def _pool_hit_rate(table: RouteTable, capacity: int) -> float:
    """Hit rate over all k experts of one LRU cache with `capacity` slots per layer for the whole model.

    Where layers share experts, a shared expert is one entry, so models that share can be compared with others.
    """
    access = Access(order="decode", pool=True)
    per_token = replace(table, phase=None)
    return 1 - simulate(per_token, capacity=capacity * table.n_layers, access=access).miss_rate


def loads_per_token(table: RouteTable, capacity: int) -> tuple[float, float]:
    """Loads per token, over all layers, of the first 2,048 tokens of the stream, and of those after them.

    LRU with `capacity` slots per layer, all k experts of a token at once. NaN for a stream that is too short.
    """
    stream = replace(table, phase=None)
    place = np.cumsum(table.mask).reshape(table.mask.shape)
    start = replace(stream, mask=table.mask & (place <= COLD_TOKENS))
    access = Access(order="decode", warm=True)
    whole, cold = (simulate(part, capacity=capacity, access=access) for part in (stream, start))
    warm_tokens = whole.tokens - cold.tokens
    warm = (whole.loads - cold.loads) / warm_tokens if warm_tokens else float("nan")
    return cold.loads_per_token, warm
