"""Routers that keep experts resident drive the slots: a run loads what they promise, and the simulator predicts it."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from checkpoints import byte_tokenizer, write_checkpoint
from lively import enliven
from stickymoe.cli.runtime import stats_of
from stickymoe.errors import ConfigError
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runtime.engine import offload
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import Progress, save_checkpoint
from stickymoe.variants import variant

VOCAB = 256
SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2, "n_experts": 8, "top_k": 2, "d_ff": 12, "seq_len": 96}
PROMPT = [72, 101, 108, 108, 111, 44]
NEW = 80
RUNS = {
    "siblings, B 0.03": {"name": "siblings", "capacity": 3, "budget": 0.03},
    "siblings, B 0.2": {"name": "siblings", "capacity": 3, "budget": 0.2, "rho": 0.0, "slow": 0.5},
    "siblings, B 0.5": {"name": "siblings", "capacity": 4, "budget": 0.5, "rho": 0.0, "slow": 0.0},
    "siblings, B 1": {"name": "siblings", "capacity": 5, "budget": 1.0, "rho": 0.0, "slow": 0.0},
    "siblings, hashed": {"name": "siblings", "capacity": 4, "budget": 0.3, "rho": 0.0, "slow": 0.2, "hashed": True},
    "residency": {"name": "residency", "capacity": 4, "average": 0.6, "rho": 0.0},
    "residency by logits": {"name": "residency", "capacity": 5, "average": 0.0, "rho": 0.1, "pinned": 1},
    "rent": {"name": "rent", "capacity": 4, "price": 0.2},
}
every_run = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def store_of(tmp_path_factory):
    """The packed store of a run with large random weights."""

    @cache
    def find(name: str, **sizes):
        settings = RUNS.get(name, {"name": name})
        config = RunConfig(model=ModelConfig(**SIZES | sizes), variant=variant(**settings))
        folder = tmp_path_factory.mktemp("runs") / "run"
        files, model = RunFolder(folder), enliven(build_model(config, VOCAB))
        folder.mkdir()
        files.write_config(config)
        byte_tokenizer().backend_tokenizer.save(str(files.tokenizer))
        save_checkpoint(files.checkpoints, Progress(step=1), model, torch.optim.AdamW(model.parameters()))
        offload(folder, store=folder.with_name("store")).close()
        return folder.with_name("store"), model.requires_grad_(False).eval()

    return find


def run(store, **options):
    with offload(store, **options) as engine:
        return engine.policy, engine.generate(PROMPT, max_new_tokens=NEW)


@torch.no_grad()
def plain_text(model: GPT) -> list[int]:
    cache, tokens = DecodeCache.empty(model.config.n_layers), []
    out = model(torch.tensor([PROMPT]), cache=cache)
    for _ in range(NEW):
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([tokens[-1:]]), cache=cache)
    return tokens


def predicted(out, capacity, policy="router", prefetch=None):
    return simulate(out.table, policy=policy, capacity=capacity, access=Access(order="decode", prefetch=prefetch))


def assert_predicted(out, found):
    counts = (out.stats.hits, out.stats.misses, out.stats.evictions, out.stats.prefetched, out.stats.wasted)
    prefetched = sum(c.prefetched for c in found.caches)
    assert counts == (found.hits, found.misses, found.evictions, prefetched, found.wasted)


def swaps(table) -> list[list[int]]:
    """For each layer and decoded token, how many experts the router made resident."""
    rows = [[set(row.tolist()) for row in layer[0, len(PROMPT) - 1 :]] for layer in table.residents]
    return [[len(now - before) for before, now in pairwise(layer)] for layer in rows]


def decode_misses(out, capacity, policy):
    """Misses of each layer after the prompt."""
    t = out.table
    n = len(PROMPT)
    prompt = type(t)(
        S=t.S[:, :, :n],
        n_experts=t.n_experts,
        mask=t.mask[:, :n],
        phase=t.phase[:, :n],
        residents=t.residents[:, :, :n],
    )
    both = [simulate(x, policy=policy, capacity=capacity, access=Access(order="decode")).caches for x in (t, prompt)]
    return [whole.misses - before.misses for whole, before in zip(*both, strict=True)]


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@every_run
def test_a_run_loads_what_its_router_promises(name, kernel, store_of):
    store, model = store_of(name)
    C = RUNS[name]["capacity"]
    policy, out = run(store, slots=C, kernel=kernel)
    assert policy == "router"
    assert out.tokens == plain_text(model)
    assert out.table.residents.shape == (3, 1, len(PROMPT) + NEW - 1, C)
    asked = out.table.S[:, 0, len(PROMPT) - 1 :, :, None] == out.table.residents[:, 0, len(PROMPT) - 1 :, None]
    assert asked.any(-1).all(), "a token uses residents only"
    assert_predicted(out, predicted(out, C))
    made = swaps(out.table)
    # The prompt leaves the residents of its last token that it used; each of the others is loaded once, if at all.
    for layer, (loads, swapped) in enumerate(zip(decode_misses(out, C, "router"), made, strict=True)):
        union = set(out.table.S[layer, 0, : len(PROMPT)].reshape(-1).tolist())
        unused = set(out.table.residents[layer, 0, len(PROMPT) - 1].tolist()) - union
        assert loads <= len(unused) + sum(swapped)
        if name.startswith("siblings"):
            first = next((i for i, n in enumerate(swapped) if n), len(swapped))
            assert sum(swapped) <= 1 + RUNS[name]["budget"] * len(swapped[first + 1 :])
        assert max(swapped) <= 1


@pytest.mark.parametrize("prefetch", ["none", "previous", "next_layer"])
@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize("name", ["siblings, B 0.5", "residency", "rent"])
def test_every_capacity_is_predicted(name, kernel, prefetch, store_of):
    store, _ = store_of(name)
    text = None
    for capacity in (1, 3, 4, 6):
        _, out = run(store, slots=capacity, kernel=kernel, prefetch=prefetch)
        text = text or out.tokens
        assert out.tokens == text
        recorded = out.table.predicted is not None
        assert_predicted(out, predicted(out, capacity, prefetch="recorded" if recorded else None))
        if prefetch == "previous":
            assert_predicted(out, predicted(out, capacity, prefetch="previous"))


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize("prefetch", ["none", "previous"])
@pytest.mark.parametrize("sizes", [{"share_block": 2}, {"universal": True}], ids=str)
def test_layers_that_share_slots_keep_what_any_of_their_routers_keeps(sizes, prefetch, kernel, store_of):
    store, _ = store_of("residency", n_layers=4, **sizes)
    text = None
    for capacity in (2, 5, 12):
        policy, out = run(store, slots=capacity, kernel=kernel, prefetch=prefetch)
        assert policy == "router"
        text = text or out.tokens
        assert out.tokens == text
        assert_predicted(out, predicted(out, capacity, prefetch=None if prefetch == "none" else prefetch))


@every_run
def test_lru_loads_as_predicted_from_the_same_trace(name, store_of):
    store, _ = store_of(name)
    C = RUNS[name]["capacity"]
    _, routed = run(store, slots=C)
    policy, out = run(store, slots=C, policy="lru")
    assert policy == "lru"
    assert out.tokens == routed.tokens
    np.testing.assert_array_equal(out.table.residents, routed.table.residents)
    assert_predicted(out, predicted(out, C, policy="lru"))
    assert_predicted(routed, predicted(out, C))


def test_lru_can_load_more_than_the_router_promises(store_of):
    """An expert that the router keeps and no token used for a while leaves an LRU cache, not this one."""
    C = RUNS["residency"]["capacity"]
    _, out = run(store_of("residency")[0], slots=C)
    assert predicted(out, C).misses < predicted(out, C, policy="lru").misses


def test_a_warm_cache_and_a_saved_trace(store_of, tmp_path):
    store, _ = store_of("residency")
    with offload(store, slots=4) as engine:
        first = engine.generate(PROMPT, max_new_tokens=20)
        again = engine.generate(PROMPT, max_new_tokens=20)
        assert (again.tokens, again.stats.misses) == (first.tokens, first.stats.misses)
        engine.generate(PROMPT, max_new_tokens=20, warm=True)
        assert stats_of(engine, first)["policy"] == "router"
    save_table(first.table, tmp_path / "trace")
    found = simulate(load_table(tmp_path / "trace"), policy="router", capacity=4, access=Access(order="decode"))
    assert found.misses == first.stats.misses
    assert math.isfinite(found.miss_rate)


def test_other_models_use_lru_and_refuse_router(store_of, tmp_path):
    says = r"^policy: got router, but the routers of this model keep no experts resident: use lru, lfu, fifo, sieve\.$"
    mixtral = tmp_path / "mixtral-store"
    offload(write_checkpoint(tmp_path / "mixtral"), store=mixtral).close()
    for store in (store_of("vanilla")[0], store_of("cache_prior")[0], mixtral):
        with pytest.raises(ConfigError, match=says):
            offload(store, slots=3, policy="router")
        with offload(store, slots=3) as engine:
            assert engine.policy == "lru"
    assert run(store_of("vanilla")[0], slots=3)[1].table.residents is None


def test_bypass_is_decided_by_counts_not_by_the_router(store_of):
    store, _ = store_of("rent")
    with pytest.raises(ConfigError, match=r"^router admits every load: choose another policy, or on_miss load\.$"):
        offload(store, slots=3, policy="router", on_miss="bypass")
    assert run(store, slots=3, on_miss="bypass")[0] == "lru"


def test_an_offline_policy_is_refused_with_those_that_can_run(store_of):
    with pytest.raises(ConfigError, match=r"expected one of lru, lfu, fifo, sieve, router\.$"):
        offload(store_of("rent")[0], policy="belady")
