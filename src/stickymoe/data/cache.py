"""Cache entries that are whole or absent: folders written aside, renamed into place, and checked when read.

An entry is a folder of files with `meta.json`, which holds the checksum of each and of itself. Any number of
processes may write the same entry at once; whoever renames first wins and the others keep the winner's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stickymoe import files
from stickymoe.errors import DataError

SCHEMA = 1
_log = logging.getLogger("stickymoe")


@dataclass(frozen=True)
class Entry:
    """`about` is what `meta.json` says besides schema and checksums."""

    about: dict[str, Any]
    files: dict[str, bytes]


class _DamagedError(Exception):
    pass


def read_entry(folder: Path) -> Entry | None:
    """The entry, or None where there is none or none that can be trusted; the latter is logged."""
    if not folder.is_dir():
        return None
    try:
        return _read(folder)
    except _DamagedError as damage:
        _log.warning("Token cache: %s; rebuilding the entry.", damage)
        return None


def write_entry(folder: Path, entry: Entry) -> None:
    """Put the entry where readers see all of it or nothing."""
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        for name, content in {**entry.files, "meta.json": _meta(entry)}.items():
            (temporary / name).write_bytes(content)
        _publish(temporary, folder)
    except OSError as error:
        raise DataError(
            f"Cannot write the token cache '{folder.parent}': {error.strerror}. "
            f"Pass a writable folder: --data.cache_dir DIR."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _meta(entry: Entry) -> bytes:
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in entry.files.items()}
    body = {"schema": SCHEMA, "files": sums, "about": entry.about}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> Entry:
    meta = _read_meta(folder / "meta.json")
    contents = {}
    for name, expected in meta["files"].items():
        contents[name] = _read_file(folder / name)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise _DamagedError(f"'{folder / name}' does not match its checksum")
    return Entry(about=meta["about"], files=contents)


def _read_meta(file: Path) -> dict[str, Any]:
    try:
        meta = json.loads(_read_file(file))
    except ValueError:
        meta = None
    if not isinstance(meta, dict) or meta.pop("sha256", None) != _digest(meta) or meta["schema"] != SCHEMA:
        raise _DamagedError(f"'{file}' does not match its checksum")
    return meta


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _DamagedError(f"'{file}' cannot be read ({error.strerror})") from error


def _publish(temporary: Path, folder: Path) -> None:
    while not _renamed(temporary, folder):
        try:
            _read(folder)
            return
        except _DamagedError:
            _move_away(folder)


def _renamed(source: Path, target: Path) -> bool:
    try:
        files.publish_folder(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _move_away(folder: Path) -> None:
    """Renamed before it is deleted, so that no reader meets a half-deleted entry."""
    doomed = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)
