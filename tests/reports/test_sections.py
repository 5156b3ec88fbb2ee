"""Sections are plug-ins: a user can add one, and no run of a user needs the paper."""

from __future__ import annotations

import subprocess
import sys

import altair as alt
import pytest

from reports.records import a_run, write
from stickymoe.errors import RunError
from stickymoe.reports.parts import FigurePart, Item, ListPart, TablePart
from stickymoe.reports.report import report
from stickymoe.reports.sections import DEFAULT_SECTIONS
from stickymoe.reports.tables import Table


def seeds(group, context):
    """A section as a user would write it: a table, a list with a summary, a figure."""
    rows = tuple((row.label, str(len(row.runs))) for row in group.rows)
    table = Table(f"seeds-{context.name}", "Seeds of <each> row.", ("variant", "seeds"), rows)
    values = [{"label": label, "seeds": int(n)} for label, n in rows]
    chart = alt.Chart(alt.InlineData(values=values)).mark_bar().encode(x="seeds:Q", y="label:N")
    return [
        TablePart(name=table.name, title="My seeds", table=table, note="A note."),
        ListPart(
            name=f"verdict-{context.name}",
            title="My verdict",
            items=[Item("Enough seeds?", "It has <one>.", badge="does not hold")],
            summary="Too few seeds.",
        ),
        FigurePart(name=f"bars-{context.name}", title="My bars", note="One bar per row.", chart=chart),
    ]


@pytest.fixture
def runs(tmp_path):
    for variant in ("vanilla", "soft", "dense"):
        write(a_run(variant, ppl=110.0 if variant == "dense" else 100.0), tmp_path / "runs")
    return tmp_path / "runs"


def test_a_section_of_the_user_is_in_the_page_the_markdown_and_the_files(runs, tmp_path):
    report([runs], tmp_path / "page.html", sections=[*DEFAULT_SECTIONS, seeds])
    page, text = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    for title in ("My seeds", "My verdict", "My bars"):
        assert f"<h3>{title}</h3>" in page
        assert f"### {title}" in text
    assert "Seeds of &lt;each&gt; row." in page
    assert '<span class="badge does-not-hold">does not hold</span>It has &lt;one&gt;.' in page
    assert "- **Enough seeds?** (does not hold): It has &lt;one&gt;." in text
    assert "Too few seeds." in page.split("<h2>")[0]
    assert "Too few seeds." in text.split("##")[0]
    assert (tmp_path / "page" / "tables" / "seeds-small-1000.csv").read_text().startswith("variant,seeds\n")
    assert (tmp_path / "page" / "figures" / "bars-small-1000.svg").exists()
    assert "<h3>Results</h3>" in page


def test_sections_can_be_left_out_and_the_order_of_rows_chosen(runs, tmp_path):
    report([runs], tmp_path / "page.html", sections=[seeds], appendices=[], order=["soft"])
    text = (tmp_path / "page.md").read_text()
    assert "### Results" not in text
    assert "Provenance" not in text
    assert text.index("| soft") < text.index("| vanilla")


def test_two_parts_of_one_name_are_refused(runs, tmp_path):
    with pytest.raises(RunError, match=r"Two parts of the report have the name 'seeds-small-1000': use context.name"):
        report([runs], tmp_path / "page.html", sections=[seeds, seeds])
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(("flags", "imported"), [([], False), (["--paper"], True)])
def test_the_paper_is_imported_only_if_it_is_asked_for(runs, tmp_path, flags, imported):
    code = (
        "import sys; from stickymoe.cli import main; code = main(sys.argv[1:]); "
        "print(code, any(name.startswith('stickymoe.paper') for name in sys.modules))"
    )
    command = [sys.executable, "-c", code, "report", str(runs), "-o", str(tmp_path / "page.html"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"0 {imported}"
    text = (tmp_path / "page.md").read_text()
    for title in ("### MoE gain kept", "### Findings", "### The paper and our runs", "### Two orders of access"):
        assert (title in text) == imported
    assert "### Results" in text
