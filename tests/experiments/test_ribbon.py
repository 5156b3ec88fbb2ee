"""The ribbon: text by its experts, switches marked, whatever the text holds."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from stickymoe.experiments.ribbon import PALETTE, Ribbon, ribbon_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(ribbon, layer=0):
    return ET.fromstring(ribbon_svg([ribbon], layer=layer))


def test_a_colour_per_expert_and_a_mark_per_switch():
    ribbon = Ribbon("soft", ("a", "b", "c", "d"), np.array([[0, 0, 1, 0], [2, 2, 2, 2]]))
    fills = [rect.get("fill") for rect in drawn(ribbon).iter(f"{SVG}rect")][1:]
    assert [fill for fill in fills if fill in PALETTE] == [PALETTE[0], PALETTE[0], PALETTE[1], PALETTE[0]]
    assert fills.count("#222") == ribbon.switches(0) == 2
    assert ribbon.switches(1) == 0
    assert "changes 0 times in 3 steps" in drawn(ribbon, layer=1).find(f"{SVG}text").text


def test_text_that_is_markup_shows_as_text():
    words = ("<script>alert(1)</script>", '"&', "\n", "")
    texts = [text.text for text in drawn(Ribbon("<b>", words, np.zeros((1, 4), np.int64))).iter(f"{SVG}text")]
    assert texts[0].startswith("<b>: ")
    assert texts[1:] == ["<script>alert(1)</script>", '"&', " ", "·"]


def test_long_text_wraps_inside_the_picture():
    svg = drawn(Ribbon("x", ("word ",) * 200, np.zeros((1, 200), np.int64)))
    width = float(svg.get("width"))
    ends = [float(r.get("x")) + float(r.get("width")) for r in svg.iter(f"{SVG}rect") if r.get("x")]
    assert max(ends) <= width
    assert len({r.get("y") for r in svg.iter(f"{SVG}rect")}) > 5
