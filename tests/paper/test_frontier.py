"""Gain kept and misses: cases by hand."""

from __future__ import annotations

import re

import pytest

from reports.records import a_run
from stickymoe.paper import figures as paper_figures
from stickymoe.paper import frontier
from stickymoe.reports import figures, tables
from stickymoe.reports.collection import Row, Value, grouped


def runs(seed=42, shift=0.0):
    """Vanilla gains 10 over dense; `soft` is the paper's, the others are not."""

    def run(variant, ppl, hit2=0.5, hit3=0.75, **more):
        return a_run(
            variant,
            seed=seed,
            ppl=ppl + shift,
            cache_hit_rate_all_c2=hit2,
            cache_hit_rate_all_c3=hit3,
            **more,
        )

    return [
        run("vanilla", 100.0),
        run("dense", 110.0),
        run({"name": "soft", "lam": 0.1}, 105.0, 0.55, 0.78),
        run({"name": "soft", "lam": 0.01}, 101.0, 0.52, 0.78),
        run({"name": "smooth", "decay": 0.5}, 104.0, 0.6, 0.80),
        run("residency", 101.5, 0.51, 0.98),
        run("hysteresis", 101.0, 0.5, 0.99, neglected_experts=1),
    ]


def test_the_share_of_the_gain_that_is_kept():
    vanilla, dense, soft = (
        Row.of([a_run(name, seed=seed, ppl=ppl) for seed, ppl in enumerate(ppls)])
        for name, ppls in (("vanilla", (100.0, 104.0)), ("dense", (110.0, 114.0)), ("soft", (102.0, 105.0)))
    )
    assert frontier.kept_gain(soft, baseline=vanilla, dense=dense).mean == pytest.approx(0.85)
    assert frontier.kept_gain(dense, baseline=vanilla, dense=dense).mean == 0
    assert frontier.kept_gain(soft, baseline=dense, dense=vanilla) is None
    assert frontier.kept_gain(Row.of([a_run("soft", seed=9)]), baseline=vanilla, dense=dense) is None


def found(*more):
    (group,) = grouped([*runs(), *more])
    return group, {point.row.variant.name: point for point in frontier.points(group)}


def test_a_point_has_a_share_of_the_gain_and_misses():
    _, by_name = found()
    smooth = by_name["smooth"]
    assert smooth.kept.mean == pytest.approx(0.6)
    assert {C: misses.mean for C, misses in smooth.misses.items()} == pytest.approx({2: 0.4, 3: 0.2})
    assert smooth.fewer[3].mean == pytest.approx(1.25)
    assert "dense" not in by_name


def test_the_pareto_front_depends_on_the_cache():
    group, _ = found()
    everything = frontier.points(group)
    names = {C: [p.row.variant.name for p in frontier.front(everything, C)] for C in (2, 3)}
    assert names == {2: ["smooth", "soft", "vanilla"], 3: ["hysteresis", "vanilla"]}


def test_the_target_is_gain_misses_and_even_use():
    _, by_name = found()
    assert by_name["residency"].reaches_target(3)
    assert not by_name["residency"].reaches_target(2), "too many misses"
    assert not by_name["smooth"].reaches_target(3), "too little gain"
    assert not by_name["hysteresis"].reaches_target(3), "an expert is neglected"
    assert not by_name["vanilla"].reaches_target(3)


def test_which_of_ours_beats_the_papers_rows():
    group, _ = found(a_run({"name": "soft", "lam": 0.1, "gate_only": True}, ppl=99.0, cache_hit_rate_all_c2=0.9))
    assert {
        label: None if by is None else by.row.variant.name
        for label, by in frontier.dominators(frontier.points(group), 2).items()
    } == {"soft λ=0.1": "smooth", "soft λ=0.01": None}
    appendix = [a_run(name, ppl=90.0, cache_hit_rate_all_c2=0.99) for name in ("hash", "trajectory", "cross_layer")]
    (named_by_it,) = grouped([a_run("vanilla"), a_run("dense", ppl=110.0), a_run("soft", ppl=105.0), *appendix])
    assert frontier.dominators(frontier.points(named_by_it), 2) == {"soft λ=0.1": None}, "the paper's own bounds"
    nearest = frontier.nearest(frontier.points(group), 3)
    assert nearest is not None
    assert nearest.row.variant.name == "residency"


