"""Tables and the figure of `reroute` and `adapt`: perplexity against loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stickymoe.errors import StickyError, require
from stickymoe.locality.plan import bytes_text
from stickymoe.reports.tables import Table

_FORMATS = (".svg", ".png", ".html")


def rules_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Each rule and strength beside the model as it is, the first row."""
    before = rows[0]
    cells = []
    for row in rows:
        more = 100 * (row["ppl"] / before["ppl"] - 1)
        fewer = before["loads_per_token"] / row["loads_per_token"] if row["loads_per_token"] else float("inf")
        cells.append(
            (
                row["rule"],
                "" if row["strength"] is None else f"{row['strength']:g}",
                f"{row['ppl']:.2f}",
                f"{more:+.1f}",
                f"{100 * row['miss_rate']:.1f}",
                f"{row['loads_per_token']:.2f}",
                bytes_text(row["bytes_per_token"]),
                f"{fewer:.2f}",
            )
        )
    headings = ("rule", "strength", "PPL", "ΔPPL %", "misses %", "loads/token", "read/token", "× fewer loads")
    return Table("rules", "", headings, tuple(cells))


def adapted_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """A checkpoint before and after it was adapted."""
    names = {
        "ppl": ("PPL", ".2f", 1.0),
        "switch_rate": ("SR", ".3f", 1.0),
        "miss_rate": ("misses %", ".1f", 100.0),
        "loads_per_token": ("loads/token", ".2f", 1.0),
        "effective_experts": ("effective experts", ".2f", 1.0),
    }
    rows = []
    for label, found in (("before", before), ("after", after)):
        cells = [format(scale * found[name], form) for name, (_, form, scale) in names.items()]
        rows.append((label, *cells, bytes_text(found["bytes_per_token"])))
    headings = ("checkpoint", *(heading for heading, _, _ in names.values()), "read/token")
    return Table("adapted", "", headings, tuple(rows))


def save_figure(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Perplexity against bytes read per token, one line per rule; the model as it is stands alone."""
    require(file.suffix in _FORMATS, "--figure", str(file), f"a file that ends in {', '.join(_FORMATS)}")
    import altair as alt

    from stickymoe.reports.charts import colour_by, inline, labels, themed

    points = [
        {
            "rule": row["rule"],
            "ppl": row["ppl"],
            "read": row["bytes_per_token"] / 1e6,
            "misses": 100 * row["miss_rate"],
            "label": row["rule"] if row["strength"] is None else f"{row['strength']:g}",
            "order": 0.0 if row["strength"] is None else row["strength"],
        }
        for row in rows
    ]
    names = list(dict.fromkeys(point["rule"] for point in points))
    x = alt.X("read:Q", title="MB read per token", scale=alt.Scale(zero=False, padding=18))
    y = alt.Y("ppl:Q", title="perplexity", scale=alt.Scale(zero=False, padding=18))
    base = alt.Chart(inline(points)).encode(x=x, y=y, color=colour_by("rule", names))
    shape = alt.Shape("rule:N", scale=alt.Scale(domain=names), legend=alt.Legend(title=None, orient="bottom"))
    tooltip = ["rule:N", "label:N", "ppl:Q", "read:Q", "misses:Q"]
    chart = alt.layer(
        base.mark_line().encode(order="order:Q"),
        base.mark_point(filled=True, size=60).encode(shape=shape, tooltip=tooltip),
        labels(points, x, y),
    ).properties(width=520, height=340)
    spec = alt.Chart.from_dict(themed(chart))
    try:
        spec.save(str(file))
    except OSError as e:
        raise StickyError(f"{file} cannot be written ({e.strerror or e}).") from e
