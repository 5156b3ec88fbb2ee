"""`export`: our models in transformers."""

from __future__ import annotations

from pathlib import Path

from stickymoe.cli.parsing import make_parser


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
