"""Damage files at random, the same way for the same seed, and require of a reader a valid result or one clear line."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stickymoe.errors import StickyError

Files = dict[str, bytes]  # the content of a folder by relative path

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
OTHER_NUMBERS = [
    *(b"-1", b"0", b"1", b"2.5", b"-0.0", b"1e-400", b"1e39", b"1e400", b"65537", b"1000000000000"),
    *(b"9223372036854775807", b"9223372036854775808", b"9" * 400, b"9" * 5000, b"0x" + b"f" * 6000),
    *(b"NaN", b"nan", b".nan", b"Infinity", b"-inf", b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"[[1]]"),
    *(b"2026-01-01", b'"\\ud800"', b"&a [*a]", b"[" * 3000, b"\xff", b"\x00"),
]
BRACKETS = [b"{", b"}", b"[", b"]", b"(", b")", b'"', b"'", b",", b":", b"\n", b"#", b"\\", b"- ", b"? ", b"!!set "]
SECONDS = 5.0  # of processor time, for a file of a few kilobytes
MAX_LINE = 700


def snapshot(folder: Path) -> Files:
    """The files of a folder, to make damaged copies of."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def restore(files: Files, folder: Path) -> None:
    """Make the folder hold these files and nothing else."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one file of the folder, or two; says how."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    path = rng.choice(found)
    if rng.random() < 0.1:
        return f"{path.name}: {rng.choice(FILE_DAMAGES)(path, rng, found)}"
    content, done = path.read_bytes(), []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        operator = rng.choice(BYTE_DAMAGES)
        content = operator(content, rng)
        done.append(operator.__name__)
    path.write_bytes(content)
    return f"{path.name}: {', '.join(done)}"


def survive(read: Callable[[Path], object], files: Files, folder: Path, seeds: range) -> int:
    """Read the folder once for each seed, damaged anew; returns how many of the damages were refused.

    A reader may return a result or raise a `StickyError` of one line. Anything else is a failure, which names the seed.
    """
    refused = 0
    for seed in seeds:
        restore(files, folder)
        what = f"seed {seed}, {damage(folder, random.Random(seed))}"
        started = time.process_time()
        try:
            read(folder)
        except StickyError as e:
            refused += 1
            require_one_line(str(e), what)
        except Exception as e:
            raise AssertionError(f"{what}: {type(e).__name__}: {e}") from e
        if time.process_time() - started > SECONDS:
            pytest.fail(f"{what}: took {time.process_time() - started:.1f} s")
    return refused


def require_one_line(message: str, what: str) -> None:
    if "\n" in message or not message.strip() or len(message) > MAX_LINE or message[-1] not in ".?)":
        pytest.fail(f"{what}: not one clear line: {message!r}")
    message.encode("utf-8")


# Damage to bytes


def flip_bit(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def flip_bit_near_start(content: bytes, rng: random.Random) -> bytes:
    return flip_bit(content[:160], rng) + content[160:]


def replace_byte(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng, longest=1)
    return content[:start] + bytes([rng.randrange(256)]) + content[end:]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 8, 100))) + content[at:]


def insert_bracket(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(BRACKETS) + content[at:]


def delete(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + content[end:]


def duplicate(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:end] + content[start:]


def zero(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + bytes(end - start) + content[end:]


def replace_number(content: bytes, rng: random.Random) -> bytes:
    numbers = list(NUMBER.finditer(content))
    if not numbers:
        return content
    number = rng.choice(numbers)
    return content[: number.start()] + rng.choice(OTHER_NUMBERS) + content[number.end() :]


def replace_line_end(content: bytes, rng: random.Random) -> bytes:
    """Replace what follows a colon or comma, which is a value in most texts."""
    marks = [m.end() for m in re.finditer(rb"[:,]\s*", content)]
    if not marks:
        return content
    start = rng.choice(marks)
    end = start + next((i for i, c in enumerate(content[start:]) if c in b",\n}"), 0)
    return content[:start] + rng.choice(OTHER_NUMBERS) + content[end:]


def _span(content: bytes, rng: random.Random, longest: int = 64) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(start + rng.randint(1, longest), len(content))


BYTE_DAMAGES = (
    *(flip_bit, flip_bit_near_start, replace_byte, truncate, insert, insert_bracket, delete, duplicate, zero),
    *(replace_number, replace_number, replace_line_end, replace_line_end),
)


# Damage to files


def empty(path: Path, rng: random.Random, found: list[Path]) -> str:
    path.write_bytes(b"")
    return "emptied"


def remove(path: Path, rng: random.Random, found: list[Path]) -> str:
    path.unlink()
    return "removed"


def folder_instead(path: Path, rng: random.Random, found: list[Path]) -> str:
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def dangling_link(path: Path, rng: random.Random, found: list[Path]) -> str:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))
    return "a dangling link in its place"


def link_to_itself(path: Path, rng: random.Random, found: list[Path]) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "a link to itself in its place"


def swap(path: Path, rng: random.Random, found: list[Path]) -> str:
    other = rng.choice(found)
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)
    return f"swapped with {other.name}"


FILE_DAMAGES = (empty, remove, folder_instead, dangling_link, link_to_itself, swap)
