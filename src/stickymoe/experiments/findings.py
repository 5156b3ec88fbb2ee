"""What the runs say: the paper's six observations and the questions it leaves open, each decided by its numbers.

A finding names the rows it needs; where they are missing it is not tested, never guessed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stickymoe.experiments.collection import Group, Row
from stickymoe.experiments.tables import ALL_SLOTS, Figure, capacities

Verdict = Literal["holds", "holds in part", "does not hold", "measured", "not tested"]


@dataclass(frozen=True)
class Finding:
    """A claim or question, what became of it, and the numbers."""

    claim: str
    verdict: Verdict
    text: str


class MissingRowError(Exception):
    """A row that a finding needs is not there."""


_SOFT = "soft-lam{:g}".format
_STICKIEST = "soft_hard-lam0.1-alpha1-window4"


def findings(group: Group) -> list[Finding]:
    """Every finding about one group of runs, the paper's observations first."""
    return [_decided(claim, decide, group) for claim, decide in (*_OBSERVATIONS, *_QUESTIONS)]


def _decided(claim: str, decide: Callable[[Group], tuple[Verdict, str]], group: Group) -> Finding:
    try:
        return Finding(claim, *decide(group))
    except MissingRowError as missing:
        return Finding(claim, "not tested", f"Needs {missing}, which is not among these runs.")


def _row(group: Group, key: str) -> Row:
    row = group.find(key)
    if row is None:
        raise MissingRowError(key)
    return row


def _metric(row: Row, name: str) -> float:
    value = row.mean(name)
    if value is None:
        raise MissingRowError(f"{name} of {row.label}")
    return value


def _change(group: Group, row: Row) -> float:
    value = row.change(_row(group, "vanilla"))
    if value is None:
        raise MissingRowError(f"the perplexity of {row.label}")
    return value.mean


def _percent(group: Group, row: Row) -> str:
    value = row.change(_row(group, "vanilla"))
    assert value is not None
    return f"{Figure(value, '+.1f')} %"


def _named(group: Group, name: str) -> list[Row]:
    """The paper's own rows of a method: those without an ablation's settings."""
    rows = [
        row
        for row in group.complete
        if row.variant.name == name and all(f.metadata.get("always") for f, _ in row.variant.shown())
    ]
    if not rows:
        raise MissingRowError(name)
    return rows


def _low_strength(group: Group) -> tuple[Verdict, str]:
    rows = [_row(group, _SOFT(lam)) for lam in (0.01, 0.05)]
    changes = [_change(group, row) for row in rows]
    strong = [row for lam in (0.2, 0.5) if (row := group.find(_SOFT(lam))) is not None]
    kept = sum(change <= 0.5 for change in changes)
    verdict: Verdict = "holds" if kept == len(rows) else "holds in part" if kept else "does not hold"
    said = ", ".join(f"{row.label} {_percent(group, row)}" for row in [*rows, *strong])
    noise = _row(group, "vanilla").metric("ppl")
    spread = ""
    if noise is not None and noise.sd is not None:
        spread = f" Vanilla's own spread over {noise.n} seeds is {100 * noise.sd / noise.mean:.1f} %."
    return verdict, f"Perplexity against vanilla: {said}; preserved means at most +0.5 % at λ ≤ 0.05.{spread}"


def _switches(group: Group) -> tuple[Verdict, str]:
    base = _metric(_row(group, "vanilla"), "switch_rate")
    row = _row(group, _SOFT(0.5))
    rate = _metric(row, "switch_rate")
    soft = sorted(_named(group, "soft"), key=lambda r: r.variant.lam)  # type: ignore[attr-defined]
    rates = [_metric(r, "switch_rate") for r in soft]
    monotone = all(a >= b for a, b in itertools.pairwise(rates))
    reduction = 1 - rate / base
    verdict: Verdict = (
        "holds" if reduction >= 0.5 and monotone else "holds in part" if reduction >= 0.2 else "does not hold"
    )
    said = " → ".join(f"{r:.3f}" for r in [base, *rates])
    return verdict, (
        f"λ=0.5 switches {reduction:.0%} less than vanilla (the paper: 59 %). Over rising λ: {said}, "
        f"{'monotone' if monotone else 'not monotone'}."
    )


def _post_hoc(group: Group) -> tuple[Verdict, str]:
    base, remoe = _row(group, "vanilla"), _row(group, "remoe-lam0.1")
    reduction = 1 - _metric(remoe, "switch_rate") / _metric(base, "switch_rate")
    verdict: Verdict = "holds" if reduction < 0.02 else "holds in part" if reduction < 0.1 else "does not hold"
    return verdict, (
        f"The gates alone, trained {0.1:.0%} longer, switch {reduction:.1%} less "
        f"({_metric(base, 'switch_rate'):.3f} → {_metric(remoe, 'switch_rate'):.3f}; the paper: under 0.5 %)."
    )