def lines_of(chart):
    """The names of the horizontal lines of a chart."""
    return [value["name"] for data in chart.to_dict()["datasets"].values() for value in data if "name" in value]


def test_only_what_never_loads_again_is_a_line_beside_the_trade_off():
    spans = [a_run({"name": "trajectory", "span": span}, ppl=112.0) for span in (0, 16)]
    (group,) = grouped([*runs(), *spans, a_run({"name": "trajectory", "sentence": True}, ppl=113.0)])
    chart = figures.pareto(group, "switch_rate", "switch rate", better="lower")
    assert lines_of(chart) == ["dense (no experts)", "trajectory span=0 (loads once)"]


def test_of_two_rows_at_one_place_one_is_named():
    def smooth(decay, ppl, hits):
        return a_run({"name": "smooth", "decay": decay}, ppl=ppl, cache_hit_rate_all_c3=hits)

    apart = [smooth(0.1, 98.0, 0.8), smooth(0.9, 108.0, 0.999)]
    (group,) = grouped([a_run("vanilla"), *apart, smooth(0.7, 105.0, 0.97), smooth(0.71, 104.9, 0.9699)])
    chart = figures.pareto(group, "cache_hit_rate_all_c3", "misses", better="lower", misses=True).to_dict()
    texts = next(layer for layer in chart["layer"] if layer["encoding"].get("text", {}).get("field") == "label")
    named = [point["label"] for point in chart["datasets"][texts["data"]["name"]]]
    assert named == ["vanilla", "smooth d=0.9", "smooth d=0.7", "smooth d=0.1"]


@pytest.mark.parametrize(("worst", "off"), [(111.0, False), (150.0, True)])
def test_what_is_far_worse_than_vanilla_is_at_the_edge(worst, off):
    (group,) = grouped([a_run("vanilla"), a_run("smooth", ppl=98.0), a_run("soft", ppl=worst)])
    chart = figures.pareto(group, "switch_rate", "switch rate", better="lower").to_dict()
    axes = [layer["encoding"]["y"] for layer in chart["layer"] if layer["encoding"]["y"]["field"] == "ppl"]
    assert {axis["title"] for axis in axes if "title" in axis} == {
        "perplexity (lower is better; at the edge: above 112)" if off else "perplexity (lower is better)"
    }
    tops = {axis["scale"].get("domain", [0, None])[1] for axis in axes if "scale" in axis}
    assert list(tops) == [pytest.approx(112.0) if off else None]


def test_a_mixture_that_the_cache_holds_is_a_line_at_what_its_best_row_keeps():
    (group,) = grouped(runs())
    few = {"model": {"n_experts": 3}}
    mixtures = [a_run("vanilla", settings=few, ppl=104.0), a_run("hash", settings=few, ppl=102.0)]
    (smaller,) = grouped([*mixtures, a_run("smooth", settings=few, seed=43, ppl=90.0)])
    kept = {row.variant.name: share.mean for row, share in frontier.fitting(group, smaller)}
    assert kept == pytest.approx({"hash": 0.8, "vanilla": 0.6}), "over common seeds"
    assert list(kept) == ["hash", "vanilla"]

    assert lines_of(paper_figures.kept_gain(group, 3, smaller=smaller)) == ["best of N=3, all in memory"]
    assert lines_of(paper_figures.kept_gain(group, 3)) == []
    (no_dense,) = grouped(run for run in runs() if run.config.variant.name != "dense")
    assert frontier.fitting(no_dense, smaller) == []


