"""Texts of one engine that take turns: each is the text that it is alone, and each pays for its own passes."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref

import pytest
from offloading import RUNS

from checkpoints import write_checkpoint
from stickymoe.errors import ConfigError, StoreError
from stickymoe.runtime.engine import _MEASURED, Settings, offload

PROMPTS = [[1, 2, 3, 4, 5], [200, 7], [9] * 11, [33]]
SAMPLED = [{}, {"do_sample": True, "seed": 3}, {}, {"do_sample": True, "top_p": 0.9, "seed": 4}]


def taking_turns(engine, order):
    """The tokens of all prompts; `order` chooses whose turn it is."""
    texts = [
        engine.begin(ids, max_new_tokens=8, warm=True, **settings)
        for ids, settings in zip(PROMPTS, SAMPLED, strict=True)
    ]
    left = list(texts)
    while left:
        text = order.choice(left)
        text.step()
        if text.ended:
            text.close()
            left.remove(text)
    return texts


def alone(engine):
    return [engine.generate(i, max_new_tokens=8, **s).tokens for i, s in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize("name", RUNS)
def test_texts_that_take_turns_are_the_same_as_alone(name, kernel, run_of, store_of):
    model = run_of(name) if name == "dense" else store_of(name)
    options = {} if name == "dense" else {"slots": 2, "kernel": kernel}
    with offload(model, **options) as engine:
        expected = alone(engine)
        for seed in range(3):
            assert [text.tokens for text in taking_turns(engine, random.Random(seed))] == expected


@pytest.mark.parametrize("prefetch", ["none", "previous", "next_layer"])
@pytest.mark.parametrize("kernel", ["compiled", "torch"])  # compiled tokens, and the model's own
def test_texts_of_transformers_models_take_turns(kernel, prefetch, tmp_path):
    write_checkpoint(tmp_path / "model")
    options = {"slots": 2, "prefetch": prefetch, "kernel": kernel, "store": tmp_path / "store"}
    with offload(tmp_path / "model", **options) as engine:
        assert (engine.host.decoder is not None) == (kernel == "compiled")
        assert [text.tokens for text in taking_turns(engine, random.Random(0))] == alone(engine)


@pytest.mark.parametrize("prefetch", ["none", "previous"])
def test_what_texts_pay_adds_up_to_what_was_counted(prefetch, store_of):
    with offload(store_of(), slots=2, prefetch=prefetch) as engine:
        texts = taking_turns(engine, random.Random(1))
        stats = [text.stats for text in texts]
        counts = [pool.counts for pool in engine.layers.pools]
        hits, misses, evictions, *_ = (sum(column) for column in zip(*counts, strict=True))
        assert sum(s.hits for s in stats) == hits
        assert sum(s.misses for s in stats) == misses
        assert sum(s.evictions for s in stats) == evictions
        assert sum(s.bytes_read for s in stats) == engine._readers.bytes_read
        assert all(s.hits + s.misses > 0 for s in stats)


def test_a_warm_text_that_uses_earlier_prefetches_has_no_negative_waste(store_of):
    with offload(store_of(), slots=5) as engine:
        engine.generate(PROMPTS[0], max_new_tokens=1)
        for pool in engine.layers.pools:
            pool.prefetch([e for e in range(5) if e not in pool.contents])
        text = engine.begin(PROMPTS[2], max_new_tokens=8, warm=True)
        while not text.ended:
            text.step()
        assert text.stats.misses == 0
        assert text.charged[_MEASURED.index("wasted")] < 0  # the earlier prefetches were of use
        assert text.stats.wasted == 0


def test_the_table_of_a_text_is_its_own(store_of):
    with offload(store_of(), slots=2) as engine:
        expected = [engine.generate(i, max_new_tokens=8, **s).table for i, s in zip(PROMPTS, SAMPLED, strict=True)]
        for text, table in zip(taking_turns(engine, random.Random(2)), expected, strict=True):
            assert (text.table.S == table.S).all()
            assert (text.table.tokens == table.tokens).all()
            assert (text.table.phase == table.phase).all()


@pytest.mark.parametrize("on_miss", ["load", "bypass"])
@pytest.mark.parametrize("prefetch", ["none", "previous", "next_layer"])
@pytest.mark.parametrize("name", ["vanilla", "one pool"])
def test_a_watched_text_reports_every_change_of_the_slots(name, prefetch, on_miss, store_of):
    with offload(store_of(name), slots=2, prefetch=prefetch, on_miss=on_miss) as engine:
        text = engine.begin(PROMPTS[0], max_new_tokens=12, watch=True)
        pools = engine.layers.pools
        shown = [[None] * 2 for _ in pools]
        hits = misses = 0
        while not text.ended:
            text.step()
            for held, changes in zip(shown, text.last.changes, strict=True):
                for change in changes:
                    if change.slot >= 0:
                        assert held[change.slot] == change.evicted
                        held[change.slot] = change.expert
            assert shown == [pool.contents for pool in pools]
            assert [S[-1].tolist() for S in text._notes.S[-1]] == text.last.S
            hits, misses = hits + text.last.hits, misses + text.last.misses
        assert (hits, misses) == (text.stats.hits, text.stats.misses)
        assert all(pool.changes is None for pool in pools)


def test_a_closed_text_frees_its_keys_and_values(store_of):
    with offload(store_of(), slots=2) as engine:
        text = engine.begin(PROMPTS[0], max_new_tokens=8)
        text.step()
        held = weakref.ref(text._host_text)
        text.close()
        gc.collect()
        assert held() is None
        assert not engine.texts
        with pytest.raises(ConfigError, match="has ended"):
            text.step()


def test_settings_change_between_texts(store_of):
    with offload(store_of(), slots=2) as engine:
        expected = engine.generate(PROMPTS[0], max_new_tokens=8)
        for changed in ({"slots": 5}, {"policy": "fifo"}, {"prefetch": "previous"}, {"throttle": 1e9}):
            engine.configure(dataclasses.replace(Settings(2), **changed))
            out = engine.generate(PROMPTS[0], max_new_tokens=8)
            assert out.tokens == expected.tokens
        engine.configure(Settings(5))
        assert engine.resident_bytes - engine.host.dense_bytes == 4 * 5 * engine.expert_bytes
        assert engine.generate(PROMPTS[0], max_new_tokens=8).stats.evictions == 0
        engine.configure(Settings(2))
        again = engine.generate(PROMPTS[0], max_new_tokens=8).stats
        assert (again.hits, again.misses, again.bytes_read) == (
            expected.stats.hits,
            expected.stats.misses,
            expected.stats.bytes_read,
        )


def test_settings_that_cannot_be_used_are_refused(store_of):
    with offload(store_of(), slots=2) as engine:
        for settings, match in (
            (Settings(0), "slots: got 0"),
            (Settings(2, policy="belady"), "policy: got 'belady'"),
            (Settings(2, policy="router"), "keep no experts resident"),
            (Settings(2, prefetch="soon"), "prefetch: got 'soon'"),
        ):
            with pytest.raises(ConfigError, match=match):
                engine.configure(settings)
        assert engine.settings == Settings(2)
        text = engine.begin(PROMPTS[0], max_new_tokens=8)
        with pytest.raises(ConfigError, match="generates a text"):
            engine.configure(Settings(3))
        with pytest.raises(ConfigError, match="warm=True"):
            engine.begin(PROMPTS[0], max_new_tokens=8)
        engine.close()
        with pytest.raises(StoreError, match="closed"):
            text.step()
