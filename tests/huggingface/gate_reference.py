"""Routing of the Hugging Face families recomputed in float64, from what each gate reads and from its parameters.

Written from the modelling code of transformers 5.22.2. No gate's own result is used: a hook keeps the gate's arguments,
and a rule per family turns them into scores, choice and weights. A rule is data; the few families that do something
unusual add a small function.

All rules share these steps, and every step can be left out:

1. logits from the gate's input;
2. scores: softmax, sigmoid or square root of softplus of the logits;
3. for the choice only: scores plus a bias, then all but the best groups of experts struck out;
4. the k best;
5. their scores, divided by their sum, times a factor.

Families that take the best logits first and the softmax of those afterwards come out the same: softmax keeps the order,
and dividing by the sum over the chosen cancels its denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(NamedTuple):
    """Routing at one gate for n tokens, ordered by sequence and position.

    `g` is the score of all classes divided by its sum, before bias and groups. `S` are the classes chosen. `w` are the
    weights that the experts are given: a factor that the block applies to the experts' sum is not in them. A chosen
    skip class of Zaya is S = N and w = 0 (its gate reports expert 0 with weight 0); a null expert of LongCat is S >= N
    with its true weight. Inkling's `g` has the routed experts only, though its weights are also shared with its shared
    experts.
    """

    name: str
    g: Tensor
    S: Tensor
    w: Tensor


class Call(NamedTuple):
    """A gate, the block around it and the arguments of the gate's one call, in float64 where they are floats."""

    gate: nn.Module
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def x(self) -> Tensor:
        """The input of the gate as [n, hidden size]."""
        return self.args[0].reshape(-1, self.args[0].shape[-1])


class Rule(NamedTuple):
    """How a family routes; strings name attributes of the gate or, failing that, of its block."""

    score: str = "softmax"
    k: str = "top_k"
    bias: str | None = None
    groups: str | None = None  # a group is as good as its best expert ("best") or as its two best ("pair")
    outside: float = float("-inf")  # what the score of an expert outside the best groups becomes
    normalise: bool | str = True
    eps: float = 0.0
    scale: str | float = 1.0
    logits: Callable[[Call], Tensor] | None = None
    choose: Callable[[Call, Rule, Tensor, Tensor], Tensor] | None = None
    weigh: Callable[[Call, Tensor, Tensor, Tensor], Tensor] | None = None


def reference_routing(model: nn.Module, family: str, **inputs: Any) -> list[Layer]:
    """Run the model once and recompute the routing of every gate that was called, in the order of the modules."""
    rule = RULES[family]
    layers = []
    for name, call in _calls(model, inputs):
        logits = (rule.logits or _linear)(call)
        scores = SCORES[_score(call, rule)](logits)
        S = (rule.choose or _choose)(call, rule, logits, scores)
        w = rule.weigh(call, logits, scores, S) if rule.weigh else _weigh(call, rule, scores, S)
        layers.append(Layer(name, scores / scores.sum(-1, keepdim=True), S, w))
    return layers


