"""`profile`, `adapt`, `reroute` and `export`: commands for checkpoints of transformers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.cli.parsing import Parser, make_parser, names
from stickymoe.cli.printing import print_lines, progress, write_json
from stickymoe.errors import StickyError
from stickymoe.runs.adaptation import AdaptConfig

if TYPE_CHECKING:
    from torch import Tensor

    from stickymoe.huggingface.text import Loaded


def _checkpoint_parser(command: str, description: str) -> Parser:
    """A parser with what the commands have in common: the model, the text, and how it is read."""
    parser = make_parser(command, description)
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("model", metavar="MODEL", help="folder of a transformers model, or its id on the hub")
    parser.add_argument("--text", type=Path, required=True, metavar="PATH", help="text file, or folder of text files")
    parser.add_argument("--seq_len", type=int, default=256, metavar="T", help="tokens of a row (default 256)")
    parser.add_argument("--batch_size", type=int, default=4, metavar="B", help="rows of a batch (default 4)")
    return parser


def _add_dtype(parser: Parser) -> None:
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="auto, fp32, bf16 or fp16 (default auto)")


def _load(args: argparse.Namespace, most: int | None) -> tuple[Loaded, list[Tensor]]:
    """The model, and rows of at most `most` tokens of the text."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from stickymoe.errors import DataError
    from stickymoe.huggingface.text import load_model, token_chunks

    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    if not args.text.exists():
        raise DataError(f"{args.text} does not exist: expected a text file, or a folder with text files.")
    loaded = load_model(args.model, args.dtype)
    rows = list(token_chunks(loaded.tokenizer, args.text, args.seq_len, most))
    if not rows:
        raise DataError(f"{args.text} is empty: expected at least 2 tokens of text.")
    return loaded, rows


def profile_command(argv: list[str]) -> None:
    parser = _checkpoint_parser("profile", "Record how a checkpoint routes a text; simulate and plan take the result.")
    _add_dtype(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="new trace folder (default traces/MODEL)")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="tokens to read (default 16384)")
    parser.add_argument(
        "--generate", type=int, default=0, metavar="N", help="use each row as a prompt and generate N tokens"
    )
    args = parser.parse_args(argv)

    from stickymoe.huggingface.profile import profile
    from stickymoe.locality.measure import measure
    from stickymoe.locality.study import study
    from stickymoe.reports import locality as report
    from stickymoe.runs.traces import Trace

    if args.generate < 0:
        raise StickyError(f"--generate: got {args.generate}, expected a whole number ≥ 0.")
    out = args.out or Path("traces") / Path(args.model).name
    loaded, rows = _load(args, args.tokens)
    total = sum(len(row) for row in rows) + args.generate * len(rows)
    with progress(f"profile {loaded.name}", total) as advance:
        found = profile(loaded, rows, out, generate=args.generate, batch_size=args.batch_size, progress=advance)
    trace = Trace(out, loaded.name, found.table)
    misses = study(found.table)
    lines: list[Any] = [trace.description]
    if found.ppl is not None:
        lines.append(f"perplexity {found.ppl:.2f} over rows of {args.seq_len} tokens")
    lines += [report.figures_table(measure(found.table)), report.misses_table(misses), report.star_note(misses.results)]
    print_lines([*lines, misses.verdict, f"{out}: next, stickymoe plan {out} --device NAME"])


def reroute_command(argv: list[str]) -> None:
    parser = _checkpoint_parser(
        "reroute", "Show what rules that prefer resident experts cost in perplexity and save in loads."
    )
    _add_dtype(parser)
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="tokens to read (default 8192)")
    parser.add_argument(
        "--slots", type=int, metavar="C", help="cache slots per layer (default: twice the experts of a token)"
    )
    parser.add_argument("--policy", default="lru", help="cache policy (default lru)")
    parser.add_argument(
        "--rules", metavar="LIST", help="rules to try (default all): cache_prior,max_rank,tau_reroute,drop_cold"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw perplexity against bytes read (svg, png, html)"
    )
    args = parser.parse_args(argv)

    from stickymoe.huggingface.reroute import RULES, strengths, sweep_rules
    from stickymoe.huggingface.text import sizes_of
    from stickymoe.reports.rerouting import rules_table, save_figure

    loaded, rows = _load(args, args.tokens)
    rules = names(args.rules) if args.rules else list(RULES)
    sizes = sizes_of(loaded, rows)
    slots = _slots(args.slots, sizes[0])
    runs = 1 + sum(len(strengths(rule, *sizes)) for rule in rules if rule in RULES)
    with progress(f"reroute {loaded.name}", runs * sum(len(row) for row in rows)) as advance:
        found = sweep_rules(
            loaded, rows, slots=slots, rules=rules, policy=args.policy, batch_size=args.batch_size, progress=advance
        )
    values = [row.as_dict() for row in found]
    if args.json is not None:
        write_json(args.json, {"model": loaded.name, "slots": slots, "policy": args.policy, "rows": values})
    if args.figure is not None:
        save_figure(values, args.figure)
    tokens = sum(len(row) for row in rows)
    print_lines([f"{loaded.name}: {args.policy}, {slots} slots per layer, {tokens} tokens", rules_table(values)])


