"""Durable, atomic writing: the one place that does it.

A reader sees the old content or the new, never a part, and what was written survives a power cut.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step."""
    with replacing(path) as f:
        f.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which replaces `path` in one step when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish_folder(temporary: Path, final: Path) -> None:
    """Put every file of `temporary` on the disk, then rename the folder to `final`, which must not exist."""
    for path in temporary.iterdir():
        if path.is_file():
            _sync(path)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
