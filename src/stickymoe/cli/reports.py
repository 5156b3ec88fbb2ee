"""`report` and `frontier`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stickymoe.cli.parsing import make_parser
from stickymoe.cli.printing import print_damaged, print_lines
from stickymoe.errors import StickyError

if TYPE_CHECKING:
    from stickymoe.reports.collection import Collection


def report_command(argv: list[str]) -> None:
    parser = make_parser(
        "report", "Show finished runs on a page that opens offline; tables and figures are also written as files."
    )
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that contain runs")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="page to write (default report.html)",
    )
    parser.add_argument(
        "--paper", action="store_true", help="add the paper: its numbers, its observations, the MoE gain kept"
    )
    parser.add_argument(
        "--device",
        default="raspberry-pi-5",
        metavar="NAME",
        help="device for tokens/s (default raspberry-pi-5)",
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help="memory for weights (default: half of the experts and all other weights)"
    )
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import parse_bytes

    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    collection = _writer(paper=args.paper)(args.runs, args.out, device=args.device, memory=memory)
    print_damaged(collection)
    done = sum(run.complete for run in collection.runs)
    print(
        f"{args.out}  {done} of {len(collection.runs)} runs complete; tables and figures in {args.out.with_suffix('')}/"
    )


def _writer(*, paper: bool) -> Callable[..., Collection]:
    """The function that writes the report; the paper is imported only if it is asked for."""
    if paper:
        from stickymoe.paper.sections import paper_report

        return paper_report
    from stickymoe.reports.report import report

    return report


def frontier_command(argv: list[str]) -> None:
    about = "Compare runs at equal fast memory; show how much of the MoE gain over dense each keeps, and its misses."
    parser = make_parser("frontier", about)
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that contain runs")
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="fast memory of the device, such as 12MB (default: the most slots measured for the most experts)",
    )
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import parse_bytes
    from stickymoe.paper.grids import PAPER_ORDER
    from stickymoe.reports.collection import collect

    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    collection = collect(args.runs, order=PAPER_ORDER)
    print_damaged(collection)
    for run in collection.runs:
        if not run.complete:
            why = f": {run.record.failure}" if run.record.failure else ""
            name = f"{run.config.variant.label}, seed {run.config.seed}"
            print(f"stickymoe: {name} is ignored, its status is {run.record.status}{why}", file=sys.stderr)
    at_memory = _print_at_equal_memory(collection, memory)
    if not _print_kept_gain(collection) and not at_memory:
        raise StickyError(
            "Nothing to compare: expected finished runs of vanilla, dense and another variant with the same data and "
            "model. Train the two controls with stickymoe sweep GRID --rows vanilla,dense."
        )


def _print_at_equal_memory(collection: Collection, memory: float | None) -> bool:
    """Print the models that fit into fast memory, for each corpus and training; whether there are any."""
    from stickymoe.locality.plan import bytes_text
    from stickymoe.paper.yardstick import EXPLAINED, table, yardsticks

    old = sum(run.complete and not run.record.sizes for run in collection.runs)
    if old:
        print(f"stickymoe: {old} runs of an earlier version have no sizes: not compared by memory", file=sys.stderr)
    compared = yardsticks(collection.groups)
    least = min((c.fast_bytes for found in compared for c in found.choices), default=0)
    if memory is not None and compared and not any(found.fitting(memory) for found in compared):
        needs = f"{bytes_text(least)}, what the smallest model needs"
        raise StickyError(f"--memory: got {bytes_text(memory)}, expected at least {needs}.")
    shown = False
    for found in compared:
        budget = found.memory if memory is None else memory
        if budget is None or not found.fitting(budget):
            continue
        print_lines([f"{found.title} · fast memory {bytes_text(budget)}", table(found, budget)])
        if warning := found.warning(budget):
            print(f"stickymoe: {warning}", file=sys.stderr)
        shown = True
    if shown:
        print(f"{EXPLAINED}\n")
    return shown


def _print_kept_gain(collection: Collection) -> bool:
    """Print the gain over dense that each row keeps, for groups with both controls; whether there are any."""
    from stickymoe.paper.frontier import EXPLAINED, gain_warning, kept_table

    shown = False
    for group in collection.groups:
        table = kept_table(group)
        if table is not None:
            print_lines([group.title, table])
            shown = True
        if warning := gain_warning(group):
            print(f"stickymoe: {warning}", file=sys.stderr)
    if shown:
        print(EXPLAINED)
    return shown
