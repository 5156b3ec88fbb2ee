"""`stickymoe demo`: every variant trained for a moment on the embedded corpus, side by side."""

from __future__ import annotations

from pathlib import Path

from stickymoe.experiments.tables import LEGEND, Row, results_console, results_markdown, results_table
from stickymoe.runs.settings import read_config

# The strengths are the demo's own: a run this short needs more of λ than the paper's 10,000 steps.
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vanilla", ()),
    ("soft", ("--variant.lam", "1.0")),
    ("soft_hard", ("--variant.lam", "1.0", "--variant.alpha", "1.0")),
    ("hard_window", ()),
    ("remoe", ("--variant.lam", "1.0")),
    ("oracle", ()),
    ("dense", ()),
)

NEXT = """\
Next:
  stickymoe variants                                    what each row does, with its equation
  stickymoe train --preset demo --variant soft --variant.lam 0.3 --out runs/soft
                                                        one run with a strength of your own
  stickymoe train --preset cpu-small --data.path DIR    the paper's small model on a folder of text
"""


def demo(out: Path) -> None:
    """Train every row into `out`, print the comparison and write it as Markdown."""
    from stickymoe.training.loop import train

    console = results_console()
    rows = []
    for name, flags in ROWS:
        config = read_config(list(flags), preset="demo", variant=name)
        rows.append(Row.from_record(train(config, out / name, resume=True)))
    vanilla = rows[0]
    console.print(results_table(rows, baseline=vanilla))
    markdown = out / "comparison.md"
    markdown.write_text(results_markdown(rows, baseline=vanilla), encoding="utf-8")
    console.print(f"{LEGEND}\n\nWritten to {markdown}.\n\n{NEXT}", highlight=False)
