"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stickymoe import __version__
from stickymoe.errors import InterruptedRunError, StickyError, unknown

if TYPE_CHECKING:
    from stickymoe.runs.config import RunConfig
    from stickymoe.runs.record import RunRecord

HELP = """\
usage: stickymoe COMMAND [options]

Mixture-of-experts models whose routing stays put.

commands:
  demo       train the paper's variants on the embedded corpus and compare them (about four minutes)
  train      train one variant into a run folder
  sweep      carry out every run of a grid, such as the paper's table
  eval       measure a finished run again
  variants   list the variants with their equations

stickymoe COMMAND --help tells the options of each. --debug shows tracebacks, --version the version.
"""


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are `StickyError`s."""

    def error(self, message: str) -> NoReturn:
        raise StickyError(f"{message}. See {self.prog} --help.")


def _parser(command: str, description: str) -> _Parser:
    return _Parser(
        prog=f"stickymoe {command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )


def _train(argv: list[str]) -> None:
    from stickymoe.runs.presets import PRESETS

    parser = _parser("train", "Train one variant into a run folder.")
    options = parser.add_argument_group("run")
    options.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    options.add_argument("--preset", metavar="NAME", help=f"settings to start from: {', '.join(PRESETS)}")
    options.add_argument("--variant", "--variant.name", metavar="NAME", help="what to train; see stickymoe variants")
    options.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, over the preset's")
    options.add_argument("--out", type=Path, metavar="DIR", help="run folder (default runs/VARIANT-HASH)")
    options.add_argument("--resume", action="store_true", help="go on with an unfinished run in --out")
    options.add_argument("--checkpoint", metavar="NAME", help="resume from this checkpoint, not the newest")
    options.add_argument("--first_phase", type=Path, metavar="DIR", help="finished run to begin from (remoe: vanilla)")
    options.add_argument("--quiet", action="store_true", help="no progress display")
    options.add_argument("--print_config", action="store_true", help="print the whole config as YAML and exit")
    args, flags = parser.parse_known_args(argv)
    if args.help:
        _print_train_help(parser, args.preset, args.variant)
        return
    config = _train_config(args, flags)
    if args.print_config:
        import yaml

        sys.stdout.write(yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True))
        return

    from stickymoe.training.loop import train

    out = args.out or _default_folder(config)
    record = train(
        config,
        out,
        resume=args.resume,
        checkpoint=args.checkpoint,
        first_phase=args.first_phase,
        quiet=args.quiet,
    )
    if os.environ.get("RANK", "0") == "0":
        _print_result(record, out)


def _train_config(args: argparse.Namespace, flags: list[str]) -> RunConfig:
    """Flags over --config over --preset; a bare `--resume --out DIR` takes the folder's own config."""
    from stickymoe.errors import RunError
    from stickymoe.runs.record import RunRecord
    from stickymoe.runs.settings import config_from, read_config

    file = args.config
    if args.checkpoint and not args.resume:
        raise StickyError(f"--checkpoint {args.checkpoint} chooses where to go on from: add --resume.")
    if args.resume and file is None and args.preset is None:
        if args.out is None:
            raise StickyError("--resume needs the run folder: add --out DIR.")
        file = args.out / "config.yaml"
        if not file.exists():
            if not (args.out / "record.json").exists():
                raise RunError(f"There is no run to resume in {args.out}: start one without --resume.")
            return config_from(RunRecord.read(args.out / "record.json").config, flags)  # killed between the two
    return read_config(flags, preset=args.preset, variant=args.variant, file=file)


def _default_folder(config: RunConfig) -> Path:
    import hashlib
    import json

    digest = hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"{config.variant.key}-{digest}"


def _print_train_help(parser: argparse.ArgumentParser, preset: str | None, variant: str | None) -> None:
    from stickymoe.runs.settings import config_parser

    settings = config_parser(variant or "vanilla", preset).format_help()
    sys.stdout.write(parser.format_help() + settings[settings.index("\n\n") :])


def _print_result(record: RunRecord, out: Path) -> None:
    from stickymoe.experiments.tables import Row, results_console, results_table

    console = results_console()
    console.print(results_table([Row.from_record(record)]))
    console.print(f"{out}", highlight=False, markup=False, soft_wrap=True)


