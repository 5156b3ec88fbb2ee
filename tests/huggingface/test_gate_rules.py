"""Rules on the gates of transformers models: training, decoding, beams, cropping, checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tiny import batch, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import stickymoe
from stickymoe import RoutingTrace, StickyError

RULES: dict[str, dict[str, Any]] = {
    "hysteresis": {"bonus": 1.0},
    "smooth": {"decay": 0.6},
    "hard_window": {"window": 2, "beta": 1.0},
    "residency": {"capacity": 3, "rho": 0.02},
    "rent": {"capacity": 3, "price": 0.2},
    "segment": {"span": 3},
    "cache_prior": {"capacity": 3, "strength": 0.5},
    "max_rank": {"capacity": 3, "depth": 4},
    "tau_reroute": {"capacity": 3, "tau": 0.7},
    "drop_cold": {"capacity": 3, "share": 0.9},
}


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> stickymoe.variants.Variant:
    return stickymoe.variant(request.param, **RULES[request.param])


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("mixtral")


def tokens(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(seed))


def joined(parts: list[RoutingTrace]) -> tuple[Tensor, Tensor]:
    return torch.cat([part.S for part in parts], 2), torch.cat([part.w for part in parts], 2)


def assert_same_choice(found: list[RoutingTrace], expected: RoutingTrace) -> None:
    S, w = joined(found)
    T = S.shape[2]
    assert torch.equal(S.sort(-1).values, expected.S[:, :, :T].sort(-1).values)
    torch.testing.assert_close(w, expected.w[:, :, :T], atol=1e-5, rtol=1e-4)


# What the rules choose, by hand


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits of the first layer, which no rule changes."""
    other = copy.deepcopy(model)
    return other(input_ids=ids, output_router_logits=True).router_logits[0].detach().view(*ids.shape, -1)


