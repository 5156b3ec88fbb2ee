"""The offload runtime writes the text of the plain model, whatever the cache, and the simulator counts its loads."""

from __future__ import annotations

import contextlib
import functools
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offloading import RUNS, generate, plain_model, plain_text, require_predicted, write_run
from packing import UNSUPPORTED

from alone import alone
from stickymoe.errors import ConfigError, StoreError
from stickymoe.locality.policies import policy_names
from stickymoe.runtime.engine import offload
from stickymoe.runtime.opening import open_store
from stickymoe.runtime.sampling import Sampling
from tests.huggingface.tiny import FAMILIES, tiny

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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MOE_RUNS)
def test_every_variant_follows_the_law(name, kernel, store_of):
    """With prefetch, the router of a layer is asked ahead, which must not change its state."""
    reference = {}
    for slots, prefetch, on_miss in (
        (None, "none", "load"),
        (3, "next_layer", "bypass"),
        (2, "next_layer", "load"),
        (2, "previous", "load"),
        (1, "next_layer", "load"),
    ):
        with offload(store_of(name), slots=slots, kernel=kernel, prefetch=prefetch, on_miss=on_miss) as engine:
            for ids in (PROMPT, PROMPT[:1]):
                out, logits = generate(engine, ids, 6)
                tokens, expected = reference.setdefault(len(ids), (out.tokens, logits))
                assert out.tokens == tokens
                assert np.array_equal(logits, expected)
                require_predicted(engine, out, policy=engine.policy, prefetch=prefetch, on_miss=on_miss)


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


# Models of transformers

