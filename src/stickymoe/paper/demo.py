"""`stickymoe demo`: train the variants of the paper for a short time on the embedded corpus and compare them."""

from __future__ import annotations

import os
from pathlib import Path

from stickymoe.paper.grids import GRIDS, PAPER_ORDER
from stickymoe.reports.collection import Run, grouped
from stickymoe.reports.ribbon import read_ribbon, ribbon_svg
from stickymoe.reports.tables import LEGEND, markdown, results, results_console, terminal
from stickymoe.sweeps.engine import plan, sweep
from stickymoe.sweeps.grid import configs

NEXT = """\
Next:
  {command} variants
      list the variants with their equations
  {command} train --preset demo --variant soft --variant.lam 0.2 --out runs/soft
      train one run with your own strength
  {command} report {out} -o report.html --paper
      show these runs on a page: tables, figures, a text coloured by expert, the numbers of the paper
  {command} sweep cpu-small --data.corpus factbook --dry_run
      list the runs of the paper's table on the embedded corpus; without --dry_run, run them
"""
SHOWN, SEQUENCE = ("vanilla", "soft", "oracle"), 40  # in the ribbon


def demo(out: Path, *, command: str = "stickymoe") -> None:
    """Train every row into `out`, print the comparison, write it as Markdown and draw the ribbon.

    `command` is the name of the program in the suggested commands.
    """
    console = results_console()
    cells = sweep(plan(configs(GRIDS["demo"], seeds=[42], flags=[], source="demo"), out), jobs=os.cpu_count() or 1)
    records = [record for cell in cells if (record := cell.record) is not None]
    (group,) = grouped((Run.of(record) for record in records), order=PAPER_ORDER)
    table = results(group.rows, group.baseline)
    console.print(terminal(table))
    comparison, ribbon = out / "comparison.md", out / "ribbon.svg"
    comparison.write_text(markdown(table), encoding="utf-8")
    shown = [cell for cell in cells if cell.config.variant.name in SHOWN and cell.status == "complete"]
    ribbons = [read_ribbon(cell.folder.path, sequence=SEQUENCE, length=70) for cell in shown]
    ribbon.write_text(ribbon_svg(ribbons, layer=2), encoding="utf-8")
    console.print(
        f"{LEGEND}\n\nThe table is in {comparison}. {ribbon} shows how three runs route a text.\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(NEXT.format(command=command, out=out), highlight=False, soft_wrap=True)