def test_hysteresis_by_hand(model: PreTrainedModel) -> None:
    ids = tokens(2, 12)
    z = logits_of(model, ids)
    with stickymoe.attach(model, "hysteresis", bonus=1.0) as attached:
        model(input_ids=ids)
        trace = attached.trace
    for b in range(2):
        before: list[int] = []
        for t in range(12):
            biased = z[b, t].clone()
            biased[before] += 1.0
            before = biased.topk(2).indices.tolist()
            assert set(before) == set(trace.S[0, b, t].tolist())
            w = z[b, t, trace.S[0, b, t]].softmax(0)  # the bonus does not count in the weights
            torch.testing.assert_close(trace.w[0, b, t].detach(), w, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(trace.g[0].detach(), z.softmax(-1), atol=1e-6, rtol=1e-5)


def test_hysteresis_by_hand_with_bias_and_groups() -> None:
    """With a selection bias, the bonus is in units of the scores; it does not open other groups."""
    model = tiny("deepseek_v3", first_k_dense_replace=0)
    ids = tokens(2, 12)
    gate = model.model.layers[0].mlp.gate
    seen: list[Tensor] = []
    handle = gate.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with stickymoe.attach(model, "hysteresis", bonus=0.3) as attached, torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    p = (seen[0].view(2, 12, -1) @ gate.weight.T).sigmoid().detach()
    rank = p + gate.e_score_correction_bias
    best = rank.view(2, 12, 4, 2).sum(-1).topk(2).indices
    allowed = torch.zeros(2, 12, 4).scatter(-1, best, 1).repeat_interleave(2, -1).bool()
    changed = 0
    for b in range(2):
        before: list[int] = []
        for t in range(12):
            biased = rank[b, t].clone()
            biased[before] += 0.3
            biased[~allowed[b, t]] = -torch.inf
            changed += before != [] and set(rank[b, t].masked_fill(~allowed[b, t], -9).topk(2).indices.tolist()) != set(
                biased.topk(2).indices.tolist()
            )
            before = biased.topk(2).indices.tolist()
            assert set(before) == set(attached.trace.S[0, b, t].tolist())
            w = p[b, t, attached.trace.S[0, b, t]]
            torch.testing.assert_close(attached.trace.w[0, b, t], 1.5 * w / w.sum(), atol=1e-5, rtol=1e-5)
    assert changed


def test_smooth_by_hand(model: PreTrainedModel) -> None:
    ids = tokens(2, 12)
    z = logits_of(model, ids)
    average = z.clone()
    for t in range(1, 12):
        average[:, t] = 0.6 * average[:, t - 1] + 0.4 * z[:, t]
    with stickymoe.attach(model, "smooth", decay=0.6) as attached:
        model(input_ids=ids)
        trace = attached.trace
    torch.testing.assert_close(trace.g[0].detach(), average.softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(trace.S[0], average.topk(2).indices)


def test_rules_reach_the_experts(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """The output is that of a model whose first block is computed by hand from the trace."""
    ids = tokens(2, 12)
    model = tiny("mixtral", num_hidden_layers=1)
    seen: dict[str, Tensor] = {}
    block = model.model.layers[0].mlp
    handles = [
        block.register_forward_pre_hook(lambda module, args: seen.__setitem__("x", args[0])),
        block.register_forward_hook(lambda module, args, out: seen.__setitem__("y", out)),
    ]
    bare = model(input_ids=ids).logits
    with stickymoe.attach(model, rule) as attached:
        logits = model(input_ids=ids).logits
        trace = attached.trace
    for handle in handles:
        handle.remove()
    assert (logits - bare).abs().max() > 1e-3
    experts, y = block.experts, torch.zeros_like(seen["x"])
    for b, t, j in np.ndindex(2, 12, 2):
        e = int(trace.S[0, b, t, j])
        gate, up = (experts.gate_up_proj[e] @ seen["x"][b, t]).chunk(2)
        y[b, t] += trace.w[0, b, t, j] * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(seen["y"].view_as(y), y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gpt_oss", "gemma4", "inkling", "longcat_flash", "zaya", "deepseek_v4"]
)
def test_all_rules_on_other_families_decode_as_they_prefill(family: str) -> None:
    model = tiny(family)
    ids = tokens(2, 10)
    for name, settings in RULES.items():
        if family in ("longcat_flash", "zaya") and "capacity" in settings:
            with (
                stickymoe.attach(model, name, **settings),
                pytest.raises(StickyError, match=r"classes are no experts and take no slot"),
            ):
                model(input_ids=ids)
            continue
        with stickymoe.attach(model, name, **settings) as attached, torch.no_grad():
            model(input_ids=ids, use_cache=False)
            whole = attached.trace
            found = forced(model, attached, ids, 4)
        assert_same_choice(found, whole)


def forced(model: PreTrainedModel, attached: Any, ids: Tensor, first: int, **settings: Any) -> list[RoutingTrace]:
    """The traces of generating given tokens after the first ones."""
    parts: list[RoutingTrace] = []
    attached.on_trace = lambda trace, inputs: parts.append(trace)
    settings = {"attention_mask": torch.ones_like(ids[:, :first]), **settings}
    model.generate(
        ids[:, :first],
        max_new_tokens=ids.shape[1] - first,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        prefix_allowed_tokens_fn=lambda row, so_far: [int(ids[row, len(so_far)])],
        **settings,
    )
    attached.on_trace = None
    return parts


# Decoding


@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_equals_prefill(model: PreTrainedModel, rule: stickymoe.variants.Variant, cache: str | None) -> None:
    ids = tokens(2, 14)
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        model(input_ids=ids)
        whole = attached.trace
        settings = {} if cache is None else {"cache_implementation": cache}
        assert_same_choice(forced(model, attached, ids, 5, **settings), whole)


def test_decoding_with_left_padding(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """A row with padding on the left decodes as it does alone."""
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    ids = torch.where(mask.bool(), ids, 0)
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        model(input_ids=ids[1:, 3:])
        alone = attached.trace
        model(input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(attached.trace.w[:, 1, 3:], alone.w[:, 0], atol=1e-5, rtol=1e-4)
        assert torch.equal(attached.trace.S[:, 1, 3:].sort(-1).values, alone.S[:, 0].sort(-1).values)
        for settings in ({}, {"cache_implementation": "static"}):
            parts = forced(model, attached, ids, 6, attention_mask=mask[:, :6], **settings)
            S, w = joined(parts)
            assert torch.equal(S[:, 1, 3:].sort(-1).values, alone.S[:, 0, :10].sort(-1).values)
            torch.testing.assert_close(w[:, 1, 3:], alone.w[:, 0, :10], atol=1e-5, rtol=1e-4)


def test_right_padding_changes_nothing(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        model(input_ids=ids[1:, :7])
        alone = attached.trace
        model(input_ids=ids, attention_mask=mask)
        trace = attached.trace
    torch.testing.assert_close(trace.g[:, 1, :7], alone.g[:, 0], atol=1e-6, rtol=1e-4)
    assert torch.equal(trace.S[:, 1, :7].sort(-1).values, alone.S[:, 0].sort(-1).values)


def test_packed_documents_are_routed_apart(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    lengths = (5, 1, 6)
    ids = tokens(1, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with stickymoe.attach(model, rule) as attached:
        model(input_ids=ids, position_ids=positions, use_cache=False)
        packed = attached.trace
        parts = []
        for part in ids.split(lengths, dim=1):
            model(input_ids=part)
            parts.append(attached.trace)
    torch.testing.assert_close(packed.g, torch.cat([p.g for p in parts], 2), atol=1e-6, rtol=1e-4)
    assert_same_choice(parts, packed)


def test_prefill_in_parts(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """A cache can be continued by several tokens at once, and by hand."""
    ids = tokens(2, 13)
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        expected = model(input_ids=ids).logits
        whole = attached.trace
        past, parts, outs = DynamicCache(config=model.config), [], []
        for part in ids.split((4, 1, 5, 3), dim=1):
            outs.append(model(input_ids=part, past_key_values=past).logits)
            parts.append(attached.trace)
    assert_same_choice(parts, whole)
    torch.testing.assert_close(torch.cat(outs, 1), expected, atol=1e-4, rtol=1e-4)


BEAMS = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


def test_beams_equal_those_without_a_cache(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    settings = {**BEAMS, "attention_mask": mask, "num_return_sequences": 3}
    settings |= {"return_dict_in_generate": True, "output_scores": True}
    with stickymoe.attach(model, rule):
        expected = model.generate(ids, use_cache=False, **settings)
        found = model.generate(ids, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)


def test_samples_equal_those_without_a_cache(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids = tokens(1, 6)
    settings = {"num_return_sequences": 4, "do_sample": True, "max_new_tokens": 8, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(ids)}
    results = []
    with stickymoe.attach(model, rule):
        for use_cache in (False, True):
            torch.manual_seed(1)
            results.append(model.generate(ids, use_cache=use_cache, **settings))
    assert torch.equal(*results)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("cut", [3, 8, 9, 11])
@torch.no_grad()
def test_a_cropped_cache_continues_as_if_it_had_never_been_longer(family: str, cut: int) -> None:
    model = tiny(family)
    ids, other = tokens(2, 12), tokens(2, 6, seed=9)
    sequence = torch.cat([ids[:, :cut], other], 1)
    for name, settings in RULES.items():
        with stickymoe.attach(model, name, **settings) as attached:
            expected = model(input_ids=sequence).logits
            whole = attached.trace
            past = DynamicCache(config=model.config)
            for part in ids.split((6, 1, 1, 4), dim=1):
                model(input_ids=part, past_key_values=past)
            past.crop(cut - 12)
            outs, S = [], []
            for part in other.split((2, 1, 3), dim=1):
                outs.append(model(input_ids=part, past_key_values=past).logits)
                S.append(attached.trace.S)
        assert torch.equal(torch.cat(S, 2).sort(-1).values, whole.S[:, :, cut:].sort(-1).values), name
        torch.testing.assert_close(torch.cat(outs, 1), expected[:, cut:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [2, 5])
def test_cropping_with_padding(model: PreTrainedModel, rule: stickymoe.variants.Variant, cut: int) -> None:
    """Two tokens are all padding in the second row."""
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        whole = attached.trace
        past = DynamicCache(config=model.config)
        model(input_ids=ids[:, :10], attention_mask=mask[:, :10], past_key_values=past)
        past.crop(-2)
        past.crop(cut - 8)
        model(input_ids=ids[:, cut : cut + 1], attention_mask=mask[:, : cut + 1], past_key_values=past)
        model(input_ids=ids[:, cut + 1 : 9], attention_mask=mask[:, :9], past_key_values=past)
        past.crop(-2)
        model(input_ids=ids[:, 7:], attention_mask=mask, past_key_values=past)
        assert torch.equal(attached.trace.S.sort(-1).values, whole.S[:, :, 7:].sort(-1).values)
        torch.testing.assert_close(attached.trace.w, whole.w[:, :, 7:], atol=1e-5, rtol=1e-4)


def test_cropping_further_than_is_remembered_is_refused(model: PreTrainedModel) -> None:
    ids = tokens(1, 75)
    with stickymoe.attach(model, "smooth", decay=0.9), torch.no_grad():
        past = DynamicCache(config=tiny("mixtral", sliding_window=None).config)
        for t in range(75):
            model(input_ids=ids[:, t : t + 1], past_key_values=past)
        past.crop(-74)
        with pytest.raises(StickyError, match="the KV cache holds 1 tokens"):
            model(input_ids=ids[:, 1:2], past_key_values=past)


def test_padding_between_real_tokens_is_refused(model: PreTrainedModel) -> None:
    """A short row of a batch is padded on the right, and continued after the padding."""
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:7] = 0
    with stickymoe.attach(model, "hysteresis") as attached, torch.no_grad():
        with pytest.raises(StickyError, match=r"padding between real tokens .*; pad on the left") as error:
            model(input_ids=ids, attention_mask=mask)
        assert "\n" not in str(error.value)
        past = DynamicCache(config=model.config)
        model(input_ids=ids[:, :7], attention_mask=mask[:, :7], past_key_values=past)  # padding at the end is fine
        with pytest.raises(StickyError, match="padding between real tokens"):
            model(input_ids=ids[:, 7:8], attention_mask=mask[:, :8], past_key_values=past)
        past.crop(-2)
        model(input_ids=ids[:, 7:], attention_mask=torch.ones(2, 10), past_key_values=past)
        found = attached.trace
        model(input_ids=torch.cat([ids[:, :5], ids[:, 7:]], 1))
    assert torch.equal(found.S.sort(-1).values, attached.trace.S[:, :, 5:].sort(-1).values)
    with stickymoe.attach(model, "soft"):
        assert model(input_ids=ids, attention_mask=mask, labels=ids).loss.isfinite()


def test_assisted_generation_equals_greedy(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """Candidates of a small model are checked in one pass, and the wrong ones cropped away."""
    draft = tiny("llama")
    ids = tokens(1, 6)
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with stickymoe.attach(model, rule):
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, assistant_model=draft, **settings), expected)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), expected)


def test_rows_of_a_cache_can_be_selected(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids, rows = tokens(3, 10), torch.tensor([2, 0, 2, 1])
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        model(input_ids=ids)
        whole = attached.trace
        past = DynamicCache(config=model.config)
        model(input_ids=ids[:, :6], past_key_values=past)
        past.reorder_cache(torch.tensor([1, 2, 0]))
        past.batch_select_indices(torch.tensor([1, 2, 1, 0]))  # rows 2 0 2 1
        past.batch_repeat_interleave(2)
        later = ids[rows, 6:].repeat_interleave(2, 0)
        model(input_ids=later[:, :1], past_key_values=past)
        model(input_ids=later[:, 1:], past_key_values=past)
        expected = whole.S[:, rows, 7:].repeat_interleave(2, 1)
        assert torch.equal(attached.trace.S.sort(-1).values, expected.sort(-1).values)


def test_a_cache_that_is_copied_keeps_its_own_state(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """A prompt is read once and continued in two ways."""
    ids, ends = tokens(2, 6), (tokens(2, 5, seed=1), tokens(2, 5, seed=2))
    with stickymoe.attach(model, rule) as attached, torch.no_grad():
        prompt = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=prompt)
        pasts = [copy.deepcopy(prompt), copy.deepcopy(prompt)]
        for t in range(5):
            for past, end in zip(pasts, ends, strict=True):
                model(input_ids=end[:, t : t + 1], past_key_values=past)
                last = attached.trace
                model(input_ids=torch.cat([ids, end[:, : t + 1]], 1))
                assert torch.equal(last.S.sort(-1).values, attached.trace.S[:, :, -1:].sort(-1).values)


def test_a_cache_filled_without_the_rule_is_refused(model: PreTrainedModel) -> None:
    ids = tokens(2, 6)
    past = model(input_ids=ids).past_key_values
    with stickymoe.attach(model, "hysteresis"):
        with pytest.raises(StickyError, match=r"holds 6 tokens, but the routing rule has seen 0") as error:
            model(input_ids=ids[:, :1], past_key_values=past)
        assert "\n" not in str(error.value)
        past.reset()
        own = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=own)
    model(input_ids=ids[:, :1], past_key_values=own)  # one token passes by the rule
    with stickymoe.attach(model, "hysteresis"), pytest.raises(StickyError, match=r"holds 7 tokens, .* has seen 0"):
        model(input_ids=ids[:, :1], past_key_values=own)


# Training


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "deepseek_v2"])
def test_a_rule_that_changes_nothing_leaves_gradients_alone(family: str) -> None:
    model = tiny(family).train()
    inputs = batch(model)
    expected = gradients(model, model(**inputs).loss)
    with stickymoe.attach(model, "hysteresis", bonus=0.0, mu=0.0):
        found = gradients(model, model(**inputs).loss)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: name + text)


def test_training_with_a_rule_and_terms(model: PreTrainedModel) -> None:
    model.train()
    inputs = batch(model)
    with stickymoe.attach(model, "hysteresis+soft", bonus=1.0, lam=2.0, mu=0.5) as attached:
        out = model(**inputs)
        trace = attached.trace
        terms = 2.0 * stickymoe.consistency_loss(trace) + 0.5 * stickymoe.balance_loss(trace)
        found = gradients(model, out.loss)
    with stickymoe.attach(model, "hysteresis", bonus=1.0, mu=0.0):
        bare = model(**inputs).loss
        without = gradients(model, bare)
    torch.testing.assert_close((out.loss - bare).detach(), terms.detach(), atol=1e-5, rtol=0)
    for name in found:
        if "gate.weight" in name:
            assert (found[name] - without[name]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_checkpointing_with_rules_gives_the_same_gradients(family: str) -> None:
    model = tiny(family).train()
    inputs = batch(model)
    for name, settings in RULES.items():
        with stickymoe.attach(model, name, **settings):
            model.gradient_checkpointing_disable()
            expected = gradients(model, model(**inputs, use_cache=False).loss)
            model.gradient_checkpointing_enable()
            found = gradients(model, model(**inputs, use_cache=False).loss)
            again = gradients(model, model(**inputs, use_cache=False).loss)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: name + text)
            assert torch.equal(found[key], again[key])


def test_checkpointing_from_the_first_pass(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    """What is done only once after attaching is not part of what is recomputed."""
    model.train()
    inputs = batch(model)
    with stickymoe.attach(model, rule):
        expected = gradients(model, model(**inputs, use_cache=False).loss)
    model.gradient_checkpointing_enable()
    with stickymoe.attach(model, rule):
        found = gradients(model, model(**inputs, use_cache=False).loss)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)


def test_checkpointing_of_another_forward_pass_is_refused(model: PreTrainedModel) -> None:
    model.train().gradient_checkpointing_enable()
    with stickymoe.attach(model, "hysteresis"):
        first = model(**batch(model, 2, 5), use_cache=False).loss
        model(**batch(model, 2, 7), use_cache=False)
        with pytest.raises(StickyError, match="recomputes another forward pass"):
            first.backward()


def test_checkpointing_of_another_forward_pass_of_the_same_size_is_refused(model: PreTrainedModel) -> None:
    """Two passes, then one backward: right gradients, or an error; never wrong ones."""
    model.train()
    one, two = ({"input_ids": tokens(2, 7, s), "labels": tokens(2, 7, s)} for s in (1, 2))
    two["attention_mask"] = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    with stickymoe.attach(model, "hysteresis", bonus=2.0):
        expected = gradients(model, model(**one, use_cache=False).loss + model(**two, use_cache=False).loss)
        model.gradient_checkpointing_enable()
        loss = model(**one, use_cache=False).loss + model(**two, use_cache=False).loss
        try:
            found = gradients(model, loss)
        except StickyError as error:
            assert "recomputes another forward pass" in str(error)  # noqa: PT017
            return
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)


def test_a_part_alone_is_refused_with_a_rule(model: PreTrainedModel) -> None:
    ids = tokens(2, 5)
    with stickymoe.attach(model, "hysteresis"):
        with pytest.raises(StickyError, match="outside a forward pass of the model; call the model itself"):
            model.model(input_ids=ids)
        model(input_ids=ids)


def test_annealing_follows_progress_in_training_only(model: PreTrainedModel) -> None:
    ids = tokens(2, 12)
    with stickymoe.attach(model, "residency", capacity=2, rho=0.02, anneal=1.0) as attached:
        attached.progress = 0.0
        model(input_ids=ids)
        final = attached.trace.S
        model.train()
        model(input_ids=ids)
        start = attached.trace.S
        attached.progress = 1.0
        model(input_ids=ids)
        assert torch.equal(attached.trace.S, final)
    assert not torch.equal(start, final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_bias_that_changes_is_followed(dtype: torch.dtype) -> None:
    model = tiny("deepseek_v3").to(dtype)
    ids = tokens(2, 8)
    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers[1:]]
    with stickymoe.attach(model, "hysteresis", bonus=0.0) as attached, torch.no_grad():
        model(input_ids=ids)
        for bias in biases:
            bias.zero_()
            bias[3] = 10.0
        model(input_ids=ids)
        assert (attached.trace.S == 3).any(-1).all()


def test_rules_that_do_not_fit_the_model_are_refused(model: PreTrainedModel) -> None:
    for name, settings, message in (
        ("residency", {"capacity": 9}, "at most the 8 experts"),
        ("residency", {"capacity": 1}, "at least the 2 experts"),
        ("rent", {"capacity": 9}, "at most the 8 experts"),
    ):
        with stickymoe.attach(model, name, **settings), pytest.raises(StickyError, match=message):
            model(**batch(model))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_bf16_rules_decode_as_they_prefill(family: str) -> None:
    model = tiny(family).bfloat16()
    ids = tokens(2, 10)
    with stickymoe.attach(model, "hysteresis", bonus=1.0) as attached, torch.no_grad():
        out = model(input_ids=ids)
        assert out.logits.dtype == torch.bfloat16
        assert attached.trace.g.dtype == torch.float32
        first = attached.trace.S[0]
        parts = forced(model, attached, ids, 4)
    assert torch.equal(joined(parts)[0][0], first[:, :9])


def test_drop_cold_skips_experts(model: PreTrainedModel) -> None:
    ids = tokens(2, 12)
    with stickymoe.attach(model, "drop_cold", capacity=2, share=10.0) as attached:
        model(input_ids=ids)
        w = attached.trace.w.detach()
        table = attached.trace.table()
    torch.testing.assert_close(w.sum(-1), torch.ones(3, 2, 12))
    assert (w[..., 1] == 0).any()
    assert table.skips
    assert np.array_equal(table.S == 8, (w == 0).numpy())


def test_cache_rules_raise_the_hit_rate(model: PreTrainedModel) -> None:
    from stickymoe.locality.metrics import cache_hit_rate_all

    ids = tokens(4, 40)
    with stickymoe.attach(model) as attached:
        model(input_ids=ids)
        before = cache_hit_rate_all(attached.trace.table(), 3)
    for name in ("cache_prior", "max_rank", "tau_reroute", "drop_cold", "residency", "rent", "hysteresis", "segment"):
        with stickymoe.attach(model, name, **RULES[name]) as attached:
            model(input_ids=ids)
            assert cache_hit_rate_all(attached.trace.table(), 3) > before + 0.05, name


# Generation in its other forms


def generated(model: PreTrainedModel, ids: Tensor, n: int, **settings: Any) -> Tensor:
    settings = {"attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0, **settings)


def test_prompts_in_chunks_and_as_embeddings(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with stickymoe.attach(model, rule):
        expected = generated(model, ids, 6, attention_mask=mask)
        assert torch.equal(generated(model, ids, 6, attention_mask=mask, prefill_chunk_size=4), expected)
        embeds = model.get_input_embeddings()(ids)
        found = model.generate(
            inputs_embeds=embeds,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        assert torch.equal(found, expected[:, 9:])


def test_generation_continues_with_a_cache(model: PreTrainedModel, rule: stickymoe.variants.Variant) -> None:
    ids = tokens(2, 9)
    with stickymoe.attach(model, rule):
        expected = generated(model, ids, 8)
        past = DynamicCache(config=model.config)
        half = generated(model, ids, 4, past_key_values=past)
        assert torch.equal(generated(model, half, 4, past_key_values=past), expected)
        past.reset()
        past = DynamicCache(config=model.config)
        assert torch.equal(generated(model, ids, 8, past_key_values=past), expected)


def test_training_after_inference_mode(rule: stickymoe.variants.Variant) -> None:
    model = tiny("deepseek_v3")
    inputs = batch(model)
    with stickymoe.attach(model, rule):
        expected = gradients(model, model(**inputs).loss)
    with stickymoe.attach(model, rule):
        with torch.inference_mode():
            generated(model, inputs["input_ids"], 3)
        found = gradients(model, model(**inputs).loss)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_cache_of_another_rule_is_refused() -> None:
    model = tiny("mixtral")
    ids = batch(model)["input_ids"]
    with torch.no_grad():
        with stickymoe.attach(model, "hysteresis"):
            past = model(input_ids=ids, use_cache=True).past_key_values
        with (
            stickymoe.attach(model, "hysteresis", bonus=2.0),
            pytest.raises(StickyError, match="start with an empty cache"),
        ):
            model(input_ids=ids[:, :1], past_key_values=past)