def _hard(group: Group) -> tuple[Verdict, str]:
    windows = [_row(group, f"hard_window-window{W}-beta10") for W in (2, 4, 8)]
    soft = _row(group, _SOFT(0.1))
    rates = [_metric(row, "switch_rate") for row in windows]
    dearer = _change(group, windows[0]) > max(_change(group, soft), 0)
    wider = rates[2] > rates[0]
    verdict: Verdict = "holds" if dearer and wider else "holds in part" if dearer or wider else "does not hold"
    costs = ", ".join(f"{r.label} {_percent(group, r)} at SR {_metric(r, 'switch_rate'):.3f}" for r in [*windows, soft])
    return verdict, f"{costs}. A wider window switches {'more' if wider else 'less'}."


def _anchored(group: Group) -> tuple[Verdict, str]:
    row = _row(group, _STICKIEST)
    others = [r for r in group.routed if r.variant.name in {"vanilla", "soft", "hard_window", "remoe", "oracle"}]
    others = [r for r in others if all(f.metadata.get("always") for f, _ in r.variant.shown())]
    lowest = min([*others, *_named(group, "soft_hard")], key=lambda r: _metric(r, "switch_rate"))
    best = max([*others, *_named(group, "soft_hard")], key=lambda r: _metric(r, "cache_hit_rate"))
    won = (lowest is row) + (best is row)
    verdicts: tuple[Verdict, ...] = ("does not hold", "holds in part", "holds")
    return verdicts[won], (
        f"α=1 has SR {_metric(row, 'switch_rate'):.3f} and CHR {_metric(row, 'cache_hit_rate'):.3f} at "
        f"{_percent(group, row)}. The lowest SR is that of {lowest.label} ({_metric(lowest, 'switch_rate'):.3f}), the "
        f"highest CHR that of {best.label} ({_metric(best, 'cache_hit_rate'):.3f})."
    )


def _used(group: Group) -> tuple[Verdict, str]:
    rows = [*_named(group, "soft"), *_named(group, "soft_hard")]
    least = min(rows, key=lambda r: _metric(r, "utilisation_entropy"))
    bits = math.log2(group.config.model.n_experts)
    entropy = _metric(least, "utilisation_entropy")
    verdict: Verdict = "holds" if entropy >= 0.96 * bits else "does not hold"
    return verdict, (
        f"The least utilisation entropy of soft and soft_hard is {entropy:.3f} of {bits:g} bits ({least.label}; the "
        "paper: above 1.92)."
    )


def _flattered(group: Group) -> tuple[Verdict, str]:
    base = _row(group, "vanilla")
    rows = [row for key in (_SOFT(0.5), _STICKIEST, "oracle") if (row := group.find(key)) is not None]
    if not rows:
        raise MissingRowError(_SOFT(0.5))
    said = []
    for row in rows:
        factors = [(f"top-1 C=2 {_factor(row, base, 'cache_hit_rate')}")]
        factors += [f"all slots C={C} {_factor(row, base, f'{ALL_SLOTS}{C}')}" for C in capacities(group.rows)]
        said.append(f"{row.label}: {', '.join(factors)}")
    return "measured", "Times fewer misses than vanilla. " + "; ".join(said) + "."


def _factor(row: Row, base: Row, hit_rate: str) -> str:
    value = row.fewer_misses(base, hit_rate)
    if value is None:
        raise MissingRowError(f"{hit_rate} of {row.label}")
    return f"{Figure(value, '.2f')}×"


def _uniform(group: Group) -> tuple[Verdict, str]:
    bits = math.log2(group.config.model.n_experts)
    rows = sorted(group.routed, key=lambda r: -_metric(r, "gate_entropy"))
    base = _row(group, "vanilla")
    near = [r for r in rows if _metric(r, "gate_entropy") > 0.99 * bits]
    said = ", ".join(f"{r.label} {_metric(r, 'gate_entropy'):.3f}" for r in rows[:3])
    return "measured", (
        f"Mean gate entropy, of {bits:g} bits: vanilla {_metric(base, 'gate_entropy'):.3f}; highest {said}. "
        f"{len(near)} of {len(rows)} rows have gates within 1 % of uniform"
        + (f" ({', '.join(r.label for r in near)})" if near else "")
        + ", which utilisation entropy cannot see."
    )


def _worth(group: Group) -> tuple[Verdict, str]:
    base, dense = _row(group, "vanilla"), _row(group, "dense")
    gain = 1 - _metric(base, "ppl") / _metric(dense, "ppl")
    text = (
        f"Dense with the same active width: PPL {_metric(dense, 'ppl'):.2f}; vanilla {_metric(base, 'ppl'):.2f}, "
        f"{gain:.1%} lower. "
    )
    if gain <= 0:
        return "measured", text + "Here the mixture is worth nothing, so no share of it can be kept."
    kept = [
        (r, (_metric(dense, "ppl") - _metric(r, "ppl")) / (_metric(dense, "ppl") - _metric(base, "ppl")))
        for r in group.routed
        if r is not base
    ]
    shown = ", ".join(f"{r.label} {share:.0%}" for r, share in kept)
    return "measured", text + f"Share of that gain kept: {shown}."


