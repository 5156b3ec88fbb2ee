"""The ribbon: text by its experts, switches marked, whatever the text holds."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from reports.records import a_run, write
from stickymoe.errors import RunError
from stickymoe.locality.formats import load_table, save_table
from stickymoe.locality.replay import replay
from stickymoe.locality.table import RouteTable
from stickymoe.reports.ribbon import PALETTE, Ribbon, read_ribbon, ribbon_svg

SVG = "{http://www.w3.org/2000/svg}"


def a_ribbon(label, words, experts):
    experts = np.array(experts)
    return Ribbon(label, words, experts, np.zeros_like(experts), n_experts=4, capacity=2)


def drawn(ribbon, layer=0):
    return ET.fromstring(ribbon_svg([ribbon], layer=layer))


def test_a_colour_per_expert_and_a_mark_per_switch():
    ribbon = a_ribbon("soft", ("a", "b", "c", "d"), [[0, 0, 1, 0], [2, 2, 2, 2]])
    fills = [rect.get("fill") for rect in drawn(ribbon).iter(f"{SVG}rect")][1:]
    assert [fill for fill in fills if fill in PALETTE] == [PALETTE[0], PALETTE[0], PALETTE[1], PALETTE[0]]
    assert fills.count("#222") == ribbon.switches(0) == 2
    assert ribbon.switches(1) == 0
    assert "changes 0 times in 3 steps" in drawn(ribbon, layer=1).find(f"{SVG}text").text


def test_text_that_is_markup_shows_as_text():
    words = ("<script>alert(1)</script>", '"&', "\n", "")
    texts = [text.text for text in drawn(a_ribbon("<b>", words, [[0] * 4])).iter(f"{SVG}text")]
    assert texts[0].startswith("<b>: ")
    assert texts[1:] == ["<script>alert(1)</script>", '"&', " ", "·"]


def test_long_text_wraps_inside_the_picture():
    svg = drawn(a_ribbon("x", ("word ",) * 200, [[0] * 200]))
    width = float(svg.get("width"))
    ends = [float(r.get("x")) + float(r.get("width")) for r in svg.iter(f"{SVG}rect") if r.get("x")]
    assert max(ends) <= width
    assert len({r.get("y") for r in svg.iter(f"{SVG}rect")}) > 5


def test_a_run_is_read_with_what_its_text_makes_a_cache_load(tmp_path):
    run = write(a_run("soft"), tmp_path, words=("one", "two", "three"))
    ribbon = read_ribbon(run, sequence=1, length=20)
    table = load_table(run / "routes")
    assert ribbon.label == "soft λ=0.1"
    assert ribbon.tokens == tuple(("one", "two", "three")[int(t)] for t in table.tokens[1, :20])
    assert np.array_equal(ribbon.experts, table.S[:, 1, :20, 0])
    expected = [replay(np.asarray(layer), capacity=2, n_experts=4).misses for layer in table.S[:, 1:2, :20]]
    assert ribbon.loads.sum(1).tolist() == expected


def test_padding_is_not_shown(tmp_path):
    run = write(a_run("soft"), tmp_path, words=("one", "two"))
    table = load_table(run / "routes")
    mask = np.ones((2, 64), bool)
    mask[0, 5:] = False
    save_table(
        RouteTable(S=np.asarray(table.S), n_experts=4, mask=mask, tokens=np.asarray(table.tokens)), run / "routes"
    )
    ribbon = read_ribbon(run)
    assert len(ribbon.tokens) == ribbon.experts.shape[1] == ribbon.loads.shape[1] == 5


def test_a_table_without_tokens_is_refused(tmp_path):
    run = write(a_run("soft"), tmp_path, words=("one",))
    table = load_table(run / "routes")
    save_table(RouteTable(S=np.asarray(table.S), n_experts=4, mask=np.asarray(table.mask)), run / "routes")
    with pytest.raises(RunError, match="has no tokens"):
        read_ribbon(run)
