"""The report: complete, self-contained, and harmless whatever the corpus holds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from reports.records import a_run, failed, write
from stickymoe.cli import main
from stickymoe.paper.sections import paper_report
from stickymoe.reports.report import report

EVIL = ("<script>document.title='owned'</script>", "</script>", "<b>bold</b>", "&amp;", "plain")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page over a small sweep with two seeds, a failure, damage, and runs on another corpus."""
    folder = tmp_path_factory.mktemp("report")
    runs = folder / "runs"
    for seed in (42, 43):
        write(a_run("vanilla", seed=seed, ppl=100.0 + seed), runs, words=EVIL)
        write(a_run({"name": "soft", "lam": 0.5}, seed=seed, ppl=103.0 + seed, switch_rate=0.3), runs, words=EVIL)
    write(a_run("dense", ppl=160.0), runs)
    write(failed("oracle"), runs)
    write(a_run("vanilla", fingerprint="e" * 64, settings={"data": {"path": "texts/<i>other</i>"}}), runs)
    (runs / "broken").mkdir()
    (runs / "broken" / "record.json").write_text("{")
    paper_report([runs], folder / "out" / "page.html")
    return folder / "out"


def test_every_table_and_figure_lies_beside_the_page(made):
    files = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    tables = ["results-small-1000", "paper-small-1000", "paper-layers-small-1000", "results-small-1000-2", "provenance"]
    assert {f"page/tables/{t}.{e}" for t in tables for e in ("md", "tex", "csv")} <= files
    names = ["pareto-chr", "pareto-sr", "pareto-misses-c2", "pareto-misses-c3", "layers", "switches-misses"]
    names += ["utilisation", "curves", "miss-curves", "speed", "working-set"]
    names = [f"{name}-small-1000" for name in names] + [
        "access-patterns",
        "ribbon-small-1000",
    ]
    assert {f"page/figures/{n}.{e}" for n in names for e in ("svg", "png")} <= files
    for svg in (made / "page" / "figures").glob("*.svg"):
        ET.parse(svg)
    assert (made / "page" / "figures" / "access-patterns.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_asks_no_other_host_for_anything(made):
    page = (made / "page.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=\s*["']?https?:""", page)
    assert len(page) < 5e6


def test_what_failed_or_is_damaged_is_shown_so(made):
    page, text = (made / "page.html").read_text(), (made / "page.md").read_text()
    assert re.search(r"<strong>failed</strong> oracle, seed 42: The loss became nan", page)
    assert re.search(r"<strong>damaged</strong> \S*broken/record.json", page)
    assert "| oracle | 0 (1 not complete) | failed | failed |" in text
    assert "**damaged**" in text


def test_text_of_a_corpus_is_data_not_markup(made):
    page = (made / "page.html").read_text()
    assert "<script>document.title" not in page
    assert "<b>bold</b>" not in page
    assert "<i>other</i>" not in page
    assert r"\u003cscript\u003edocument.title" in page


def test_runs_on_other_data_are_never_in_one_table(made):
    first, second = ((made / "page" / "tables" / f"results-small-1000{n}.md").read_text() for n in ("", "-2"))
    assert first.count("| vanilla |") == second.count("| vanilla |") == 1
    assert "dense" in first
    assert "dense" not in second


def test_a_record_alone_is_enough(tmp_path):
    """Published results keep records without routes or metrics: tables and figures from them, no ribbon."""
    path = write(a_run("vanilla"), tmp_path / "results")
    (path / "metrics.jsonl").unlink()
    report([tmp_path / "results"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "The same text" not in page
    assert not (tmp_path / "page" / "figures" / "curves-small-1000.svg").exists()
    assert (tmp_path / "page" / "figures" / "pareto-chr-small-1000.svg").exists()


def test_only_a_dense_run_makes_a_page_without_routing_figures(tmp_path):
    write(a_run("dense"), tmp_path / "runs")
    report([tmp_path / "runs"], tmp_path / "page.html")
    assert '<th scope="row">dense</th>' in (tmp_path / "page.html").read_text()
    drawn = {p.name for p in (tmp_path / "page" / "figures").glob("*.svg")}
    assert drawn == {"curves-small-1000.svg"}


def test_rows_measured_at_other_capacities_share_a_page(tmp_path):
    write(a_run("vanilla"), tmp_path / "runs")
    write(a_run("soft", cache_hit_rate_all_c3=None, cache_hit_rate_all_c4=0.9), tmp_path / "runs")
    report([tmp_path / "runs"], tmp_path / "page.html")
    assert "all C=4 ↑" in (tmp_path / "page.md").read_text()


def test_a_run_without_its_tokenizer_or_with_odd_characters_is_shown_as_far_as_can_be(tmp_path):
    first = write(a_run("vanilla"), tmp_path / "runs", words=("one\x0c", "two"))
    second = write(a_run("soft"), tmp_path / "runs", words=("one\x0c", "two"))
    (second / "tokenizer.json").unlink()
    report([tmp_path / "runs"], tmp_path / "page.html")
    assert "one·" in (tmp_path / "page" / "figures" / "ribbon-small-1000.svg").read_text()
    (first / "routes" / "S.npy").write_bytes(b"")
    report([tmp_path / "runs"], tmp_path / "other.html")
    assert "The same text" not in (tmp_path / "other.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["empty"], "There is no run in empty"),
        (["nowhere"], "nowhere is not a folder"),
        (["failed"], "No run in failed is complete (1 failed): The loss became nan at step 7."),
        (["failed", "-o", "page.pdf"], "page.pdf: expected the name of an HTML file"),
        (["failed", "--device", "raspberry"], "Did you mean 'raspberry-pi-5'"),
        (["failed", "--memory", "lots"], "--memory: got 'lots', expected bytes"),
        (["failed", "-o", "failed.html"], "failed.html would write tables and figures into the runs"),
        ([], "the following arguments are required: RUNS"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(failed("vanilla"), tmp_path / "failed")
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_the_command_says_what_it_wrote_and_what_it_skipped(tmp_path, capsys):
    write(a_run("vanilla"), tmp_path / "runs")
    (tmp_path / "runs" / "x").mkdir()
    (tmp_path / "runs" / "x" / "record.json").write_text("[]")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert "1 of 1 runs complete" in printed.out
    assert "skipped" in printed.err
    assert "x/record.json" in printed.err
