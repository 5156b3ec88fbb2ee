"""`demo` and `sweep`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stickymoe.cli.parsing import make_parser, numbers, require_settings
from stickymoe.cli.printing import print_results
from stickymoe.errors import StickyError

if TYPE_CHECKING:
    from stickymoe.sweeps.cells import Engine


def demo_command(argv: list[str]) -> None:
    parser = make_parser("demo", "Train the paper's variants on the embedded corpus, compare them and generate.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), metavar="DIR", help="folder for the runs and stores (default demo)"
    )
    args = parser.parse_args(argv)

    from stickymoe.paper.demo import demo

    demo(args.out, command=sys.argv[0] if sys.argv[0].startswith(".") else "stickymoe")


def sweep_command(argv: list[str]) -> None:
    from stickymoe.paper.grids import GRIDS

    parser = make_parser("sweep", "Run every row of a grid, one process per core.")
    parser.epilog = "Settings of stickymoe train, such as --data.path DIR, apply to every run."
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("grid", metavar="GRID", help=f"{', '.join(GRIDS)}, or a YAML file")
    parser.add_argument(
        "--seeds", type=numbers, default=[42], metavar="LIST", help="comma-separated seeds (default 42)"
    )
    parser.add_argument("--rows", metavar="LIST", help="run only these rows: comma-separated variants, labels or keys")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs in parallel (default: one per core, of this machine or the cluster)"
    )
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where runs run: local (default), or a Ray cluster"
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="head node of the Ray cluster (default: RAY_ADDRESS, or the cluster that runs on this machine)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs (default runs/GRID)")
    parser.add_argument("--dry_run", action="store_true", help="list the runs and exit")
    args, flags = parser.parse_known_args(argv)
    require_settings(parser, flags)
    if any(flag.partition("=")[0] == "--seed" for flag in flags):
        raise StickyError("--seed: use --seeds in a sweep, for example --seeds 42,43.")
    if any(flag.partition("=")[0] in ("--variant", "--variant.name") for flag in flags):
        raise StickyError(
            "--variant: the rows of a grid set the variant; choose rows with --rows, or pass a YAML file."
        )

    if args.jobs is not None and args.jobs < 1:
        raise StickyError(f"--jobs: got {args.jobs}, expected at least 1.")
    if args.address is not None and args.engine != "ray":
        raise StickyError(f"--address {args.address}: works only with --engine ray; add --engine ray.")

    from stickymoe.sweeps.cells import plan
    from stickymoe.sweeps.engine import sweep
    from stickymoe.sweeps.grid import chosen_rows, configs, load_grid

    grid = load_grid(args.grid, GRIDS)
    runs = configs(grid, seeds=args.seeds, flags=flags, source=args.grid)
    cells = plan(chosen_rows(runs, args.rows), args.out or Path("runs") / Path(args.grid).stem)
    if args.dry_run:
        for cell in cells:
            print(f"{cell.run_id}  {cell.config.variant.label}  seed {cell.config.seed}  {cell.folder.path}")
        return
    with _engine(args.engine, args.address) as engine:
        sweep(cells, jobs=args.jobs, engine=engine)
    print_results([record for cell in cells if (record := cell.record) is not None])
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        raise StickyError(
            f"{len(failed)} of {len(cells)} runs failed, first {failed[0].folder.path}: {failed[0].failure}"
        )


def _engine(name: str, address: str | None) -> contextlib.AbstractContextManager[Engine]:
    if name == "ray":
        from stickymoe.sweeps.ray import ray_engine

        return ray_engine(address)

    from stickymoe.sweeps.local import LocalEngine

    return contextlib.nullcontext(LocalEngine())
