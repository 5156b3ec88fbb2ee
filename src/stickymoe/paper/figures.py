"""The figures of the paper's sections: gain kept against misses, and the two orders of access."""

from __future__ import annotations

import altair as alt

from stickymoe.paper.frontier import MISSES_FACTOR, TARGET_GAIN, Point, fitting, origin, points
from stickymoe.paper.frontier import front as pareto_points
from stickymoe.reports.charts import (
    FEWEST_MISSES,
    INK,
    MUTED,
    Chart,
    Points,
    horizontal_lines,
    inline,
    labels,
    legible,
    pixels,
    rounded,
)
from stickymoe.reports.collection import Group
from stickymoe.reports.ribbon import PALETTE

_MARKS = {
    "beyond the paper": (PALETTE[0], "circle"),
    "paper": (PALETTE[1], "square"),
    "appendix of the paper": (PALETTE[3], "triangle-up"),
    "vanilla": (INK, "diamond"),
}


def kept_gain(group: Group, capacity: int, *, smaller: Group | None = None) -> Chart | None:
    """The share of the MoE gain that each row keeps against its misses; the target region is shaded.

    `smaller` is a group with as many experts as the cache holds: its best row is a horizontal line.
    """
    found = [point for point in points(group) if capacity in point.misses]
    baseline = next((p for p in found if p.row is group.baseline), None)
    if baseline is None or len(found) < 2:
        return None
    shown = _placed(found, capacity)
    lines = [
        {"kept": rounded(100 * kept.mean), "name": f"best of N={capacity}, all in memory", "label": row.label}
        for row, kept in (fitting(group, smaller)[:1] if smaller is not None else [])
    ]
    vanilla = baseline.misses[capacity].mean
    low = min(min(p["misses"] for p in shown), vanilla / MISSES_FACTOR) * 0.8
    top = max(110.0, max(p["kept"] for p in (*shown, *lines)) + 5)
    floor = max(-100.0, min(p["kept"] for p in shown) - 5)
    title = f"misses per access, all k experts, C={capacity} (log, lower is better)"
    at_x = alt.X("misses:Q", title=title, scale=alt.Scale(type="log", domain=[low, vanilla * 1.25], nice=False))
    at_y = alt.Y("kept:Q", title="gain over dense kept, %", scale=alt.Scale(domain=[floor, top], clamp=True))
    target = [{"x": low, "x2": vanilla / MISSES_FACTOR, "y": 100 * TARGET_GAIN, "y2": top}]
    by_seeds = sorted((p for p in shown if p["best"]), key=lambda p: -p["seeds"])
    base = alt.Chart(inline(shown)).encode(x=at_x, y=at_y)
    width, height = 560, 340
    x, y = pixels(low, vanilla * 1.25, width, log=True), pixels(floor, top, height)
    return alt.layer(
        alt.Chart(inline(target))
        .mark_rect(color=PALETTE[2], opacity=0.15)
        .encode(x="x:Q", x2="x2:Q", y="y:Q", y2="y2:Q"),
        base.transform_filter("datum.best").mark_line(color=MUTED, strokeDash=[5, 4], interpolate="step-after"),
        _marks(base, shown),
        labels(legible(by_seeds, lambda p: (x(p["misses"]), y(p["kept"]))), at_x, at_y),
        *horizontal_lines(lines, "kept", ["label:N", alt.Tooltip("kept:Q", title="gain kept, %")], at_end=True),
    ).properties(width=width, height=height)


def _placed(found: list[Point], capacity: int) -> Points:
    front = pareto_points(found, capacity)
    return [
        {
            "label": p.row.label,
            "origin": origin(p.row),
            "misses": rounded(max(p.misses[capacity].mean, FEWEST_MISSES)),
            "kept": rounded(100 * p.kept.mean),
            "seeds": p.kept.n,
            "best": p in front,
        }
        for p in found
    ]


def _marks(base: Chart, shown: Points) -> Chart:
    names = [name for name in _MARKS if any(p["origin"] == name for p in shown)]
    colours, shapes = ([_MARKS[name][i] for name in names] for i in (0, 1))
    colour = alt.Color(
        "origin:N",
        scale=alt.Scale(domain=names, range=colours),
        legend=alt.Legend(title=None, orient="bottom", labelLimit=200),
    )
    return base.mark_point(size=80, filled=True, opacity=0.9).encode(
        color=colour,
        shape=alt.Shape("origin:N", scale=alt.Scale(domain=names, range=shapes)),
        tooltip=["label:N", "kept:Q", "misses:Q", "seeds:Q"],
    )


def access_patterns(n_tokens: int = 4, n_layers: int = 4) -> Chart:
    """The two access orders of the paper's appendix: layer by layer (prefill) and token by token (decoding)."""
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
        base = alt.Chart(inline(names)).encode(
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
