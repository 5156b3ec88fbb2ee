"""Errors that the user can fix, each with a message of one line.

The command line prints a `StickyError` as one line and exits with code 2; from Python it is an ordinary exception.
A message says what was given, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """A value for a message: its `repr`, cut to a readable length."""
    return _short.repr(value)


class StickyError(Exception):
    """Base of every error that the user can fix. Its message is one line."""


class ConfigError(StickyError):
    """A setting that cannot be used."""


class DataError(StickyError):
    """A corpus, tokenizer or token cache that cannot be used."""


class RunError(StickyError):
    """A run folder, record or checkpoint that cannot be used."""


class StoreError(StickyError):
    """A packed store that cannot be written, read or used."""


class MissingExtraError(StickyError, ImportError):
    """A command or function needs a package that an extra installs."""

    def __init__(self, needed_by: str, *, package: str, extra: str) -> None:
        install = f'pip install "stickymoe[{extra}]"'
        super().__init__(f"{needed_by} needs {package}, which is not installed: {install}.")


class DivergedError(StickyError):
    """The loss is no longer finite."""


def unknown(kind: str, name: str, known: Iterable[str], *, or_else: str | None = None) -> str:
    """The message for an unknown name: similar names if there are any, otherwise `or_else` or all known names."""
    known = sorted(known)
    name = name if len(name) <= 80 else name[:80] + "…"
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    if near:
        return f"Unknown {kind} {name!r}. Did you mean {' or '.join(repr(n) for n in near)}?"
    return f"Unknown {kind} {name!r}. {or_else or 'Known: ' + ', '.join(known) + '.'}"


def require(ok: bool, key: str, given: object, expected: str) -> None:
    """Refuse a setting: name its key, what was given and what was expected."""
    if not ok:
        raise ConfigError(f"{key}: got {shown(given)}, expected {expected}.")


class InterruptedRunError(StickyError):
    """A run was interrupted; it is saved and can be resumed."""