def gates(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """List (name, gate, block) of all gates of feed-forward experts."""
    found = []
    for name, block in model.named_modules():
        children = dict(block.named_children())
        holds_experts = "experts" in children or "input_linear" in children
        if not holds_experts or "attention" in name:  # JetMoE routes its attention heads, too
            continue
        prefix = f"{name}." if name else ""
        found += [(f"{prefix}{child}", children[child], block) for child in ("gate", "router") if child in children]
    return found


# --- capture


def _calls(model: nn.Module, inputs: dict[str, Any]) -> list[tuple[str, Call]]:
    """Run the model and give, for every gate that was called, its arguments in float64."""
    seen: dict[str, Call] = {}
    handles = []
    for name, gate, block in gates(model):

        def keep(gate: nn.Module, args: Any, kwargs: Any, name: str = name, block: nn.Module = block) -> None:
            if name in seen:
                raise RuntimeError(f"the gate {name} was called twice in one forward pass")
            copied = {key: _double(value) for key, value in kwargs.items()}
            seen[name] = Call(gate, block, tuple(_double(value) for value in args), copied)

        handles.append(gate.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [(name, seen[name]) for name, _, _ in gates(model) if name in seen]


def _double(value: Any) -> Any:
    """Copy a tensor, in float64 if it holds floats; leave anything else alone."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().double() if value.is_floating_point() else value.detach().clone()


def _attribute(call: Call, name: str) -> Any:
    """Read an attribute of the gate, or of its block; dots reach into children."""
    for owner in (call.gate, call.block):
        value: Any = owner
        for part in name.split("."):
            value = getattr(value, part, _MISSING)
        if value is not _MISSING:
            return value.detach().double() if isinstance(value, Tensor) else value
    raise AttributeError(f"neither gate nor block has {name}")


_MISSING = object()

# --- logits and scores


def _linear(call: Call) -> Tensor:
    """Multiply the input by the gate's matrix, which is its own or that of a linear layer inside it."""
    gate = call.gate
    layer = next((getattr(gate, name) for name in ("wg", "classifier", "gate", "layer") if hasattr(gate, name)), gate)
    return call.x @ layer.weight.detach().double().T


def _linear_with_bias(call: Call) -> Tensor:
    """Multiply by the gate's matrix and add the bias that belongs to it."""
    return _linear(call) + _attribute(call, "bias")


def _multiplied(call: Call) -> Tensor:
    """Muse Spark scales its logits down."""
    return _linear(call) * call.gate.output_multiplier


def _softcapped(call: Call) -> Tensor:
    """Laguna keeps logits within a cap, if it has one."""
    cap = call.gate.router_logit_softcapping
    return torch.tanh(_linear(call) / cap) * cap if cap > 0 else _linear(call)


def _inkling_logits(call: Call) -> Tensor:
    """Leave the shared experts' logits, the last ones, out."""
    return _linear(call)[:, : call.gate.num_experts]


def _gemma_logits(call: Call) -> Tensor:
    """Gemma divides the input by its root mean square and scales it before the projection."""
    x = call.x / (call.x.square().mean(-1, keepdim=True) + call.gate.eps).sqrt()
    x = x * call.gate.scale.detach().double() * call.x.shape[-1] ** -0.5
    return x @ call.gate.proj.weight.detach().double().T


def _zaya_logits(call: Call) -> Tensor:
    """Zaya's gate is a small network that also reads the state of the gate below."""
    gate, mlp = call.gate, call.gate.router_mlp
    h = _layer(gate.down_proj, call.x)
    below = call.kwargs.get("router_states", call.args[1] if len(call.args) > 1 else None)
    if gate.use_eda and below is not None:
        h = h + below.reshape(-1, below.shape[-1]) * gate.router_states_scale.detach().double()
    h = h / (h.square().mean(-1, keepdim=True) + mlp.norm.variance_epsilon).sqrt() * mlp.norm.weight.detach().double()
    return _layer(mlp.out_proj, F.gelu(_layer(mlp.fc2, F.gelu(_layer(mlp.fc1, h)))))


def _layer(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer in float64."""
    y = x @ linear.weight.detach().double().T
    return y if linear.bias is None else y + linear.bias.detach().double()


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def _score(call: Call, rule: Rule) -> str:
    """Name the scoring function; two families have it in their configuration."""
    return getattr(call.gate, rule.score, rule.score)


# --- choice


def _choose(call: Call, rule: Rule, logits: Tensor, scores: Tensor) -> Tensor:
    """Take the k best of the biased scores within the best groups."""
    if rule.bias is not None:
        scores = scores + _attribute(call, rule.bias).reshape(-1)
    return _within_groups(call, rule, scores).topk(_attribute(call, rule.k)).indices


def _within_groups(call: Call, rule: Rule, scores: Tensor) -> Tensor:
    """Strike out the experts of all but the best groups."""
    count = getattr(call.gate, "num_group", None)
    if rule.groups is None or count is None or getattr(call.gate, "topk_method", None) == "greedy":
        return scores
    grouped = scores.unflatten(-1, (count, -1))
    value = grouped.amax(-1) if rule.groups == "best" else grouped.topk(2).values.sum(-1)
    best = value.topk(call.gate.topk_group).indices
    allowed = torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~allowed[..., None], rule.outside).flatten(1)


def _choose_by_biased_logits(call: Call, rule: Rule, logits: Tensor, scores: Tensor) -> Tensor:
    """Kolibri adds its bias to the logits, not to the scores."""
    return _choose(call, rule, logits, logits)


def _choose_by_token(call: Call, rule: Rule, logits: Tensor, scores: Tensor) -> Tensor:
    """DeepSeek-V4's hash layers look the experts up by the token; its other layers choose as usual."""
    if not hasattr(call.gate, "tid2eid"):
        return _choose(call, rule, logits, scores)
    ids = call.kwargs.get("input_ids", call.args[1] if len(call.args) > 1 else None)
    return call.gate.tid2eid[ids.reshape(-1)].long()


# --- weights


def _weigh(call: Call, rule: Rule, scores: Tensor, S: Tensor) -> Tensor:
    """Take the scores of the chosen, divide by their sum if the family does, and scale."""
    w = scores.gather(1, S)
    if _attribute(call, rule.normalise) if isinstance(rule.normalise, str) else rule.normalise:
        w = w / (w.sum(-1, keepdim=True) + rule.eps)
    return w * (_attribute(call, rule.scale) if isinstance(rule.scale, str) else rule.scale)


def _weigh_divided_by_k(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """OpenAI's privacy filter divides by k here, and its block multiplies by k."""
    return _weigh(call, Rule(), scores, S) / call.gate.top_k


def _weigh_ernie(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Ernie divides by the sum, but not by less than a bound."""
    w = scores.gather(1, S)
    return w / w.sum(-1, keepdim=True).clamp(min=call.gate.norm_min)


def _weigh_cohere(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Cohere always normalises softmax, and sigmoid if told to."""
    always = call.gate.expert_selection_fn == "softmax"
    return _weigh(call, Rule(normalise=always or call.gate.norm_topk_prob), scores, S)


def _weigh_inkling(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Inkling shares one unit of weight among the chosen and the shared experts, and scales it."""
    shared = torch.sigmoid(_linear(call)[:, call.gate.num_experts :]).sum(-1, keepdim=True)
    w = scores.gather(1, S)
    return w / (w.sum(-1, keepdim=True) + shared) * call.gate.route_scale * _attribute(call, "global_scale")


def _weigh_gemma(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Gemma normalises and then scales every expert by its own number."""
    return _weigh(call, Rule(), scores, S) * _attribute(call, "per_expert_scale")[S]


def _weigh_zaya(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Zaya does not normalise, and its skip class weighs nothing."""
    return scores.gather(1, S).masked_fill(call.gate.num_experts == S, 0.0)


def _weigh_phimoe(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """Phi's two experts each get a softmax of their own, over the logits that come close to the winner's."""
    weights = []
    remaining = logits
    for chosen in S.split(1, dim=1):
        best = logits.gather(1, chosen)
        near = (best - logits) / torch.maximum(logits.abs(), best) <= 2 * call.gate.router_jitter_noise
        weights.append(remaining.masked_fill(~near, float("-inf")).softmax(-1).gather(1, chosen))
        remaining = remaining.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, 1)


def _weigh_dbrx(call: Call, logits: Tensor, scores: Tensor, S: Tensor) -> Tensor:
    """DBRX divides by a norm of its own choice, if any."""
    w = scores.gather(1, S)
    p = call.block.moe_normalize_expert_weights
    return w if p is None else w / torch.linalg.vector_norm(w, ord=p, dim=-1, keepdim=True)


# --- families

_OPTIONAL = Rule(normalise="norm_topk_prob")
_NORMALISED = Rule()
_DEEPSEEK_V2 = Rule(groups="best", outside=0.0, normalise=False, scale="routed_scaling_factor")
_MISTRAL = Rule(groups="pair", outside=0.0, eps=1e-20, scale="routed_scaling_factor")
_ERNIE = Rule(bias="moe_statics.e_score_correction_bias", weigh=_weigh_ernie)
_DEEPSEEK_V3 = Rule(
    score="sigmoid",
    bias="e_score_correction_bias",
    groups="pair",
    normalise="norm_topk_prob",
    eps=1e-20,
    scale="routed_scaling_factor",
)
_SIGMOID = Rule(score="sigmoid", bias="e_score_correction_bias")
_GEMMA = Rule(k="config.top_k_experts", logits=_gemma_logits, weigh=_weigh_gemma)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("olmoe", "flex_olmo", "mellum", "qwen2_moe", "qwen3_moe", "qwen3_next"), _OPTIONAL),
    **dict.fromkeys(("qwen4_exp", "qwen3_omni_moe"), _OPTIONAL),
    **dict.fromkeys(("mixtral", "minimax", "qwen3_vl_moe", "qwen3_5_moe", "hunyuan_v1_moe"), _NORMALISED),
    **dict.fromkeys(("aria", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _NORMALISED),
    "jamba": Rule(normalise=False),
    "jetmoe": _NORMALISED,
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2", "unlimited_ocr"), _DEEPSEEK_V2),
    "mistral4": _MISTRAL._replace(normalise="norm_topk_prob"),
    "mistral_large4": _MISTRAL,
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), _ERNIE),
    "longcat_flash": Rule(bias="e_score_correction_bias", normalise=False, scale="routed_scaling_factor"),
    "gpt_oss": Rule(logits=_linear_with_bias),
    "openai_privacy_filter": Rule(logits=_linear_with_bias, weigh=_weigh_divided_by_k),
    "cohere2_moe": Rule(score="expert_selection_fn", weigh=_weigh_cohere),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "axk1", "bailing_hybrid", "dots1", "exaone_moe"), _DEEPSEEK_V3),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "hy_v4"), _DEEPSEEK_V3),
    **dict.fromkeys(("kimi_linear", "solar_open", "nemotron_h", "mimo_v2_flash"), _DEEPSEEK_V3),
    "axk2": _DEEPSEEK_V3._replace(outside=0.0),
    "beam": _DEEPSEEK_V3._replace(scale=1.0),
    **dict.fromkeys(("minimax_m3_vl", "step3p7", "minimax_m2"), _SIGMOID),
    "muse_spark": _SIGMOID._replace(logits=_multiplied, eps=1e-15, scale="routed_scaling_factor"),
    "laguna": _SIGMOID._replace(logits=_softcapped),
    "afmoe": Rule(score="sigmoid", bias="expert_bias", eps=1e-20, scale="route_scale"),
    "hy_v3": _SIGMOID._replace(eps=1e-20, scale="router_scaling_factor"),
    "lfm2_moe": Rule(
        score="sigmoid",
        bias="expert_bias",
        normalise="norm_topk_prob",
        eps=1e-6,
        scale="routed_scaling_factor",
    ),
    "kolibri1": _SIGMOID._replace(choose=_choose_by_biased_logits, normalise="norm_topk_prob"),
    "flint": Rule(score="sigmoid", normalise="norm_topk_prob"),
    "inkling": _SIGMOID._replace(logits=_inkling_logits, weigh=_weigh_inkling),
    "deepseek_v4": Rule(
        score="sqrtsoftplus",
        bias="e_score_correction_bias",
        eps=1e-20,
        scale="routed_scaling_factor",
        choose=_choose_by_token,
    ),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), _GEMMA),
    "zaya": Rule(bias="balancing_biases", logits=_zaya_logits, weigh=_weigh_zaya),
    "phimoe": Rule(weigh=_weigh_phimoe),
    "dbrx": Rule(weigh=_weigh_dbrx),
    "llama4": Rule(score="sigmoid", normalise=False),
}