def _equivalent(group: Group) -> tuple[Verdict, str]:
    said = []
    for C in capacities(group.rows):
        points = [
            (sr, 1 - hit)
            for row in group.routed
            for sr, hit in zip(row.per_layer("switch_rate") or [], row.per_layer(f"{ALL_SLOTS}{C}") or [], strict=True)
        ]
        with contextlib.suppress(statistics.StatisticsError):  # too few points, or all alike
            said.append(f"C={C}: r = {statistics.correlation(*zip(*points, strict=True)):.3f}")
    if not said:
        raise MissingRowError("layers that differ")
    return "measured", f"Correlation of switch rate and all-slots misses over layers and rows: {', '.join(said)}."


def _first_layer(group: Group) -> tuple[Verdict, str]:
    row = _row(group, _SOFT(0.5))
    rates = row.per_layer("switch_rate")
    if rates is None:
        raise MissingRowError(f"the layers of {row.label}")
    verdict: Verdict = "holds" if rates[0] == max(rates) else "does not hold"
    return verdict, f"{row.label}: " + ", ".join(f"L{i} {rate:.3f}" for i, rate in enumerate(rates)) + "."


def _co_adaptation(group: Group) -> tuple[Verdict, str]:
    whole, gate = _row(group, _SOFT(0.5)), _row(group, "soft-lam0.5-gate_only1")
    return "measured", (
        f"With the hidden state detached for L_cons: SR {_metric(gate, 'switch_rate'):.3f} at {_percent(group, gate)}; "
        f"with gradient through it: {_metric(whole, 'switch_rate'):.3f} at {_percent(group, whole)}."
    )


def _without_balance(group: Group) -> tuple[Verdict, str]:
    with_it, without = _row(group, _SOFT(0.5)), _row(group, "soft-mu0-lam0.5")
    return "measured", (
        f"λ=0.5 without L_bal: utilisation entropy {_metric(without, 'utilisation_entropy'):.3f} bits, "
        f"{_metric(without, 'neglected_experts'):g} neglected experts, {_percent(group, without)}; with it "
        f"{_metric(with_it, 'utilisation_entropy'):.3f} bits, {_percent(group, with_it)}."
    )


def _anchor_alone(group: Group) -> tuple[Verdict, str]:
    both, alone = _row(group, _STICKIEST), _row(group, "soft_hard-lam0-alpha1-window4")
    return "measured", (
        f"α=1 with λ=0: SR {_metric(alone, 'switch_rate'):.3f} at {_percent(group, alone)}; with λ=0.1: "
        f"{_metric(both, 'switch_rate'):.3f} at {_percent(group, both)}."
    )


Decision = Callable[[Group], tuple[Verdict, str]]
_OBSERVATIONS: list[tuple[str, Decision]] = [
    ("1. Soft consistency improves or preserves perplexity at low λ", _low_strength),
    ("2. The switch rate falls substantially, smoothly with λ", _switches),
    ("3. Post-hoc router tuning (ReMoE) does not lower the switch rate", _post_hoc),
    ("4. Hard windows are dear, and wider ones no stickier", _hard),
    ("5. Soft-Hard (α=1) is the stickiest of all at moderate cost", _anchored),
    ("6. Expert utilisation is preserved", _used),
]
_QUESTIONS: list[tuple[str, Decision]] = [
    ("Layer 0 resists most", _first_layer),
    ("Does the top-1 hit rate flatter?", _flattered),
    ("Are fewer switches fewer misses?", _equivalent),
    ("Does utilisation entropy hide uniform gates?", _uniform),
    ("What is the mixture worth over a dense model?", _worth),
    ("Is co-adaptation the cause?", _co_adaptation),
    ("Does the balance loss prevent collapse?", _without_balance),
    ("Does the anchor work alone?", _anchor_alone),
]


def overfitting(group: Group) -> Finding | None:
    """Where the corpus was repeated often: does the loss help only because the model overfits?"""
    if group.config.data.fraction == 1:
        return None
    claim = "Is the gain at low λ regularisation?"
    base, soft = group.baseline, group.find(_SOFT(0.1))
    if base is None or soft is None:
        return Finding(claim, "not tested", "Needs vanilla and soft λ=0.1 on the same part of the corpus.")
    said = [
        f"{row.label} ends at PPL {_metric(row, 'ppl'):.2f}, its best was {_metric(row, 'best_ppl'):.2f} "
        f"at step {_metric(row, 'best_step'):.0f}"
        for row in (base, soft)
    ]
    return Finding(claim, "measured", "; ".join(said) + f"; {_percent(group, soft)} at the end.")
