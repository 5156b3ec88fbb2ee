"""The figures of a report, as Altair charts: they draw themselves on the page and are saved as SVG and PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import altair as alt

from stickymoe.experiments.collection import Group, Row
from stickymoe.experiments.frontier import FEWER, KEPT, best, fitting, origin, points
from stickymoe.experiments.ribbon import PALETTE
from stickymoe.experiments.tables import ALL_SLOTS, capacities

Chart = Any  # altair's charts share no useful base type
Points = list[dict[str, Any]]

_INK, _MUTED = "#222", "#767676"
_DASHES = ([1, 0], [6, 2], [2, 2], [8, 3, 2, 3], [1, 3], [4, 4])  # one for each policy there is
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
_WORST = 1.12  # times vanilla's perplexity; what is worse is drawn at the edge
_FEWEST = 1e-4  # misses: a log axis has no zero
_MAX_CURVE = 50  # points of one curve; more cannot be told apart


def _values(points: Points) -> alt.InlineData:
    return alt.InlineData(values=points)


def _round(x: float, digits: int = 5) -> float:
    """Fewer digits than a screen has pixels, more than it can show."""
    return float(f"{x:.{digits}g}")


def _families(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.variant.name for row in rows))


def _colour(families: Sequence[str]) -> alt.Color:
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(families))]
    scale = alt.Scale(domain=list(families), range=colours)
    return alt.Color("family:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", columns=7))


def _style(families: Sequence[str]) -> dict[str, Any]:
    """Colour and shape both tell the family, so that colour need not be seen; with many families only both together."""
    shapes = [_SHAPES[(i + i // len(PALETTE)) % len(_SHAPES)] for i in range(len(families))]
    scale = alt.Scale(domain=list(families), range=shapes)
    return {"color": _colour(families), "shape": alt.Shape("family:N", scale=scale)}


def frontier(points: Points) -> Points:
    """The points that no other beats in both `cost` (lower is better) and `ppl`, by cost."""
    best, out = math.inf, []
    for point in sorted(points, key=lambda p: (p["cost"], p["ppl"])):
        if point["ppl"] < best:
            best = point["ppl"]
            out.append(point)
    return out


def pareto(group: Group, metric: str, title: str, *, better: str, misses: bool = False) -> Chart | None:
    """Perplexity against a locality metric, the frontier drawn, the controls as lines.

    `better` is the good direction of the axis, `lower` or `higher`; `misses` shows 1 − the metric, on a log axis.
    """
    points: Points = []
    for row in group.routed:
        x, ppl = row.metric(metric), row.metric("ppl")
        if x is None or ppl is None:
            continue
        value = max(1 - x.mean, _FEWEST) if misses else x.mean
        points.append(
            {
                "label": row.label,
                "family": row.variant.name,
                "x": _round(value),
                "ppl": _round(ppl.mean),
                "low": _round(ppl.mean - (ppl.sd or 0)),
                "high": _round(ppl.mean + (ppl.sd or 0)),
                "left": _round(max(value - (x.sd or 0), _FEWEST) if misses else value - (x.sd or 0)),
                "right": _round(value + (x.sd or 0)),
                "seeds": ppl.n,
                "cost": value if better == "lower" else -value,
            }
        )
    if not points:
        return None
    spread = alt.Scale(type="log", nice=False, padding=18) if misses else alt.Scale(zero=False, nice=True, padding=18)
    at_x = alt.X("x:Q", title=title, scale=spread)
    most = _WORST * (group.baseline.mean("ppl") or math.inf) if group.baseline is not None else math.inf
    quality, height = "perplexity (lower is better)", alt.Scale(zero=False, padding=18)
    if any(p["ppl"] > most for p in points):
        quality = f"perplexity (lower is better; at the edge: above {most:.0f})"
        least = min(p["ppl"] for p in points)
        height = alt.Scale(domain=[least - 0.05 * (most - least), most], nice=False, clamp=True)
    at_y = alt.Y("ppl:Q", title=quality, scale=height)
    base = alt.Chart(_values(points))
    tooltip = [
        alt.Tooltip("label:N", title="run"),
        alt.Tooltip("x:Q", title=title.split(" (")[0], format=".3f"),
        alt.Tooltip("ppl:Q", title="PPL", format=".2f"),
        alt.Tooltip("seeds:Q"),
    ]
    best = frontier(points)
    named = [p for p in points if p["label"] == "vanilla"]
    scale = math.log if misses else float
    others = sorted((p for p in best if p not in named), key=lambda p: p["cost"])
    named += _legible(others, points, lambda p: (scale(p["x"]), min(p["ppl"], most)))
    line = alt.Chart(_values(best)).mark_line(color=_MUTED, strokeDash=[5, 4], interpolate="step-after")
    layers = [
        line.encode(x=at_x, y=at_y, order="cost:Q"),
        base.mark_rule(color=_MUTED, opacity=0.6).encode(x=at_x, y=alt.Y("low:Q", title=quality), y2="high:Q"),
        base.mark_rule(color=_MUTED, opacity=0.6).encode(x=alt.X("left:Q", title=title), x2="right:Q", y=at_y),
        *_controls(group, at_end=misses),
        base.mark_point(size=110, filled=True, opacity=1, stroke="white", strokeWidth=0.8).encode(
            x=at_x, y=at_y, tooltip=tooltip, **_style(_families(group.routed))
        ),
        alt.Chart(_values(named))
        .mark_text(align="left", dx=8, dy=-6, fontSize=10, color=_INK)
        .encode(x=at_x, y=at_y, text="label:N"),
    ]
    return alt.layer(*layers).properties(width=460, height=340)


def _legible(points: Points, drawn: Points, place: Callable[[dict[str, Any]], tuple[float, float]]) -> Points:
    """Those whose names fit beside each other: of two at nearly one place among all `drawn` the first."""
    xs, ys = zip(*map(place, drawn), strict=True)
    wide, high = 0.2 * (max(xs) - min(xs)), 0.035 * (max(ys) - min(ys))
    kept: Points = []
    for p in points:
        x, y = place(p)
        if all(abs(x - place(q)[0]) > wide or abs(y - place(q)[1]) > high for q in kept):
            kept.append(p)
    return kept


def kept_gain(group: Group, capacity: int, *, smaller: Group | None = None) -> Chart | None:
    """Share of the mixture's gain that is kept against all-slots misses, and the corner one would like to be in.

    A `smaller` mixture, which the cache holds whole, is a line: what its best row keeps without a load.
    """
    found = [point for point in points(group) if capacity in point.misses]
    baseline = next((p for p in found if p.row is group.baseline), None)
    if baseline is None or len(found) < 2:
        return None
    unbeaten = best(found, capacity)
    shown: Points = [
        {
            "label": p.row.label,
            "of": origin(p.row),
            "misses": _round(max(p.misses[capacity].mean, _FEWEST)),
            "kept": _round(100 * p.kept.mean),
            "seeds": p.kept.n,
            "best": p in unbeaten,
        }
        for p in found
    ]
    by_seeds = sorted((p for p in shown if p["best"]), key=lambda p: -p["seeds"])
    named = _legible(by_seeds, shown, lambda p: (math.log(p["misses"]), p["kept"]))
    held = fitting(group, smaller)[:1] if smaller is not None else []
    levels = [
        {"kept": _round(100 * kept.mean), "name": f"best of N={capacity}, all in memory", "label": row.label}
        for row, kept in held
    ]
    vanilla = baseline.misses[capacity].mean
    low = min(min(p["misses"] for p in shown), vanilla / FEWER) * 0.8
    top = max(110.0, max(p["kept"] for p in (*shown, *levels)) + 5)
    floor = max(-100.0, min(p["kept"] for p in shown) - 5)
    corner = [{"x": low, "x2": vanilla / FEWER, "y": 100 * KEPT, "y2": top}]
    title = f"misses per access, all slots, C={capacity} (log, lower is better)"
    at_x = alt.X("misses:Q", title=title, scale=alt.Scale(type="log", domain=[low, vanilla * 1.25], nice=False))
    at_y = alt.Y("kept:Q", title="gain over dense kept, %", scale=alt.Scale(domain=[floor, top], clamp=True))
    marks = {
        "past the paper": (PALETTE[0], "circle"),
        "the paper": (PALETTE[1], "square"),
        "its appendix": (PALETTE[3], "triangle-up"),
        "vanilla": (_INK, "diamond"),
    }
    whose = [name for name in marks if any(p["of"] == name for p in shown)]
    colour = alt.Scale(domain=whose, range=[marks[name][0] for name in whose])
    shape = alt.Scale(domain=whose, range=[marks[name][1] for name in whose])
    base = alt.Chart(_values(shown)).encode(x=at_x, y=at_y)
    return alt.layer(
        alt.Chart(_values(corner))
        .mark_rect(color=PALETTE[2], opacity=0.15)
        .encode(x="x:Q", x2="x2:Q", y="y:Q", y2="y2:Q"),
        base.transform_filter("datum.best").mark_line(color=_MUTED, strokeDash=[5, 4], interpolate="step-after"),
        base.mark_point(size=80, filled=True, opacity=0.9).encode(
            color=alt.Color("of:N", scale=colour, legend=alt.Legend(title=None, orient="bottom")),
            shape=alt.Shape("of:N", scale=shape),
            tooltip=["label:N", "kept:Q", "misses:Q", "seeds:Q"],
        ),
        alt.Chart(_values(named))
        .mark_text(align="left", dx=7, dy=-5, fontSize=10, color=_INK)
        .encode(x=at_x, y=at_y, text="label:N"),
        *_levels(levels, "kept", ["label:N", alt.Tooltip("kept:Q", title="gain kept, %")], at_end=True),
    ).properties(width=560, height=340)


def _controls(group: Group, *, at_end: bool) -> list[Chart]:
    """What costs no misses at all, as lines to hold a trade-off against."""
    points = [
        {"ppl": _round(ppl), "name": f"{row.label} ({why})"}
        for key, why in (("dense", "no experts"), ("trajectory-span0", "loads once"))
        for row in group.complete
        if row.variant.key == key and (ppl := row.mean("ppl")) is not None
    ]
    return _levels(points, "ppl", [alt.Tooltip("ppl:Q", title="PPL")], at_end=at_end, below=at_end)


def _levels(
    points: Points, field: str, tooltip: Sequence[str | alt.Tooltip], *, at_end: bool, below: bool = False
) -> list[Chart]:
    """Lines across a chart, each with its `name` at its start or end, above or below; none for no points."""
    if not points:
        return []
    base = alt.Chart(_values(points)).encode(y=f"{field}:Q")
    rule = base.mark_rule(color=_INK, strokeDash=[2, 3]).encode(tooltip=["name:N", *tooltip])
    side: dict[str, Any] = {"align": "right", "dx": -4} if at_end else {"align": "left", "dx": 4}
    name = base.mark_text(**side, dy=9 if below else -5, fontSize=10, color=_INK)
    return [rule, name.encode(x=alt.value("width" if at_end else 0), text="name:N")]


def layers(group: Group) -> Chart | None:
    """Switch rate of every layer."""
    points = [
        {"label": row.label, "layer": f"L{i}", "rate": _round(rate, 3)}
        for row in group.routed
        for i, rate in enumerate(row.per_layer("switch_rate") or [])
    ]
    if not points:
        return None
    labels = [row.label for row in group.routed]
    base = alt.Chart(_values(points)).encode(
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
    """Every loss term over training, on the training batches and on the validation split; the mean over seeds."""
    points: Points = []
    terms: dict[str, None] = {}
    for row in group.complete:
        for part in ("train", "valid"):
            for term, line in _curve(row, part).items():
                terms[term] = None
                points += [
                    {"label": row.label, "family": row.variant.name, "term": term, "part": part, "step": s, "value": v}
                    for s, v in line
                ]
    if not points:
        return None
    ordered = [*(t for t in _TERMS if t in terms), *(t for t in terms if t not in _TERMS)]
    colour = _colour(_families(group.complete))
    panels = [
        _panel([p for p in points if (p["term"], p["part"]) == (term, part)], term, part, colour)
        for term in ordered
        for part in ("train", "valid")
        if any((p["term"], p["part"]) == (term, part) for p in points)
    ]
    return alt.concat(*panels, columns=2).resolve_scale(color="shared")


def _panel(points: Points, term: str, part: str, colour: alt.Color) -> Chart:
    chosen = alt.selection_point(fields=["label"], on="pointerover", name=f"{term}_{part}")
    shown = [{key: p[key] for key in ("label", "family", "step", "value")} for p in points]
    return (
        alt.Chart(_values(shown))
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
    """Each term's line: its mean over the seeds whose metrics are at hand, thinned."""
    sums: dict[str, dict[int, list[float]]] = {}
    for run in row.complete:
        trained = {term for line in run.log for term in line.get("train", {})} - {"loss", "grad_norm"}
        for line in run.log:
            for term, value in line.get(part, {}).items():
                if value is not None and term in trained:
                    sums.setdefault(term, {}).setdefault(line["step"], []).append(value)
    return {
        term: _thinned([(step, _round(sum(values) / len(values))) for step, values in sorted(by_step.items())])
        for term, by_step in sums.items()
    }