def _slots(asked: int | None, top_k: int) -> int:
    """Cache slots per layer: as asked, or twice the experts of a token."""
    slots = 2 * top_k if asked is None else asked
    if slots < 1:
        raise StickyError(f"--slots: got {slots}, expected a whole number ≥ 1.")
    return slots


def adapt_command(argv: list[str]) -> None:
    parser = _checkpoint_parser("adapt", "Train a checkpoint for locality; transformers loads the result as it is.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--method", default="soft", help="soft, soft_hard, remoe or remoe_full (default soft)")
    parser.add_argument("--train", default="routers", help="what is trained: routers, all or lora (default routers)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="updates (default 200)")
    for name, what in (
        ("lr", "learning rate"),
        ("lam", "weight λ of the consistency loss"),
        ("alpha", "weight α of the anchor loss (soft_hard)"),
        ("kl", "weight of the KL to the original gates (remoe_full)"),
        ("reuse", "weight of the reuse loss (remoe_full)"),
        ("lags", "weight of the KL at lags (remoe_full)"),
        ("entropy", "weight of the entropy of windows (remoe_full)"),
    ):
        default = _adapt_default(name)
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"{what} (default {default:g})")
    for name, what in (
        ("window", "window of the anchor loss (soft_hard)"),
        ("seed", "seed"),
        ("save_every", "steps between checkpoints"),
    ):
        default = _adapt_default(name)
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--slots", type=int, metavar="C", help="cache slots per layer that misses are counted for")
    parser.add_argument(
        "--held_out", type=Path, metavar="PATH", help="text to measure on (default: what follows in --text)"
    )
    parser.add_argument(
        "--held_out_tokens", type=int, default=8192, metavar="N", help="tokens to measure on (default 8192)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    args = parser.parse_args(argv)
    args.dtype = "fp32"  # in half precision, small updates round away

    from stickymoe.errors import DataError, RunError
    from stickymoe.huggingface.adapt import adapt
    from stickymoe.huggingface.text import sizes_of, token_chunks
    from stickymoe.reports.rerouting import adapted_table

    if args.out.exists():
        raise RunError(f"{args.out} exists: choose another folder, or delete it first.")
    fields = {field.name for field in dataclasses.fields(AdaptConfig)}
    config = AdaptConfig(**{name: value for name, value in vars(args).items() if name in fields})
    needed = config.steps * config.batch_size * args.seq_len
    loaded, rows = _load(args, needed if args.held_out else needed + args.held_out_tokens)
    n_held = -(-args.held_out_tokens // args.seq_len)
    if args.held_out is not None:
        held_out = list(token_chunks(loaded.tokenizer, args.held_out, args.seq_len, args.held_out_tokens))
    else:
        rows, held_out = rows[:-n_held], rows[-n_held:]
    if not rows or not held_out:
        raise DataError(
            f"{args.text} is too short: {args.held_out_tokens} tokens are held out and nothing is left to train on; "
            "lower --held_out_tokens, or pass --held_out."
        )
    slots = _slots(args.slots, sizes_of(loaded, rows)[0])
    found = adapt(loaded, args.out, config, rows, held_out, slots=slots, quiet=args.quiet)
    before, after = (dataclasses.asdict(found[name]) for name in ("before", "after"))
    tokens = sum(len(row) for row in held_out)
    note = (
        f"{loaded.name}: {config.method}, {config.train}, {config.steps} steps; {tokens} held-out tokens, {slots} slots"
    )
    print_lines([note, adapted_table(before, after), str(args.out)])


def _adapt_default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(AdaptConfig) if field.name == name)


def export_command(argv: list[str]) -> None:
    parser = make_parser("export", "Write the model of a run as a folder that transformers loads.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("out", type=Path, metavar="DIR", help="new folder to write")
    parser.add_argument("--checkpoint", metavar="NAME", help="export this checkpoint, not the newest")
    args = parser.parse_args(argv)

    from transformers.utils.logging import disable_progress_bar

    from stickymoe.huggingface.export import export_run

    disable_progress_bar()  # type: ignore[no-untyped-call]
    export_run(args.run, args.out, checkpoint=args.checkpoint)
    print(args.out)
