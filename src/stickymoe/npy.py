"""Reading NumPy's `.npy` and `.npz` files that may be damaged: the one place that does it.

No pickle is ever opened, and no memory is allocated before a header was checked against the length of its file.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from stickymoe.errors import StickyError
from stickymoe.reading import reason

_HEAD = 1 << 14  # more than the longest header that NumPy accepts
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 60
_KINDS = "biufU"
_DEFLATE_RATIO = 1032  # no deflated data expands further
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class _Layout:
    """How an array lies in its file; `offset` is where its data begins."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Length of the whole file."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def map_npy(path: Path, error: type[StickyError]) -> Shaped[np.ndarray, ...]:
    """Map the array of a file, to read it as it is used."""
    try:
        with path.open("rb") as file:
            layout = _layout(file.read(_HEAD), file.seek(0, io.SEEK_END))
            return np.memmap(
                file, dtype=layout.dtype, mode="r", offset=layout.offset, shape=layout.shape, order=layout.order
            )
    except OSError as e:
        raise error(f"{path} cannot be read ({reason(e)}).") from e
    except ValueError as e:
        raise error(f"{path} is damaged: {reason(e)}.") from e


def parse_npy(content: bytes, source: Path | str, error: type[StickyError]) -> Shaped[np.ndarray, ...]:
    """The array of a file that was read as `content`."""
    try:
        layout = _layout(content[:_HEAD], len(content))
        flat = np.frombuffer(content, layout.dtype, math.prod(layout.shape), layout.offset)
        return flat.reshape(layout.shape, order=layout.order)
    except ValueError as e:
        raise error(f"{source} is damaged: {reason(e)}.") from e


def read_npz(path: Path, names: tuple[str, ...], error: type[StickyError]) -> dict[str, Shaped[np.ndarray, ...]]:
    """The named arrays of an `.npz` archive; its other arrays are not read."""
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: _member(archive, f"{name}.npy") for name in names}
    except OSError as e:
        raise error(f"{path} cannot be read ({reason(e)}).") from e
    # zipfile lets these through: RuntimeError of an encrypted member, EOFError and the others of wrong offsets.
    except (ValueError, LookupError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise error(f"{path} is damaged: {reason(e)}.") from e
    return {name: parse_npy(content, f"{path} ({name}.npy)", error) for name, content in contents.items()}


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    if name not in archive.namelist():
        raise ValueError(f"it has no {name}")
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} has the compression {info.compress_type}, expected stored or deflated")
    if info.file_size > _DEFLATE_RATIO * (info.compress_size + 1):
        raise ValueError(f"{name} claims {info.file_size:,} bytes, more than its {info.compress_size:,} can hold")
    with archive.open(info) as member:
        content = member.read(_HEAD)
        _layout(content, info.file_size)
        return content + member.read()


def _layout(head: bytes, n_bytes: int) -> _Layout:
    """Read a header by NumPy's own functions and check it; `n_bytes` is the length of the whole file."""
    layout = _parse_header(head)
    if layout.dtype.kind not in _KINDS or layout.dtype.hasobject:
        raise ValueError(f"got the dtype {layout.dtype}, expected numbers, bool or text")
    if not layout.dtype.isnative and layout.dtype.kind != "U":
        raise ValueError(f"got the dtype {layout.dtype.str}, expected the byte order of this machine")
    if len(layout.shape) > _MAX_DIMENSIONS or math.prod(abs(size) + 1 for size in layout.shape) > _MAX_SIZE:
        raise ValueError("its header describes an array of impossible shape")
    if min(layout.shape, default=0) < 0:
        raise ValueError(f"got the shape {layout.shape}, expected sizes ≥ 0")
    if layout.n_bytes != n_bytes:
        raise ValueError(f"its header describes {layout.n_bytes:,} bytes, but there are {n_bytes:,}")
    return layout


def _parse_header(head: bytes) -> _Layout:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of headers that look as if Python 2 had written them
            shape, fortran, dtype = _HEADERS[version](stream)
    # NumPy evaluates the header as a literal and as a dtype, and lets through whatever goes wrong in either.
    except Exception as e:
        raise ValueError("it does not start with the header of an .npy array, version 1 or 2") from e
    return _Layout(tuple(int(size) for size in shape), "F" if fortran else "C", dtype, stream.tell())
