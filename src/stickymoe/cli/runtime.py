"""`generate` and `pack`: run a model with experts on disk."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.cli.parsing import Parser, make_parser, require_outside_runs
from stickymoe.cli.printing import progress, write_json
from stickymoe.errors import StickyError

if TYPE_CHECKING:
    from stickymoe.runtime.engine import Engine, Generation
    from stickymoe.runtime.store import Contents

_MODEL = "packed store, run folder, or folder of a transformers model"


def generate_command(argv: list[str]) -> None:
    parser = make_parser("generate", "Generate text with experts on disk and a few slots per layer in memory.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("model", type=Path, metavar="MODEL", help=_MODEL)
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="use the prompt as a message in the model's chat template")
    parser.add_argument(
        "--max_new_tokens", type=int, default=64, metavar="N", help="tokens to generate, at most (default 64)"
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens at random; without it, the most likely one")
    parser.add_argument("--temperature", type=float, metavar="X", help="sample at this temperature (default 1)")
    parser.add_argument("--top_k", type=int, metavar="N", help="sample among the N most likely tokens (default all)")
    parser.add_argument(
        "--top_p", type=float, metavar="P", help="sample among the most likely tokens of total probability P"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="sample with this seed (default 0)")
    add_engine_options(parser)
    parser.add_argument("--stats", type=Path, metavar="FILE", help="write text, counts and times as JSON")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write the routes as a new trace folder")
    args = parser.parse_args(argv)

    from stickymoe.locality.formats import save_table

    require_outside_runs(args.stats)
    if args.trace is not None and args.trace.exists():
        raise StickyError(f"{args.trace} exists already, expected a new folder. Choose another one.")
    prompt = _prompt(args.prompt)
    with open_engine(args) as engine:
        if args.trace is not None and engine.layers is None:
            raise StickyError(f"--trace: {args.model} has no experts; omit --trace.")
        settings = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
        given = {name: value for name, value in settings.items() if value is not None}
        printer = _Printer(engine)
        out = engine.generate(
            engine.host.encode(prompt, chat=args.chat),
            max_new_tokens=args.max_new_tokens,
            do_sample=args.sample or bool(given),
            on_token=printer,
            **given,
        )
        printer.end()
        print(closing_line(engine, out), file=sys.stderr)
        if args.stats is not None:
            write_json(args.stats, stats_of(engine, out))
        if args.trace is not None and out.table is not None:
            save_table(out.table, args.trace)
            print(f"{args.trace}: next, stickymoe simulate {args.trace}", file=sys.stderr)
    if out.interrupted:
        raise KeyboardInterrupt


def add_engine_options(parser: Parser) -> None:
    """How experts are held in memory and loaded."""
    parser.add_argument("--slots", type=int, metavar="C", help="slots per layer (default: one for every expert)")
    parser.add_argument("--memory", metavar="BYTES", help="as many slots as fit, such as 64MB")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="which expert leaves a full cache (default router if the routers keep experts resident, otherwise lru)",
    )
    parser.add_argument(
        "--prefetch", default="none", metavar="NAME", help="none, previous or next_layer (default none)"
    )
    parser.add_argument(
        "--on_miss", default="load", metavar="NAME", help="load, or bypass: rare experts evict nobody (default load)"
    )
    parser.add_argument("--kernel", metavar="NAME", help="torch or compiled (default compiled, where it can be)")
    parser.add_argument("--io", default="direct", metavar="NAME", help="direct or buffered reads (default direct)")
    parser.add_argument("--throttle", metavar="BYTES", help="simulate slow memory of BYTES per second, such as 200MB")
    parser.add_argument(
        "--rows",
        metavar="BYTES",
        help="keep tables of rows on disk, and hot rows in so much memory, such as 1MB or 0 (default: all in memory)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads that compute (default 1)")
    parser.add_argument(
        "--experts", metavar="TYPE", help="precision of the store that is packed: fp32, bf16, int8 or int4"
    )
    parser.add_argument("--store", type=Path, metavar="DIR", help="where the store is packed (default: user's cache)")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of `offload` in the options of `add_engine_options`."""
    names = ("slots", "memory", "policy", "prefetch", "on_miss", "kernel", "io", "throttle", "rows", "threads")
    given = {name: getattr(args, name) for name in (*names, "experts", "store")}
    return given | {"progress": _progress}


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine of the options of `add_engine_options`."""
    from stickymoe.runtime.engine import offload

    engine = offload(args.model, **engine_settings(args))
    if engine.io == "buffered" and args.io == "direct":
        print("stickymoe: this file system has no direct I/O; reads are buffered", file=sys.stderr)
    return engine


def _prompt(given: str | None) -> str:
    if given is None:
        raise StickyError("--prompt is missing: pass a text, or - to read it from standard input.")
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()
    except UnicodeError as e:
        raise StickyError("--prompt: expected text in UTF-8.") from e
    if not text:
        raise StickyError("--prompt is empty: expected at least one character.")
    return text


class _Printer:
    """Prints text as it comes."""

    def __init__(self, engine: Engine) -> None:
        from stickymoe.runtime.streaming import TextStream

        self._stream = TextStream(engine.host.decode)

    def __call__(self, token: int) -> None:
        sys.stdout.write(self._stream.push(token))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write(self._stream.end() + "\n")
        sys.stdout.flush()


def closing_line(engine: Engine, out: Generation) -> str:
    """What a generation cost, on one line."""
    from stickymoe.locality.plan import bytes_text, speed_text

    s = out.stats
    speed = "–" if math.isnan(s.tokens_per_s) else speed_text(s.tokens_per_s)
    parts = [f"{s.tokens} tokens, {speed} tokens/s"]
    if engine.layers is not None:
        parts.append(f"{s.hits} hits, {s.misses} misses ({s.hit_rate:.1%} hits)")
        parts.append(f"{bytes_text(s.bytes_read)} read")
        stalled = s.stall_s + s.late_s + s.row_stall_s
        parts.append(f"stalled {stalled:.2f} s of {s.prompt_s + s.decode_s:.2f} s")
    if engine.rows is not None:
        parts.append(
            f"{s.rows} rows, {s.row_hits} in memory, {bytes_text(s.row_bytes_read)} read, stalled {s.row_stall_s:.2f} s"
        )
    memory = f"{bytes_text(s.resident_bytes)} resident"
    if engine.layers is not None:
        memory += f" ({engine.slots} slots of {bytes_text(engine.expert_bytes)} per layer, {engine.policy})"
    return " · ".join([*parts, memory])


def stats_of(engine: Engine, out: Generation) -> dict[str, Any]:
    """Text, counts and times of a generation."""
    speed = out.stats.tokens_per_s
    return {
        "text": engine.host.decode(out.tokens),
        "tokens": out.tokens,
        "tokens_per_s": None if math.isnan(speed) else speed,
        "slots": engine.slots,
        "policy": engine.policy,
        "expert_bytes": engine.expert_bytes,
        "io": engine.io,
        "interrupted": out.interrupted,
        **{f"n_{k}" if k == "tokens" else k: v for k, v in dataclasses.asdict(out.stats).items()},
    }


def _rows_of(contents: Contents) -> str:
    """The tables of a store, for the line of `pack`."""
    from stickymoe.locality.plan import bytes_text

    if not contents.rows:
        return ""
    layout = contents.row_layout
    return f"; rows {bytes_text(layout.nbytes)}, of which a token reads {bytes_text(layout.row_bytes)}"


def _progress(title: str, experts: int) -> AbstractContextManager[Callable[[int], None]]:
    return progress(title, experts, "experts/s")


def pack_command(argv: list[str]) -> None:
    parser = make_parser("pack", "Pack a model into a store, from which experts are loaded one read each.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("model", type=Path, metavar="MODEL", help="run folder, or folder of a transformers model")
    parser.add_argument("store", type=Path, metavar="STORE", help="new folder to write")
    parser.add_argument(
        "--experts",
        metavar="TYPE",
        help="fp32, bf16, int8, int4, or mixed: important experts keep more bits (default: as saved)",
    )
    parser.add_argument("--budget", metavar="BYTES", help="most bytes of all experts, with --experts mixed")
    parser.add_argument("--text", type=Path, metavar="PATH", help="text to measure on (default: the embedded corpus)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens to measure on (default 4096)")
    args = parser.parse_args(argv)

    from stickymoe.locality.plan import bytes_text
    from stickymoe.runtime.packing import pack_model

    done = pack_model(
        args.model,
        args.store,
        experts=args.experts,
        budget=args.budget,
        text=args.text,
        tokens=args.tokens,
        progress=_progress,
    )
    store = done.store
    c = store.contents
    print(
        f"{args.store}: {c.n_pools} × {c.n_experts} experts in {store.precision}, {bytes_text(store.slot_bytes)} each, "
        f"{bytes_text(store.nbytes)} together; dense part {bytes_text(store.dense_bytes)}" + _rows_of(c)
    )
    if done.cost is not None:
        print(done.cost.message)
