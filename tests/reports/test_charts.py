"""Labels that are shown do not overlap, in charts and in the published figures."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.reports.charts import legible, pixels

FIGURES = sorted((Path(__file__).parents[2] / "docs").glob("frontier/*.svg"))
TEXT = re.compile(r'<text [^>]*text-anchor="(start|end)" transform="translate\(([-.\d]+),([-.\d]+)\)"[^>]*>([^<]+)<')
CHARACTER, LINE = 5.4, 9.0  # pixels: the mean width of a character, the height of a line
LABELS = st.text("ab", max_size=40)
POINTS = st.fixed_dictionaries({"x": st.floats(0, 600), "y": st.floats(0, 300), "label": LABELS})


def overlaps(found):
    """Pairs of texts whose boxes overlap, of texts with their anchor, x and y."""
    boxes = []
    for side, x, y, text in found:
        width = CHARACTER * len(text)
        left = x - width if side == "end" else x
        boxes.append((left, left + width, y, text))
    pairs = combinations(boxes, 2)
    return [(a[3], b[3]) for a, b in pairs if a[0] < b[1] and b[0] < a[1] and abs(a[2] - b[2]) < LINE]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda p: p.stem)
def test_labels_of_a_published_figure_do_not_overlap(figure):
    layers = re.findall(r"mark-text role-mark.*?</g>", figure.read_text())
    found = [(side, float(x), float(y), text) for layer in layers for side, x, y, text in TEXT.findall(layer)]
    assert overlaps(found) == []


@given(st.lists(POINTS, max_size=12), st.floats(0, 600))
def test_labels_that_are_kept_do_not_overlap_and_the_first_is_kept(points, edge):
    kept = legible(points, lambda p: (p["x"], p["y"]), before=lambda p: p["x"] > edge)
    found = [
        ("end", p["x"] - 8, p["y"], p["label"]) if p["x"] > edge else ("start", p["x"] + 8, p["y"], p["label"])
        for p in kept
    ]
    assert overlaps(found) == []
    assert kept[:1] == points[:1]


def test_a_label_is_left_out_only_if_it_overlaps():
    long, behind = {"x": 0, "y": 50, "label": "a" * 40}, {"x": 150, "y": 50, "label": "b"}
    farther, below = behind | {"x": 250}, behind | {"y": 80}
    assert legible([long, behind, farther, below], lambda p: (p["x"], p["y"])) == [long, farther, below]


def test_pixels_of_an_axis():
    assert pixels(1.0, 5.0, 100)(2.0) == 25
    assert pixels(100.0, 10_000.0, 600, log=True)(1000.0) == pytest.approx(300)
    assert pixels(3.0, 3.0, 100)(3.0) == 0
