"""`simulate`, `plan`, `device` and `trace`: what a routing trace costs on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.cli.parsing import capacities, make_parser, names, require_outside_runs
from stickymoe.cli.printing import print_lines, write_json
from stickymoe.errors import StickyError, unknown

if TYPE_CHECKING:
    from stickymoe.locality.policies import OnMiss
    from stickymoe.locality.streams import Access
    from stickymoe.reports.tables import Table
    from stickymoe.runs.traces import Trace

TRACE_HELP = """\
usage: stickymoe trace convert SOURCE OUT
       stickymoe trace make OUT [options]

  convert    turn another tool's routing trace into a trace folder
  make       write a synthetic trace folder

Options: stickymoe trace convert --help, stickymoe trace make --help.
"""


def _add_access(parser: argparse.ArgumentParser, *, order: str) -> None:
    """Options of simulate and plan: how a device runs through a trace."""
    parser.add_argument(
        "--order", choices=("layer", "decode"), default=order, help=f"order of accesses (default {order})"
    )
    parser.add_argument("--pool", action="store_true", help="one cache for all layers instead of slots per layer")
    parser.add_argument(
        "--share_block",
        metavar="K",
        help="number of adjacent layers that share experts: 1, 2, …, full or universal (default: from the trace)",
    )
    parser.add_argument("--warm", action="store_true", help="keep the content of caches from one sequence to the next")
    parser.add_argument("--batch", action="store_true", help="run all sequences in lockstep through the same caches")
    parser.add_argument(
        "--allocated", "--chosen", action="store_true", help="divide the slots over the layers by their miss curves"
    )


def _access(
    args: argparse.Namespace,
    traces: Sequence[Trace],
    *,
    top1: bool = False,
    prefetch: str | None = None,
    on_miss: OnMiss = "load",
) -> Access:
    from stickymoe.locality.streams import Access
    from stickymoe.runs.traces import parse_sharing

    return Access(
        order=args.order,
        pool=args.pool,
        share_block=parse_sharing(args.share_block, traces),
        warm=args.warm,
        top1=top1,
        batch=args.batch,
        prefetch=_prefetch(prefetch),
        on_miss=on_miss,
    )


def _prefetch(what: str | None) -> Any:
    """What `Access.prefetch` takes."""
    if what is None or what in ("previous", "recorded"):
        return what
    from stickymoe.locality.formats import open_trace

    return open_trace(Path(what)).S


def simulate_command(argv: list[str]) -> None:
    parser = make_parser("simulate", "Replay a routing trace against expert caches.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="run folder, its routes, or a trace")
    parser.add_argument("--policy", metavar="LIST", help="policies, such as lru,lfu,belady (default all)")
    parser.add_argument("--capacity", type=capacities, metavar="LIST", help="slots of each cache, such as 2,3; or all")
    _add_access(parser, order="layer")
    parser.add_argument("--top1", action="store_true", help="request only the heaviest expert, as the paper does")
    parser.add_argument(
        "--prefetch",
        metavar="WHAT",
        help="experts to load early: previous (token's), recorded (in the trace), or a trace of predictions",
    )
    parser.add_argument(
        "--on_miss",
        choices=("load", "bypass"),
        default="load",
        help="bypass: do not admit an expert that was requested less often lately than the one it would evict",
    )
    parser.add_argument("--figures", action="store_true", help="also show locality metrics by layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)

    from stickymoe.locality.measure import measure
    from stickymoe.locality.row_replay import ROW_POLICIES, study_rows
    from stickymoe.locality.study import finite, study
    from stickymoe.reports import locality as report
    from stickymoe.runs.traces import open_traces

    require_outside_runs(args.json)
    traces = open_traces(args.traces)
    access = _access(args, traces, top1=args.top1, prefetch=args.prefetch, on_miss=args.on_miss)
    entries = []
    for trace in traces:
        found = study(
            trace.table,
            policies=None if args.policy is None else names(args.policy),
            capacities=args.capacity,
            access=access,
            allocated=args.allocated,
        )
        entry = {"trace": trace.label, "path": str(trace.path)} | found.as_dict()
        lines: list[str | Table | None] = [trace.description, report.misses_table(found)]
        if args.figures:
            measured = measure(trace.table)
            entry["figures"] = {name: [finite(v) for v in layers] for name, layers in measured.per_layer.items()}
            lines.append(report.figures_table(measured))
        if trace.table.row_keys and trace.table.tokens is not None:
            asked = [name for name in found.results if name in (*ROW_POLICIES, *names(args.policy or ""))]
            rows = study_rows(trace.table, asked or ROW_POLICIES, access)
            entry["rows"] = {str(share): [r.as_dict() for r in results] for share, results in rows.items()}
            lines.append(report.rows_table(rows))
        print_lines([*lines, report.star_note(found.results), report.capacity_note(found), found.verdict])
        entries.append(entry)
    if args.json:
        write_json(args.json, entries)


def plan_command(argv: list[str]) -> None:
    parser = make_parser("plan", "Show what every cache costs on a device, and the smallest one that meets a budget.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="run folder, its routes, or a trace")
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help="an included profile (see stickymoe device --list), or a YAML file",
    )
    parser.add_argument("--memory", metavar="BYTES", help="budget, such as 512MB (default: the fast memory)")
    parser.add_argument("--tokens_per_s", type=float, metavar="X", help="required speed")
    parser.add_argument("--policy", default="lru,belady", metavar="LIST", help="policies (default lru,belady)")
    parser.add_argument(
        "--expert_bytes", metavar="BYTES", help="size of one expert, such as 14MB (default: from the trace)"
    )
    parser.add_argument(
        "--other_bytes", metavar="BYTES", help="weights that are always resident (default: from the trace, or 0)"
    )
    parser.add_argument(
        "--rows", metavar="BYTES", help="memory for hot rows of lookup, such as 1MB (default: every row is read)"
    )
    _add_access(parser, order="decode")
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import load_device, parse_bytes
    from stickymoe.locality.plan import choose_run, plan
    from stickymoe.locality.streams import streams
    from stickymoe.locality.study import default_capacities
    from stickymoe.reports import locality as report
    from stickymoe.runs.traces import open_traces

    device = load_device(args.device)
    memory, expert_bytes, other_bytes, rows = (
        None if (text := getattr(args, name)) is None else parse_bytes(text, f"--{name}")
        for name in ("memory", "expert_bytes", "other_bytes", "rows")
    )
    traces = open_traces(args.traces)
    access = _access(args, traces)
    several = len(traces) > 1
    perplexities = _perplexities(traces) if several else []
    lines: list[str | Table | None] = [device.name]
    plans = []
    for trace in traces:
        found = plan(
            trace.table,
            device,
            memory=memory,
            tokens_per_s=args.tokens_per_s,
            policies=names(args.policy),
            expert_bytes=expert_bytes,
            other_bytes=other_bytes,
            access=access,
            allocated=args.allocated,
            useful=several and args.tokens_per_s is None,
            rows=rows or 0.0,
        )
        plans.append(found)
        lines += [report.sizes_note(trace, found, other_given=other_bytes is not None), report.loads_note(trace, found)]
    if several:
        best = choose_run(perplexities, plans)
        lines += [report.runs_table(traces, plans, best), *report.choice_notes(traces, plans, best)]
    else:
        shown = default_capacities(streams(traces[0].table, access)[0])
        lines += [report.plan_table(plans[0], shown), report.knee_note(), report.star_note(plans[0].points)]
        lines.append(plans[0].answer.message)
    print_lines(lines)


def _perplexities(traces: Sequence[Trace]) -> list[float]:
    for trace in traces:
        if trace.ppl is None:
            raise StickyError(f"{trace.path} has no perplexity: to choose among several traces, pass run folders.")
    return [trace.ppl for trace in traces if trace.ppl is not None]


def device_command(argv: list[str]) -> None:
    parser = make_parser(
        "device", "Measure this machine, alone or with a model, or show a device profile, as YAML that plan reads."
    )
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a model to calibrate for, or a profile or YAML file to show"
    )
    parser.add_argument("--list", action="store_true", help="list the included profiles")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="folder on the disk to measure (default: here)"
    )
    parser.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="megabytes to read and to compute with (default 256)"
    )
    parser.add_argument("--slots", type=int, metavar="C", help="calibrate with C slots per layer (default: top-k)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="calibrate with N tokens (default 64)")
    parser.add_argument("--throttle", metavar="BYTES", help="simulate slow memory of BYTES per second, such as 200MB")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile here")
    args = parser.parse_args(argv)

    from stickymoe.locality.devices import as_yaml, device_names, load_device, measure_device

    require_outside_runs(args.out)
    if args.list:
        for name in device_names():
            print(f"{name}  {load_device(name).name}")
        return
    if args.name is not None and Path(args.name).is_dir():
        from stickymoe.runtime.calibrate import calibrate

        device = calibrate(args.name, slots=args.slots, tokens=args.tokens, throttle=args.throttle)
    elif args.name is not None:
        device = load_device(args.name)
    else:
        device = measure_device(args.folder, megabytes=args.megabytes)
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
    real = int(table.mask.sum())
    print(f"{args.out}: {L} layers, {B} × {T} tokens ({real} real), {table.n_experts} experts, top-{k}")


def _trace_make(argv: list[str]) -> None:
    from stickymoe.locality.synthetic import Synthetic, make_trace

    parser = make_parser("trace make", "Write a synthetic trace folder.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    for f in fields(Synthetic):
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
            raise StickyError(f"{file.parent} already has a {what}. Choose another folder.")
