"""`attach` in the situations that models are trained and used in, against losses computed by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny import batch, tiny
from torch import Tensor, nn
from transformers import MixtralForCausalLM, PreTrainedModel

import stickymoe
from stickymoe import RoutingTrace, StickyError

LAM, MU = 2.0, 0.5


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("mixtral")


def soft(lam: float = LAM, mu: float = MU) -> stickymoe.variants.Variant:
    return stickymoe.variant("soft", lam=lam, mu=mu)


def logits_by_hand(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """The router logits [L, B, T, N] that transformers itself gives, from a copy of the model."""
    other = copy.deepcopy(model)
    like = inputs.get("input_ids", inputs.get("inputs_embeds"))
    out = other(**inputs, output_router_logits=True)
    return torch.stack(out.router_logits).view(len(out.router_logits), *like.shape[:2], -1)


def trace_by_hand(model: PreTrainedModel, doc: Tensor | None = None, **inputs: Any) -> RoutingTrace:
    return RoutingTrace.from_logits(logits_by_hand(model, **inputs), 2, inputs.get("attention_mask"), doc)


def terms_by_hand(trace: RoutingTrace, lam: float = LAM, mu: float = MU) -> Tensor:
    return lam * stickymoe.consistency_loss(trace) + mu * stickymoe.balance_loss(trace)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=1e-4, msg=lambda text, name=name: name + text)


def assert_same_routing(found: RoutingTrace, expected: RoutingTrace) -> None:
    torch.testing.assert_close(found.mask, expected.mask)
    real = expected.mask
    torch.testing.assert_close(found.g[:, real], expected.g[:, real], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.w[:, real], expected.w[:, real], atol=1e-6, rtol=1e-5)
    assert torch.equal(found.S[:, real], expected.S[:, real])


def padded(side: str) -> dict[str, Tensor]:
    """Two rows of 9 and 6 tokens."""
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :3] = 0
    else:
        mask[1, 6:] = 0
    ids = torch.where(mask.bool(), ids, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


# The loss


def test_loss_and_gradients_equal_those_by_hand(model: PreTrainedModel) -> None:
    inputs = batch(model)
    other = copy.deepcopy(model)
    out = other(**inputs, output_router_logits=True)
    ce = out.loss - other.router_aux_loss_coef * out.aux_loss
    trace = RoutingTrace.from_logits(torch.stack(out.router_logits).view(3, 2, 9, 8), 2)
    expected = ce + terms_by_hand(trace)
    with stickymoe.attach(model, "soft", lam=LAM, mu=MU) as attached:
        found = model(**inputs)
        torch.testing.assert_close(found.loss, expected)
        assert attached.loss is found.loss
        assert_same_routing(attached.trace, trace)
        assert attached.trace.layers == (0, 1, 2)
        assert set(attached.terms) == {"cons", "bal"}
        assert not any(value.requires_grad for value in attached.terms.values())
        assert_same_gradients(gradients(model, found.loss), gradients(other, expected))


def test_a_variant_can_be_an_object_or_a_name(model: PreTrainedModel) -> None:
    inputs = batch(model)
    losses = []
    for variant, settings in ((soft(), {}), ("soft", {"lam": LAM, "mu": MU}), ("vanilla+soft", {"lam": LAM, "mu": MU})):
        with stickymoe.attach(model, variant, **settings):
            losses.append(model(**inputs).loss)
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=0)
    torch.testing.assert_close(losses[2], losses[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_padding_does_not_count(family: str, side: str) -> None:
    model = tiny(family)
    inputs = padded(side)
    with stickymoe.attach(model, soft()) as attached:
        loss = model(**inputs).loss
        trace = attached.trace
        alone = []
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
            model(input_ids=row[mask][None])
            alone.append(attached.trace)
    assert torch.equal(trace.mask, inputs["attention_mask"].bool())
    for i, mask in enumerate(trace.mask):
        torch.testing.assert_close(trace.g[:, i, mask], alone[i].g[:, 0], atol=1e-5, rtol=0)
        assert torch.equal(trace.S[:, i, mask], alone[i].S[:, 0])
    steps = sum(stickymoe.consistency_loss(t) * (t.g.shape[2] - 1) for t in alone)
    torch.testing.assert_close(stickymoe.consistency_loss(trace), steps / (8 + 5), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(loss - model(**inputs).loss, terms_by_hand(trace), atol=1e-5, rtol=0)
    g = trace.g[:, 1][:, ~trace.mask[1]]
    torch.testing.assert_close(g, torch.full_like(g, 1 / 8))


def test_padding_that_overflows_leaves_gradients_finite(model: PreTrainedModel) -> None:
    """Whatever a gate computes at padding has no influence on the gradient."""
    inputs = padded("right")

    def spoil(forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        logits, weights, indices = forward(hidden)
        padding = ~inputs["attention_mask"].bool().flatten()
        return logits.masked_fill(padding[:, None], torch.inf), weights, indices

    for layer in model.model.layers:
        layer.mlp.gate.forward = functools.partial(spoil, layer.mlp.gate.forward)
    with stickymoe.attach(model, soft()) as attached:
        found = gradients(model, model(**inputs).loss)
        assert attached.loss.isfinite()
    assert all(value.isfinite().all() for value in found.values())


def test_packed_documents_by_position_ids(model: PreTrainedModel) -> None:
    lengths = (4, 1, 5)
    ids = torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with stickymoe.attach(model, soft()) as attached:
        out = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
        trace = attached.trace
        parts = []
        for part in ids.split(lengths, dim=1):
            model(input_ids=part)
            parts.append(attached.trace)
    assert torch.equal(trace.doc, torch.tensor([[0] * 4 + [1] + [2] * 5]))
    torch.testing.assert_close(trace.g, torch.cat([part.g for part in parts], 2), atol=1e-6, rtol=0)
    cons = (3 * stickymoe.consistency_loss(parts[0]) + 4 * stickymoe.consistency_loss(parts[2])) / 7
    torch.testing.assert_close(stickymoe.consistency_loss(trace), cons)
    bare = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
    torch.testing.assert_close(out.loss - bare.loss, LAM * cons + MU * stickymoe.balance_loss(trace), atol=1e-6, rtol=0)


def test_ordinary_position_ids_are_one_document(model: PreTrainedModel) -> None:
    inputs = padded("left")
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with stickymoe.attach(model) as attached:
        model(**inputs, position_ids=positions)
        assert attached.trace.doc is None
        model(input_ids=inputs["input_ids"], position_ids=torch.arange(9)[None])
        assert attached.trace.doc is None
        model(input_ids=inputs["input_ids"], position_ids=torch.arange(30, 39)[None])
        assert attached.trace.doc is None


def test_inputs_embeds_positional_arguments_and_tuples(model: PreTrainedModel) -> None:
    inputs = padded("left")
    ids, mask, labels = (inputs[name] for name in ("input_ids", "attention_mask", "labels"))
    embeds = model.get_input_embeddings()(ids)
    with stickymoe.attach(model, soft()) as attached:
        expected = model(**inputs).loss
        trace = attached.trace
        torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=mask, labels=labels).loss, expected)
        assert_same_routing(attached.trace, trace)
        torch.testing.assert_close(model(ids, mask, labels=labels).loss, expected)
        assert_same_routing(attached.trace, trace)
        as_tuple = model(**inputs, return_dict=False)
        torch.testing.assert_close(as_tuple[0], expected)
        assert as_tuple[1].shape == (2, 9, 64)
        assert attached.loss is as_tuple[0]


def test_without_labels_there_is_a_trace_but_no_loss(model: PreTrainedModel) -> None:
    inputs = batch(model)
    labels = inputs.pop("labels")
    with stickymoe.attach(model, soft()) as attached:
        with pytest.raises(StickyError, match="no finished forward pass"):
            _ = attached.trace
        out = model(**inputs)
        assert out.loss is None
        assert_same_routing(attached.trace, trace_by_hand(model, **inputs))
        torch.testing.assert_close(attached.total, terms_by_hand(attached.trace))
        with pytest.raises(StickyError, match=r"no labels.*pass labels") as error:
            _ = attached.loss
        assert "\n" not in str(error.value)
        torch.testing.assert_close(
            attached.loss if model(**inputs, labels=labels) else None, model(**inputs, labels=labels).loss
        )


def test_warm_up_follows_progress(model: PreTrainedModel) -> None:
    inputs = batch(model)
    bare = model(**inputs).loss
    term = stickymoe.variant("soft", lam=1.0, mu=0.0).terms()[1]
    with stickymoe.attach(model, "soft", lam=1.0, mu=0.0) as attached:
        attached.terms_of_loss = (dataclasses.replace(term, warmup=0.5),)
        for progress, share in ((0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (1.0, 1.0)):
            attached.progress = progress
            added = model(**inputs).loss - bare
            torch.testing.assert_close(added, share * stickymoe.consistency_loss(attached.trace), atol=1e-6, rtol=0)
        attached.adds_terms = False
        assert torch.equal(model(**inputs).loss, bare)


def test_the_trace_of_evaluation_has_no_gradient(model: PreTrainedModel) -> None:
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached:
        expected = model(**inputs).loss
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).loss, expected)
            assert not attached.trace.g.requires_grad


# Training


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_checkpointing_gives_the_same_gradients(family: str) -> None:
    model = tiny(family).train()
    inputs = batch(model)
    with stickymoe.attach(model, soft()):
        expected = gradients(model, model(**inputs).loss)
        model.gradient_checkpointing_enable()
        loss = model(**inputs, use_cache=False).loss
        found = gradients(model, loss)
    assert_same_gradients(found, expected)
    bare = gradients(model, model(**inputs, use_cache=False).loss)
    assert any(
        (bare[name] - found[name]).abs().max() > 1e-4 for name in bare if "gate.weight" in name or "router" in name
    )


def test_reentrant_checkpointing_is_refused(model: PreTrainedModel) -> None:
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached:
        with pytest.raises(StickyError, match=r"reentrant.*use_reentrant.*False") as error:
            model(**inputs, use_cache=False)
        assert "\n" not in str(error.value)
        model.gradient_checkpointing_disable()
        model(**inputs)  # the refusal left nothing half done
        assert attached.trace.g.requires_grad


def test_accumulation_equals_one_batch(model: PreTrainedModel) -> None:
    inputs = batch(model, 8, 7)
    n = inputs["labels"][:, 1:].numel()
    with stickymoe.attach(model, soft(mu=0.0)) as attached:
        expected = gradients(model, model(**inputs).loss)
        bare_terms = attached.total
        whole = gradients(model, model(**inputs, num_items_in_batch=torch.tensor(n)).loss)
        model.zero_grad()
        total = 0.0
        for i in range(0, 8, 2):
            part = {name: value[i : i + 2] for name, value in inputs.items()}
            loss = model(**part, num_items_in_batch=torch.tensor(n)).loss
            total += loss.item()
            loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert_same_gradients(whole, expected)
    assert_same_gradients(found, expected)
    torch.testing.assert_close(torch.tensor(total), model(**inputs).loss.detach() + bare_terms.detach())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_bf16_models_have_fp32_gates(family: str) -> None:
    model = tiny(family)
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached:
        model(**inputs)
        exact = attached.trace.g
    model.bfloat16()
    with stickymoe.attach(model, soft()) as attached:
        out = model(**inputs)
        trace, total = attached.trace, attached.total
        found = gradients(model, out.loss)
    assert trace.g.dtype == trace.w.dtype == total.dtype == torch.float32
    torch.testing.assert_close(trace.g.sum(-1), torch.ones(3 - (family == "deepseek_v3"), 2, 9))
    torch.testing.assert_close(trace.g[0], exact[0], atol=0.05, rtol=0)
    torch.testing.assert_close(total, terms_by_hand(trace))
    torch.testing.assert_close(out.loss.float() - model(**inputs).loss.float(), total, atol=0.05, rtol=0)
    assert all(value.isfinite().all() for value in found.values())


def test_autocast(model: PreTrainedModel) -> None:
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached, torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs)
    assert attached.trace.g.dtype == torch.float32
    torch.testing.assert_close(attached.total, terms_by_hand(attached.trace))
    assert all(value.isfinite().all() for value in gradients(model, out.loss).values())


def test_a_frozen_body_trains_the_gates_alone(model: PreTrainedModel) -> None:
    inputs = batch(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate.weight" in name)
    trace = trace_by_hand(model, input_ids=inputs["input_ids"])
    weights = [layer.mlp.gate.weight for layer in model.model.layers]
    bare = gradients(model, model(**inputs).loss)
    with stickymoe.attach(model, soft()):
        found = gradients(model, model(**inputs).loss)
    assert len(found) == len(weights) == 3
    for name in found:
        assert (found[name] - bare[name]).abs().max() > 1e-4
    model.requires_grad_(False)
    with stickymoe.attach(model, soft()) as attached:
        torch.testing.assert_close(model(**inputs).loss, attached.loss)
        assert not attached.trace.g.requires_grad
        assert_same_routing(attached.trace, trace)


# torch.compile


COMPILER_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@COMPILER_WARNS
def test_compiled_before_attaching() -> None:
    model = tiny("mixtral", num_hidden_layers=1)
    inputs = batch(model)
    del inputs["attention_mask"]
    bare = model(**inputs).loss.detach()
    trace = trace_by_hand(model, input_ids=inputs["input_ids"])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs).loss.detach(), bare)
    with stickymoe.attach(compiled, soft()) as attached:
        loss = compiled(**inputs).loss
        torch.testing.assert_close(loss.detach(), bare + terms_by_hand(trace).detach())
        assert_same_routing(attached.trace, trace)
        found = gradients(model, loss)
        assert_same_gradients(found, gradients(model, model(**inputs).loss))
    torch.testing.assert_close(compiled(**inputs).loss.detach(), bare)


@pytest.mark.usefixtures("fresh_compiler")
@COMPILER_WARNS
def test_compiled_after_attaching() -> None:
    model = tiny("mixtral", num_hidden_layers=1)
    inputs = batch(model)
    del inputs["attention_mask"]
    bare = model(**inputs).loss.detach()
    expected = bare + terms_by_hand(trace_by_hand(model, input_ids=inputs["input_ids"])).detach()
    with stickymoe.attach(model, soft()) as attached:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            loss = compiled(**inputs).loss
            torch.testing.assert_close(loss.detach(), expected)
        found = gradients(model, loss)
        assert_same_gradients(found, gradients(model, model(**inputs).loss))
        assert attached.trace.g.requires_grad
    torch.testing.assert_close(compiled(**inputs).loss.detach(), bare)


# Generation

GENERATE = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "answers": {"do_sample": True, "num_return_sequences": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "static beams": {"do_sample": False, "num_beams": 3, "cache_implementation": "static"},
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("given", ["mask", "pad tokens"])
def test_generation_with_left_padding(model: PreTrainedModel, how: str, given: str) -> None:
    ids, mask = (padded("left")[name] for name in ("input_ids", "attention_mask"))
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0, "eos_token_id": 2, **GENERATE[how]}
    settings |= {"disable_compile": True}
    if given == "mask":
        settings["attention_mask"] = mask
    torch.manual_seed(3)
    expected = model.generate(ids, **settings)
    traces: list[RoutingTrace] = []
    with stickymoe.attach(model, soft()) as attached:
        attached.on_trace = lambda trace, inputs: traces.append(trace)
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **settings), expected)
    copies = 3 if how in ("beams", "answers", "static beams") else 1
    prompt = mask.bool().repeat_interleave(copies, 0)
    assert len(traces) == 3
    for i, trace in enumerate(traces):
        new = torch.ones(len(prompt), i, dtype=torch.bool)
        seen = torch.cat([prompt, new], 1)
        rows = seen if how == "no cache" else seen[:, 9 * (i > 0) + max(i - 1, 0) :]
        assert torch.equal(trace.mask, rows), i
    alone = trace_by_hand(model, input_ids=ids[1:, 3:])
    torch.testing.assert_close(traces[0].g[:, copies, 3:9], alone.g[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_padding_token_of_a_call_counts(model: PreTrainedModel, cache: str) -> None:
    """A mask is inferred from padding tokens, which the call may name where the model does not."""
    ids, mask = (padded("left")[name] for name in ("input_ids", "attention_mask"))
    model.generation_config.pad_token_id = None
    settings = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    masks = []
    with stickymoe.attach(model) as attached:
        attached.on_trace = lambda trace, inputs: masks.append(trace.mask)
        model.generate(ids, pad_token_id=0, **settings)
        config = copy.deepcopy(model.generation_config)
        config.update(pad_token_id=0)
        model.generate(ids, config, **settings)
    for found in masks[::2]:
        assert torch.equal(found, mask.bool())
    for found in masks[1::2]:
        assert found.all()


def test_the_models_own_balance_loss_stays(model: PreTrainedModel) -> None:
    inputs = batch(model)
    bare = copy.deepcopy(model)(**inputs, output_router_logits=True)
    with stickymoe.attach(model, soft()) as attached:
        out = model(**inputs, output_router_logits=True)
        assert len(out.router_logits) == 3
        torch.testing.assert_close(out.aux_loss, bare.aux_loss)
        torch.testing.assert_close(out.loss, bare.loss + terms_by_hand(attached.trace))


def test_generation_forgets_the_mask_of_its_prompt(model: PreTrainedModel) -> None:
    ids, mask = (padded("left")[name] for name in ("input_ids", "attention_mask"))
    with stickymoe.attach(model) as attached:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, pad_token_id=0, do_sample=False)
        assert torch.equal(attached.trace.mask, mask.bool())
        model(input_ids=ids)
        assert attached.trace.mask.all()
        with pytest.raises(ValueError, match="max_new_tokens"):
            model.generate(ids, attention_mask=mask, max_new_tokens=-1, pad_token_id=0)
        model(input_ids=ids)
        assert attached.trace.mask.all()


# PEFT

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "saved gates": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    "parameters": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore:The ParamWrapper")
def test_adapters(family: str, adapter: str) -> None:
    settings = dict(ADAPTERS[adapter])
    if family == "deepseek_v3" and "target_modules" in settings:
        settings["target_modules"] = ["q_b_proj", "kv_b_proj"][: len(settings["target_modules"])]
    model = tiny(family)
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached:
        expected = model(**inputs).loss.detach()
        trace = attached.trace
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=True, **settings))
    wrapped.eval()
    with stickymoe.attach(wrapped, soft()) as attached:
        out = wrapped(**inputs)
        torch.testing.assert_close(out.loss.detach(), expected)
        assert_same_routing(attached.trace, trace)
        found = gradients(wrapped, out.loss)
        generated = wrapped.generate(input_ids=inputs["input_ids"], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 11)
    bare = gradients(wrapped, wrapped(**inputs).loss)
    assert found
    assert all("lora_" in name or "modules_to_save" in name for name in found)
    changed = [name for name in found if (found[name] - bare[name]).abs().max() > 1e-6]
    assert changed
    if adapter == "saved gates":
        assert all(name in changed for name in found if "gate" in name)
    if adapter == "parameters":
        assert any("gate.lora" in name or "gate.base" in name or ".gate." in name for name in changed)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_adapters_with_a_rule(family: str, adapter: str) -> None:
    settings = dict(ADAPTERS[adapter])
    if family == "deepseek_v3" and "target_modules" in settings:
        settings["target_modules"] = ["q_b_proj", "kv_b_proj"][: len(settings["target_modules"])]
    model = tiny(family)
    inputs = batch(model)
    with stickymoe.attach(model, "hysteresis", bonus=1.0, mu=0.0) as attached:
        expected = model(**inputs).logits.detach()
        trace = attached.trace
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings)).eval()
    with stickymoe.attach(wrapped, "hysteresis", bonus=1.0, mu=0.0) as attached:
        torch.testing.assert_close(wrapped(**inputs).logits.detach(), expected)
        assert torch.equal(attached.trace.S, trace.S)


# Threads, copies, saving


def test_two_threads_share_a_model(model: PreTrainedModel) -> None:
    batches = [batch(model, 2, 6), batch(model, 3, 8)]
    expected = [
        model(**inputs).loss.detach() + terms_by_hand(trace_by_hand(model, input_ids=inputs["input_ids"])).detach()
        for inputs in batches
    ]
    together = threading.Barrier(2)
    found: list[list[Any]] = [[], []]

    def work(i: int) -> None:
        for _ in range(5):
            together.wait()
            loss = model(**batches[i]).loss
            together.wait()
            found[i].append((loss.detach(), attached.loss is loss, tuple(attached.trace.g.shape)))

    def waiting(module: nn.Module, args: Any) -> None:
        """Let the other thread in between."""
        together.wait()

    handles = [layer.register_forward_pre_hook(waiting) for layer in model.model.layers]
    with stickymoe.attach(model, soft()) as attached:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    for handle in handles:
        handle.remove()
    for i, (B, T) in enumerate(((2, 6), (3, 8))):
        assert len(found[i]) == 5
        for loss, own, shape in found[i]:
            torch.testing.assert_close(loss, expected[i])
            assert own
            assert shape == (3, B, T, 8)


def test_a_copy_is_not_attached(model: PreTrainedModel) -> None:
    inputs = batch(model)
    bare = model(**inputs).loss
    with stickymoe.attach(model, soft()) as attached:
        other = copy.deepcopy(model)
        attached_loss = model(**inputs).loss
        trace = attached.trace
        torch.testing.assert_close(other(**inputs).loss, bare)
        assert attached.trace is trace
        torch.testing.assert_close(model(**inputs).loss, attached_loss)
    torch.testing.assert_close(other(**inputs).loss, bare)


def test_a_copy_is_not_attached_to_a_rule(model: PreTrainedModel) -> None:
    inputs = batch(model)
    bare = model(**inputs).logits
    with stickymoe.attach(model, "hysteresis", bonus=1.0):
        other = copy.deepcopy(model)
        assert (model(**inputs).logits - bare).abs().max() > 1e-3
        torch.testing.assert_close(other(**inputs).logits, bare)


def test_the_gate_is_read_before_other_hooks_change_its_output(model: PreTrainedModel) -> None:
    """Expert parallelism has a hook that rewrites experts as those of its own process."""
    inputs = batch(model)
    expected = trace_by_hand(model, input_ids=inputs["input_ids"])
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, args, output: (output[0], output[1], output[2] % 4))
    with stickymoe.attach(model) as attached:
        model(**inputs)
    assert torch.equal(attached.trace.S[0], expected.S[0])


def test_saving_while_attached(model: PreTrainedModel, tmp_path: Path) -> None:
    inputs = batch(model)
    expected = model(**inputs).logits
    with stickymoe.attach(model, soft()):
        model(**inputs)
        model.save_pretrained(tmp_path)
    torch.testing.assert_close(MixtralForCausalLM.from_pretrained(tmp_path)(**inputs).logits, expected)


# Detaching and refusing


def test_errors_leave_the_model_clean(model: PreTrainedModel) -> None:
    inputs = batch(model)
    bare = model(**inputs).loss
    with pytest.raises(ZeroDivisionError), stickymoe.attach(model, soft()):  # noqa: PT012
        model(**inputs)
        raise ZeroDivisionError
    assert torch.equal(model(**inputs).loss, bare)
    with stickymoe.attach(model, soft()) as attached:
        expected = model(**inputs).loss
        with pytest.raises(IndexError):
            model(input_ids=torch.full((2, 4), 1000))
        with pytest.raises(StickyError, match="there is no finished forward pass"):
            _ = attached.trace  # that of an earlier pass would be mistaken for this one's
        torch.testing.assert_close(model(**inputs).loss, expected)


def one_line(error: pytest.ExceptionInfo[StickyError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_attaching_twice_is_refused(model: PreTrainedModel) -> None:
    inputs = batch(model)
    with stickymoe.attach(model, soft()):
        expected = model(**inputs).loss
        with pytest.raises(StickyError, match="attached already; detach it first") as error:
            stickymoe.attach(model, "vanilla")
        one_line(error)
        torch.testing.assert_close(model(**inputs).loss, expected)
    with stickymoe.attach(model, soft()):
        torch.testing.assert_close(model(**inputs).loss, expected)


@pytest.mark.parametrize("family", ["doge", "nllb_moe", "switch_transformers", "llama"])
def test_models_without_readable_gates_are_refused(family: str) -> None:
    with pytest.raises(StickyError, match=rf"family {family}.*Supported families: .*mixtral") as error:
        stickymoe.attach(tiny(family), "soft")
    one_line(error)


def test_other_modules_are_refused() -> None:
    with pytest.raises(StickyError, match=r"got Linear, expected a transformers model") as error:
        stickymoe.attach(nn.Linear(2, 2), "soft")
    one_line(error)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dense", {}),
        ("oracle", {}),
        ("siblings", {}),
        ("delta", {}),
        ("two_speed", {}),
        ("lookup", {}),
        ("soft", {"gate_only": True}),
        ("smooth", {"learned": True}),
        ("boundary", {}),
    ],
)
def test_variants_that_do_not_fit_are_refused(model: PreTrainedModel, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(StickyError, match=rf"variant '{name}' does not fit a transformers model: ") as error:
        stickymoe.attach(model, name, **settings)
    one_line(error)
    with stickymoe.attach(model, "soft"):  # nothing was left behind
        model(**batch(model))


def test_settings_that_cannot_be_used_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(StickyError, match="lam"):
        stickymoe.attach(model, "soft", lam=-1.0)
    with pytest.raises(StickyError, match="sofft"):
        stickymoe.attach(model, "sofft")
    with pytest.raises(StickyError, match="settings lam without the name") as error:
        stickymoe.attach(model, soft(), lam=0.1)
    one_line(error)
    with pytest.raises(StickyError, match="settings lam without the name"):
        stickymoe.attach(model, lam=0.1)


def test_a_gate_that_never_ran_is_refused(model: PreTrainedModel) -> None:
    """A kernel that replaces the block computes the gate itself."""
    inputs = batch(model)
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden
    with stickymoe.attach(model, soft()):
        with pytest.raises(StickyError, match=r"1 of 3 gates did not run.*model\.layers\.1\.mlp\.gate") as error:
            model(**inputs)
        one_line(error)
        del block.forward
        assert model(**inputs).loss.isfinite()


def test_a_gate_that_contradicts_its_family_is_refused(model: PreTrainedModel) -> None:
    """The weights of a sigmoid gate in a family of softmax gates."""

    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def spoil(hidden: Tensor) -> Any:
        logits, _, indices = forward(hidden)
        w = logits.gather(1, indices).sigmoid()
        return logits, w / w.sum(-1, keepdim=True), indices

    gate.forward = spoil
    with (
        stickymoe.attach(model, soft()),
        pytest.raises(StickyError, match="mixtral scores experts by softmax") as error,
    ):
        model(**batch(model))
    one_line(error)


def test_a_part_of_the_model_alone_runs_without_a_trace(model: PreTrainedModel) -> None:
    inputs = batch(model)
    with stickymoe.attach(model, soft()) as attached:
        model(**inputs)
        trace = attached.trace
        model.model(input_ids=inputs["input_ids"])
        assert attached.trace is trace


def test_a_mask_that_hides_padding_is_refused() -> None:
    model = tiny("mixtral")
    ids = batch(model)["input_ids"]
    square = torch.ones(*ids.shape, ids.shape[1], dtype=torch.bool).tril()[:, None]
    with stickymoe.attach(model), pytest.raises(StickyError, match="pass a mask of two dimensions"):
        model(input_ids=ids, attention_mask=square)


def test_terms_keep_their_gradient_when_they_are_first_read_without() -> None:
    model = tiny("mixtral")
    ids = batch(model)["input_ids"]
    with stickymoe.attach(model, "soft") as attached:
        model(input_ids=ids)
        with torch.no_grad():
            assert attached.terms["cons"] > 0
        assert attached.total.requires_grad
