"""`stickymoe demo`: every variant trained for a moment on the embedded corpus, side by side."""

from __future__ import annotations

import os
from pathlib import Path

from stickymoe.experiments.grids import GRIDS, configs
from stickymoe.experiments.sweep import plan, sweep
from stickymoe.experiments.tables import LEGEND, Row, results_console, results_markdown, results_table
from stickymoe.runs.record import RunRecord

NEXT = """\
Next:
  stickymoe variants                                    what each row does, with its equation
  stickymoe train --preset demo --variant soft --variant.lam 0.3 --out runs/soft
                                                        one run with a strength of your own
  stickymoe sweep cpu-small --data.path DIR             the paper's table on a folder of text
"""


def demo(out: Path) -> None:
    """Train every row into `out`, print the comparison and write it as Markdown."""
    console = results_console()
    cells = sweep(plan(configs(GRIDS["demo"], seeds=[42], flags=[], source="demo"), out), jobs=os.cpu_count() or 1)
    rows = [Row.from_record(RunRecord.read(cell.folder.record)) for cell in cells]
    console.print(results_table(rows, baseline=rows[0]))
    markdown = out / "comparison.md"
    markdown.write_text(results_markdown(rows, baseline=rows[0]), encoding="utf-8")
    console.print(f"{LEGEND}\n\nWritten to {markdown}.\n\n{NEXT}", highlight=False)
