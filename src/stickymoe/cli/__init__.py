"""The command line: parse, call, print. A command imports what it needs only when it runs."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from stickymoe import __version__
from stickymoe.errors import InterruptedRunError, StickyError, unknown
from stickymoe.extras import extras_for

HELP = """\
usage: stickymoe COMMAND [options]

Train mixture-of-experts models whose routing stays local, and measure what routing costs on a device.

commands:
  demo       train the paper's variants on the embedded corpus and compare them (about four minutes)
  train      train one variant into a run folder
  sweep      train every row of a grid, such as the paper's table
  monitor    show live curves of trainings on a page
  report     show finished runs on a page: tables, figures, a text coloured by expert
  frontier   show how much of the MoE gain each run keeps, and its misses
  eval       evaluate a run again, on the validation or test split
  export     write the model of a run as a folder that transformers loads
  generate   generate text with experts on disk, inside a byte budget
  serve      answer requests in OpenAI's protocol, with a page that shows loads
  pack       pack a model into a store for generate and serve
  simulate   replay a routing trace on expert caches and count misses
  plan       predict tokens/s on a device for every cache size; find the smallest that is fast enough
  profile    record how a transformers checkpoint routes a text
  reroute    show what rules that prefer resident experts cost and save
  adapt      train a transformers checkpoint for locality
  device     measure this machine, or show a device profile
  trace      convert a trace of another tool, or make a synthetic one
  variants   list the variants with their equations

stickymoe COMMAND --help shows the options of a command. --debug shows tracebacks, --version the version.
"""

# Each command and the module of this package that defines it, as NAME_command.
COMMANDS = {
    "demo": "sweeps",
    "train": "train",
    "eval": "train",
    "simulate": "locality",
    "plan": "locality",
    "device": "locality",
    "trace": "locality",
    "sweep": "sweeps",
    "report": "reports",
    "frontier": "reports",
    "variants": "train",
    "profile": "huggingface",
    "reroute": "huggingface",
    "adapt": "huggingface",
    "export": "huggingface",
    "generate": "runtime",
    "serve": "serving",
    "monitor": "serving",
    "pack": "runtime",
}


def _command(name: str) -> Callable[[list[str]], None]:
    module = importlib.import_module(f"{__name__}.{COMMANDS[name]}")
    command: Callable[[list[str]], None] = getattr(module, f"{name}_command")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 2 for an error that the user can fix, 130 after Ctrl-C."""
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
        with extras_for(args[0]):
            _command(args[0])(args[1:])
    except InterruptedRunError as e:
        _report(str(e))
        return 130
    except StickyError as e:
        if debug:
            traceback.print_exc()
            return 2
        _report(f"stickymoe: {e}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return 0


def _report(line: str) -> None:
    """Print an error, once per machine: all processes of a run end with the same one. Also give it to torchrun."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(report))
