"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import dataclasses
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
    from stickymoe.experiments.collection import Collection
    from stickymoe.experiments.tables import Table
    from stickymoe.locality.streams import Access
    from stickymoe.runs.config import RunConfig
    from stickymoe.runs.record import RunRecord

HELP = """\
usage: stickymoe COMMAND [options]

Mixture-of-experts models whose routing stays put.

commands:
  demo       train the paper's variants on the embedded corpus and compare them (about four minutes)
  train      train one variant into a run folder
  sweep      carry out every run of a grid, such as the paper's table
  report     put finished runs on a page: tables, figures, the text by its experts
  frontier   which of them keeps how much of the mixture's gain, at how many misses
  eval       measure a finished run again
  simulate   replay a routing trace against expert caches
  plan       milliseconds and tokens/s of every cache on a device; the smallest that does it
  device     measure this machine, or show a device profile
  trace      convert another tool's trace, or make a synthetic one
  variants   list the variants with their equations

stickymoe COMMAND --help tells the options of each. --debug shows tracebacks, --version the version.
"""


TRACE_HELP = """\
usage: stickymoe trace convert SOURCE OUT
       stickymoe trace make OUT [options]

  convert    turn another tool's routing trace into a trace folder
  make       write a synthetic trace folder

stickymoe trace convert --help and stickymoe trace make --help tell the options.
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


def _require_settings(parser: _Parser, flags: list[str]) -> None:
    """What is no option of the command must be a setting: a dot in its name, or the seed, or a whole section."""
    settings = ("--seed", "--data", "--model", "--variant", "--train", "--eval")
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and "." not in name and name not in settings:
            options = [option for action in parser._actions for option in action.option_strings if len(option) > 2]
            raise StickyError(unknown("setting", name, [*options, "--seed"], or_else=f"See {parser.prog} --help."))


def _train(argv: list[str]) -> None:
    from stickymoe.runs.presets import PRESETS, RECOMMENDED

    if not argv:
        raise StickyError("Nothing says what to train: try --preset tiny (seconds), or see stickymoe train --help.")
    parser = _parser("train", "Train one variant into a run folder.")
    options = parser.add_argument_group("run")
    options.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    options.add_argument("--preset", metavar="NAME", help=f"settings to start from: {', '.join(PRESETS)}")
    options.add_argument(
        "--variant",
        "--variant.name",
        metavar="NAME",
        help="what to train; stickymoe variants lists them, --variant NAME --help tells the settings of one",
    )
    options.add_argument(
        "--recommended",
        action="store_true",
        help="train the router that docs/frontier.md recommends",
    )
    options.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, over the preset's")
    options.add_argument("--out", type=Path, metavar="DIR", help="run folder (default runs/VARIANT-HASH)")
    options.add_argument("--resume", action="store_true", help="go on with an unfinished run in --out")
    options.add_argument("--checkpoint", metavar="NAME", help="resume from this checkpoint, not the newest")
    options.add_argument("--first_phase", type=Path, metavar="DIR", help="finished run to begin from (remoe: vanilla)")
    options.add_argument("--quiet", action="store_true", help="no progress display")
    options.add_argument("--print_config", action="store_true", help="print the whole config as YAML and exit")
    args, flags = parser.parse_known_args(argv)
    _require_settings(parser, flags)
    if args.help:
        _print_train_help(parser, args.preset, RECOMMENDED["name"] if args.recommended else args.variant)
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
        _print_results([record])
        print(out)


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
            if args.variant or args.recommended:
                raise StickyError(f"--resume goes on with the variant of {args.out}: leave out the other one.")
            return config_from(RunRecord.read(args.out / "record.json").config, flags)  # killed between the two
    return read_config(flags, preset=args.preset, variant=args.variant, recommended=args.recommended, file=file)


def _default_folder(config: RunConfig) -> Path:
    import hashlib
    import json

    digest = hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"{config.variant.key}-{digest}"


def _print_train_help(parser: argparse.ArgumentParser, preset: str | None, variant: str | None) -> None:
    from stickymoe.runs.settings import config_parser

    settings = config_parser(variant or "vanilla", preset).format_help()
    sys.stdout.write(parser.format_help() + settings[settings.index("\n\n") :])


def _print_results(records: Sequence[RunRecord]) -> None:
    """A table for each group of runs that may be compared."""
    from stickymoe.experiments.collection import Run, grouped
    from stickymoe.experiments.tables import results, results_console, terminal

    console = results_console()
    for group in grouped(Run.of(record) for record in records):
        if len(records) > 1:
            console.print(group.title, highlight=False, markup=False)
        console.print(terminal(results(group.rows, group.baseline if len(group.rows) > 1 else None)))


def _eval(argv: list[str]) -> None:
    parser = _parser("eval", "Measure a run's model again, on its validation or test split.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("run", type=Path, metavar="DIR", help="run folder")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--checkpoint", metavar="NAME", help="this checkpoint, not the newest")
    parser.add_argument("--data.path", dest="path", metavar="DIR", help="where the run's corpus lies now")
    args = parser.parse_args(argv)

    from stickymoe.training.restore import evaluate_run

    _print_results([evaluate_run(args.run, split=args.split, checkpoint=args.checkpoint, data_path=args.path)])


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
    parser.epilog = "Any setting of stickymoe train, such as --data.path DIR, is laid over every run."
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("grid", metavar="GRID", help=f"{', '.join(GRIDS)}, or a YAML file")
    parser.add_argument("--seeds", type=_numbers, default=[42], metavar="LIST", help="separated by commas (default 42)")
    parser.add_argument("--rows", metavar="LIST", help="only these variants or labels, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs (default runs/GRID)")
    parser.add_argument("--dry_run", action="store_true", help="list the runs and exit")
    args, flags = parser.parse_known_args(argv)
    _require_settings(parser, flags)
    if any(flag.partition("=")[0] == "--seed" for flag in flags):
        raise StickyError("--seed: a sweep takes --seeds, as in --seeds 42,43.")
    if any(flag.partition("=")[0] in ("--variant", "--variant.name") for flag in flags):
        raise StickyError("--variant: the rows of a grid have theirs; choose some with --rows, or pass a YAML file.")

    from stickymoe.experiments.grids import chosen_rows, configs, load_grid
    from stickymoe.experiments.sweep import plan, sweep

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
    _print_results([record for cell in cells if (record := cell.record) is not None])
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        raise StickyError(
            f"{len(failed)} of {len(cells)} runs failed, first {failed[0].folder.path}: {failed[0].failure}"
        )


def _report(argv: list[str]) -> None:
    parser = _parser("report", "Put finished runs on a page that opens offline, its tables and figures beside it.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders with runs in or under them")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write")
    parser.add_argument(
        "--device", default="raspberry-pi-5", metavar="NAME", help="profile for tokens/s (default raspberry-pi-5)"
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help="budget for weights (default half of the experts and all else)"
    )
    args = parser.parse_args(argv)

    from stickymoe.experiments.report import report
    from stickymoe.locality.devices import parse_bytes

    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    collection = report(args.runs, args.out, device=args.device, memory=memory)
    _print_damaged(collection)
    done = sum(run.complete for run in collection.runs)
    print(
        f"{args.out}  {done} of {len(collection.runs)} runs complete; tables and figures in {args.out.with_suffix('')}/"
    )


def _print_damaged(collection: Collection) -> None:
    for bad in collection.damaged:
        print(f"stickymoe: skipped {bad.path}: {bad.reason}", file=sys.stderr)


def _frontier(argv: list[str]) -> None:
    parser = _parser("frontier", "How much of the mixture's gain over dense each run keeps, at how many misses.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders with runs in or under them")
    args = parser.parse_args(argv)

    from stickymoe.experiments.collection import collect
    from stickymoe.experiments.frontier import EXPLAINED, kept_table, no_share

    shown = False
    collection = collect(args.runs)
    _print_damaged(collection)
    for run in collection.runs:
        if not run.complete:
            why = f": {run.record.failure}" if run.record.failure else ""
            name = f"{run.config.variant.label}, seed {run.config.seed}"
            print(f"stickymoe: {name} is not counted, {run.record.status}{why}", file=sys.stderr)
    for group in collection.groups:
        table = kept_table(group)
        if table is not None:
            _print_lines([group.title, table])
            shown = True
        if warning := no_share(group):
            print(f"stickymoe: {warning}", file=sys.stderr)
    if not shown:
        raise StickyError(
            "Nothing to compare: it takes finished runs of vanilla, dense and others with one protocol. "
            "stickymoe sweep GRID --rows vanilla,dense makes the two."
        )
    print(EXPLAINED)


def _variants(argv: list[str]) -> None:
    parser = _parser("variants", "List the variants with their equations.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.parse_args(argv)

    from rich.console import Console
    from rich.markup import escape

    from stickymoe.variants import variant_class, variant_names

    console = Console(highlight=False)
    for name in variant_names():
        cls = variant_class(name)
        defaults = "  ".join(
            f"--variant.{f.name} {f.default}{_sign(f.name, f.metadata.get('symbol', f.name))}"
            for f in dataclasses.fields(cls)
        )
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        console.print(f"[bold]{name}[/bold]  {escape(summary)}", soft_wrap=True)
        console.print(f"    {cls.equation}\n    {defaults}", markup=False, soft_wrap=True)
    console.print(
        "\nThey combine by name: --variant smooth+residency+soft has the settings of all three.", soft_wrap=True
    )


def _sign(name: str, symbol: str) -> str:
    """How a setting is written in equations and labels, where that is not its name."""
    return "" if symbol.replace(" ", "_") == name else f" ({symbol})"


def _add_access(parser: argparse.ArgumentParser, *, order: str) -> None:
    """Options of both simulate and plan: how a device goes through a trace."""
    parser.add_argument(
        "--order", choices=("layer", "decode"), default=order, help=f"order of accesses (default {order})"
    )
    parser.add_argument("--pool", action="store_true", help="one cache over all layers instead of slots per layer")
    parser.add_argument(
        "--share_block",
        metavar="K",
        help="layers that share their weights: 1, 2, …, full or universal (default the run's)",
    )
    parser.add_argument("--warm", action="store_true", help="keep caches from one sequence to the next")
    parser.add_argument("--chosen", action="store_true", help="divide the slots over the layers by their miss curves")


def _access(args: argparse.Namespace, *, top1: bool = False, prefetch: str | None = None) -> Access:
    """The options; sharing is each trace's own."""
    from stickymoe.locality.formats import open_trace
    from stickymoe.locality.streams import Access

    return Access(
        order=args.order,
        pool=args.pool,
        warm=args.warm,
        top1=top1,
        prefetch="previous" if prefetch == "previous" else None if prefetch is None else open_trace(Path(prefetch)).S,
    )


