"""Building blocks of the charts: colours, shapes, labels that do not overlap, the common look."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from stickymoe.reports.ribbon import PALETTE

Chart = Any  # altair's charts share no useful base type
Points = list[dict[str, Any]]

INK, MUTED = "#222", "#767676"
FEWEST_MISSES = 1e-4  # a log axis has no zero
_GAP, _CHARACTER, _LINE = 8, 5.6, 12  # pixels: from a point to its label, of a character, from line to line
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


def pixels(low: float, high: float, length: int, *, log: bool = False) -> Callable[[float], float]:
    """Where an axis from `low` to `high` of `length` pixels shows a value."""
    scale = math.log if log else float
    span = scale(high) - scale(low) or 1.0
    return lambda value: (scale(value) - scale(low)) / span * length


def legible(
    points: Points,
    at: Callable[[dict[str, Any]], tuple[float, float]],
    *,
    before: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> Points:
    """The points whose labels do not overlap: of two that would, the first.

    `at` gives the pixels of a point. Its label follows the point, or ends `before` it.
    """
    kept: Points = []
    boxes: list[tuple[float, float, float]] = []  # left, right, middle
    for p in points:
        x, y = at(p)
        width = _CHARACTER * len(p["label"])
        left = x - _GAP - width if before(p) else x + _GAP
        if all(left > r or left + width < l or abs(y - m) >= _LINE for l, r, m in boxes):
            kept.append(p)
            boxes.append((left, left + width, y))
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
    side: dict[str, Any] = {"align": "right", "dx": -_GAP} if before else {"align": "left", "dx": _GAP}
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
