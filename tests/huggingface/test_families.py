"""Every supported family: its trace, gradients, generation, rules, and what is left of us afterwards."""

from __future__ import annotations

import functools
from typing import Any

import gate_reference
import pytest
import torch
from gate_reference import reference_routing
from tiny import FAMILIES, batch, gates, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

import stickymoe
from stickymoe import RoutingTrace, StickyError
from stickymoe.huggingface import supported_families

RULES_REFUSED = ("dbrx", "jetmoe", "llama4")


@functools.cache
def built(family: str) -> PreTrainedModel:
    return tiny(family)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return built(family)


def experts_as_sets(S: Tensor) -> Tensor:
    return S.sort(-1).values


def own_gates(model: PreTrainedModel) -> list[nn.Module]:
    """The gates that read text."""
    return [gate for name, gate, _ in gates(model) if "vision" not in name]


def gate_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The matrices of the gates, by gate and name."""
    found = {}
    for i, gate in enumerate(own_gates(model)):
        for name, parameter in gate.named_parameters():
            if parameter.requires_grad and parameter.ndim == 2:
                found[f"{i}.{name}"] = parameter
    return found


def test_the_list_of_families_is_complete() -> None:
    assert set(supported_families()) == set(FAMILIES)


def test_trace_equals_the_reference_in_double_precision(family: str, model: PreTrainedModel) -> None:
    inputs = batch(model)
    expected = reference_routing(model, family, **inputs)
    with stickymoe.attach(model) as attached:
        out = model(**inputs)
        trace = attached.trace
    L, B, T = len(expected), *inputs["input_ids"].shape
    assert trace.g.shape[:3] == trace.S.shape[:3] == trace.w.shape[:3] == (L, B, T)
    assert trace.mask.all()
    assert trace.doc is None
    assert len(set(trace.layers)) == L
    assert trace.g.requires_grad
    assert trace.n_null == {"longcat_flash": 4, "zaya": 1}.get(family, 0)
    for i, layer in enumerate(expected):
        g, S, w = trace.g[i].flatten(0, 1), trace.S[i].flatten(0, 1), trace.w[i].flatten(0, 1)
        torch.testing.assert_close(g.double(), layer.g, atol=1e-5, rtol=0)
        order = layer.w.sort(-1, descending=True).indices
        assert torch.equal(S, layer.S.gather(1, order)), layer.name
        torch.testing.assert_close(w.double(), layer.w.gather(1, order), atol=1e-5, rtol=0)
        assert (w[:, :-1] >= w[:, 1:]).all()
    if "labels" in inputs:
        assert torch.equal(attached.loss, out.loss)  # no variant, no terms


def test_terms_are_in_the_loss_and_train_every_gate(family: str, model: PreTrainedModel) -> None:
    inputs = batch(model)
    parameters = gate_parameters(model)
    assert len(parameters) >= len(own_gates(model))
    with stickymoe.attach(model, "soft", lam=3.0, mu=0.5) as attached:
        out = model(**inputs)
        trace = attached.trace
        terms = 3.0 * stickymoe.consistency_loss(trace) + 0.5 * stickymoe.balance_loss(trace)
        torch.testing.assert_close(attached.total, terms)
        torch.testing.assert_close(attached.terms["cons"], stickymoe.consistency_loss(trace).detach())
        torch.testing.assert_close(attached.terms["bal"], stickymoe.balance_loss(trace).detach())
        if "labels" not in inputs:
            by_terms = _gradients(attached.total, parameters)
            assert all(gradient.abs().max() > 1e-6 for gradient in by_terms.values())
            return
        with_terms = _gradients(out.loss, parameters)
    bare = model(**inputs)
    torch.testing.assert_close(out.loss - bare.loss, terms, atol=1e-5, rtol=0)
    without = _gradients(bare.loss, parameters)
    for name in parameters:
        assert (with_terms[name] - without[name]).abs().max() > 1e-6, name


def _gradients(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if x is None else x for (n, p), x in zip(parameters.items(), found, strict=True)}


def test_generation_leaves_one_trace_per_forward_pass(family: str, model: PreTrainedModel) -> None:
    ids = batch(model, 2, 5)["input_ids"]
    if not model.can_generate():
        assert family in ("diffusion_gemma", "openai_privacy_filter")
        return
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    traces: list[RoutingTrace] = []
    with stickymoe.attach(model, "soft") as attached:
        attached.on_trace = lambda trace, inputs: traces.append(trace)
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(generated, expected)
    assert [trace.mask.shape[1] for trace in traces] == [5, 1, 1, 1]
    assert all(trace.mask.all() and not trace.g.requires_grad for trace in traces)


def _snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a model that attaching could leave a mark on."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    hooks += ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks")
    modules = {
        name: (type(module), sorted(module.__dict__), [dict(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    }
    return {
        "modules": modules,
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "forwards": [module.forward.__func__ for module in model.modules()],
    }


def test_detaching_leaves_nothing_behind(family: str, model: PreTrainedModel) -> None:
    inputs = batch(model)
    before = _output(model, inputs)
    snapshot = _snapshot(model)
    attached = stickymoe.attach(model, "soft", lam=3.0)
    model(**inputs)
    attached.detach()
    attached.detach()
    if family not in RULES_REFUSED:
        with stickymoe.attach(model, "hysteresis", bonus=2.0):
            model(**inputs)
    now = _snapshot(model)
    for name in ("modules", "config", "generation", "training", "forwards"):
        assert now[name] == snapshot[name], name
    assert list(now["state"]) == list(snapshot["state"])
    assert all(torch.equal(now["state"][name], value) for name, value in snapshot["state"].items())
    assert torch.equal(_output(model, inputs), before)
    assert attached.trace.g.shape[1:3] == inputs["input_ids"].shape


def _output(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def test_rules_are_refused_where_the_choice_is_fixed() -> None:
    for family in RULES_REFUSED:
        with pytest.raises(StickyError, match=rf"^attach: variant 'hysteresis' .*{family}.*\.$") as error:
            stickymoe.attach(built(family), "hysteresis")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in RULES_REFUSED])
def test_a_rule_that_changes_nothing_changes_nothing(family: str) -> None:
    model = built(family)
    inputs = batch(model)
    expected = reference_routing(model, family, **inputs)
    before = _output(model, inputs)
    with stickymoe.attach(model, "hysteresis", bonus=0.0) as attached:
        after = _output(model, inputs)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    trace = attached.trace
    for i, layer in enumerate(expected):
        torch.testing.assert_close(trace.g[i].flatten(0, 1).double(), layer.g, atol=1e-5, rtol=0)
        assert torch.equal(experts_as_sets(trace.S[i].flatten(0, 1)), experts_as_sets(layer.S))
        w = layer.w.sort(-1, descending=True).values
        torch.testing.assert_close(trace.w[i].flatten(0, 1).double(), w, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in RULES_REFUSED and built(name).can_generate()]
)
@torch.no_grad()
def test_decoding_with_a_rule_equals_the_whole_sequence(family: str) -> None:
    model = built(family)
    ids = batch(model)["input_ids"]
    everything = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    bare = _output(model, everything)
    parts: list[RoutingTrace] = []
    with stickymoe.attach(model, "hysteresis", bonus=0.3) as attached:
        whole = _output(model, everything)
        trace = attached.trace
        attached.on_trace = lambda trace, inputs: parts.append(trace)
        generated = model.generate(
            ids[:, :4],
            attention_mask=torch.ones_like(ids[:, :4]),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            prefix_allowed_tokens_fn=lambda row, so_far: [int(ids[row, len(so_far)])],
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert torch.equal(generated.sequences, ids)
    assert [part.mask.shape[1] for part in parts] == [4, 1, 1, 1, 1]
    assert torch.equal(torch.cat([part.S for part in parts], 2), trace.S[:, :, :8])
    torch.testing.assert_close(torch.cat([part.w for part in parts], 2), trace.w[:, :, :8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(generated.logits, 1), whole[:, 3:8], atol=1e-4, rtol=1e-3)
    assert (whole - bare).abs().max() > 1e-3  # the rule did something,
    assert (trace.S[-1, :, 1:] != trace.S[-1, :, :-1]).any()  # and not everything


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*RULES_REFUSED, "phimoe")])
@torch.no_grad()
def test_changed_choices_are_weighed_as_the_family_does(family: str) -> None:
    """The family's own formula, in double precision, at the experts that a rule chose.

    Phi's formula is for the experts with the highest logits only.
    """
    model = built(family)
    inputs = batch(model)
    rule = gate_reference.RULES[family]
    with stickymoe.attach(model, "hysteresis", bonus=0.3) as attached:
        calls = gate_reference._calls(model, inputs)
    trace = attached.trace
    assert len(calls) == len(trace.S)
    for (name, call), S, w in zip(calls, trace.S.flatten(1, 2), trace.w.flatten(1, 2), strict=True):
        logits = (rule.logits or gate_reference._linear)(call)
        scores = gate_reference.SCORES[gate_reference._score(call, rule)](logits)
        weigh = rule.weigh or (lambda call, logits, scores, S: gate_reference._weigh(call, rule, scores, S))
        expected = weigh(call, logits, scores, S)
        torch.testing.assert_close(w.double(), expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: name + text)
