"""Cache entries, complete or absent: folders are written under a temporary name, renamed, and checked when read.

An entry is a folder of files with `meta.json`, which contains the checksum of each file and of itself. Any number of
processes may write the same entry at once: the first rename succeeds, and the other processes use its result.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stickymoe import files
from stickymoe.errors import DataError
from stickymoe.reading import read_json, reason

SCHEMA = 1
_log = logging.getLogger("stickymoe")


@dataclass(frozen=True)
class Entry:
    """A folder whose files are intact. `about` is the content of `meta.json` besides schema and checksums."""

    about: dict[str, Any]
    folder: Path


def read_entry(folder: Path) -> Entry | None:
    """The entry, or None if it is missing or damaged; damage is logged."""
    if not folder.is_dir():
        return None
    try:
        return _read(folder)
    except DataError as damage:
        _log.warning("Token cache: %s The entry is rebuilt.", damage)
        return None


def write_entry(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> Entry:
    """Write an entry so that readers see all of it or nothing. `fill` writes its files and returns `about`."""
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        about = fill(temporary)
        sums = {file.name: _checksum(file) for file in sorted(temporary.iterdir())}
        body = {"schema": SCHEMA, "files": sums, "about": about}
        (temporary / "meta.json").write_text(json.dumps({**body, "sha256": _digest(body)}, indent=1))
        _publish(temporary, folder)
    except OSError as error:
        raise DataError(
            f"Cannot write the token cache '{folder.parent}': {error.strerror}. "
            f"Pass a writable folder: --data.cache_dir DIR."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Entry(about, folder)


def _checksum(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> Entry:
    meta = _read_meta(folder / "meta.json")
    for name, expected in meta["files"].items():
        try:
            found = _checksum(folder / name)
        except OSError as e:
            raise DataError(f"{folder / name} cannot be read ({reason(e)}).") from e
        if found != expected:
            raise DataError(f"{folder / name} does not match its checksum.")
    return Entry(meta["about"], folder)


def _read_meta(file: Path) -> dict[str, Any]:
    meta = read_json(file, DataError)
    if not isinstance(meta, dict) or meta.pop("sha256", None) != _digest(meta) or meta["schema"] != SCHEMA:
        raise DataError(f"{file} does not match its checksum.")
    return meta


def _publish(temporary: Path, folder: Path) -> None:
    while not _renamed(temporary, folder):
        try:
            _read(folder)
            return
        except DataError:
            _move_away(folder)


def _renamed(source: Path, target: Path) -> bool:
    try:
        files.publish_folder(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def _move_away(folder: Path) -> None:
    """Rename an entry before deleting it, so that no reader sees half of it."""
    doomed = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()
