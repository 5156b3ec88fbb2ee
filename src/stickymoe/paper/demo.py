"""`stickymoe demo`: train the variants of the paper for a short time on the embedded corpus and compare them.

Then plain routing and the recommended router generate text, with experts on disk and the same bytes of slots.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from stickymoe.paper.generation import (
    MEMORY,
    THROTTLE,
    beginnings,
    conclusion,
    generate_in_turns,
    generation_table,
    setting,
)
from stickymoe.paper.grids import GRIDS, PAPER_ORDER
from stickymoe.reports.collection import Run, grouped
from stickymoe.reports.ribbon import read_ribbon, ribbon_svg
from stickymoe.reports.tables import LEGEND, markdown, results, results_console, terminal
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.sweeps.cells import plan
from stickymoe.sweeps.engine import sweep
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
SERVE = """\
To watch both models load and generate side by side, run
  {command} serve {out}/stores/vanilla {out}/stores/sticky --memory {memory} --throttle {throttle}
and open http://127.0.0.1:8000/
"""
SHOWN, SEQUENCE = ("vanilla", "soft", "oracle"), 40  # in the ribbon
STORES = {"vanilla": "vanilla", "sticky": RECOMMENDED["name"]}  # the variant of each store


def demo(out: Path, *, command: str = "stickymoe") -> None:
    """Train every row into `out`, print the comparison, write it as Markdown and draw the ribbon; then generate.

    `command` is the name of the program in the suggested commands.
    """
    console = results_console()
    cells = sweep(plan(configs(GRIDS["demo"], seeds=[42], flags=[], source="demo"), out))
    records = [record for cell in cells if (record := cell.record) is not None]
    (group,) = grouped((Run.of(record) for record in records), order=PAPER_ORDER)
    table = results(group.rows, group.baseline)
    console.print(terminal(table))
    comparison, ribbon = out / "comparison.md", out / "ribbon.svg"
    comparison.write_text(markdown(table), encoding="utf-8")
    runs = {cell.config.variant.name: cell.folder.path for cell in cells if cell.status == "complete"}
    ribbons = [read_ribbon(runs[name], sequence=SEQUENCE, length=70) for name in SHOWN if name in runs]
    ribbon.write_text(ribbon_svg(ribbons, layer=2), encoding="utf-8")
    _print(console, f"{LEGEND}\n\nThe table is in {comparison}. {ribbon} shows how three runs route a text.\n")
    if all(variant in runs for variant in STORES.values()):
        _generate({name: runs[variant] for name, variant in STORES.items()}, out / "stores", comparison, console)
        _print(console, SERVE.format(command=command, out=out, memory=MEMORY, throttle=THROTTLE))
    _print(console, NEXT.format(command=command, out=out))


def _generate(runs: dict[str, Path], stores: Path, comparison: Path, console: Console) -> None:
    """Generate with each of the runs, print what it costs, and add it to the comparison."""
    _print(console, f"Generating with {' and '.join(runs)} from {stores}; the first time, loops are compiled …\n")
    models = generate_in_turns(runs, stores)
    table, before, after = generation_table(models), setting(models), conclusion(models)
    _print(console, f"{before}\n\n{beginnings(models)}\n")
    console.print(terminal(table))
    _print(console, f"{after}\n")
    with comparison.open("a", encoding="utf-8") as f:
        f.write(f"\n{before}\n\n{markdown(table)}\n{after}\n")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