def _thinned(line: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = math.ceil(len(line) / _MAX_CURVE)
    kept = line[::every]
    return kept if kept[-1] == line[-1] else [*kept, line[-1]]


def utilisation(group: Group) -> Chart | None:
    """How often each expert is used, layer by layer."""
    N = group.config.model.pool_size
    points: Points = []
    for row in group.routed:
        for expert in range(N):
            shares = row.per_layer(f"utilisation_{expert}") or []
            points += [
                {"label": row.label, "layer": f"L{i}", "expert": expert, "share": _round(share, 3)}
                for i, share in enumerate(shares)
            ]
    if not points:
        return None
    labels = [row.label for row in group.routed]
    return (
        alt.Chart(_values(points))
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
    """Are fewer switches fewer misses? Each layer of each run a point, per capacity."""
    points: Points = []
    for row in group.routed:
        for C in capacities(group.rows):
            points += [
                {
                    "label": row.label,
                    "family": row.variant.name,
                    "layer": f"L{i}",
                    "cache": f"all slots, C={C}",
                    "sr": _round(rate, 4),
                    "misses": _round(1 - hit, 4),
                }
                for i, (rate, hit) in enumerate(row.per_layer_pairs("switch_rate", f"{ALL_SLOTS}{C}"))
            ]
    if not points:
        return None
    return (
        alt.Chart(_values(points))
        .mark_point(size=60, filled=True, opacity=0.85)
        .encode(
            x=alt.X("sr:Q", title="switch rate of the top-1 expert", scale=alt.Scale(zero=False)),
            y=alt.Y("misses:Q", title="misses per access"),
            column=alt.Column("cache:N", title=None),
            tooltip=["label:N", "layer:N", alt.Tooltip("sr:Q", format=".3f"), alt.Tooltip("misses:Q", format=".3f")],
            **_style(_families(group.routed)),
        )
        .properties(width=330, height=260)
    )


def access_patterns(n_tokens: int = 4, n_layers: int = 4) -> Chart:
    """The appendix's two orders of access: layer by layer over the tokens, and token by token through the layers."""
    panels = []
    for name, colour in (("prefill: one layer at a time", PALETTE[0]), ("decode: one token at a time", PALETTE[5])):
        by_layer = name.startswith("prefill")
        steps = [
            {"token": t, "layer": l, "step": (l * n_tokens + t if by_layer else t * n_layers + l) + 1}
            for t in range(n_tokens)
            for l in range(n_layers)
        ]
        tokens = ["t", *(f"t+{i}" for i in range(1, n_tokens))]
        names = [{**s, "token": tokens[s["token"]], "layer": f"L{s['layer']}"} for s in steps]
        base = alt.Chart(_values(names)).encode(
            x=alt.X("token:N", sort=tokens, title="token", axis=alt.Axis(labelAngle=0, orient="bottom")),
            y=alt.Y("layer:N", title=None),
        )
        panels.append(
            (
                base.mark_rect(fill="#f3f3f3", stroke="white", strokeWidth=2)
                + base.mark_line(color=colour, strokeWidth=2.5, opacity=0.55).encode(order="step:Q")
                + base.mark_circle(size=420, color=colour, opacity=1)
                + base.mark_text(color="white", fontWeight="bold", fontSize=12).encode(text="step:Q")
            ).properties(width=240, height=210, title=name)
        )
    return alt.hconcat(*panels, spacing=40)


def themed(chart: Chart) -> dict[str, Any]:
    """The chart's Vega-Lite specification in the report's own look."""
    spec: dict[str, Any] = chart.configure(
        font="system-ui, DejaVu Sans, sans-serif",
        background="white",
        axis=alt.AxisConfig(gridColor="#ececec", labelColor=_INK, titleColor=_INK, titleFontWeight="normal"),
        title=alt.TitleConfig(fontSize=12, fontWeight="normal", anchor="start", color=_INK),
        view=alt.ViewConfig(stroke=None),
        legend=alt.LegendConfig(labelColor=_INK, titleFontWeight="normal", symbolOpacity=1),
    ).to_dict()
    return spec


def _run_colour(labels: Sequence[str]) -> alt.Color:
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(labels))]
    scale = alt.Scale(domain=list(labels), range=colours)
    return alt.Color("label:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", labelLimit=260, columns=2))