SUPPORTED = [family for family in FAMILIES if family not in UNSUPPORTED]
SILENT = ("openai_privacy_filter", "diffusion_gemma")  # they write no text
WRITERS = [family for family in SUPPORTED if family not in SILENT]
UNPREDICTED = ("jamba",)  # it has one layer of experts
CORE = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a tiny model of a family."""

    @functools.cache
    def folder(family):
        path = tmp_path_factory.mktemp("saved") / family
        tiny(family).save_pretrained(path)
        return path

    return folder


@torch.no_grad()
def hf_text(family, ids, n):
    model = tiny(family)
    model.set_experts_implementation("eager")
    inputs = torch.tensor([ids])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", WRITERS)
def test_a_family_writes_the_text_of_transformers(family, saved):
    """With prefetch from the gate of the next layer, which must work, or predict nothing, in every family."""
    ids = [3, 9, 27, 5, 40]
    expected = hf_text(family, ids, 5)
    with offload(saved(family), slots=3, prefetch="next_layer") as engine:
        out, _ = generate(engine, ids, 5)
        assert out.tokens == expected
        require_predicted(engine, out, policy="lru", prefetch="next_layer", on_miss="load")
        assert (out.table.predicted is None) == (family in UNPREDICTED)


@pytest.mark.parametrize("family", CORE)
def test_a_family_follows_the_law(family, saved):
    ids = [3, 9, 27, 5, 40]
    kernels = ["torch"] if family == "gpt_oss" else KERNELS
    for kernel in kernels:
        reference = {}
        for slots, policy, prefetch, on_miss in (
            (None, "lru", "none", "load"),
            (1, "lfu", "previous", "load"),
            (2, "sieve", "next_layer", "load"),
            (3, "fifo", "none", "bypass"),
            (5, "lru", "next_layer", "bypass"),
        ):
            settings = {"policy": policy, "prefetch": prefetch, "on_miss": on_miss}
            with offload(saved(family), slots=slots, kernel=kernel, **settings) as engine:
                for n in (5, 1):
                    out, logits = generate(engine, ids[:n], 6, stop_ids=())
                    tokens, expected = reference.setdefault(n, (out.tokens, logits))
                    assert out.tokens == tokens
                    assert np.array_equal(logits, expected)
                    require_predicted(engine, out, **settings)


@pytest.mark.parametrize("family", SILENT)
def test_a_model_that_writes_no_text_is_refused(family, saved):
    with pytest.raises(ConfigError, match=r"which does not generate text"):
        offload(saved(family))


def test_the_end_of_a_text_is_that_of_the_model(saved):
    with offload(saved("mixtral")) as engine:
        free = engine.generate([3, 9], max_new_tokens=10, stop_ids=()).tokens
        engine.host.model.generation_config.eos_token_id = [free[2], 63]
        assert engine.generate([3, 9], max_new_tokens=10).tokens == free[: free.index(free[2]) + 1]


# What a generation gives back


@pytest.fixture
def engine(store_of):
    with offload(store_of(), slots=2) as opened:
        yield opened


def test_the_table_has_the_routes_of_the_text(engine):
    out = engine.generate(PROMPT, max_new_tokens=5)
    table = out.table
    given = PROMPT + out.tokens[:-1]  # the last token is not read again
    assert table.tokens.tolist() == [given]
    assert table.phase.tolist() == [[0] * len(PROMPT) + [1] * 4]
    assert table.mask.all()
    assert table.expert_bytes == (engine.expert_bytes,) * 4
    assert table.other_bytes == engine.host.dense_bytes
    assert (table.weights[..., 0] >= table.weights[..., 1]).all()
    np.testing.assert_allclose(table.weights.sum(-1), 1, atol=1e-6)


@torch.no_grad()
def test_the_table_has_the_choices_of_the_plain_model(engine, run_of):
    out = engine.generate(PROMPT, max_new_tokens=5)
    trace = plain_model(run_of("vanilla"))(torch.tensor(out.table.tokens)).trace
    assert np.array_equal(out.table.S, trace.S.numpy())


def test_counts_and_bytes_agree(engine):
    s = engine.generate(PROMPT, max_new_tokens=6).stats
    assert (s.prompt_tokens, s.tokens) == (6, 6)
    assert s.bytes_read == s.misses * engine.expert_bytes
    assert s.resident_bytes == engine.resident_bytes == engine.host.dense_bytes + 4 * 2 * engine.expert_bytes
    assert s.hit_rate == s.hits / (s.hits + s.misses)
    assert s.prompt_s > 0
    assert s.tokens_per_s > 0
    assert np.isnan(engine.generate(PROMPT, max_new_tokens=1).stats.tokens_per_s)


def test_a_dense_model_has_no_slots(run_of):
    with offload(run_of("dense"), slots=2) as engine:
        out = engine.generate(PROMPT, max_new_tokens=3)
    assert (engine.slots, engine.expert_bytes, engine.io) == (0, 0, "none")
    assert out.table is None
    assert (out.stats.hits, out.stats.misses, out.stats.bytes_read) == (0, 0, 0)
    assert np.isnan(out.stats.hit_rate)


# Precision


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "experts"),
    [
        *(("vanilla", precision) for precision in ("bf16", "int8", "int4", "mixed")),
        ("delta", "bf16"),
        ("delta", "int4"),
    ],
)
def test_a_precision_computes_with_its_decoded_weights(name, experts, kernel, store_of, run_of):
    store = store_of(name, experts)
    with offload(store, kernel=kernel) as engine:
        expected, expected_logits = generate(engine, PROMPT)
        opened = engine.layers.store
    assert opened.precision == experts
    with offload(store, slots=2, kernel=kernel) as engine:
        out, logits = generate(engine, PROMPT)
    assert out.tokens == expected.tokens
    assert np.array_equal(logits, expected_logits)

    decoded = plain_model(run_of(name))
    names = [tensor.name for tensor in opened.contents.spec.tensors]
    with torch.no_grad():
        for layer, block in enumerate(decoded.blocks):
            for e in range(5):
                for stack, tensor in zip(names, opened.read(layer, e), strict=True):
                    getattr(block.ffn.experts, stack)[e] = torch.tensor(tensor)
    tokens, decoded_logits = plain_text(decoded, PROMPT, 8)
    assert out.tokens == tokens
    np.testing.assert_allclose(logits, decoded_logits, rtol=0, atol=1e-4 * np.abs(decoded_logits).max())


@alone
@pytest.mark.parametrize("name", ["vanilla", "delta"])
def test_threads_do_not_change_the_text(name, store_of):
    with offload(store_of(name, "int8"), threads=2) as engine:
        expected, expected_logits = generate(engine, PROMPT)
    with offload(store_of(name, "int8"), threads=2, slots=1) as engine:
        out, logits = generate(engine, PROMPT)
    assert out.tokens == expected.tokens
    assert np.array_equal(logits, expected_logits)


# Sampling


def test_a_seed_decides_a_sampled_text(engine):
    texts = [engine.generate(PROMPT, max_new_tokens=12, do_sample=True, seed=seed).tokens for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}, {"temperature": 5e-324}])
def test_the_narrowest_sampling_is_greedy(engine, settings):
    greedy = engine.generate(PROMPT, max_new_tokens=8).tokens
    assert engine.generate(PROMPT, max_new_tokens=8, do_sample=True, seed=3, **settings).tokens == greedy


def test_sampling_follows_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    def drawn(**settings):
        choose = Sampling(do_sample=True, **settings).chooser()
        return np.bincount([choose(logits) for _ in range(4000)], minlength=4) / 4000

    np.testing.assert_allclose(drawn(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(drawn(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(drawn(top_p=0.9), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(drawn(temperature=0.5), squares / squares.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"temperature: got 0.0, expected a number > 0; for greedy text"),
        ({"temperature": float("nan")}, r"temperature: got nan"),
        ({"top_k": -1}, r"top_k: got -1"),
        ({"top_p": 0.0}, r"top_p: got 0.0, expected a fraction"),
        ({"seed": -1}, r"seed: got -1"),
        ({"max_new_tokens": 0}, r"max_new_tokens: got 0"),
        ({"max_new_tokens": 28}, r"6 tokens and 28 are to be generated, but the model reads at most 32: .* most 27"),
    ],
)
def test_wrong_settings_are_refused_and_the_engine_stays_open(engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(PROMPT, do_sample=True, **settings)
    assert len(engine.generate(PROMPT, max_new_tokens=27).tokens) == 27


# Tokens in and out


@pytest.mark.parametrize(
    "ids", [torch.tensor(PROMPT), torch.tensor([PROMPT]), np.array(PROMPT), tuple(PROMPT), list(np.array(PROMPT))]
)
def test_ids_in_any_form(engine, ids):
    expected = engine.generate(PROMPT, max_new_tokens=3).tokens
    assert engine.generate(ids, max_new_tokens=3).tokens == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "The prompt is empty"),
        (torch.zeros(0, dtype=torch.long), "The prompt is empty"),
        ([-1], r"ids: got \[-1\], expected a list of token numbers ≥ 0"),
        ([1.5], r"ids: got \[1.5\]"),
        (["a"], "expected a list of token numbers"),
        ("text", "expected a list of token numbers"),
        (7, "ids: got 7"),
        (torch.tensor(7), "expected a list of token numbers"),
        (torch.zeros(2, 3, dtype=torch.long), "ids: got '2 sequences', expected one sequence"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "expected a list of token numbers"),
        ([256], "ids: got 'token 256', expected tokens from 0 to 255"),
        ([1] * 33, "The prompt has 33 tokens and 1 are to be generated, but the model reads at most 32"),
    ],
)
def test_wrong_ids_are_refused_and_the_engine_stays_open(engine, ids, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(ids, max_new_tokens=1)
    assert engine.generate(PROMPT, max_new_tokens=1).tokens


def test_tokens_are_reported_in_order(engine):
    seen = []
    out = engine.generate(PROMPT, max_new_tokens=6, on_token=seen.append)
    assert seen == out.tokens
    assert len(seen) == 6


def test_a_stop_token_ends_the_text_and_is_kept(engine):
    free = engine.generate(PROMPT, max_new_tokens=12).tokens
    end = free[4]
    assert engine.generate(PROMPT, max_new_tokens=12, stop_ids=[end]).tokens == free[: free.index(end) + 1]


# Engines


def test_slots_start_empty_unless_they_are_warm(engine):
    first = engine.generate(PROMPT, max_new_tokens=6)
    again = engine.generate(PROMPT, max_new_tokens=6)
    warm = engine.generate(PROMPT, max_new_tokens=6, warm=True)
    assert first.tokens == again.tokens == warm.tokens
    counted = [(o.stats.hits, o.stats.misses, o.stats.evictions, o.stats.bytes_read) for o in (first, again)]
    assert counted[0] == counted[1]
    assert warm.stats.misses < first.stats.misses
    assert warm.stats.bytes_read == warm.stats.misses * engine.expert_bytes
    assert warm.stats.hits + warm.stats.misses == first.stats.hits + first.stats.misses


def test_a_warm_engine_with_all_slots_reads_nothing(store_of):
    with offload(store_of(), prefetch="next_layer") as engine:
        engine.generate(PROMPT, max_new_tokens=6)
        warm = engine.generate(PROMPT, max_new_tokens=6, warm=True).stats
    assert (warm.misses, warm.evictions) == (0, 0)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_a_warm_text_after_prefetches_is_the_same(store_of, prefetch):
    """Prefetches in flight when a text ends are used by the next one."""
    with offload(store_of("shared by two layers"), slots=2, prefetch=prefetch) as engine:
        texts = [engine.generate(PROMPT, max_new_tokens=6, warm=warm).tokens for warm in (False, True, True, False)]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_two_engines_read_one_store(store_of):
    with offload(store_of(), slots=1) as a, offload(store_of(), slots=2, policy="lfu") as b:
        nested = []
        out = a.generate(
            PROMPT,
            max_new_tokens=4,
            on_token=lambda _: nested.append(b.generate(PROMPT, max_new_tokens=4).tokens),
        )
    assert nested == [out.tokens] * 4


def test_a_closed_engine_says_so(store_of):
    engine = offload(store_of(), slots=2)
    engine.close()
    engine.close()
    with pytest.raises(StoreError, match="The engine is closed; open it again with offload"):
        engine.generate(PROMPT)


def test_a_store_is_packed_once_and_again_when_the_model_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = []

    @contextlib.contextmanager
    def progress(title, n):
        packed.append((title, n))
        yield lambda done: None

    def text():
        with offload(tmp_path / "run", progress=progress) as engine:
            return engine.generate(PROMPT, max_new_tokens=4).tokens, engine.layers.store.folder

    write_run(tmp_path / "run")
    tokens, folder = text()
    assert text() == (tokens, folder)
    assert packed == [(f"pack run into {folder}", 20)]

    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", "vanilla", "--seed", "5")
    assert text()[1] == folder
    assert len(packed) == 2

    (folder / "store.json").unlink()  # deleted in part
    text()
    (folder / "store.json").write_text("damaged")
    text()
    assert len(packed) == 4


def test_a_store_of_another_model_is_not_used(store_of, run_of, tmp_path):
    shutil.copytree(store_of("hash"), tmp_path / "store")
    with pytest.raises(ConfigError, match="is a store of another model or precision"):
        offload(run_of("vanilla"), store=tmp_path / "store")
    (tmp_path / "store" / "store.json").write_text("damaged")
    with pytest.raises(StoreError, match="damaged"):
        offload(run_of("vanilla"), store=tmp_path / "store")
    found = open_store(run_of("vanilla"), store=tmp_path / "store", replace=True)
    assert found.contents == open_store(store_of("vanilla")).contents
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        open_store(run_of("vanilla"), store=tmp_path / "mine", replace=True)
    with offload(run_of("vanilla"), store=tmp_path / "new", experts="int8") as engine:
        assert engine.layers.store.precision == "int8"
