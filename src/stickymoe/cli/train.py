"""`train`, `eval` and `variants`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stickymoe.cli.parsing import make_parser, require_settings
from stickymoe.cli.printing import print_results
from stickymoe.errors import StickyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stickymoe.models.gpt import GPT
    from stickymoe.runs.config import RunConfig
    from stickymoe.runs.record import RunRecord


def train_command(argv: list[str]) -> None:
    from stickymoe.runs.presets import PRESETS, RECOMMENDED

    if not argv:
        raise StickyError("train: got no settings. Try --preset tiny (seconds), or see stickymoe train --help.")
    parser = make_parser("train", "Train one variant into a run folder.")
    options = parser.add_argument_group("run")
    options.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    options.add_argument("--preset", metavar="NAME", help=f"settings to start from: {', '.join(PRESETS)}")
    options.add_argument(
        "--variant",
        "--variant.name",
        metavar="NAME",
        help="variant to train; stickymoe variants lists all, --variant NAME --help shows the settings of one",
    )
    options.add_argument(
        "--recommended",
        action="store_true",
        help="train the router that docs/frontier.md recommends",
    )
    options.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings; overrides the preset")
    options.add_argument("--out", type=Path, metavar="DIR", help="run folder (default runs/VARIANT-HASH)")
    options.add_argument("--resume", action="store_true", help="resume the unfinished run in --out")
    options.add_argument("--checkpoint", metavar="NAME", help="resume from this checkpoint, not the newest")
    options.add_argument(
        "--first_phase", type=Path, metavar="DIR", help="finished run to use as the first phase (remoe: vanilla)"
    )
    options.add_argument("--quiet", action="store_true", help="no progress display")
    options.add_argument("--print_config", action="store_true", help="print the whole config as YAML and exit")
    args, flags = parser.parse_known_args(argv)
    require_settings(parser, flags)
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
    if _is_main():
        print_results([record])
        print(out)


def _is_main() -> bool:
    """Whether this is the only process of the command, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def _train_config(args: argparse.Namespace, flags: list[str]) -> RunConfig:
    """Flags override --config, which overrides --preset. `--resume --out DIR` alone uses the config of the folder."""
    from stickymoe.errors import RunError
    from stickymoe.runs.record import RunRecord
    from stickymoe.runs.settings import config_from, read_config

    file = args.config
    if args.checkpoint and not args.resume:
        raise StickyError(f"--checkpoint {args.checkpoint}: works only with --resume; add --resume.")
    if args.resume and file is None and args.preset is None:
        if args.out is None:
            raise StickyError("--resume needs the run folder: add --out DIR.")
        file = args.out / "config.yaml"
        if not file.exists():
            if not (args.out / "record.json").exists():
                raise RunError(f"There is no run to resume in {args.out}: start one without --resume.")
            if args.variant or args.recommended:
                raise StickyError(f"--resume uses the variant of {args.out}: omit --variant and --recommended.")
            return config_from(
                RunRecord.read(args.out / "record.json").config, flags
            )  # killed before config.yaml was written
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


def eval_command(argv: list[str]) -> None:
    parser = make_parser("eval", "Evaluate the model of a run again, on its validation or test split.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("run", type=Path, metavar="DIR", help="run folder")
    parser.add_argument("--split", choices=("valid", "test"), default="valid", help="default valid")
    parser.add_argument(
        "--experts", choices=("bf16", "int8", "int4"), help="round the experts to what a store of this precision holds"
    )
    parser.add_argument(
        "--shuffle_residents",
        action="store_true",
        help="for siblings: also measure with every resident replaced by a random other expert of its slot",
    )
    parser.add_argument("--save", action="store_true", help="add the result to record.json, once for each measurement")
    parser.add_argument("--checkpoint", metavar="NAME", help="evaluate this checkpoint, not the newest")
    parser.add_argument("--data.path", dest="path", metavar="DIR", help="folder of the corpus, if it was moved")
    args = parser.parse_args(argv)
    if args.save and args.checkpoint:
        raise StickyError("--save is for the final model: omit --checkpoint.")
    name = args.split if args.experts is None else f"{args.split} {args.experts}"
    if args.shuffle_residents:
        name = f"shuffled {name}"
    if args.save and name == "valid":
        raise StickyError("--save: the record of a run has its validation split: add --split test or --experts.")

    from stickymoe.training.restore import evaluate_run, require_new_evaluation, save_evaluation
    from stickymoe.training.shuffle import shuffle_residents

    if args.save:
        require_new_evaluation(args.run, name)
    expert_bytes: list[int] = []

    def prepare(model: GPT) -> None:
        from stickymoe.runtime.rounding import round_experts

        expert_bytes[:] = model.expert_bytes() if args.experts is None else round_experts(model, args.experts)

    def prepare_shuffled(model: GPT) -> None:
        shuffle_residents(model)
        prepare(model)

    def measured(prepare: Callable[[GPT], None]) -> RunRecord:
        where = {"split": args.split, "checkpoint": args.checkpoint, "data_path": args.path}
        return evaluate_run(args.run, prepare=prepare, **where)

    shuffled = measured(prepare_shuffled) if args.shuffle_residents else None
    record = measured(prepare)
    if _is_main():
        print_results([record])
        if shuffled is not None:
            print(_shuffled_text(record.metrics["ppl"], shuffled.metrics["ppl"]))
        if args.save:
            save_evaluation(args.run, name, shuffled or record, expert_bytes)


def _shuffled_text(ppl: float | None, shuffled: float | None) -> str:
    if ppl is None or shuffled is None:
        return "with another expert of every slot resident: the perplexity is not finite"
    return f"with another expert of every slot resident: perplexity {shuffled:.2f} ({shuffled / ppl - 1:+.1%})"


def variants_command(argv: list[str]) -> None:
    parser = make_parser("variants", "List the variants with their equations.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.parse_args(argv)

    from rich.console import Console
    from rich.markup import escape

    from stickymoe.variants import hypers, variant_class, variant_names

    console = Console(highlight=False)
    for name in variant_names():
        cls = variant_class(name)
        defaults = "  ".join(
            f"--variant.{hyper.name} {hyper.default}{_symbol(hyper.name, hyper.symbol)}"
            for hyper in hypers(name).values()
        )
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        console.print(f"[bold]{name}[/bold]  {escape(summary)}", soft_wrap=True)
        console.print(f"    {cls.equation}\n    {defaults}", markup=False, soft_wrap=True)
    console.print(
        "\nNames joined by + combine variants: --variant smooth+residency+soft has the settings of all three.",
        soft_wrap=True,
    )


def _symbol(name: str, symbol: str) -> str:
    """The symbol in brackets, unless it equals the name."""
    return "" if symbol.replace(" ", "_") == name else f" ({symbol})"
