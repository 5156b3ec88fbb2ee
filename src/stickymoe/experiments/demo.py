"""`stickymoe demo`: every variant trained for a moment on the embedded corpus, side by side."""

from __future__ import annotations

import os
from pathlib import Path

from stickymoe.experiments.collection import Run, grouped
from stickymoe.experiments.grids import GRIDS, configs
from stickymoe.experiments.ribbon import read_ribbon, ribbon_svg
from stickymoe.experiments.sweep import plan, sweep
from stickymoe.experiments.tables import LEGEND, markdown, results, results_console, terminal

NEXT = """\
Next:
  {command} variants
      what each row does, with its equation
  {command} train --preset demo --variant soft --variant.lam 0.2 --out runs/soft
      one run with a strength of your own
  {command} report {out} -o report.html
      these runs on a page: tables, figures, the text by its experts
  {command} sweep cpu-small --data.corpus factbook --dry_run
      the runs of the paper's table, here on the embedded corpus; without --dry_run it carries them out
"""
SHOWN, SEQUENCE = ("vanilla", "soft", "oracle"), 40  # in the ribbon


def demo(out: Path, *, command: str = "stickymoe") -> None:
    """Train every row into `out`, print the comparison, write it as Markdown and draw the ribbon.

    `command` is how the user calls the program, for the commands to try next.
    """
    console = results_console()
    cells = sweep(plan(configs(GRIDS["demo"], seeds=[42], flags=[], source="demo"), out), jobs=os.cpu_count() or 1)
    (group,) = grouped(Run.of(record) for cell in cells if (record := cell.record) is not None)
    table = results(group.rows, group.baseline)
    console.print(terminal(table))
    comparison, ribbon = out / "comparison.md", out / "ribbon.svg"
    comparison.write_text(markdown(table), encoding="utf-8")
    shown = [cell for cell in cells if cell.config.variant.name in SHOWN and cell.status == "complete"]
    ribbons = [read_ribbon(cell.folder.path, sequence=SEQUENCE, length=70) for cell in shown]
    ribbon.write_text(ribbon_svg(ribbons, layer=2), encoding="utf-8")
    console.print(
        f"{LEGEND}\n\nWritten to {comparison}; {ribbon} shows the routing of a text.\n", highlight=False, soft_wrap=True
    )
    console.print(NEXT.format(command=command, out=out), highlight=False, soft_wrap=True)
