"""Findings: the six observations of the paper and its open questions, each decided by the numbers of the runs.

A finding is "not tested" if a row that it needs is missing. Rows are compared over their common seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from stickymoe.paper.frontier import kept_gain
from stickymoe.reports.collection import Group, Row, Value
from stickymoe.reports.tables import ALL_SLOTS, Number, capacities
from stickymoe.runs.presets import PRESETS

Verdict = Literal["holds", "holds in part", "does not hold", "measured", "not tested"]
Decision = tuple[Verdict, str]


@dataclass(frozen=True)
class Finding:
    """A claim or question, the verdict, and the numbers behind it."""

    claim: str
    verdict: Verdict
    text: str


class MissingRowError(Exception):
    """A row that a finding needs is missing."""


_SOFT = "soft-lam{:g}".format
_STICKIEST = "soft_hard-lam0.1-alpha1-window4"
# A perplexity at most this many per cent above the baseline counts as preserved.
_PRESERVED = 0.5


def findings(group: Group, others: Sequence[Group] = ()) -> list[Finding]:
    """All findings about a group; the observations of the paper come first. `others` are groups to compare with."""
    found = [_decided(claim, partial(decide, group)) for claim, decide in (*_OBSERVATIONS, *_QUESTIONS)]
    if group.config.data.fraction < 1:
        claim = "Does the loss act as a regulariser?"
        found.insert(0, _decided(claim, partial(_overfitting, group, others)))
    return found


def scope(group: Group) -> str:
    """How far the runs are from those of the paper."""
    steps, papers = group.config.train.steps, PRESETS["paper-small"]["train"]["steps"]
    shorter = f"; the paper trains for {papers:,} steps" if steps != papers else ""
    return f"The verdicts hold for runs of {steps:,} steps{shorter}. The thresholds are ours."


def summary(found: Sequence[Finding]) -> str:
    """The verdicts on the observations of the paper, by number; empty if none was tested."""
    claims = {claim for claim, _ in _OBSERVATIONS}
    by_verdict: dict[Verdict, list[str]] = {}
    for finding in found:
        if finding.claim in claims:
            by_verdict.setdefault(finding.verdict, []).append(finding.claim.partition(".")[0])
    verdicts = [
        f"{verdict}: {', '.join(by_verdict[verdict])}" for verdict in get_args(Verdict) if verdict in by_verdict
    ]
    return "" if set(by_verdict) <= {"not tested"} else f"The six observations of the paper: {' · '.join(verdicts)}."


def _decided(claim: str, decide: Callable[[], Decision]) -> Finding:
    try:
        return Finding(claim, *decide())
    except MissingRowError as missing:
        return Finding(claim, "not tested", f"This needs {missing}, which is not among the runs.")


def _row(group: Group, key: str, *, grid: str | None = None) -> Row:
    row = group.find(key)
    if row is None:
        raise MissingRowError(f"{key} (from stickymoe sweep {grid})" if grid else key)
    return row


def _measured(value: Value | None, what: str) -> Value:
    if value is None:
        raise MissingRowError(what)
    return value


def _metric(row: Row, name: str) -> float:
    return _measured(row.metric(name), f"{name} of {row.label}").mean


def _change(group: Group, row: Row) -> Value:
    """Change of perplexity relative to vanilla, in per cent."""
    return _measured(row.change(_row(group, "vanilla")), f"a common seed of vanilla and {row.label}")


def _percent(group: Group, row: Row) -> str:
    return f"{Number(_change(group, row), '+.1f')} %"


def _reduction(row: Row, base: Row, metric: str = "switch_rate") -> float:
    """By which fraction a rate is lower than that of the baseline."""
    value = row.against(base, metric, lambda ours, theirs: 1 - ours / theirs if theirs else 0.0)
    return _measured(value, f"a common seed of {base.label} and {row.label} with {metric}").mean


def _less(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def _of_method(group: Group, *names: str) -> list[Row]:
    """The rows of some variants, without ablations."""
    rows = [row for row in group.routed if row.variant.name in names and not row.ablation]
    if not rows:
        raise MissingRowError(" or ".join(names))
    return rows


def _layers(row: Row) -> list[float]:
    rates = row.per_layer("switch_rate")
    if rates is None or len(rates) < 2:
        raise MissingRowError(f"several layers of {row.label}")
    return rates


def _low_strength(group: Group) -> Decision:
    rows = [row for lam in (0.01, 0.05) if (row := group.find(_SOFT(lam))) is not None]
    if not rows:
        raise MissingRowError(_SOFT(0.05))
    noise = _measured(_row(group, "vanilla").metric("ppl"), "the perplexity of vanilla")
    spread = 100 * noise.sd / noise.mean if noise.sd is not None else 0.0
    bound = max(_PRESERVED, 2 * spread)
    kept = sum(_change(group, row).mean <= bound for row in rows)
    verdict: Verdict = "holds" if kept == len(rows) else "holds in part" if kept else "does not hold"
    strong = [row for lam in (0.1, 0.2, 0.5) if (row := group.find(_SOFT(lam))) is not None]
    changes = ", ".join(f"{row.label} {_percent(group, row)}" for row in [*rows, *strong])
    why = f" (two standard deviations of vanilla over {noise.n} seeds)" if bound > _PRESERVED else ""
    return (
        verdict,
        f"Perplexity relative to vanilla: {changes}. Preserved means at most +{bound:.1f} %{why} at λ ≤ 0.05.",
    )


def _switches(group: Group) -> Decision:
    base, row = _row(group, "vanilla"), _row(group, _SOFT(0.5))
    soft = _of_method(group, "soft")  # by λ
    rates = [_metric(r, "switch_rate") for r in [base, *soft]]
    smooth = len(soft) >= 3 and all(a >= b for a, b in itertools.pairwise(rates))
    reduction = _reduction(row, base)
    verdict: Verdict = "does not hold"
    if reduction >= 0.2:
        verdict = "holds" if reduction >= 0.5 and smooth else "holds in part"
    course = " → ".join(f"{r:.3f}" for r in rates)
    shape = "too few λ to see a trend" if len(soft) < 3 else "it always falls" if smooth else "it does not always fall"
    return verdict, (
        f"soft λ=0.5 switches {_less(reduction)} than vanilla (the paper: 59 % less). Switch rate from vanilla to the "
        f"largest λ: {course} ({shape}). Substantially means at least 50 % less, in part means at least 20 % less."
    )


def _post_hoc(group: Group) -> Decision:
    base, remoe = _row(group, "vanilla"), _row(group, "remoe-lam0.1")
    reduction = _reduction(remoe, base)
    verdict: Verdict = "holds" if reduction < 0.02 else "holds in part" if reduction < 0.1 else "does not hold"
    return verdict, (
        f"ReMoE trains only the gates in its second phase. At its end the model switches {_less(reduction)} than "
        "vanilla with the same seed (the paper: under 0.5 % less)."
    )


def _hard(group: Group) -> Decision:
    """The paper: hard windows cost several times more than soft at a similar switch rate, and W=8 switches more."""
    narrow, wide = (_row(group, f"hard_window-window{W}-beta10") for W in (2, 8))
    rate = _metric(narrow, "switch_rate")
    soft = min(_of_method(group, "soft"), key=lambda r: abs(_metric(r, "switch_rate") - rate))
    comparable = abs(_metric(soft, "switch_rate") - rate) <= 0.1
    costly = comparable and _change(group, narrow).mean > _change(group, soft).mean + _PRESERVED
    wider = all(w > n for w, n in zip(_layers(wide), _layers(narrow), strict=True))
    verdict: Verdict = "holds" if costly and wider else "holds in part" if costly or wider else "does not hold"
    rows = [*_of_method(group, "hard_window"), soft]
    costs = ", ".join(f"{r.label} {_percent(group, r)} at SR {_metric(r, 'switch_rate'):.3f}" for r in rows)
    comparison = "its switch rate is too different to compare the costs"
    if comparable:
        comparison = f"W=2 costs {'more' if costly else 'no more'} than it"
    return verdict, (
        f"{costs}. {soft.label} is the soft row with the switch rate closest to W=2, and {comparison}. W=8 "
        f"{'switches more than W=2 in every layer' if wider else 'does not switch more than W=2 in every layer'}."
    )


def _anchored(group: Group) -> Decision:
    """The paper, for the medium model: lowest switch rate, highest hit rate, perplexity within 1 % of vanilla."""
    row = _row(group, _STICKIEST)
    rows = _of_method(group, "vanilla", "soft", "hard_window", "soft_hard", "remoe", "oracle")
    lowest = min(rows, key=lambda r: _metric(r, "switch_rate"))
    best = max(rows, key=lambda r: _metric(r, "cache_hit_rate"))
    cheap = _change(group, row).mean <= 1
    verdict: Verdict = "does not hold"
    if row in (lowest, best):
        verdict = "holds" if lowest is best and cheap else "holds in part"
    return verdict, (
        f"α=1 has SR {_metric(row, 'switch_rate'):.3f} and CHR {_metric(row, 'cache_hit_rate'):.3f} at "
        f"{_percent(group, row)} perplexity relative to vanilla. {lowest.label} has the lowest SR "
        f"({_metric(lowest, 'switch_rate'):.3f}); {best.label} has the highest CHR "
        f"({_metric(best, 'cache_hit_rate'):.3f}). The paper claims this for the medium model, within 1 % of vanilla."
    )


def _used(group: Group) -> Decision:
    least = min(_of_method(group, "soft", "soft_hard"), key=lambda r: _metric(r, "utilisation_entropy"))
    bits = math.log2(group.config.model.pool_size)
    entropy = _metric(least, "utilisation_entropy")
    verdict: Verdict = "holds" if entropy >= 0.96 * bits else "does not hold"
    return verdict, (
        f"The lowest utilisation entropy of soft and soft_hard is {entropy:.3f} of {bits:g} bits ({least.label}). "
        "Preserved means at least 96 % of the maximum (the paper: 1.92 of 2)."
    )


def _first_layer(group: Group) -> Decision:
    base, row = _layers(_row(group, "vanilla")), _layers(_row(group, _SOFT(0.5)))
    falls = [1 - ours / theirs if theirs else 0.0 for ours, theirs in zip(row, base, strict=True)]
    verdict: Verdict = "holds" if falls[0] == min(falls) else "does not hold"
    return verdict, "soft λ=0.5 relative to vanilla: " + ", ".join(
        f"L{i} switches {_less(fall)} ({rate:.3f})" for i, (fall, rate) in enumerate(zip(falls, row, strict=True))
    ) + "."


def _flattered(group: Group) -> Decision:
    base = _row(group, "vanilla")
    rows = [row for key in (_SOFT(0.5), _STICKIEST, "oracle") if (row := group.find(key)) is not None]
    if not rows:
        raise MissingRowError(_SOFT(0.5))
    lines = []
    for row in rows:
        factors = [f"top-1 C=2 {_factor(row, base, 'cache_hit_rate')}"]
        factors += [f"all k C={C} {_factor(row, base, f'{ALL_SLOTS}{C}')}" for C in capacities(group.rows)]
        lines.append(f"{row.label}: {', '.join(factors)}")
    return "measured", "How many times fewer misses than vanilla. " + "; ".join(lines) + "."


def _factor(row: Row, base: Row, hit_rate: str) -> str:
    value = row.fewer_misses(base, hit_rate)
    return "–" if value is None else f"{Number(value, '.2f')}×"


def _equivalent(group: Group) -> Decision:
    correlations = []
    for C in capacities(group.rows):
        points = [p for row in group.routed for p in row.per_layer_pairs("switch_rate", f"{ALL_SLOTS}{C}")]
        with contextlib.suppress(statistics.StatisticsError):  # too few points, or all equal
            rates, hits = zip(*points, strict=True) if points else ((), ())
            correlations.append(f"C={C}: r = {-statistics.correlation(rates, hits):.3f}")
    if not correlations:
        raise MissingRowError("layers with different rates")
    values = ", ".join(correlations)
    return "measured", f"Correlation of switch rate and misses of all k experts, over layers and rows: {values}."


def _uniform(group: Group) -> Decision:
    bits = math.log2(group.config.model.pool_size)
    rows = sorted(group.routed, key=lambda r: -_metric(r, "gate_entropy"))
    base = _row(group, "vanilla")
    near = [r.label for r in rows if _metric(r, "gate_entropy") > 0.99 * bits]
    highest = ", ".join(f"{r.label} {_metric(r, 'gate_entropy'):.3f}" for r in rows[:3])
    named = f" ({', '.join(near)}); utilisation entropy does not show this" if near else ""
    return "measured", (
        f"Mean gate entropy, of {bits:g} bits: vanilla {_metric(base, 'gate_entropy'):.3f}; highest {highest}. "
        f"{len(near)} of {len(rows)} rows have gates within 1 % of uniform{named}."
    )


def _moe_gain(group: Group) -> Decision:
    base, dense = _row(group, "vanilla"), _row(group, "dense")
    gain = _measured(base.against(dense, "ppl", lambda ppl, without: 1 - ppl / without), "the perplexity of dense")
    text = (
        f"PPL of dense with the same active width: {_metric(dense, 'ppl'):.2f}; "
        f"PPL of vanilla: {_metric(base, 'ppl'):.2f}, "
        f"{_less(gain.mean).replace('less', 'lower').replace('more', 'higher')}. "
    )
    if gain.mean <= 0:
        return "measured", text + "The mixture gains nothing here, so there is no gain to keep."
    kept = [(r, kept_gain(r, baseline=base, dense=dense)) for r in group.routed if r is not base]
    shown = ", ".join(f"{r.label} {share.mean:.0%}" for r, share in kept if share is not None)
    return "measured", text + (
        f"Share of this gain that each row keeps, over common seeds: {shown}." if shown else ""
    ).strip()


def _co_adaptation(group: Group) -> Decision:
    gates, whole = _row(group, "soft-lam0.5-gate_only1", grid="ablations"), _row(group, _SOFT(0.5))
    return "measured", (
        f"{_reached(group, gates, whole, 'L_cons without gradient to the hidden state reaches')} "
        f"{_two(group, gates, whole)}"
    )


def _without_balance(group: Group) -> Decision:
    without, with_it = _row(group, "soft-mu0-lam0.5", grid="ablations"), _row(group, _SOFT(0.5))
    used = [
        f"{_metric(r, 'utilisation_entropy'):.3f} bits, {_metric(r, 'neglected_experts'):g} neglected"
        for r in (without, with_it)
    ]
    return "measured", f"Utilisation entropy without L_bal: {used[0]}; with L_bal: {used[1]}. " + _two(
        group, without, with_it
    )


def _anchor_alone(group: Group) -> Decision:
    alone, both = _row(group, "soft_hard-lam0-alpha1-window4", grid="ablations"), _row(group, _STICKIEST)
    return "measured", (
        f"{_reached(group, alone, both, 'The anchor loss without L_cons reaches')} {_two(group, alone, both)}"
    )


def _reached(group: Group, part: Row, whole: Row, subject: str) -> str:
    """How much of the reduction of the switch rate a part of the method reaches, over the seeds of the part."""

    def below(other: Row) -> float:
        value = part.against(other, "switch_rate", lambda ours, theirs: theirs - ours)
        return _measured(value, f"common seeds of {part.label} and {other.label}").mean

    fall = below(_row(group, "vanilla"))
    fall_of_whole = fall - below(whole)
    if fall_of_whole <= 0:
        return "The full method does not reduce the switch rate."
    return f"{subject} {fall / fall_of_whole:.0%} of the reduction of the switch rate relative to vanilla."


def _two(group: Group, *rows: Row) -> str:
    return "; ".join(f"{r.label}: SR {_metric(r, 'switch_rate'):.3f} at {_percent(group, r)} PPL" for r in rows) + "."


def _overfitting(group: Group, others: Sequence[Group]) -> Decision:
    """A part of the corpus for many epochs, compared with the whole corpus for fewer epochs."""
    base = _row(group, "vanilla")
    soft = _of_method(group, "soft")
    ends = [
        f"{row.label} ends at PPL {_metric(row, 'ppl'):.2f}; its best PPL was {_metric(row, 'best_ppl'):.2f} at step "
        f"{_metric(row, 'best_step'):.0f}"
        for row in (base, *soft)
    ]
    changes = [f"{row.label} {_percent(group, row)}" for row in soft]
    text = f"{group.runs[0].epochs:.1f} epochs: {'; '.join(ends)}. Relative to vanilla: {', '.join(changes)}"
    for other in others:
        same_task = other.config.model == group.config.model and other.corpus == group.corpus
        if same_task and other.config.data.fraction == 1 and other.baseline is not None:
            same = [row for s in soft if (row := other.find(s.variant.key)) is not None]
            whole = ", ".join(f"{row.label} {_percent(other, row)}" for row in same)
            seen = f"{other.config.train.steps:,} steps, {other.runs[0].epochs:.1f} epochs"
            text += f"; on the whole corpus, {seen}: {whole}" if same else ""
    return "measured", text + "."


_OBSERVATIONS: list[tuple[str, Callable[[Group], Decision]]] = [
    ("1. Soft consistency improves or preserves perplexity at low λ", _low_strength),
    ("2. The switch rate falls substantially, smoothly with λ", _switches),
    ("3. Post-hoc router tuning (ReMoE) does not lower the switch rate", _post_hoc),
    ("4. Hard windows are costly, and wider windows are not stickier", _hard),
    ("5. Soft-hard (α=1) is the stickiest variant at moderate cost", _anchored),
    ("6. Expert utilisation is preserved", _used),
]
_QUESTIONS: list[tuple[str, Callable[[Group], Decision]]] = [
    ("Layer 0 changes least", _first_layer),
    ("Is the top-1 hit rate too optimistic?", _flattered),
    ("Do fewer switches mean fewer misses?", _equivalent),
    ("Does utilisation entropy hide uniform gates?", _uniform),
    ("What does the mixture gain over a dense model?", _moe_gain),
    ("Is co-adaptation the cause?", _co_adaptation),
    ("Does the balance loss prevent collapse?", _without_balance),
    ("Does the anchor loss work alone?", _anchor_alone),
]
