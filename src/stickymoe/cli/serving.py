"""`serve`: answer requests in OpenAI's protocol, with experts on disk. `monitor`: live curves of a training."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stickymoe.cli.parsing import make_parser
from stickymoe.cli.runtime import add_engine_options, engine_settings

if TYPE_CHECKING:
    from stickymoe.serving.worker import Worker

KEY_VARIABLE = "STICKYMOE_API_KEY"


def serve_command(argv: list[str]) -> None:
    parser = make_parser("serve", "Serve models with experts on disk: OpenAI's protocol, and a page that shows loads.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="packed store, run folder or folder of a transformers model; NAME=FOLDER gives it a name",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (default 8000; 0: a free one)")
    parser.add_argument(
        "--api_key", metavar="KEY", help=f"ask clients for this bearer token (default: ${KEY_VARIABLE}, if set)"
    )
    parser.add_argument("--max_tokens", type=int, default=1024, metavar="N", help="tokens of an answer (default 1024)")
    parser.add_argument(
        "--max_running", type=int, default=8, metavar="N", help="answers of a model that take turns (default 8)"
    )
    parser.add_argument(
        "--max_waiting", type=int, default=64, metavar="N", help="requests of a model that wait (default 64)"
    )
    parser.add_argument(
        "--time_limit", type=float, default=300.0, metavar="S", help="seconds of an answer, at most (default 300)"
    )
    parser.add_argument("--max_body", default="1MB", metavar="BYTES", help="size of a request, at most (default 1MB)")
    add_engine_options(parser)
    args = parser.parse_args(argv)

    from stickymoe.errors import ConfigError, require
    from stickymoe.runtime.engine import parsed_bytes
    from stickymoe.serving.serve import named, serve_models
    from stickymoe.serving.worker import Limits

    for key in ("max_tokens", "max_running", "max_waiting"):
        require(getattr(args, key) >= 1, f"--{key}", getattr(args, key), "a whole number ≥ 1")
    require(args.time_limit > 0, "--time_limit", args.time_limit, "seconds > 0")
    limits = Limits(
        args.max_tokens,
        args.max_running,
        args.max_waiting,
        args.time_limit,
        int(parsed_bytes("--max_body", args.max_body)),
    )
    models = named(args.models)
    if args.store is not None and len(models) > 1:
        raise ConfigError("--store: got one folder for several models; pack them first with stickymoe pack.")
    secret: str | None = os.environ.get(KEY_VARIABLE) or None if args.api_key is None else args.api_key
    if secret is not None:
        usable = bool(secret) and secret.isprintable() and secret.isascii()
        if not usable:  # without the key, which is a secret
            raise ConfigError("--api_key: got an empty key or other characters, expected printable ASCII characters.")

    def ready(url: str, workers: Mapping[str, Worker]) -> None:
        from stickymoe.locality.plan import bytes_text

        for name, worker in workers.items():
            engine = worker.engine
            held = (
                "no experts"
                if engine.layers is None
                else f"{engine.slots} of {engine.layers.contents.n_experts} experts per layer in memory"
            )
            print(f"{name}: {held}, {bytes_text(engine.resident_bytes)} resident", file=sys.stderr)
        if secret is None and not url.startswith(("http://127.", "http://[::1]")):
            print("stickymoe: anyone who reaches this address can use it; set --api_key", file=sys.stderr)
        print(f"Serving on {url} (page) and {url}v1 (OpenAI's protocol). Ctrl-C stops it.", file=sys.stderr, flush=True)

    serve_models(
        models,
        host=args.host,
        port=args.port,
        key=secret,
        limits=limits,
        settings=engine_settings(args),
        on_ready=ready,
    )


def monitor_command(argv: list[str]) -> None:
    parser = make_parser("monitor", "Show the curves of running and finished trainings on a page. Files are only read.")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a run folder, or a folder with runs, such as a sweep's"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001, metavar="N", help="port (default 8001; 0: a free one)")
    args = parser.parse_args(argv)

    from stickymoe.serving.monitor import monitor_runs

    def ready(url: str) -> None:
        print(f"{args.folder}: curves on {url}. Ctrl-C stops it; trainings go on.", file=sys.stderr, flush=True)

    monitor_runs(args.folder, host=args.host, port=args.port, on_ready=ready)
