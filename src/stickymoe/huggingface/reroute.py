"""`reroute`: what rules that look at a cache cost in perplexity, and what they save in loads, for several strengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from stickymoe.errors import ConfigError, unknown
from stickymoe.huggingface.attached import attach
from stickymoe.huggingface.text import Loaded, Progress, Scored, score_text, sizes_of
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.variants import variant as make_variant

# Each rule with the name of its strength, and the strengths that are tried. Those of max_rank are multiples of k.
RULES: dict[str, tuple[str, tuple[float, ...]]] = {
    "cache_prior": ("strength", (0.1, 0.2, 0.5, 1.0)),
    "max_rank": ("depth", (1.5, 2.0, 3.0, 4.0)),
    "tau_reroute": ("tau", (0.2, 0.4, 0.6, 0.8)),
    "drop_cold": ("share", (0.25, 0.5, 0.75, 1.0)),
}


@dataclass(frozen=True)
class RerouteRow:
    """One rule at one strength: perplexity, and what a cache loads that is empty at the start of every row."""

    rule: str
    strength: float | None
    ppl: float
    miss_rate: float
    loads_per_token: float
    bytes_per_token: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_rules(
    loaded: Loaded,
    rows: list[Int[Tensor, " _"]],
    *,
    slots: int,
    rules: Sequence[str] = tuple(RULES),
    policy: str = "lru",
    batch_size: int = 4,
    progress: Progress | None = None,
) -> list[RerouteRow]:
    """Evaluate a text with the model as it is, then with every rule at every strength."""
    for rule in rules:
        if rule not in RULES:
            raise ConfigError(unknown("rule", rule, RULES))
    sizes = sizes_of(loaded, rows)
    found = [_evaluate(loaded, rows, None, None, slots, policy, batch_size, progress)]
    for rule in rules:
        for strength in strengths(rule, *sizes):
            found.append(_evaluate(loaded, rows, rule, strength, slots, policy, batch_size, progress))
    return found


def strengths(rule: str, top_k: int, n_experts: int) -> list[float]:
    """The strengths that are tried for a model of these sizes."""
    name, values = RULES[rule]
    if name == "depth":
        values = tuple(float(min(int(value * top_k + 0.5), n_experts)) for value in values)
    return sorted(set(values))


def _evaluate(
    loaded: Loaded,
    rows: list[Int[Tensor, " _"]],
    rule: str | None,
    strength: float | None,
    slots: int,
    policy: str,
    batch_size: int,
    progress: Progress | None,
) -> RerouteRow:
    chosen = None
    if rule is not None:
        name = RULES[rule][0]
        value = int(strength or 0) if name == "depth" else strength
        chosen = make_variant(rule, capacity=slots, policy=policy, **{name: value})
    with attach(loaded.model, chosen) as attached:
        attached.terms_of_loss = ()
        scored = score_text(attached, rows, batch_size=batch_size, progress=progress)
    return row_of(rule or "as it is", strength, scored, slots, policy)


def row_of(rule: str, strength: float | None, scored: Scored, slots: int, policy: str = "lru") -> RerouteRow:
    """The loads of the routes of a text. Every row starts cold, as its router did."""
    table = scored.table
    result = simulate(table, capacity=slots, policy=policy, access=Access(order="decode"))
    tokens = int(table.mask.sum())
    assert table.expert_bytes is not None
    return RerouteRow(
        rule=rule,
        strength=strength,
        ppl=scored.ppl,
        miss_rate=result.miss_rate,
        loads_per_token=result.misses / tokens,
        bytes_per_token=result.misses / tokens * sum(table.expert_bytes) / table.n_layers,
    )
