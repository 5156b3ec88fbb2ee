"""`simulate`, `plan`, `device` and `trace`: what a routing trace costs on a device."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stickymoe.cli.parsing import capacities, make_parser, names, require_outside_runs
from stickymoe.cli.printing import print_lines
from stickymoe.errors import StickyError, unknown

if TYPE_CHECKING:
    from stickymoe.locality.streams import Access
    from stickymoe.reports.tables import Table

TRACE_HELP = """\
usage: stickymoe trace convert SOURCE OUT
       stickymoe trace make OUT [options]

  convert    turn another tool's routing trace into a trace folder
  make       write a synthetic trace folder

stickymoe trace convert --help and stickymoe trace make --help tell the options.
"""


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


def simulate_command(argv: list[str]) -> None:
    parser = make_parser("simulate", "Replay a routing trace against expert caches.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="run folder, its routes, or a trace")
    parser.add_argument("--policy", metavar="LIST", help="lru, lfu, fifo, sieve, static, belady (default all)")
    parser.add_argument("--capacity", type=capacities, metavar="LIST", help="slots of each cache, as 2,3; or all")
    _add_access(parser, order="layer")
    parser.add_argument("--top1", action="store_true", help="ask for the heaviest expert only, as the paper does")
    parser.add_argument("--prefetch", metavar="WHAT", help="previous (token's set), or a trace of predicted sets")
    parser.add_argument("--figures", action="store_true", help="locality figures by layer too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)

    from stickymoe.reports import lab

    require_outside_runs(args.json)
    asked = _access(args, top1=args.top1, prefetch=args.prefetch)
    policies = lab.default_policies(asked) if args.policy is None else names(args.policy)
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
        print_lines(lines)
    if args.json:
        lab.write_json(args.json, reports, found)


def plan_command(argv: list[str]) -> None:
    parser = make_parser("plan", "What every cache costs on a device, and the smallest that does what is asked.")
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

    from stickymoe.locality.devices import load_device, parse_bytes
    from stickymoe.locality.streams import streams
    from stickymoe.reports import lab

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
        points = lab.plan_points(trace, device, weights, policies=names(args.policy), access=access, chosen=args.chosen)
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
    print_lines([device.name, *lines])


def device_command(argv: list[str]) -> None:
    parser = make_parser("device", "Measure this machine, or show a device profile; both as YAML that plan takes.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a shipped profile or YAML file to show")
    parser.add_argument("--list", action="store_true", help="list the shipped profiles")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help="disk to load from (default here)")
    parser.add_argument("--megabytes", type=int, default=256, metavar="N", help="to read and to compute (default 256)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile here")
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import as_yaml, device_names, load_device, measure_device

    require_outside_runs(args.out)
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


def trace_command(argv: list[str]) -> None:
    actions = {"convert": _trace_convert, "make": _trace_make}
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(TRACE_HELP)
        return
    if argv[0] not in actions:
        raise StickyError(unknown("trace command", argv[0], actions))
    actions[argv[0]](argv[1:])


def _trace_convert(argv: list[str]) -> None:
    parser = make_parser("trace convert", "Turn another tool's routing trace into a trace folder.")
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

    parser = make_parser("trace make", "Write a synthetic trace folder.")
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
