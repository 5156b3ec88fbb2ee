"""The supported model families of transformers: how each gate scores, and how its output is read.

A family is a folder of `transformers.models`. Most gates return (logits, weights, indices); a family that differs has a
`read` function. `score` turns logits into the scores that combine weights come from, before selection bias and group
limits. The table is data, and every attached model is checked against it on its first forward pass.

n tokens, N classes, k experts per token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "probabilities"]


class Reading(NamedTuple):
    """What a gate decided: its logits, and the chosen experts with their combine weights, in any order."""

    logits: Float[Tensor, "n N"]
    weights: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]


Read = Callable[[nn.Module, nn.Module, Any], Reading]  # gate, block, what the gate returned


def _read_tuple(gate: nn.Module, block: nn.Module, output: Any) -> Reading:
    return Reading(*output[:3])


def _read_dbrx(gate: Any, block: Any, output: Any) -> Reading:
    """The gate returns logits only; the block chooses."""
    weights, indices = block.route_tokens_to_experts(output)
    return Reading(output, weights, indices)


def _read_llama4(gate: Any, block: nn.Module, output: Any) -> Reading:
    """The gate returns the sigmoid of the chosen logits, 0 elsewhere, and the logits."""
    scores, logits = output
    indices = logits.detach().topk(gate.top_k, dim=-1).indices
    return Reading(logits, scores.gather(-1, indices), indices)


def _read_jetmoe(gate: Any, block: nn.Module, output: Any) -> Reading:
    """The gate returns rows sorted by expert, and the logits."""
    logits = output[4]
    top, indices = logits.topk(gate.top_k, dim=-1)
    return Reading(logits, top.softmax(-1), indices)


def _read_zaya(gate: Any, block: nn.Module, output: Any) -> Reading:
    """Where a token skips its expert, the gate returns expert 0 with weight 0; the last class stands for it."""
    logits, weights, indices = output[:3]
    return Reading(logits, weights, torch.where(weights == 0, gate.num_experts, indices))


def _write_tuple(gate: Any, changed: Reading) -> Reading:
    return changed


def _write_zaya(gate: Any, changed: Reading) -> Reading:
    """The reverse of `_read_zaya`."""
    skipped = changed.indices == gate.num_experts
    return Reading(changed.logits, changed.weights.masked_fill(skipped, 0), changed.indices.masked_fill(skipped, 0))


def _sparse_mixer(gate: Any, logits: Float[Tensor, "n N"], S: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Each expert's softmax among those not chosen before it whose logits are near their highest."""
    weights, left = [], logits
    for expert in S.unbind(-1):
        highest = left.amax(-1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > 2 * gate.router_jitter_noise
        chosen = nn.functional.one_hot(expert, logits.shape[-1]).bool()
        near = left.masked_fill(far & ~chosen, -torch.inf)
        weights.append(near.softmax(-1).gather(-1, expert[:, None]))
        left = left.masked_fill(chosen, -torch.inf)
    return torch.cat(weights, -1)


def _no_nulls(gate: Any) -> int:
    return 0


@dataclass(frozen=True)
class Family:
    """How the gates of a family work.

    score: what turns logits into scores; a function of the gate where its config decides
    read: how the gate's output is read
    n_null: classes at the end that are no experts
    proportional: the combine weights are proportional to the scores of the chosen experts
    write: how a changed choice is returned
    weigh: the combine weights of any choice, heaviest first, where they are not proportional to the scores
    fixed_choice: why no other choice of experts can be made; None where it can
    normalised: the combine weights are divided by their sum over the chosen experts; a gate's own `norm_topk_prob`
        overrides a constant
    bias_on: what the selection bias, if there is one, is added to
    """

    score: Score | Callable[[Any], Score] = "softmax"
    read: Read = _read_tuple
    n_null: Callable[[Any], int] = _no_nulls
    proportional: bool = True
    write: Callable[[Any, Reading], Reading] = _write_tuple
    weigh: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    fixed_choice: str | None = None
    normalised: bool | Callable[[Any], bool] = True
    bias_on: Literal["scores", "logits"] = "scores"

    def score_of(self, gate: nn.Module) -> Score:
        return self.score if isinstance(self.score, str) else self.score(gate)


_NOT_REACHED = "what its gates return does not decide which experts are used"
_SOFTMAX = Family()
_UNNORMALISED = Family(normalised=False)
_SIGMOID = Family(score="sigmoid")
_PROBABILITIES = Family(score="probabilities")


def _all(family: Family, *names: str) -> dict[str, Family]:
    """The same entry for several families."""
    return {name: family for line in names for name in line.split()}


FAMILIES: dict[str, Family] = {
    # softmax → top-k, and top-k → softmax, which is the same where weights are normalised
    **_all(
        _SOFTMAX,
        "olmoe flex_olmo mellum qwen2_moe qwen3_moe qwen3_next qwen4_exp qwen3_omni_moe mixtral minimax qwen3_vl_moe",
        "qwen3_5_moe hunyuan_v1_moe mistral4 mistral_large4 ernie4_5_moe gpt_oss openai_privacy_filter aria",
        "granitemoe granitemoe_swa granitemoehybrid granitemoeshared",
    ),
    **_all(_UNNORMALISED, "jamba deepseek_v2 deepseek_ocr2 unlimited_ocr"),
    "longcat_flash": Family(normalised=False, n_null=lambda gate: gate.n_routed_experts - gate.num_experts),
    "cohere2_moe": Family(
        score=lambda gate: gate.expert_selection_fn,
        normalised=lambda gate: gate.expert_selection_fn == "softmax" or gate.norm_topk_prob,
    ),
    # sigmoid, most of them with a selection bias and group limits
    **_all(
        _SIGMOID,
        "deepseek_v3 deepseek_v32 axk1 axk2 bailing_hybrid dots1 exaone_moe glm4_moe glm4_moe_lite glm4v_moe glm5_next",
        "glm_moe_dsa hy_v4 kimi_linear solar_open nemotron_h beam mimo_v2_flash minimax_m3_vl step3p7 muse_spark",
        "laguna afmoe hy_v3 minimax_m2 lfm2_moe flint inkling",
    ),
    "kolibri1": Family(score="sigmoid", bias_on="logits"),
    "deepseek_v4": Family(score="sqrt_softplus"),
    "gemma4": _PROBABILITIES,
    "diffusion_gemma": _PROBABILITIES,
    # families whose gates return something else
    "zaya": Family(read=_read_zaya, write=_write_zaya, n_null=lambda gate: 1, normalised=False),
    "phimoe": Family(proportional=False, weigh=_sparse_mixer),
    "ernie4_5_vl_moe": _SOFTMAX,
    "dbrx": Family(read=_read_dbrx, fixed_choice=_NOT_REACHED),
    "llama4": Family(score="sigmoid", read=_read_llama4, normalised=False, fixed_choice=_NOT_REACHED),
    "jetmoe": Family(read=_read_jetmoe, fixed_choice=_NOT_REACHED),
}

# Families with experts that cannot be attached, and why.
REFUSED = {
    "doge": "its experts are addressed by product keys, and no module chooses them",
    "nllb_moe": "it is an encoder and a decoder that drop tokens over a capacity",
    "switch_transformers": "it is an encoder and a decoder that drop tokens over a capacity",
}


@cache
def supported_families() -> tuple[str, ...]:
    """The supported families that the installed version of transformers has."""
    return tuple(name for name in sorted(FAMILIES) if importlib.util.find_spec(f"transformers.models.{name}"))


def scores(score: Score, logits: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
    """The scores that combine weights are proportional to, in fp32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrt_softplus":
        return nn.functional.softplus(logits).sqrt()
    return logits
