"""What the runs say: the paper's six observations and the questions it leaves open, each decided by its numbers.

A finding names the rows it needs; where they are missing it is not tested, never guessed. Rows are compared seed by
seed where both have the seed.
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

from stickymoe.experiments.collection import Group, Row, Value, kept_gain
from stickymoe.experiments.tables import ALL_SLOTS, Number, capacities
from stickymoe.runs.presets import PRESETS

Verdict = Literal["holds", "holds in part", "does not hold", "measured", "not tested"]
Decision = tuple[Verdict, str]


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
# How far from the baseline a perplexity may be and still count as preserved, in per cent.
_PRESERVED = 0.5


def findings(group: Group, others: Sequence[Group] = ()) -> list[Finding]:
    """Every finding about one group of runs, the paper's observations first; `others` are compared with where named."""
    found = [_decided(claim, partial(decide, group)) for claim, decide in (*_OBSERVATIONS, *_QUESTIONS)]
    if group.config.data.fraction < 1:
        claim = "Is the effect of the loss regularisation?"
        found.insert(0, _decided(claim, partial(_overfitting, group, others)))
    return found


def scope(group: Group) -> str:
    """What the verdicts are about, and how far that is from the paper's own runs."""
    steps, papers = group.config.train.steps, PRESETS["paper-small"]["train"]["steps"]
    shorter = f"; the paper trains for {papers:,}" if steps != papers else ""
    return f"These verdicts are about runs of {steps:,} steps{shorter}. Each names its threshold, which is ours."


def summary(found: Sequence[Finding]) -> str:
    """What became of the paper's observations, by their numbers; empty where none was tested."""
    claims = {claim for claim, _ in _OBSERVATIONS}
    by_verdict: dict[Verdict, list[str]] = {}
    for finding in found:
        if finding.claim in claims:
            by_verdict.setdefault(finding.verdict, []).append(finding.claim.partition(".")[0])
    told = [f"{verdict}: {', '.join(by_verdict[verdict])}" for verdict in get_args(Verdict) if verdict in by_verdict]
    return "" if set(by_verdict) <= {"not tested"} else f"The paper's six observations: {' · '.join(told)}."


def _decided(claim: str, decide: Callable[[], Decision]) -> Finding:
    try:
        return Finding(claim, *decide())
    except MissingRowError as missing:
        return Finding(claim, "not tested", f"Needs {missing}, which is not among these runs.")


def _row(group: Group, key: str, *, grid: str | None = None) -> Row:
    row = group.find(key)
    if row is None:
        raise MissingRowError(f"{key} (of stickymoe sweep {grid})" if grid else key)
    return row


def _measured(value: Value | None, what: str) -> Value:
    if value is None:
        raise MissingRowError(what)
    return value


def _metric(row: Row, name: str) -> float:
    return _measured(row.metric(name), f"{name} of {row.label}").mean


def _change(group: Group, row: Row) -> Value:
    """Perplexity against vanilla, in per cent."""
    return _measured(row.change(_row(group, "vanilla")), f"a seed that both vanilla and {row.label} have")


def _percent(group: Group, row: Row) -> str:
    return f"{Number(_change(group, row), '+.1f')} %"


def _reduction(row: Row, base: Row, metric: str = "switch_rate") -> float:
    """The share by which a rate is lower than the baseline's."""
    value = row.against(base, metric, lambda ours, theirs: 1 - ours / theirs if theirs else 0.0)
    return _measured(value, f"a seed for which both {base.label} and {row.label} have {metric}").mean


