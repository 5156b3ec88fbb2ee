"""Routing rules on the gates of any family: a variant's filter, choice and skip in place of the family's own top-k.

The scores, the selection bias, the group limits and the scale of the combine weights stay the family's. Before a rule
is used, the family's own choice is recomputed in the same way and compared with what the gate did.

B sequences, T tokens, N experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from stickymoe.errors import ConfigError
from stickymoe.huggingface.families import Reading, Score, scores
from stickymoe.huggingface.gates import Gate
from stickymoe.routing.rules import ChoiceInput, RouterInput, RouterState, Routing, RoutingRule, Scoring, TopK
from stickymoe.variants import Site, Variant
from stickymoe.variants.compose import Combined

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
_AGREEMENT = 0.98  # of the tokens; rounding in half precision makes near ties differ


@dataclass(frozen=True)
class GateScoring(Scoring):
    """The scoring of a foreign gate."""

    of: Score = "softmax"
    bias_on_logits: bool = False

    @property
    def plain(self) -> bool:
        return False

    def scores(self, logits: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        return logits.softmax(-1) if self.of == "probabilities" else scores(self.of, logits)

    def normalised(self, p: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        return p / p.sum(-1, keepdim=True)

    def ranking(self, p: Float[Tensor, "B T N"]) -> Float[Tensor, "B T N"]:
        return super().ranking(p.logit() if self.bias_on_logits else p)

    def weights(self, p: Float[Tensor, "B T N"], S: Int[Tensor, "B T k"]) -> Float[Tensor, "B T k"]:
        return p.gather(-1, S)


def parts_of(variant: Variant) -> Iterator[Variant]:
    return iter(variant.combined) if isinstance(variant, Combined) else iter((variant,))


def replaces_rule(variant: Variant) -> bool:
    """Whether a variant changes how experts are chosen, in addition to its loss terms."""
    names = ("filter", "choice", "skip")
    return any(getattr(type(part), name) is not getattr(Variant, name) for part in parts_of(variant) for name in names)


def require_attachable(variant: Variant, gates: list[Gate]) -> None:
    """Refuse variants that need what a foreign model lacks."""
    for part in parts_of(variant):
        for problem, found in (
            ("it is a model without experts", not part.routes),
            ("its gate reads the attended values, which a foreign gate does not", part.source != "h"),
            ("it ties the weights of experts", part.ties() is not None),
            ("it gives experts other weights", part.deltas() is not None),
            ("it adds a part beside the experts", type(part).side is not Variant.side),
            ("it computes the gates twice; freeze the other parameters instead", part.needs_gate_only()),
            ("transformers models do not mark where sentences begin", part.name == "boundary"),
        ):
            if found:
                raise ConfigError(f"attach: variant '{part.name}' does not fit a transformers model: {problem}.")
    if not replaces_rule(variant):
        return
    rule = variant.parts(Site(0, 1, 2, 1, 2)).rule
    assert rule is not None
    if rule.filter.gates != 1 or isinstance(rule.filter, nn.Module):
        problem = "its router has weights of its own, which this model was not trained with"
        raise ConfigError(f"attach: variant '{variant.name}' does not fit a transformers model: {problem}.")
    for gate in gates:
        if gate.spec.fixed_choice is not None:
            raise ConfigError(_no_rule(variant, gate, gate.spec.fixed_choice))


def _no_rule(variant: Variant, gate: Gate, reason: str) -> str:
    return (
        f"attach: variant '{variant.name}' replaces the choice of experts, which the family {gate.family} does not "
        f"allow: {reason}. Expected a variant of loss terms alone, such as soft."
    )


def rule_for(variant: Variant, gate: Gate, model: PreTrainedModel, reading: Reading) -> RoutingRule:
    """The rule of a variant for one gate; refused if the gate's own choice cannot be reproduced."""
    N, k = reading.logits.shape[-1], reading.indices.shape[-1]
    n_null = gate.n_null
    if n_null and "capacity" in variant.settings():
        raise ConfigError(_no_rule(variant, gate, f"{n_null} of its {N} classes are no experts and take no slot"))
    variant.require_fit(n_layers=model.config.get_text_config().num_hidden_layers, n_experts=N, top_k=k)
    scoring = _scoring(gate)
    logits = as_logits(gate, reading.logits.detach())[None]
    _, S, _ = TopK()(ChoiceInput(logits, k, scoring), RouterInput(logits), RouterState())
    if gate.spec.weigh is None:
        _require_top_k(variant, gate, S[0], reading)
    text = model.config.get_text_config()
    rule = variant.parts(Site(gate.layer, text.hidden_size, N, k, text.vocab_size)).rule
    assert rule is not None
    return replace(rule, scoring=scoring)


def _require_top_k(variant: Variant, gate: Gate, S: Int[Tensor, "n k"], reading: Reading) -> None:
    """Refuse a gate whose own choice is not `S`, the experts with the highest scores."""
    same = (S.sort(-1).values == reading.indices.sort(-1).values).all(-1).float().mean()
    if float(same) < _AGREEMENT:
        raise ConfigError(_no_rule(variant, gate, f"{gate.name} does not choose the experts with the highest scores"))


