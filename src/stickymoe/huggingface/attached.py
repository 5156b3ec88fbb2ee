"""`attach`: a variant's objectives and rules on any transformers MoE, and the trace of every forward pass.

    with stickymoe.attach(model, "soft", lam=0.1) as attached:
        out = model(**batch)        # out.loss has the terms of the variant
        attached.trace              # a RoutingTrace with gradient
        attached.terms              # {"bal": …, "cons": …}

Hooks on the gates read what they decide. Nothing of the model is changed, and detaching removes the hooks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stickymoe.errors import ConfigError
from stickymoe.huggingface.families import Reading, Score, scores
from stickymoe.huggingface.gates import Gate, find_gates, find_model
from stickymoe.huggingface.inputs import Inputs
from stickymoe.huggingface.memory import RouterMemory, Step, memory_of, remember
from stickymoe.huggingface.rules import (
    as_logits,
    current,
    replaces_rule,
    require_attachable,
    route,
    routes_by_token,
    rule_for,
    shared_gammas,
)
from stickymoe.routing.losses import LossContext, Objective, objective
from stickymoe.routing.rules import RouterInput, RouterState, Routing, RoutingRule
from stickymoe.routing.terms import Term
from stickymoe.routing.trace import RoutingTrace, token_positions
from stickymoe.variants import Variant
from stickymoe.variants import variant as make_variant

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with hooks of ours


def attach(model: nn.Module, variant: Variant | str | None = None, **settings: Any) -> Attached:
    """Attach a variant to a transformers model: an object, or a name with settings; None records the trace only.

    Use it as a context manager, or call `detach`. Every forward pass leaves `trace` and `terms`. If it has labels, the
    variant's terms are added to its loss.
    """
    if isinstance(variant, str):
        variant = make_variant(variant, **settings)
    elif settings:
        raise ConfigError(f"attach: got settings {', '.join(settings)} without the name of a variant; pass a name.")
    core = find_model(model)
    if core in _attached:
        raise ConfigError(f"attach: {type(core).__name__} is attached already; detach it first.")
    gates = find_gates(core)
    if variant is not None:
        require_attachable(variant, gates)
    return Attached(core, gates, variant)


@dataclass
class _Forward:
    """One forward pass while it runs: what the gates decided so far, by name."""

    inputs: Inputs
    with_gradient: bool
    memory: RouterMemory | None
    position: Tensor | None = None
    readings: dict[str, Reading] = field(default_factory=dict)
    routed: dict[str, Routing] = field(default_factory=dict)
    step: Step | None = None

    def is_repeated(self, name: str, logits: Tensor) -> bool:
        """Whether a gate got the same logits in this forward pass."""
        if self.step is None or name not in self.step.given:
            return False
        before = self.step.given[name][1].flatten(0, 1)
        return before.shape == logits.shape and torch.allclose(before, logits, rtol=1e-2, atol=1e-3)


@dataclass
class _Result:
    """A finished forward pass. The terms are computed when they are needed."""

    trace: RoutingTrace
    inputs: Inputs
    terms: tuple[Term, ...]
    context: LossContext
    progress: float
    loss: Tensor | None = None

    @cached_property
    def objective(self) -> Objective:
        with torch.set_grad_enabled(self.trace.g.requires_grad):  # whatever the caller's mode is
            return objective(self.trace, self.terms, self.context, self.progress)


class Attached:
    """A model with hooks on its gates. `trace`, `terms` and `loss` are those of the last forward pass: of this thread,
    or of any thread if this one had none.

    Attributes:
        progress: fraction of training that has passed, for terms with a warm-up and rules that are annealed
        adds_terms: whether the terms are added to the loss of the model
        on_trace: called after every forward pass
    """

    def __init__(self, model: PreTrainedModel, gates: list[Gate], variant: Variant | None) -> None:
        self.model = model
        self.gates = gates
        self.variant = variant
        self.terms_of_loss: tuple[Term, ...] = () if variant is None else variant.phases()[-1].terms
        self.context = LossContext()
        self.progress = 1.0
        self.adds_terms = True
        self.on_trace: Callable[[RoutingTrace, Inputs], None] | None = None
        self._has_rule = variant is not None and replaces_rule(variant)
        self._rules: dict[str, RoutingRule] = {}
        self._checked: set[str] = set()
        self._local = threading.local()
        self._latest: _Result | None = None
        self._latest_forward: _Forward | None = None
        self._handles: list[Any] = []
        self._add_hooks()

    # The last forward pass

    @property
    def trace(self) -> RoutingTrace:
        """The routing of the last forward pass."""
        return self._result().trace

    @property
    def inputs(self) -> Inputs:
        """What the last forward pass was given."""
        return self._result().inputs

    @property
    def terms(self) -> dict[str, Tensor]:
        """The unweighted value of each term of the variant in the last forward pass, by its symbol."""
        return {symbol: value.detach() for symbol, value in self._result().objective.values.items()}

    @property
    def total(self) -> Tensor:
        """The weighted sum of the terms of the last forward pass, with gradient."""
        return self._result().objective.total

    @property
    def loss(self) -> Tensor:
        """The loss of the last forward pass with the terms; refused if it had no labels."""
        loss = self._result().loss
        if loss is None:
            raise ConfigError("attach: the last forward pass had no labels, so it has no loss; pass labels=….")
        return loss

    def _result(self) -> _Result:
        found: _Result | None = getattr(self._local, "result", None) or self._latest
        if found is None:
            raise ConfigError("attach: there is no finished forward pass; call the model first.")
        return found

    # Attaching and detaching

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        return self  # a copy of the model is not attached: the hooks ignore it

    def detach(self) -> None:
        """Remove every hook. The model is as it was."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.model.__dict__.pop("generate", None)
            if self._own_generate is not None:
                self.model.__dict__["generate"] = self._own_generate
            _attached.discard(self.model)
            self._latest_forward = self._local.last = None
            _forget_compiled_code()
        self._handles = []

    def _add_hooks(self) -> None:
        model = self.model
        self._handles = [
            model.register_forward_pre_hook(_without_compiling(self._begin), with_kwargs=True),
            model.register_forward_hook(_without_compiling(self._finish), with_kwargs=True, always_call=True),
        ]
        for gate in self.gates:
            self._handles.append(gate.module.register_forward_hook(_GateHook(self, gate), prepend=True))
        self._own_generate = model.__dict__.get("generate")
        own: Any = getattr(model, "generate", None)
        if own is not None:
            model.__dict__["generate"] = _Generate(self, own)
        _attached.add(model)
        _forget_compiled_code()

    # Hooks

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(module, "_is_replica", False):
            raise ConfigError("attach: nn.DataParallel is not supported; use DistributedDataParallel.")
        if module is not self.model:
            return
        self._local.result = self._latest = None  # the graph of the last pass is freed before the next one grows
        inputs = Inputs.of(self.model, args, kwargs, getattr(self._local, "prompt_mask", None))
        forward = _Forward(inputs, torch.is_grad_enabled(), None)
        if self._has_rule:
            forward.memory = memory_of(inputs.past, inputs.past_length, len(inputs.mask), self)
            forward.memory.require_continued(inputs.mask.cpu())
            before = forward.memory.seen.to(inputs.mask.device)[:, None]
            forward.position = token_positions(inputs.mask, inputs.doc) + torch.where(inputs.mask, before, 0)
            forward.step = Step.after(forward.memory, inputs.mask.cpu())
        self._local.forward = forward

    def read_gate(self, gate: Gate, args: tuple[Any, ...], output: Any) -> Any:
        """Note what a gate decided; returns its output, changed by the rule if there is one."""
        forward: _Forward | None = getattr(self._local, "forward", None)
        if forward is None:
            return self._outside(gate, output)
        if forward.with_gradient and not torch.is_grad_enabled():
            raise ConfigError(
                "attach: the gates run without gradient, because gradient checkpointing is reentrant; pass "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        if gate.name in forward.readings:
            raise ConfigError(f"attach: {gate.name} ran twice in one forward pass, which is not supported.")
        reading = gate.read(output)
        n, expected = len(reading.logits), forward.inputs.mask.numel()
        if n != expected:
            if gate.optional and n == 0:
                return output
            raise ConfigError(
                f"attach: {gate.name} got {n} tokens, expected the {expected} of the input; only text is supported."
            )
        if gate.name not in self._checked:
            gate.require_score(reading)
            self._checked.add(gate.name)
        if not self._has_rule or routes_by_token(gate):
            forward.readings[gate.name] = reading
            return output
        return self._reroute(gate, forward, reading, output)

    def _reroute(self, gate: Gate, forward: _Forward, reading: Reading, output: Any) -> Any:
        if gate.name not in self._rules:
            assert self.variant is not None
            self._rules[gate.name] = rule_for(self.variant, gate, self.model, reading)
        rule, inputs = current(self._rules[gate.name], gate), forward.inputs
        B, T = inputs.mask.shape
        logits = as_logits(gate, reading.logits.detach()).view(B, T, -1)
        x = RouterInput(logits, tokens=inputs.tokens, position=forward.position, doc=inputs.doc)
        assert forward.step is not None
        state = forward.step.states.get(gate.name)
        routing, changed = route(gate, rule, reading, x, state, self.progress if self.model.training else 1.0)
        written = (*gate.spec.write(gate.inner, changed), *shared_gammas(gate, reading, changed, output))
        forward.readings[gate.name] = gate.read(written)
        forward.routed[gate.name] = routing
        forward.step.given[gate.name] = rule, logits, x
        return written

    def _outside(self, gate: Gate, output: Any) -> Any:
        """A gate ran outside a forward pass: checkpointing recomputes it, or a part of the model was called."""
        if not self._has_rule or routes_by_token(gate):
            return output
        # On a GPU, autograd recomputes in a thread of its own.
        last: _Forward | None = getattr(self._local, "last", None) or self._latest_forward
        if torch._C._current_graph_task_id() == -1:
            raise ConfigError(f"attach: {gate.name} ran outside a forward pass of the model; call the model itself.")
        reading = gate.read(output)
        if last is None or not last.is_repeated(gate.name, as_logits(gate, reading.logits.detach())):
            raise ConfigError(
                "attach: gradient checkpointing recomputes another forward pass than the last; call backward after "
                "each forward pass, or switch checkpointing off."
            )
        forward = _Forward(last.inputs, True, last.memory, last.position, step=last.step)
        return self._reroute(gate, forward, reading, output)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        forward: _Forward | None = getattr(self._local, "forward", None)
        if module is not self.model or forward is None:
            return output
        self._local.forward = None
        if output is None:  # the forward pass raised an error
            return output
        self._require_all(forward)
        trace = self._trace(forward)
        if forward.memory is not None:
            self._remember(forward, output)
        forward.inputs = replace(forward.inputs, past=None)  # what is kept must not keep the KV cache
        result = _Result(trace, forward.inputs, self.terms_of_loss, self.context, self.progress)
        output = self._with_terms(result, output)
        self._local.result = self._latest = result
        if self.on_trace is not None:
            self.on_trace(trace, forward.inputs)
        return output

    def _require_all(self, forward: _Forward) -> None:
        missing = [gate.name for gate in self.gates if gate.name not in forward.readings and not gate.optional]
        if missing:
            raise ConfigError(
                f"attach: {len(missing)} of {len(self.gates)} gates did not run through their module in this forward "
                f"pass, {missing[0]} among them; a kernel from the hub or compiled code replaces it. Switch that off."
            )

    def _trace(self, forward: _Forward) -> RoutingTrace:
        gates = [gate for gate in self.gates if gate.name in forward.readings]
        readings = [forward.readings[gate.name] for gate in gates]
        B, T = forward.inputs.mask.shape
        if len({(r.logits.shape, r.indices.shape) for r in readings}) > 1:
            raise ConfigError("attach: the layers have different numbers of experts, which is not supported.")
        score, routed = gates[0].score, forward.routed
        if routed:
            own = {gate.name: _normalised(score, forward.readings[gate.name].logits) for gate in gates}
            g = torch.stack([routed[name].g if name in routed else g.view(B, T, -1) for name, g in own.items()])
        else:
            g = _normalised(score, torch.stack([r.logits for r in readings])).view(len(gates), B, T, -1)
        return RoutingTrace.from_choice(
            g,
            torch.stack([r.indices for r in readings]).view(len(gates), B, T, -1).long(),
            torch.stack([r.weights for r in readings]).view(len(gates), B, T, -1).to(g.dtype),
            forward.inputs.mask,
            forward.inputs.doc,
            layers=[gate.layer for gate in gates],
            n_null=gates[0].n_null,
        )

    def _remember(self, forward: _Forward, output: Any) -> None:
        """Put the states of the rules into the KV cache."""
        inputs, memory, step = forward.inputs, forward.memory, forward.step
        assert memory is not None
        assert step is not None
        self._local.last = self._latest_forward = forward
        states: dict[str, RouterState] = {name: routing.state for name, routing in forward.routed.items()}
        past = inputs.past if inputs.past is not None else getattr(output, "past_key_values", None)
        memory.add(step, states)
        forward.readings, forward.routed = {}, {}  # a recomputation needs the step alone
        remember(past, memory)

    def _with_terms(self, result: _Result, output: Any) -> Any:
        """Note the loss of a forward pass that has labels, and add the terms to it."""
        loss = _loss_of(output) if result.inputs.labels is not None else None
        result.loss = loss
        if loss is None or not result.terms or not self.adds_terms:
            return output
        result.loss = loss + (result.objective.total * result.inputs.fraction).to(loss)
        if isinstance(output, tuple):
            return (result.loss, *output[1:])
        output.loss = result.loss
        return output

    def prompt_mask(self, mask: Tensor | None) -> None:
        """Remember the mask of a prompt while the model generates."""
        self._local.prompt_mask = mask


def _loss_of(output: Any) -> Tensor | None:
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _normalised(score: Score, logits: Tensor) -> Tensor:
    """g: the family's own score divided by its sum over the classes."""
    p = scores(score, logits)
    return p if score == "softmax" else p / p.sum(-1, keepdim=True)


class _GateHook:
    """The hook on one gate."""

    def __init__(self, attached: Attached, gate: Gate) -> None:
        self.attached = attached
        self.gate = gate
        self._read = _without_compiling(attached.read_gate)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._read(self.gate, args, output) if module is self.gate.module else output

    def __deepcopy__(self, memo: dict[int, Any]) -> _GateHook:
        return self


class _Generate:
    """The model's `generate`, which notes the attention mask of the prompt: a static cache hides it."""

    def __init__(self, attached: Attached, generate: Callable[..., Any]) -> None:
        self.attached = attached
        self.generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.attached.prompt_mask(self._mask(args, kwargs))
        try:
            return self.generate(*args, **kwargs)
        finally:
            self.attached.prompt_mask(None)

    def _mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The mask that was given, or the one that transformers infers from padding tokens."""
        given = kwargs.get("attention_mask")
        if given is not None:
            return given  # type: ignore[no-any-return]
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or self.attached.model.generation_config
        pad = kwargs.get("pad_token_id", config.pad_token_id)
        eos = kwargs.get("eos_token_id", config.eos_token_id)
        ends = eos if isinstance(eos, list) else [eos]
        if not isinstance(ids, Tensor):
            embeds = kwargs.get("inputs_embeds")
            return None if embeds is None else torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        if ids.ndim != 2 or ids.is_floating_point() or pad is None or pad in ends:
            return torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        return ids.ne(pad)


def _without_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hooks run outside compiled code: they have side effects."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _forget_compiled_code() -> None:
    """Compiled code of a model does not notice that hooks were added or removed."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