def test_to_reach_the_target_clearly_takes_three_seeds_and_the_whole_interval():
    def sure(*shifts, off=0.0):
        again = [
            a_run("residency", seed=40 + i, ppl=101.5 + x, cache_hit_rate_all_c3=0.98 - off * x)
            for i, x in enumerate(shifts)
        ]
        controls = [run for i in range(len(shifts)) for run in runs(40 + i) if run.config.variant.name != "residency"]
        (group,) = grouped([*controls, *again])
        (point,) = (p for p in frontier.points(group) if p.row.variant.name == "residency")
        assert point.reaches_target(3)
        return point.clearly_reaches_target(3)

    assert sure(0.0, 0.01, -0.01)
    assert not sure(0.0), "one seed"
    assert not sure(0.0, 0.01), "two"
    assert not sure(0.0, 1.0, -1.0), "0.85 ± 0.25"
    assert not sure(0.0, 0.01, -0.01, off=0.5), "12.7 ± 8 times fewer"


def test_without_a_common_seed_there_is_no_gain_to_share():
    (group,) = grouped([a_run("vanilla", seed=43), a_run("dense", seed=42, ppl=110.0)])
    assert frontier.gain_warning(group).endswith("vanilla and dense have no common seed, so the MoE gain is unknown")


def test_the_legend_names_only_what_is_drawn():
    ours = [run for run in runs() if run.config.variant.name in ("vanilla", "dense", "residency")]
    for shown, names in ((runs(), ["beyond the paper", "paper", "vanilla"]), (ours, ["beyond the paper", "vanilla"])):
        (group,) = grouped(shown)
        drawn = paper_figures.kept_gain(group, 3).to_dict()
        scales = [layer["encoding"]["color"]["scale"] for layer in drawn["layer"] if "color" in layer["encoding"]]
        assert [scale["domain"] for scale in scales] == [names]


def test_the_interval_is_students():
    assert frontier.interval(Value(1.0, 0.5, 3)) == pytest.approx(4.303 * 0.5 / 3**0.5)
    assert frontier.interval(Value(1.0, None, 1)) is None
    (group,) = grouped([*runs(), *runs(43, shift=2.0), *runs(44, shift=-1.0)])
    table = frontier.kept_table(group)
    assert table is not None
    cells = {row[0]: [str(cell) for cell in row] for row in table.rows}
    assert {name.split()[0] for name in cells if name.endswith("★")} == {"hysteresis", "vanilla"}, "at C=3"
    assert cells["smooth d=0.5"][1:6] == ["3", "104.33 ± 1.53", "60 ± 0", "0.400 ± 0.000", "1.25 ± 0.00"]
    assert cells["vanilla ★"][5] == "–"
    assert cells["dense"] == ["dense", "3", "110.33 ± 1.53", "0", *["–"] * 7]


def test_rows_are_held_against_each_other_over_common_seeds():
    """With one seed in common, that seed decides, whatever the others are like."""
    lucky = {"name": "smooth", "decay": 0.5}
    more = [
        a_run(lucky, seed=43, ppl=90.0, cache_hit_rate_all_c2=0.9, cache_hit_rate_all_c3=0.9),
        a_run("residency", seed=42, ppl=103.0, cache_hit_rate_all_c2=0.7, cache_hit_rate_all_c3=0.9),
    ]
    (group,) = grouped([*runs()[:5], *runs(43)[:2], *more])
    by_name = {point.row.variant.name: point for point in frontier.points(group)}
    assert by_name["smooth"].ppl.mean == pytest.approx(97.0)
    assert by_name["residency"].beats(by_name["smooth"], 2)
    assert not by_name["smooth"].beats(by_name["residency"], 2)
    (group,) = grouped([*runs()[:2], *runs(43)[:2], more[0], more[1]])
    smooth, residency = (
        next(p for p in frontier.points(group) if p.row.variant.name == n) for n in ("smooth", "residency")
    )
    assert not smooth.beats(residency, 2), "without a common seed nothing can be said"
    assert not residency.beats(smooth, 2)