def miss_curves(curves: dict[str, dict[str, tuple[list[int], list[float]]]]) -> Chart:
    """Miss rate over slots, by run and policy."""
    points = [
        {"label": label, "policy": policy, "slots": slots, "rate": _round(rate, 4)}
        for label, by_policy in curves.items()
        for policy, (capacities, rates) in by_policy.items()
        for slots, rate in zip(capacities, rates, strict=True)
    ]
    policies = list(dict.fromkeys(policy for by_policy in curves.values() for policy in by_policy))
    dashes = alt.Scale(domain=policies, range=[_DASHES[i % len(_DASHES)] for i in range(len(policies))])
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolStrokeColor=_INK)
    return (
        alt.Chart(_values(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("slots:Q", title="slots a layer", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("rate:Q", title="misses per access", scale=alt.Scale(domainMin=0)),
            color=_run_colour(list(curves)),
            strokeDash=alt.StrokeDash("policy:N", scale=dashes, legend=legend),
            tooltip=["label:N", "policy:N", "slots:Q", alt.Tooltip("rate:Q", title="misses", format=".2%")],
        )
        .properties(width=460, height=300)
    )


def speed(speeds: dict[str, list[tuple[float, float, int]]], budget: float) -> Chart:
    """Tokens per second over memory, by run; the budget as a line."""
    points = [
        {"label": label, "memory": _round(memory / 1e6), "speed": _round(rate), "slots": slots}
        for label, line in speeds.items()
        for memory, rate, slots in line
    ]
    lines = (
        alt.Chart(_values(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("memory:Q", title="memory for weights, MB"),
            y=alt.Y("speed:Q", title="tokens per second", scale=alt.Scale(type="log", nice=True)),
            color=_run_colour(list(speeds)),
            tooltip=[
                "label:N",
                "slots:Q",
                alt.Tooltip("memory:Q", title="MB"),
                alt.Tooltip("speed:Q", title="tokens/s"),
            ],
        )
    )
    line = alt.Chart(_values([{"memory": _round(budget / 1e6)}])).mark_rule(color=_INK, strokeDash=[6, 4])
    return (lines + line.encode(x="memory:Q", tooltip=alt.Tooltip("memory:Q", title="budget, MB"))).properties(
        width=460, height=300
    )


def working_sets(in_use: dict[str, list[tuple[int, float]]]) -> Chart:
    """Experts of a layer in use within a window of tokens, by run."""
    points = [
        {"label": label, "window": window, "experts": _round(value, 4)}
        for label, line in in_use.items()
        for window, value in line
        if math.isfinite(value)
    ]
    return (
        alt.Chart(_values(points))
        .mark_line(point={"size": 36}, strokeWidth=1.8)
        .encode(
            x=alt.X("window:Q", title="window, tokens", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("experts:Q", title="experts of a layer in use"),
            color=_run_colour(list(in_use)),
            tooltip=["label:N", "window:Q", alt.Tooltip("experts:Q", format=".2f")],
        )
        .properties(width=460, height=300)
    )
