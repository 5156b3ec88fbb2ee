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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stickymoe import files
from stickymoe.errors import DataError
from stickymoe.reading import read_bytes, read_json

SCHEMA = 1
_log = logging.getLogger("stickymoe")


@dataclass(frozen=True)
class Entry:
    """`about` is the content of `meta.json` besides schema and checksums."""

    about: dict[str, Any]
    files: dict[str, bytes]


def read_entry(folder: Path) -> Entry | None:
    """The entry, or None if it is missing or damaged; damage is logged."""
    if not folder.is_dir():
        return None
    try:
        return _read(folder)
    except DataError as damage:
        _log.warning("Token cache: %s The entry is rebuilt.", damage)
        return None


def write_entry(folder: Path, entry: Entry) -> None:
    """Write an entry so that readers see all of it or nothing."""
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
        contents[name] = read_bytes(folder / name, DataError)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise DataError(f"{folder / name} does not match its checksum.")
    return Entry(about=meta["about"], files=contents)


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