def _scoring(gate: Gate) -> GateScoring:
    groups: dict[str, Any] = {}
    holders = [gate.inner, gate.block]
    n_groups = _first(holders, "num_group", "n_group", "n_groups") or 1
    kept = _first(holders, "topk_group") or n_groups
    limited = _first(holders, "topk_method") in (None, "group_limited_greedy", "noaux_tc")
    if n_groups > 1 and limited:
        groups = {"groups": n_groups, "groups_kept": kept}
        groups["group_score"] = "max" if _first(holders, "topk_method") == "group_limited_greedy" else "top2"
    return GateScoring(
        bias=_bias(gate),
        renormalise=False,
        of=gate.score,
        bias_on_logits=gate.spec.bias_on == "logits",
        **groups,
    )


def routes_by_token(gate: Gate) -> bool:
    """Whether a table of token ids decides the experts of a gate; rules leave such a layer as it is."""
    return hasattr(gate.inner, "tid2eid")


def _first(holders: list[nn.Module], *names: str) -> Any:
    return next((getattr(h, name) for h in holders for name in names if getattr(h, name, None) is not None), None)


def _bias(gate: Gate) -> Tensor | None:
    """The selection bias of a gate, on itself, on its statistics or on its block."""
    holders = [gate.inner, getattr(gate.inner, "moe_statics", gate.inner), gate.block]
    found = _first(holders, *SELECTION_BIASES)
    return None if found is None else found.detach().float().flatten()


def current(rule: RoutingRule, gate: Gate) -> RoutingRule:
    """The rule with the gate's selection bias as it is now: training may update it."""
    if rule.scoring.bias is None:
        return rule
    return replace(rule, scoring=replace(rule.scoring, bias=_bias(gate)))


def as_logits(gate: Gate, logits: Tensor) -> Tensor:
    """What a gate returns as logits in fp32 or wider; a family that returns probabilities gets their logarithms."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.clamp(min=torch.finfo(logits.dtype).tiny).log() if gate.spec.score == "probabilities" else logits


def route(
    gate: Gate, rule: RoutingRule, reading: Reading, x: RouterInput, state: RouterState | None, progress: float
) -> tuple[Routing, Reading]:
    """Apply a rule to the logits of a gate. Returns the routing, and the choice that replaces the gate's own."""
    B, T = x.h.shape[:2]
    logits = as_logits(gate, reading.logits)
    routing = rule(logits.view(B, T, -1), x, state, progress)
    S = routing.S.flatten(0, 1)
    chosen = routing.w.flatten(0, 1)
    if gate.spec.weigh is None:
        w = _scaled(gate, chosen, scores_at(gate, reading), reading)
    else:  # a skipped expert has the score 0
        w = gate.spec.weigh(gate.inner, logits, S) * (chosen > 0)
    factor = getattr(gate.inner, "per_expert_scale", None)
    if factor is not None:
        w = w * factor[S]
    w = w.to(reading.weights.dtype)
    return replace(routing, w=w.view(B, T, -1)), Reading(reading.logits, w, S.to(reading.indices.dtype))


def scores_at(gate: Gate, reading: Reading) -> Float[Tensor, "n k"]:
    """The scores of the experts that the gate chose itself."""
    return scores(gate.score, reading.logits.detach()).gather(-1, reading.indices)


def _scaled(gate: Gate, chosen: Tensor, before: Tensor, reading: Reading) -> Tensor:
    """The scores of the chosen experts as combine weights, normalised and scaled as the gate did with its own."""
    total = gate.unscaled(reading.weights.detach().float(), reading.indices).sum(-1, keepdim=True)
    shared = _shared_score(gate, before, total)
    if shared is not None:
        scale, others = shared
        return chosen * scale / (chosen.sum(-1, keepdim=True) + others)
    if _normalises(gate):
        return chosen * total / chosen.sum(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).tiny)
    ratio = total / before.sum(-1, keepdim=True).clamp(min=torch.finfo(before.dtype).tiny)
    return chosen * torch.where(total == 0, 1.0, ratio)


def _shared_score(gate: Gate, before: Tensor, total: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where shared experts are normalised together with the chosen ones: the scale, and the sum of their scores."""
    if gate.family != "inkling":
        return None
    scale = gate.inner.route_scale * gate.inner.global_scale.detach()  # type: ignore[operator]
    return scale, scale * before.sum(-1, keepdim=True) / total - before.sum(-1, keepdim=True)


def _normalises(gate: Gate) -> bool:
    """Whether combine weights are divided by their sum: the gate's own flag, or the table of families."""
    if callable(gate.spec.normalised):
        return gate.spec.normalised(gate.inner)
    flag = _first([gate.inner, gate.block], "norm_topk_prob", "route_norm")
    return gate.spec.normalised if flag is None else bool(flag)


def shared_gammas(gate: Gate, before: Reading, after: Reading, output: Any) -> tuple[Any, ...]:
    """What a gate returns beside its choice; weights of shared experts follow the scale of the changed choice."""
    if gate.family != "inkling":
        return tuple(output[3:])
    unscaled = scores_at(gate, before).sum(-1, keepdim=True) / before.weights.detach().sum(-1, keepdim=True)
    now = after.weights.detach().sum(-1, keepdim=True) / scores_at(gate, after).sum(-1, keepdim=True)
    return (output[3] * (unscaled * now).to(output[3].dtype), *output[4:])