def test_all_of_a_line_is_over_the_seeds_that_it_names():
    """Dense has one seed: what the other two make of a second does not count."""
    more = [
        a_run("vanilla", seed=43, ppl=100.0, cache_hit_rate_all_c3=0.75),
        a_run("residency", seed=43, ppl=99.0, cache_hit_rate_all_c3=0.76, switch_rate=0.9, neglected_experts=2),
    ]
    (group,) = grouped([*runs(), *more])
    residency = next(p for p in frontier.points(group) if p.row.variant.name == "residency")
    assert residency.seeds == (42,)
    assert residency.fewer[3].mean == pytest.approx(12.5)
    assert residency.even
    assert residency.reaches_target(3)
    table = frontier.kept_table(group)
    assert table is not None
    (line,) = (row for row in table.rows if str(row[0]).startswith("residency"))
    assert "±" not in "".join(str(cell) for cell in line)


def test_over_several_seeds_a_row_must_be_beaten_by_more_than_their_spread():
    def pair(seed, ppl, hit):
        return [
            a_run("vanilla", seed=seed, ppl=100.0, cache_hit_rate_all_c2=0.5),
            a_run("dense", seed=seed, ppl=110.0),
            a_run({"name": "soft", "lam": 0.1}, seed=seed, ppl=105.0, cache_hit_rate_all_c2=0.55),
            a_run({"name": "smooth", "decay": 0.5}, seed=seed, ppl=ppl, cache_hit_rate_all_c2=hit),
        ]

    (noisy,) = grouped([*pair(42, 104.0, 0.56), *pair(43, 103.0, 0.7), *pair(44, 104.5, 0.551)])
    assert frontier.dominators(frontier.points(noisy), 2) == {"soft λ=0.1": None}
    (sure,) = grouped([*pair(42, 104.0, 0.60), *pair(43, 103.9, 0.61), *pair(44, 104.1, 0.6)])
    by = frontier.dominators(frontier.points(sure), 2)["soft λ=0.1"]
    assert by is not None
    assert by.row.variant.name == "smooth"


def test_the_interval_of_a_share_is_that_of_a_ratio():
    """A row that keeps the same share with every seed is sure of it, however the gain itself may vary."""
    ppls = {42: (100.0, 110.0), 43: (100.0, 130.0), 44: (100.0, 104.0)}
    made = [
        run
        for seed, (base, dense) in ppls.items()
        for run in (
            a_run("vanilla", seed=seed, ppl=base),
            a_run("dense", seed=seed, ppl=dense),
            a_run("oracle", seed=seed, ppl=dense - 0.5 * (dense - base)),
        )
    ]
    (group,) = grouped(made)
    shares = {point.row.label: point.kept for point in frontier.points(group)}
    assert shares["oracle"].mean == pytest.approx(0.5)
    assert shares["oracle"].sd == pytest.approx(0.0, abs=1e-12)
    assert shares["vanilla"].sd == 0.0


def test_without_controls_or_gain_there_is_no_table():
    (group,) = grouped([a_run("vanilla", ppl=100.0), a_run("residency", ppl=90.0)])
    assert frontier.kept_table(group) is None
    assert str(frontier.gain_warning(group)).endswith("2 finished rows, but no dense, so the MoE gain is unknown")
    (group,) = grouped([a_run("vanilla", ppl=100.0), a_run("dense", ppl=99.0)])
    assert frontier.kept_table(group) is None


@pytest.mark.parametrize(("dense", "kept"), [(110.0, "150"), (101.0, "–")])
def test_shares_of_a_gain_too_small_are_not_shown(dense, kept):
    (group,) = grouped([a_run("vanilla", ppl=100.0), a_run("dense", ppl=dense), a_run("smooth", ppl=95.0)])
    table = tables.markdown(frontier.kept_table(group))
    assert re.search(rf"^\| smooth d=0.5 ★ \| 1 \| 95.00 \| {kept} \|", table, re.MULTILINE)


@pytest.mark.parametrize(("dense", "warned"), [(110.0, False), (101.0, True), (99.0, True)])
def test_a_gain_that_is_too_small_is_reported(dense, warned):
    (group,) = grouped([a_run("vanilla", ppl=100.0), a_run("dense", ppl=dense)])
    warning = frontier.gain_warning(group)
    assert (warning is not None) == warned
    if warning is not None:
        assert "expected -2 % or less" in warning
        assert "train longer" in warning
