"""Building blocks of the charts: colours, shapes, labels that do not overlap, the common look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from stickymoe.reports.ribbon import PALETTE

Chart = Any  # altair's charts share no useful base type
Points = list[dict[str, Any]]

INK, MUTED = "#222", "#767676"
FEWEST_MISSES = 1e-4  # a log axis has no zero
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")


def inline(points: Points) -> alt.InlineData:
    return alt.InlineData(values=points)


def rounded(x: float, digits: int = 5) -> float:
    """Enough digits for a screen."""
    return float(f"{x:.{digits}g}")


def colour_by(field: str, names: Sequence[str], **legend: Any) -> alt.Color:
    """One colour per name; with more than eight names the colours repeat."""
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    scale = alt.Scale(domain=list(names), range=colours)
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", **legend))


def variant_colour(names: Sequence[str]) -> alt.Color:
    return colour_by("variant", names, columns=7)


def variant_style(names: Sequence[str]) -> dict[str, Any]:
    """Colour and shape of each variant: readers who cannot see the colour can use the shape."""
    shapes = [_SHAPES[(i + i // len(PALETTE)) % len(_SHAPES)] for i in range(len(names))]
    scale = alt.Scale(domain=list(names), range=shapes)
    return {"color": variant_colour(names), "shape": alt.Shape("variant:N", scale=scale)}


def legible(points: Points, drawn: Points, place: Callable[[dict[str, Any]], tuple[float, float]]) -> Points:
    """The points whose labels do not overlap: of two that are close, the first. `drawn` gives the size of the chart."""
    xs, ys = zip(*map(place, drawn), strict=True)
    wide, high = 0.2 * (max(xs) - min(xs)), 0.035 * (max(ys) - min(ys))
    kept: Points = []
    for p in points:
        x, y = place(p)
        if all(abs(x - place(q)[0]) > wide or abs(y - place(q)[1]) > high for q in kept):
            kept.append(p)
    return kept


def horizontal_lines(
    points: Points, field: str, tooltip: Sequence[str | alt.Tooltip], *, at_end: bool, below: bool = False
) -> list[Chart]:
    """Horizontal lines, each with its `name` at the start or end, above or below; nothing for no points."""
    if not points:
        return []
    base = alt.Chart(inline(points)).encode(y=f"{field}:Q")
    rule = base.mark_rule(color=INK, strokeDash=[2, 3]).encode(tooltip=["name:N", *tooltip])
    side: dict[str, Any] = {"align": "right", "dx": -4} if at_end else {"align": "left", "dx": 4}
    name = base.mark_text(**side, dy=9 if below else -5, fontSize=10, color=INK)
    return [rule, name.encode(x=alt.value("width" if at_end else 0), text="name:N")]


def labels(points: Points, x: alt.X, y: alt.Y, *, before: bool = False) -> Chart:
    """The `label` of each point, after the point or `before` it."""
    side: dict[str, Any] = {"align": "right", "dx": -8} if before else {"align": "left", "dx": 8}
    text = alt.Chart(inline(points)).mark_text(**side, dy=-6, fontSize=10, color=INK)
    return text.encode(x=x, y=y, text="label:N")


def themed(chart: Chart) -> dict[str, Any]:
    """The Vega-Lite specification of a chart in the look of the report."""
    spec: dict[str, Any] = chart.configure(
        font="system-ui, DejaVu Sans, sans-serif",
        background="white",
        axis=alt.AxisConfig(gridColor="#ececec", labelColor=INK, titleColor=INK, titleFontWeight="normal"),
        title=alt.TitleConfig(fontSize=12, fontWeight="normal", anchor="start", color=INK),
        view=alt.ViewConfig(stroke=None),
        legend=alt.LegendConfig(labelColor=INK, titleFontWeight="normal", symbolOpacity=1),
    ).to_dict()
    return spec