def _less(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def _of_method(group: Group, *names: str) -> list[Row]:
    """The paper's own rows of some methods, without ablations of them."""
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
    said = ", ".join(f"{row.label} {_percent(group, row)}" for row in [*rows, *strong])
    why = f" (twice vanilla's deviation over {noise.n} seeds)" if bound > _PRESERVED else ""
    return verdict, f"Perplexity against vanilla: {said}. Preserved means at most +{bound:.1f} %{why} at λ ≤ 0.05."


def _switches(group: Group) -> Decision:
    base, row = _row(group, "vanilla"), _row(group, _SOFT(0.5))
    soft = _of_method(group, "soft")  # by λ
    rates = [_metric(r, "switch_rate") for r in [base, *soft]]
    smooth = len(soft) >= 3 and all(a >= b for a, b in itertools.pairwise(rates))
    reduction = _reduction(row, base)
    verdict: Verdict = "does not hold"
    if reduction >= 0.2:
        verdict = "holds" if reduction >= 0.5 and smooth else "holds in part"
    said = " → ".join(f"{r:.3f}" for r in rates)
    course = (
        "falling throughout" if smooth else "not falling throughout" if len(soft) >= 3 else "too few λ for a course"
    )
    return verdict, (
        f"λ=0.5 switches {_less(reduction)} than vanilla (the paper: 59 % less). From vanilla over rising λ: {said}, "
        f"{course}. Substantially means at least 50 % less, in part at least 20 %."
    )


def _post_hoc(group: Group) -> Decision:
    base, remoe = _row(group, "vanilla"), _row(group, "remoe-lam0.1")
    reduction = _reduction(remoe, base)
    verdict: Verdict = "holds" if reduction < 0.02 else "holds in part" if reduction < 0.1 else "does not hold"
    return verdict, (
        f"After its second phase, in which only the gates train, it switches {_less(reduction)} than vanilla "
        "with the same seed (the paper: under 0.5 % less)."
    )


def _hard(group: Group) -> Decision:
    """The paper: several times the cost of soft at a comparable switch rate; W=8 above W=2 in every layer."""
    narrow, wide = (_row(group, f"hard_window-window{W}-beta10") for W in (2, 8))
    rate = _metric(narrow, "switch_rate")
    soft = min(_of_method(group, "soft"), key=lambda r: abs(_metric(r, "switch_rate") - rate))
    comparable = abs(_metric(soft, "switch_rate") - rate) <= 0.1
    dear = comparable and _change(group, narrow).mean > _change(group, soft).mean + _PRESERVED
    wider = all(w > n for w, n in zip(_layers(wide), _layers(narrow), strict=True))
    verdict: Verdict = "holds" if dear and wider else "holds in part" if dear or wider else "does not hold"
    rows = [*_of_method(group, "hard_window"), soft]
    costs = ", ".join(f"{r.label} {_percent(group, r)} at SR {_metric(r, 'switch_rate'):.3f}" for r in rows)
    nearest = "no soft row comes near it, so their costs cannot be compared"
    if comparable:
        nearest = f"comparable, and W=2 costs {'more' if dear else 'no more'}"
    return verdict, (
        f"{costs}. The soft row nearest to W=2 in switch rate: {soft.label} ({nearest}). W=8 switches more than W=2 in "
        f"{'every layer' if wider else 'not every layer'}."
    )


def _anchored(group: Group) -> Decision:
    """Claimed of the medium model: lowest switch rate, highest hit rate, within 1 % of the baseline's perplexity."""
    row = _row(group, _STICKIEST)
    rows = _of_method(group, "vanilla", "soft", "hard_window", "soft_hard", "remoe", "oracle")
    lowest = min(rows, key=lambda r: _metric(r, "switch_rate"))
    best = max(rows, key=lambda r: _metric(r, "cache_hit_rate"))
    cheap = _change(group, row).mean <= 1
    verdict: Verdict = "does not hold"
    if row in (lowest, best):
        verdict = "holds" if lowest is best and cheap else "holds in part"
    return verdict, (
        f"Claimed of the medium model, within 1 % of the baseline. α=1 has SR {_metric(row, 'switch_rate'):.3f} and "
        f"CHR {_metric(row, 'cache_hit_rate'):.3f} at {_percent(group, row)}. The lowest SR is that of {lowest.label} "
        f"({_metric(lowest, 'switch_rate'):.3f}), the highest CHR that of {best.label} "
        f"({_metric(best, 'cache_hit_rate'):.3f})."
    )


def _used(group: Group) -> Decision:
    least = min(_of_method(group, "soft", "soft_hard"), key=lambda r: _metric(r, "utilisation_entropy"))
    bits = math.log2(group.config.model.pool_size)
    entropy = _metric(least, "utilisation_entropy")
    verdict: Verdict = "holds" if entropy >= 0.96 * bits else "does not hold"
    return verdict, (
        f"The least utilisation entropy of soft and soft_hard is {entropy:.3f} of {bits:g} bits ({least.label}); "
        "preserved means at least 96 %, the paper's 1.92 of 2."
    )


def _first_layer(group: Group) -> Decision:
    base, row = _layers(_row(group, "vanilla")), _layers(_row(group, _SOFT(0.5)))
    falls = [1 - ours / theirs if theirs else 0.0 for ours, theirs in zip(row, base, strict=True)]
    verdict: Verdict = "holds" if falls[0] == min(falls) else "does not hold"
    return verdict, "At λ=0.5, against vanilla: " + ", ".join(
        f"L{i} switches {_less(fall)} ({rate:.3f})" for i, (fall, rate) in enumerate(zip(falls, row, strict=True))
    ) + "."


def _flattered(group: Group) -> Decision:
    base = _row(group, "vanilla")
    rows = [row for key in (_SOFT(0.5), _STICKIEST, "oracle") if (row := group.find(key)) is not None]
    if not rows:
        raise MissingRowError(_SOFT(0.5))
    said = []
    for row in rows:
        factors = [f"top-1 C=2 {_factor(row, base, 'cache_hit_rate')}"]
        factors += [f"all slots C={C} {_factor(row, base, f'{ALL_SLOTS}{C}')}" for C in capacities(group.rows)]
        said.append(f"{row.label}: {', '.join(factors)}")
    return "measured", "Times fewer misses than vanilla. " + "; ".join(said) + "."


def _factor(row: Row, base: Row, hit_rate: str) -> str:
    value = row.fewer_misses(base, hit_rate)
    return "–" if value is None else f"{Number(value, '.2f')}×"


def _equivalent(group: Group) -> Decision:
    said = []
    for C in capacities(group.rows):
        points = [p for row in group.routed for p in row.per_layer_pairs("switch_rate", f"{ALL_SLOTS}{C}")]
        with contextlib.suppress(statistics.StatisticsError):  # too few points, or all alike
            rates, hits = zip(*points, strict=True) if points else ((), ())
            said.append(f"C={C}: r = {-statistics.correlation(rates, hits):.3f}")
    if not said:
        raise MissingRowError("layers that differ")
    return "measured", f"Correlation of switch rate and all-slots misses over layers and rows: {', '.join(said)}."


def _uniform(group: Group) -> Decision:
    bits = math.log2(group.config.model.pool_size)
    rows = sorted(group.routed, key=lambda r: -_metric(r, "gate_entropy"))
    base = _row(group, "vanilla")
    near = [r.label for r in rows if _metric(r, "gate_entropy") > 0.99 * bits]
    said = ", ".join(f"{r.label} {_metric(r, 'gate_entropy'):.3f}" for r in rows[:3])
    named = f" ({', '.join(near)})" if near else ""
    return "measured", (
        f"Mean gate entropy, of {bits:g} bits: vanilla {_metric(base, 'gate_entropy'):.3f}; highest {said}. "
        f"{len(near)} of {len(rows)} rows have gates within 1 % of uniform{named}, which utilisation entropy does not "
        "show."
    )


def _worth(group: Group) -> Decision:
    base, dense = _row(group, "vanilla"), _row(group, "dense")
    gain = _measured(base.against(dense, "ppl", lambda ppl, without: 1 - ppl / without), "the perplexity of dense")
    text = (
        f"Dense with the same active width: PPL {_metric(dense, 'ppl'):.2f}; vanilla {_metric(base, 'ppl'):.2f}, "
        f"{_less(gain.mean).replace('less', 'lower').replace('more', 'higher')}. "
    )
    if gain.mean <= 0:
        return "measured", text + "Here the mixture is worth nothing, so no share of it can be kept."
    kept = [(r, kept_gain(r, baseline=base, dense=dense)) for r in group.routed if r is not base]
    shown = ", ".join(f"{r.label} {share.mean:.0%}" for r, share in kept if share is not None)
    return "measured", text + (f"Share of that gain kept, over common seeds: {shown}." if shown else "").strip()


def _co_adaptation(group: Group) -> Decision:
    gates, whole = _row(group, "soft-lam0.5-gate_only1", grid="ablations"), _row(group, _SOFT(0.5))
    return "measured", (
        f"L_cons with the hidden state detached, then with gradient through it: {_two(group, gates, whole)} "
        f"{_reached(group, gates, whole, 'The gates alone bring')}"
    )


def _without_balance(group: Group) -> Decision:
    without, with_it = _row(group, "soft-mu0-lam0.5", grid="ablations"), _row(group, _SOFT(0.5))
    used = [
        f"{_metric(r, 'utilisation_entropy'):.3f} bits, {_metric(r, 'neglected_experts'):g} neglected"
        for r in (without, with_it)
    ]
    return "measured", f"Use of experts without L_bal: {used[0]}; with it: {used[1]}. " + _two(group, without, with_it)


def _anchor_alone(group: Group) -> Decision:
    alone, both = _row(group, "soft_hard-lam0-alpha1-window4", grid="ablations"), _row(group, _STICKIEST)
    return "measured", (
        f"The anchor without L_cons, then with it: {_two(group, alone, both)} "
        f"{_reached(group, alone, both, 'The anchor alone brings')}"
    )


def _reached(group: Group, part: Row, whole: Row, words: str) -> str:
    """How much of a fall in switch rate a part of the method brings, over the part's own seeds."""

    def below(other: Row) -> float:
        value = part.against(other, "switch_rate", lambda ours, theirs: theirs - ours)
        return _measured(value, f"common seeds of {part.label} and {other.label}").mean

    fall = below(_row(group, "vanilla"))
    fall_of_whole = fall - below(whole)
    if fall_of_whole <= 0:
        return "The whole does not lower the switch rate."
    return f"{words} {fall / fall_of_whole:.0%} of the fall in switch rate, over common seeds."


def _two(group: Group, *rows: Row) -> str:
    return "; ".join(f"{r.label}: SR {_metric(r, 'switch_rate'):.3f} at {_percent(group, r)}" for r in rows) + "."


def _overfitting(group: Group, others: Sequence[Group]) -> Decision:
    """A part of the corpus, seen often, beside the whole corpus seen less often."""
    base = _row(group, "vanilla")
    soft = _of_method(group, "soft")
    ends = [
        f"{row.label} ends at PPL {_metric(row, 'ppl'):.2f}, its best was {_metric(row, 'best_ppl'):.2f} at step "
        f"{_metric(row, 'best_step'):.0f}"
        for row in (base, *soft)
    ]
    changes = [f"{row.label} {_percent(group, row)}" for row in soft]
    text = f"{group.runs[0].epochs:.1f} epochs: {'; '.join(ends)}. Against vanilla: {', '.join(changes)}"
    for other in others:
        alike = other.config.model == group.config.model and other.corpus == group.corpus
        if alike and other.config.data.fraction == 1 and other.baseline is not None:
            same = [row for s in soft if (row := other.find(s.variant.key)) is not None]
            whole = ", ".join(f"{row.label} {_percent(other, row)}" for row in same)
            seen = f"{other.config.train.steps:,} steps, {other.runs[0].epochs:.1f} epochs"
            text += f"; on the whole corpus, {seen}: {whole}" if same else ""
    return "measured", text + "."


_OBSERVATIONS: list[tuple[str, Callable[[Group], Decision]]] = [
    ("1. Soft consistency improves or preserves perplexity at low λ", _low_strength),
    ("2. The switch rate falls substantially, smoothly with λ", _switches),
    ("3. Post-hoc router tuning (ReMoE) does not lower the switch rate", _post_hoc),
    ("4. Hard windows are dear, and wider ones no stickier", _hard),
    ("5. Soft-Hard (α=1) is the stickiest of all at moderate cost", _anchored),
    ("6. Expert utilisation is preserved", _used),
]
_QUESTIONS: list[tuple[str, Callable[[Group], Decision]]] = [
    ("Layer 0 resists most", _first_layer),
    ("Does the top-1 hit rate flatter?", _flattered),
    ("Are fewer switches fewer misses?", _equivalent),
    ("Does utilisation entropy hide uniform gates?", _uniform),
    ("What is the mixture worth over a dense model?", _worth),
    ("Is co-adaptation the cause?", _co_adaptation),
    ("Does the balance loss prevent collapse?", _without_balance),
    ("Does the anchor work alone?", _anchor_alone),
]
