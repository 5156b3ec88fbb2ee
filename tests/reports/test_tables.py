"""Results as tables: what failed is shown as failed, what is unknown as a dash, every capacity that was measured."""

from __future__ import annotations

import csv
import io

import pytest

from reports.records import a_run, failed, of_paper
from stickymoe.paper.published import beside_the_paper, layers_beside_the_paper, paper_rows, same_protocol
from stickymoe.reports.collection import Row, grouped
from stickymoe.reports.tables import Table, csv_text, html, latex, markdown, results, results_console, terminal

VANILLA = Row.of([a_run("vanilla", ppl=100.0, gate_entropy=None)])
SOFT = Row.of([a_run("soft", ppl=102.5, cache_hit_rate_all_c4=0.75, cache_hit_rate_all_c12=0.875)])
FAILED = Row.of([failed("oracle")])
SEEDS = Row.of(
    [a_run("soft", seed=42, ppl=102.0), a_run("soft", seed=43, ppl=103.0), a_run("soft", seed=44, status="failed")]
)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]


def test_perplexity_and_misses_are_also_relative_to_the_baseline():
    head, _, vanilla, soft = cells(markdown(results([VANILLA, SOFT], VANILLA)))
    at = head.index("ΔPPL %")
    assert (vanilla[at], soft[at]) == ("–", "+2.5")
    assert soft[head.index("× top-1")] == "1.00"
    assert "ΔPPL %" not in results([VANILLA, SOFT]).headings


def test_a_failed_run_says_so_in_every_cell():
    *_, row = cells(markdown(results([VANILLA, FAILED], VANILLA)))
    assert row[0] == "oracle"
    assert set(row[1:]) == {"failed"}


def test_what_was_not_measured_is_a_dash_not_a_zero():
    head, _, vanilla = cells(markdown(results([VANILLA])))
    assert vanilla[head.index("gate H")] == "–"
    assert vanilla[head.index("neglected")] == "0"


def test_every_capacity_has_its_column_in_order():
    head, _, _, soft = cells(markdown(results([VANILLA, SOFT])))
    assert [h for h in head if h.startswith("all")] == ["all C=2 ↑", "all C=3 ↑", "all C=4 ↑", "all C=12 ↑"]
    assert soft[head.index("all C=12 ↑")] == "0.875"


def test_seeds_are_counted_and_their_deviation_shown():
    table = results([VANILLA, SEEDS], VANILLA)
    head, _, vanilla, soft = cells(markdown(table))
    assert (vanilla[head.index("seeds")], soft[head.index("seeds")]) == ("1", "2 (1 not complete)")
    assert soft[head.index("PPL ↓")] == "102.50 ± 0.71"
    read = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert (read[1]["PPL ↓"], read[0]["PPL ↓ ±"], read[0]["ΔPPL %"]) == ("102.5", "", "")
    assert float(read[1]["PPL ↓ ±"]) == pytest.approx(0.5**0.5)


def test_latex_is_a_booktabs_table_with_nothing_unescaped():
    text = latex(Table("t", "50 % of λ_1 & more", ("a ↓", "b ±"), (("x_1 & y", "1 ± 2"), (r"\input{z}", "–"))))
    assert r"\toprule" in text
    assert r"50 \% of $\lambda$\_1 \& more" in text
    assert r"x\_1 \& y & 1 $\pm$ 2 \\" in text
    assert r"\textbackslash{}input\{z\} & -- \\" in text
    assert text.isascii()
    (group,) = grouped([a_run("vanilla"), a_run("soft_hard"), a_run("hard_window"), failed("oracle")])
    tables = (
        results(group.rows, group.baseline),
        beside_the_paper(group, name="p"),
        layers_beside_the_paper(group, name="l"),
    )
    assert all(latex(table).isascii() for table in tables)


def test_markdown_cannot_become_markup_or_break_a_row():
    text = markdown(Table("t", "", ("a",), (("<b> | x\ny",),)))
    assert text.splitlines()[-1] == r"| &lt;b&gt; \| x y |"


