"""The charts of a report, in Altair: the page draws them, and they are saved as SVG and PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable

import altair as alt

from stickymoe.reports.charts import (
    FEWEST_MISSES,
    INK,
    MUTED,
    Chart,
    Points,
    colour_by,
    horizontal_lines,
    inline,
    labels,
    legible,
    pixels,
    rounded,
    variant_colour,
    variant_style,
)
from stickymoe.reports.collection import Group, Row
from stickymoe.reports.pareto import dominates, pareto_front
from stickymoe.reports.tables import ALL_SLOTS, capacities

_DASHES = ([1, 0], [6, 2], [2, 2], [8, 3, 2, 3], [1, 3], [4, 4])  # one per cache policy
_WORST = 1.12  # times the perplexity of vanilla; worse points are drawn at the edge
_MAX_CURVE = 50  # points per curve
_WIDTH, _HEIGHT = 460, 340  # pixels of a trade-off; its axes reach beyond the points


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.variant.name for row in rows))


def pareto(group: Group, metric: str, title: str, *, better: str, misses: bool = False) -> Chart | None:
    """Perplexity against a locality metric, with the Pareto front as a line and the controls as horizontal lines.

    `better` is the good direction of the x axis, `lower` or `higher`; `misses` shows 1 − metric on a log axis.
    """
    points = _trade_off(group, metric, better=better, misses=misses)
    if not points:
        return None
    limit = _WORST * (group.baseline.mean("ppl") or math.inf) if group.baseline is not None else math.inf
    spread = alt.Scale(type="log", nice=False, padding=18) if misses else alt.Scale(zero=False, nice=True, padding=18)
    at_x, at_y = alt.X("x:Q", title=title, scale=spread), _perplexity_axis(points, limit)
    front = pareto_front(points, lambda a, b: dominates((a["cost"], a["ppl"]), (b["cost"], b["ppl"])))
    front.sort(key=lambda p: p["cost"])
    line = alt.Chart(inline(front)).mark_line(color=MUTED, strokeDash=[5, 4], interpolate="step-after")
    base = alt.Chart(inline(points))
    tooltip = [
        alt.Tooltip("label:N", title="run"),
        alt.Tooltip("x:Q", title=title.split(" (")[0], format=".3f"),
        alt.Tooltip("ppl:Q", title="PPL", format=".2f"),
        alt.Tooltip("seeds:Q"),
    ]
    return alt.layer(
        line.encode(x=at_x, y=at_y, order="cost:Q"),
        base.mark_rule(color=MUTED, opacity=0.6).encode(x=at_x, y=alt.Y("low:Q", title=at_y["title"]), y2="high:Q"),
        base.mark_rule(color=MUTED, opacity=0.6).encode(x=alt.X("left:Q", title=title), x2="right:Q", y=at_y),
        *_controls(group, at_end=misses),
        base.mark_point(size=110, filled=True, opacity=1, stroke="white", strokeWidth=0.8).encode(
            x=at_x, y=at_y, tooltip=tooltip, **variant_style(_names(group.routed))
        ),
        labels(_labelled(points, front, limit, log=misses), at_x, at_y),
    ).properties(width=_WIDTH, height=_HEIGHT)


def _trade_off(group: Group, metric: str, *, better: str, misses: bool) -> Points:
    """One point per row: the metric, the perplexity, their standard deviations, and the cost to minimise."""
    points: Points = []
    for row in group.routed:
        x, ppl = row.metric(metric), row.metric("ppl")
        if x is None or ppl is None:
            continue
        value = max(1 - x.mean, FEWEST_MISSES) if misses else x.mean
        points.append(
            {
                "label": row.label,
                "variant": row.variant.name,
                "x": rounded(value),
                "ppl": rounded(ppl.mean),
                "low": rounded(ppl.mean - (ppl.sd or 0)),
                "high": rounded(ppl.mean + (ppl.sd or 0)),
                "left": rounded(max(value - (x.sd or 0), FEWEST_MISSES) if misses else value - (x.sd or 0)),
                "right": rounded(value + (x.sd or 0)),
                "seeds": ppl.n,
                "cost": value if better == "lower" else -value,
            }
        )
    return points


def _perplexity_axis(points: Points, limit: float) -> alt.Y:
    """An axis that ends at `limit` if a point is above it."""
    if all(p["ppl"] <= limit for p in points):
        return alt.Y("ppl:Q", title="perplexity (lower is better)", scale=alt.Scale(zero=False, padding=18))
    least = min(p["ppl"] for p in points)
    scale = alt.Scale(domain=[least - 0.05 * (limit - least), limit], nice=False, clamp=True)
    return alt.Y("ppl:Q", title=f"perplexity (lower is better; at the edge: above {limit:.0f})", scale=scale)


def _labelled(points: Points, front: Points, limit: float, *, log: bool) -> Points:
    """Vanilla and the points of the front whose labels do not overlap."""
    xs, ppls = [p["x"] for p in points], [min(p["ppl"], limit) for p in points]
    x, y = pixels(min(xs), max(xs), _WIDTH - 90, log=log), pixels(min(ppls), max(ppls), _HEIGHT - 40)
    vanilla = [p for p in points if p["label"] == "vanilla"]
    others = [p for p in front if p not in vanilla]
    return legible([*vanilla, *others], lambda p: (x(p["x"]), y(min(p["ppl"], limit))))


def _controls(group: Group, *, at_end: bool) -> list[Chart]:
    """Controls without misses, as horizontal lines."""
    points = [
        {"ppl": rounded(ppl), "name": f"{row.label} ({why})"}
        for key, why in (("dense", "no experts"), ("trajectory-span0", "loads once"))
        for row in group.complete
        if row.variant.key == key and (ppl := row.mean("ppl")) is not None
    ]
    return horizontal_lines(points, "ppl", [alt.Tooltip("ppl:Q", title="PPL")], at_end=at_end, below=at_end)


def layers(group: Group) -> Chart | None:
    """Switch rate of every layer."""
    points = [
        {"label": row.label, "layer": f"L{i}", "rate": rounded(rate, 3)}
        for row in group.routed
        for i, rate in enumerate(row.per_layer("switch_rate") or [])
    ]
    if not points:
        return None
    labels = [row.label for row in group.routed]
    base = alt.Chart(inline(points)).encode(
        x=alt.X("layer:N", title=None, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("label:N", sort=labels, title=None, axis=alt.Axis(labelLimit=260)),
        tooltip=["label:N", "layer:N", alt.Tooltip("rate:Q", title="switch rate", format=".3f")],
    )
    scale = alt.Scale(scheme="viridis", domain=[0, 1], reverse=True)
    cells = base.mark_rect().encode(color=alt.Color("rate:Q", scale=scale, title="switch rate"))
    dark = alt.condition("datum.rate > 0.45", alt.value("white"), alt.value("black"))
    return (cells + base.mark_text(fontSize=11).encode(text=alt.Text("rate:Q", format=".2f"), color=dark)).properties(
        width=70 * len({p["layer"] for p in points}), height=22 * len(labels)
    )


_TERMS = {
    "ce": "cross-entropy",
    "bal": "balance loss",
    "cons": "consistency loss",
    "hard": "anchor loss",
    "switch_rate": "switch rate",
}


def curves(group: Group) -> Chart | None:
    """Every loss term over the steps, for training batches and the validation split; mean over seeds."""
    points: Points = []
    terms: dict[str, None] = {}
    for row in group.complete:
        for part in ("train", "valid"):
            for term, line in _curve(row, part).items():
                terms[term] = None
                points += [
                    {"label": row.label, "variant": row.variant.name, "term": term, "part": part, "step": s, "value": v}
                    for s, v in line
                ]
    if not points:
        return None
    ordered = [*(t for t in _TERMS if t in terms), *(t for t in terms if t not in _TERMS)]
    colour = variant_colour(_names(group.complete))
    panels = [
        _panel([p for p in points if (p["term"], p["part"]) == (term, part)], term, part, colour)
        for term in ordered
        for part in ("train", "valid")
        if any((p["term"], p["part"]) == (term, part) for p in points)
    ]
    return alt.concat(*panels, columns=2).resolve_scale(color="shared")


def _panel(points: Points, term: str, part: str, colour: alt.Color) -> Chart:
    chosen = alt.selection_point(fields=["label"], on="pointerover", name=f"{term}_{part}")
    shown = [{key: p[key] for key in ("label", "variant", "step", "value")} for p in points]
    return (
        alt.Chart(inline(shown))
        .mark_line(strokeWidth=1.6, point={"size": 12} if part == "valid" else False)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=colour,
            detail="label:N",
            opacity=alt.condition(chosen, alt.value(0.9), alt.value(0.12)),
            tooltip=["label:N", "step:Q", alt.Tooltip("value:Q", format=".4g")],
        )
        .add_params(chosen)
        .properties(
            width=400,
            height=150,
            title=f"{_TERMS.get(term, term)}, {'training' if part == 'train' else 'validation'}",
        )
    )


def _curve(row: Row, part: str) -> dict[str, list[tuple[int, float]]]:
    """For each loss term its mean over the seeds that have a log, with at most `_MAX_CURVE` points."""
    sums: dict[str, dict[int, list[float]]] = {}
    for run in row.complete:
        trained = {term for line in run.log for term in line.get("train", {})} - {"loss", "grad_norm"}
        for line in run.log:
            for term, value in line.get(part, {}).items():
                if value is not None and term in trained:
                    sums.setdefault(term, {}).setdefault(line["step"], []).append(value)
    return {
        term: _thinned([(step, rounded(sum(values) / len(values))) for step, values in sorted(by_step.items())])
        for term, by_step in sums.items()
    }


def _thinned(line: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = math.ceil(len(line) / _MAX_CURVE)
    kept = line[::every]
    return kept if kept[-1] == line[-1] else [*kept, line[-1]]


def utilisation(group: Group) -> Chart | None:
    """Share of tokens for each expert and layer."""
    N = group.config.model.pool_size
    points: Points = []
    for row in group.routed:
        for expert in range(N):
            shares = row.per_layer(f"utilisation_{expert}") or []
            points += [
                {"label": row.label, "layer": f"L{i}", "expert": expert, "share": rounded(share, 3)}
                for i, share in enumerate(shares)
            ]
    if not points:
        return None
    labels = [row.label for row in group.routed]
    return (
        alt.Chart(inline(points))
        .mark_rect()
        .encode(
            x=alt.X("expert:O", title=None, axis=alt.Axis(labelAngle=0, labels=N <= 16, ticks=False)),
            y=alt.Y("label:N", sort=labels, title=None, axis=alt.Axis(labelLimit=260)),
            color=alt.Color(
                "share:Q",
                title="share of uses",
                scale=alt.Scale(scheme="purpleorange", domainMid=1 / N, domain=[0, 2 / N], clamp=True),
            ),
            column=alt.Column("layer:N", title=None, spacing=6),
            tooltip=["label:N", "layer:N", "expert:O", alt.Tooltip("share:Q", format=".3f")],
        )
        .properties(width=max(18 * N, 70), height=18 * len(labels))
    )


def switches_and_misses(group: Group) -> Chart | None:
    """Misses against the switch rate, one point per layer and row, one panel per cache size."""
    points: Points = []
    for row in group.routed:
        for C in capacities(group.rows):
            points += [
                {
                    "label": row.label,
                    "variant": row.variant.name,
                    "layer": f"L{i}",
                    "cache": f"all k experts, C={C}",
                    "sr": rounded(rate, 4),
                    "misses": rounded(1 - hit, 4),
                }
                for i, (rate, hit) in enumerate(row.per_layer_pairs("switch_rate", f"{ALL_SLOTS}{C}"))
            ]
    if not points:
        return None
    return (
        alt.Chart(inline(points))
        .mark_point(size=60, filled=True, opacity=0.85)
        .encode(
            x=alt.X("sr:Q", title="switch rate of the top-1 expert", scale=alt.Scale(zero=False)),
            y=alt.Y("misses:Q", title="misses per access"),
            column=alt.Column("cache:N", title=None),
            tooltip=["label:N", "layer:N", alt.Tooltip("sr:Q", format=".3f"), alt.Tooltip("misses:Q", format=".3f")],
            **variant_style(_names(group.routed)),
        )
        .properties(width=330, height=260)
    )


def _run_colour(runs: Iterable[str]) -> alt.Color:
    return colour_by("label", list(runs), labelLimit=260, columns=2)


def miss_curves(curves: dict[str, dict[str, tuple[list[int], list[float]]]]) -> Chart:
    """Miss rate against slots, by run and policy."""
    points = [
        {"label": label, "policy": policy, "slots": slots, "rate": rounded(rate, 4)}
        for label, by_policy in curves.items()
        for policy, (capacities, rates) in by_policy.items()
        for slots, rate in zip(capacities, rates, strict=True)
    ]
    policies = list(dict.fromkeys(policy for by_policy in curves.values() for policy in by_policy))
    dashes = alt.Scale(domain=policies, range=[_DASHES[i % len(_DASHES)] for i in range(len(policies))])
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolStrokeColor=INK)
    return (
        alt.Chart(inline(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("slots:Q", title="slots per layer", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("rate:Q", title="misses per access", scale=alt.Scale(domainMin=0)),
            color=_run_colour(curves),
            strokeDash=alt.StrokeDash("policy:N", scale=dashes, legend=legend),
            tooltip=["label:N", "policy:N", "slots:Q", alt.Tooltip("rate:Q", title="misses", format=".2%")],
        )
        .properties(width=460, height=300)
    )


def speed(speeds: dict[str, list[tuple[float, float, int]]], budget: float) -> Chart:
    """Tokens per second against memory, by run; a vertical line marks the budget."""
    points = [
        {"label": label, "memory": rounded(memory / 1e6), "speed": rounded(rate), "slots": slots}
        for label, line in speeds.items()
        for memory, rate, slots in line
    ]
    lines = (
        alt.Chart(inline(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("memory:Q", title="memory for weights, MB"),
            y=alt.Y("speed:Q", title="tokens per second", scale=alt.Scale(type="log", nice=True)),
            color=_run_colour(speeds),
            tooltip=[
                "label:N",
                "slots:Q",
                alt.Tooltip("memory:Q", title="MB"),
                alt.Tooltip("speed:Q", title="tokens/s"),
            ],
        )
    )
    line = alt.Chart(inline([{"memory": rounded(budget / 1e6)}])).mark_rule(color=INK, strokeDash=[6, 4])
    return (lines + line.encode(x="memory:Q", tooltip=alt.Tooltip("memory:Q", title="budget, MB"))).properties(
        width=460, height=300
    )


def working_sets(in_use: dict[str, list[tuple[int, float]]]) -> Chart:
    """Number of distinct experts of a layer within a window of tokens, by run."""
    points = [
        {"label": label, "window": window, "experts": rounded(value, 4)}
        for label, line in in_use.items()
        for window, value in line
        if math.isfinite(value)
    ]
    return (
        alt.Chart(inline(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("window:Q", title="window, tokens", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("experts:Q", title="distinct experts per layer"),
            color=_run_colour(in_use),
            tooltip=["label:N", "window:Q", alt.Tooltip("experts:Q", format=".2f")],
        )
        .properties(width=460, height=300)
    )
