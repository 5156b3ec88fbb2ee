"""The parser of all commands, and the types of their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from stickymoe.errors import StickyError, unknown


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `StickyError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise StickyError(f"{message}. See {self.prog} --help.")


def make_parser(command: str, description: str) -> Parser:
    return Parser(
        prog=f"stickymoe {command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )


def require_settings(parser: Parser, flags: list[str]) -> None:
    """Refuse flags that are neither options of the command nor settings (`--section.name`, `--section`, `--seed`)."""
    settings = ("--seed", "--data", "--model", "--variant", "--train", "--eval")
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and "." not in name and name not in settings:
            options = [option for action in parser._actions for option in action.option_strings if len(option) > 2]
            raise StickyError(unknown("setting", name, [*options, "--seed"], or_else=f"See {parser.prog} --help."))


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 2,3") from None


def capacities(text: str) -> list[int] | str:
    return text if text == "all" else numbers(text)


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def require_outside_runs(file: Path | None) -> None:
    if file is not None and (file.parent / "record.json").exists():
        raise StickyError(f"{file} would be written into a run folder. Choose another folder.")