def test_html_escapes_what_it_is_given():
    text = html(Table("t", "<b>", ("<i>",), (("<script>alert(1)</script>",),)))
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<caption>&lt;b&gt;</caption>" in text


def test_the_terminal_table_is_never_squeezed():
    console = results_console()
    with console.capture() as printed:
        console.print(terminal(results([VANILLA, SOFT, FAILED, SEEDS], VANILLA)))
    assert "…" not in printed.get()
    assert "102.50 ± 0.71" in printed.get()


def test_the_papers_rows_are_ours_by_key():
    small = paper_rows("small")
    assert len(small) == len(paper_rows("medium")) == 15
    assert small["vanilla"].ppl == 245.297
    assert small["soft_hard-lam0.1-alpha1-window4"].switch_rate == 0.3342
    assert small["remoe-lam0.1"].per_layer == (0.715, 0.712, 0.711, 0.684)


def test_the_paper_stands_beside_ours_without_perplexity_where_the_protocol_differs():
    (group,) = grouped([a_run("vanilla", ppl=200.0), a_run("soft", ppl=190.0), a_run("dense"), failed("oracle")])
    table = beside_the_paper(group, name="p")
    head, _, *lines = cells(markdown(table))
    assert len(lines) == 15
    by_label = {line[0]: line for line in lines}
    vanilla, soft, oracle, absent = (by_label[label] for label in ("vanilla", "soft λ=0.1", "oracle", "soft λ=0.5"))
    assert not same_protocol(group)
    assert "PPL ↓ ours" not in head
    assert "not compared" in table.caption
    assert (soft[head.index("ΔPPL % paper")], soft[head.index("ΔPPL % ours")]) == ("+0.9", "-5.0")
    assert (soft[head.index("SR ↓ paper")], soft[head.index("SR ↓ ours")]) == ("0.476", "0.700")
    assert soft[head.index("× top-1 ↑ paper")] == "1.82"
    assert vanilla[head.index("ΔPPL % paper")] == "–"
    assert oracle[head.index("SR ↓ ours")] == "failed"
    assert (absent[head.index("SR ↓ paper")], absent[head.index("SR ↓ ours")]) == ("0.295", "not run")


def test_perplexities_are_compared_where_the_protocol_is_the_papers():
    (group,) = grouped([of_paper(a_run("vanilla", ppl=250.0))])
    head, _, vanilla, *_ = cells(markdown(beside_the_paper(group, name="p")))
    assert (vanilla[head.index("PPL ↓ paper")], vanilla[head.index("PPL ↓ ours")]) == ("245.30", "250.00")


def test_the_layers_stand_beside_the_papers():
    (group,) = grouped([a_run("vanilla", switch_rate=0.5), failed("oracle")])
    head, _, vanilla, *rest = cells(markdown(layers_beside_the_paper(group, name="l")))
    assert (vanilla[head.index("L3 ↓ paper")], vanilla[head.index("L3 ↓ ours")]) == ("0.691", "0.500")
    assert [row[-1] for row in rest] == ["not run"] * 13 + ["failed"]


def test_without_a_baseline_the_rest_is_still_compared():
    (group,) = grouped([failed("vanilla"), a_run("soft", switch_rate=0.25)])
    head, _, vanilla, *rest = cells(markdown(beside_the_paper(group, name="p")))
    soft = next(row for row in rest if row[0] == "soft λ=0.1")
    assert (soft[head.index("SR ↓ ours")], soft[head.index("ΔPPL % ours")]) == ("0.250", "–")
    assert vanilla[head.index("SR ↓ ours")] == "failed"


def test_another_model_has_no_row_in_the_paper():
    (group,) = grouped([a_run("vanilla", settings={"model": {"n_experts": 16}})])
    assert beside_the_paper(group, name="p") is layers_beside_the_paper(group, name="l") is None