def _simulate(argv: list[str]) -> None:
    parser = _parser("simulate", "Replay a routing trace against expert caches.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="run folder, its routes, or a trace")
    parser.add_argument("--policy", metavar="LIST", help="lru, lfu, fifo, sieve, static, belady (default all)")
    parser.add_argument("--capacity", type=_capacities, metavar="LIST", help="slots of each cache, as 2,3; or all")
    _add_access(parser, order="layer")
    parser.add_argument("--top1", action="store_true", help="ask for the heaviest expert only, as the paper does")
    parser.add_argument("--prefetch", metavar="WHAT", help="previous (token's set), or a trace of predicted sets")
    parser.add_argument("--figures", action="store_true", help="locality figures by layer too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)

    from stickymoe.experiments import lab

    _require_outside_runs(args.json)
    asked = _access(args, top1=args.top1, prefetch=args.prefetch)
    policies = lab.default_policies(asked) if args.policy is None else _names(args.policy)
    whole = args.capacity == "all"
    traces = lab.open_traces(args.traces)
    reports, found = [], []
    for trace in traces:
        report = lab.study(
            trace,
            policies=policies,
            capacities=None if whole else args.capacity,
            access=dataclasses.replace(asked, share_block=lab.sharing(trace, args.share_block)),
            chosen=args.chosen,
            whole=whole,
        )
        reports.append(report)
        notes = [lab.star_note(policies), lab.capacity_note(report), report.words]
        lines = [trace.told, lab.misses_table(report), *notes]
        if args.figures:
            found.append(lab.locality_figures(trace.table))
            lines.insert(2, lab.figures_table(found[-1]))
        _print_lines(lines)
    if args.json:
        lab.write_json(args.json, reports, found)


def _plan(argv: list[str]) -> None:
    parser = _parser("plan", "What every cache costs on a device, and the smallest that does what is asked.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="run folder, its routes, or a trace")
    parser.add_argument(
        "--device", required=True, metavar="NAME", help="a shipped profile (see stickymoe device), or YAML"
    )
    parser.add_argument("--memory", metavar="BYTES", help="budget, such as 512MB (default the device's fast memory)")
    parser.add_argument("--tokens_per_s", type=float, metavar="X", help="the speed that is wanted")
    parser.add_argument("--policy", default="lru,belady", metavar="LIST", help="(default lru,belady)")
    parser.add_argument("--expert_bytes", metavar="BYTES", help="size of one expert, where the trace does not know")
    parser.add_argument(
        "--other_bytes", metavar="BYTES", help="weights that are always resident (default the run's, or 0)"
    )
    _add_access(parser, order="decode")
    args = parser.parse_args(argv)

    from stickymoe.experiments import lab
    from stickymoe.locality.devices import load_device, parse_bytes
    from stickymoe.locality.streams import streams

    device = load_device(args.device)
    speed = args.tokens_per_s
    if speed is not None and not 0 < speed < float("inf"):
        raise StickyError(f"--tokens_per_s: got {speed}, expected a number > 0.")
    memory, size, other = (
        None if (text := getattr(args, name)) is None else parse_bytes(text, f"--{name}")
        for name in ("memory", "expert_bytes", "other_bytes")
    )
    budget = lab.Budget(device.fast_memory if memory is None else memory, speed)
    asked = _access(args)
    traces = lab.open_traces(args.traces)
    if len(traces) > 1:
        lab.require_perplexities(traces)
    lines: list[str | Table | None] = []
    answers = []
    for trace in traces:
        weights = lab.weights_of(trace, size, other)
        access = dataclasses.replace(asked, share_block=lab.sharing(trace, args.share_block))
        points = lab.plan_points(
            trace, device, weights, policies=_names(args.policy), access=access, chosen=args.chosen
        )
        lines += [lab.weights_note(trace, weights, other), lab.loads_note(trace, device, weights, budget)]
        if len(traces) > 1 and speed is None:
            points = lab.useful(points, lab.least_useful(trace.table, access))
        answers.append(lab.answer(points, budget))
        if len(traces) == 1:
            shown = lab.default_capacities(streams(trace.table, access)[0])
            lines += [lab.plan_table(points, shown, answers[0].point), lab.star_note(points), answers[0].words]
    if len(traces) > 1:
        best = lab.choose_run(traces, answers)
        lines += [lab.runs_table(traces, answers, best), *lab.choice_words(traces, answers, best, budget)]
    _print_lines([device.name, *lines])


def _print_lines(lines: Sequence[str | Table | None]) -> None:
    """Tables and what is said of them; nothing where there was nothing to say."""
    from stickymoe.experiments.tables import results_console, terminal

    console = results_console()
    for line in lines:
        if isinstance(line, str):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif line is not None:
            console.print(terminal(line), highlight=False, markup=False)


def _device(argv: list[str]) -> None:
    parser = _parser("device", "Measure this machine, or show a device profile; both as YAML that plan takes.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a shipped profile or YAML file to show")
    parser.add_argument("--list", action="store_true", help="list the shipped profiles")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help="disk to load from (default here)")
    parser.add_argument("--megabytes", type=int, default=256, metavar="N", help="to read and to compute (default 256)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile here")
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import as_yaml, device_names, load_device, measure_device

    _require_outside_runs(args.out)
    if args.list:
        for name in device_names():
            print(f"{name}  {load_device(name).name}")
        return
    device = load_device(args.name) if args.name else measure_device(args.folder, megabytes=args.megabytes)
    if args.out is None:
        sys.stdout.write(as_yaml(device))
        return
    try:
        args.out.write_text(as_yaml(device), encoding="utf-8")
    except OSError as e:
        raise StickyError(f"{args.out} cannot be written ({e.strerror}).") from e


def _trace(argv: list[str]) -> None:
    actions = {"convert": _trace_convert, "make": _trace_make}
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(TRACE_HELP)
        return
    if argv[0] not in actions:
        raise StickyError(unknown("trace command", argv[0], actions))
    actions[argv[0]](argv[1:])


def _trace_convert(argv: list[str]) -> None:
    parser = _parser("trace convert", "Turn another tool's routing trace into a trace folder.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the other tool's file")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--format", metavar="NAME", help="bigmoeonedge or cacheable-by-design, if not recognised")
    args = parser.parse_args(argv)

    from stickymoe.locality.foreign import read_foreign
    from stickymoe.locality.formats import save_table

    _require_new_trace(args.out)
    table = read_foreign(args.source, args.format)
    save_table(table, args.out)
    L, B, T, k = table.S.shape
    whole = int(table.mask.sum())
    print(f"{args.out}: {L} layers, {B} × {T} tokens ({whole} whole), {table.n_experts} experts, top-{k}")


def _trace_make(argv: list[str]) -> None:
    from stickymoe.locality.synthetic import Synthetic, make_trace

    parser = _parser("trace make", "Write a synthetic trace folder.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    for f in dataclasses.fields(Synthetic):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default, help=f"(default {f.default})")
    args = vars(parser.parse_args(argv))
    out, asked = args.pop("out"), Synthetic(**args)
    _require_new_trace(out)
    make_trace(out, asked)
    print(
        f"{out}: {asked.n_layers} layers, {asked.sequences} × {asked.length} tokens, {asked.n_experts} experts, "
        f"top-{asked.top_k}"
    )


def _require_new_trace(folder: Path) -> None:
    for file in (folder / "header.json", folder / "record.json", folder.parent / "record.json"):
        if file.exists():
            what = "trace" if file.name == "header.json" else "run"
            raise StickyError(f"{file.parent} holds a {what}, which would be overwritten. Choose another folder.")


def _require_outside_runs(file: Path | None) -> None:
    if file is not None and (file.parent / "record.json").exists():
        raise StickyError(f"{file} would be among the files of a run. Choose another folder.")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 2,3") from None


def _capacities(text: str) -> list[int] | str:
    return text if text == "all" else _numbers(text)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "simulate": _simulate,
    "plan": _plan,
    "device": _device,
    "trace": _trace,
    "sweep": _sweep,
    "report": _report,
    "frontier": _frontier,
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