def _eval(argv: list[str]) -> None:
    parser = _parser("eval", "Measure a run's model again, on its validation or test split.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("run", type=Path, metavar="DIR", help="run folder")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--checkpoint", metavar="NAME", help="this checkpoint, not the newest")
    parser.add_argument("--data.path", dest="path", metavar="DIR", help="where the run's corpus lies now")
    args = parser.parse_args(argv)

    from stickymoe.experiments.tables import Row, results_console, results_table
    from stickymoe.training.restore import evaluate_run

    evaluation, label = evaluate_run(args.run, split=args.split, checkpoint=args.checkpoint, data_path=args.path)
    results_console().print(results_table([Row(label, "complete", evaluation.metrics)]))


def _demo(argv: list[str]) -> None:
    parser = _parser("demo", "Train the paper's variants on the embedded corpus and compare them.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="folder for the runs")
    args = parser.parse_args(argv)

    from stickymoe.experiments.demo import demo

    demo(args.out, command=sys.argv[0] if sys.argv[0].startswith(".") else "stickymoe")


def _sweep(argv: list[str]) -> None:
    from stickymoe.experiments.grids import GRIDS

    parser = _parser("sweep", "Carry out every run of a grid, one process per core.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("grid", metavar="GRID", help=f"{', '.join(GRIDS)}, or a YAML file")
    parser.add_argument("--seeds", type=_seeds, default=[42], metavar="LIST", help="separated by commas (default 42)")
    parser.add_argument("--rows", metavar="LIST", help="only these variants or labels, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs (default runs/GRID)")
    parser.add_argument("--dry_run", action="store_true", help="list the runs and exit")
    args, flags = parser.parse_known_args(argv)

    from stickymoe.experiments.grids import chosen_rows, configs, load_grid
    from stickymoe.experiments.sweep import plan, sweep
    from stickymoe.experiments.tables import Row, results_console, results_table
    from stickymoe.runs.record import RunRecord

    if args.jobs < 1:
        raise StickyError(f"--jobs: got {args.jobs}, expected at least 1.")
    grid = load_grid(args.grid)
    runs = configs(grid, seeds=args.seeds, flags=flags, source=args.grid)
    cells = plan(chosen_rows(runs, args.rows), args.out or Path("runs") / Path(args.grid).stem)
    if args.dry_run:
        for cell in cells:
            print(f"{cell.run_id}  {cell.config.variant.label}  seed {cell.config.seed}  {cell.folder.path}")
        return
    sweep(cells, jobs=args.jobs)
    rows = [Row.from_record(RunRecord.read(cell.folder.record)) for cell in cells]
    results_console().print(results_table(rows))
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        raise StickyError(
            f"{len(failed)} of {len(cells)} runs failed, first {failed[0].folder.path}: {failed[0].failure}"
        )


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 42,43") from None


def _variants(argv: list[str]) -> None:
    parser = _parser("variants", "List the variants with their equations.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.parse_args(argv)

    import dataclasses

    from rich.console import Console
    from rich.markup import escape

    from stickymoe.variants import variant_class, variant_names

    console = Console(highlight=False)
    for name in variant_names():
        cls = variant_class(name)
        defaults = "  ".join(f"--variant.{f.name} {f.default}" for f in dataclasses.fields(cls))
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        console.print(f"[bold]{name}[/bold]  {escape(summary)}", soft_wrap=True)
        console.print(f"    {cls.equation}\n    {defaults}", markup=False, soft_wrap=True)
    console.print(
        "\nThey combine by name: --variant smooth+residency+soft has the settings of all three.", soft_wrap=True
    )


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "sweep": _sweep,
    "variants": _variants,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 for what the user can mend, 130 after Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if args[0] == "--version":
        sys.stdout.write(f"stickymoe {__version__}\n")
        return 0
    logging.basicConfig(format="stickymoe: %(message)s", level=logging.WARNING)
    try:
        if args[0] not in COMMANDS:
            raise StickyError(unknown("command", args[0], COMMANDS))
        COMMANDS[args[0]](args[1:])
    except InterruptedRunError as e:
        print(e, file=sys.stderr)
        return 130
    except StickyError as e:
        if debug:
            traceback.print_exc()
            return 2
        print(f"stickymoe: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
