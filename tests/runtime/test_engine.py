"""The offload runtime writes the text of the plain model, whatever the cache, and the simulator counts its loads."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloading import RUNS, generate, plain_model, plain_text, require_predicted

from stickymoe.locality.policies import policy_names
from stickymoe.runtime.engine import offload

PROMPT = [72, 101, 108, 108, 111, 44]
POLICIES = policy_names(online=True)
PREFETCHES = ("none", "previous", "next_layer")
MOE_RUNS = [name for name in RUNS if name != "dense"]
KERNELS = ("torch", "compiled")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_the_text_of_the_plain_model(name, kernel, run_of):
    model = plain_model(run_of(name))
    for ids in (PROMPT, PROMPT[:1]):
        with offload(run_of(name), slots=3, kernel=kernel) as engine:
            out, logits = generate(engine, ids, 12)
        tokens, expected = plain_text(model, ids, 12)
        assert out.tokens == tokens
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MOE_RUNS)
def test_every_variant_follows_the_law(name, kernel, prefetch, store_of):
    """With prefetch, the router of a layer is asked ahead, which must not change its state."""
    reference = {}
    for slots in (None, 3, 2, 1):
        on_miss = "bypass" if slots == 3 else "load"
        with offload(store_of(name), slots=slots, kernel=kernel, prefetch=prefetch, on_miss=on_miss) as engine:
            for ids in (PROMPT, PROMPT[:1]):
                out, logits = generate(engine, ids, 10)
                tokens, expected = reference.setdefault(len(ids), (out.tokens, logits))
                assert out.tokens == tokens
                assert np.array_equal(logits, expected)
                require_predicted(engine, out, policy="lru", prefetch=prefetch, on_miss=on_miss)


@pytest.mark.parametrize("on_miss", ["load", "bypass"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_cache_does_not_change_the_text(policy, on_miss, store_of):
    with offload(store_of(), prefetch="none") as engine:
        reference = {n: generate(engine, PROMPT[:n]) for n in (1, 6)}
    for prefetch in PREFETCHES:
        for capacity in range(1, 6):
            with offload(store_of(), slots=capacity, policy=policy, prefetch=prefetch, on_miss=on_miss) as engine:
                for n, (expected, expected_logits) in reference.items():
                    out, logits = generate(engine, PROMPT[:n])
                    assert out.tokens == expected.tokens
                    assert np.array_equal(logits, expected_logits)
                    require_predicted(engine, out, policy=policy, prefetch=prefetch, on_miss=on_miss)


@functools.cache
def reference_logits(store, kernel, ids, n):
    with offload(store, kernel=kernel) as engine:
        return generate(engine, list(ids), n)[1]


@settings(max_examples=25)
@given(data=st.data())
def test_any_cache_gives_the_same_logits(store_of, data):
    name = data.draw(st.sampled_from(MOE_RUNS), label="name")
    experts = data.draw(st.sampled_from(["fp32", "bf16", "int8", "int4"]), label="experts")
    kernel = data.draw(st.sampled_from(KERNELS), label="kernel")
    ids = tuple(data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=12), label="ids"))
    n = data.draw(st.integers(1, 8), label="n")
    access = {
        "policy": data.draw(st.sampled_from(POLICIES), label="policy"),
        "prefetch": data.draw(st.sampled_from(PREFETCHES), label="prefetch"),
        "on_miss": data.draw(st.sampled_from(["load", "bypass"]), label="on_miss"),
    }
    store = store_of(name, experts)
    expected = reference_logits(store, kernel, ids, n)
    slots = data.draw(st.integers(1, 8), label="slots")
    io = data.draw(st.sampled_from(["direct", "buffered"]), label="io")
    with offload(store, slots=slots, kernel=kernel, io=io, **access) as engine:
        out, logits = generate(engine, list(ids), n)
        assert np.array_equal(logits, expected)
        require_predicted(engine, out, **access)
