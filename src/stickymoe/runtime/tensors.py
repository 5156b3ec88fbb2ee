"""Read tensors, or single rows of a stack, from safetensors files into memory of their own.

The library maps a file into memory, and every page that was read counts as memory of the process while the file is
open. These reads copy the bytes asked for and nothing else, so a checkpoint larger than memory can be read through.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stickymoe.errors import DataError
from stickymoe.reading import parse_json, read_json, reason

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # the limit of the format
_SAMPLE = 64  # bytes of a sample
_SAMPLE_EVERY = 8 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> Tensor:
        """The whole tensor."""
        return self._read(self.shape, self.offset, self.nbytes)

    def row(self, i: int) -> Tensor:
        """Row i of a stack, as a stack of one."""
        return self.rows(i, i + 1)

    def rows(self, first: int, stop: int) -> Tensor:
        """The rows of a stack from `first` to `stop`."""
        size = self.nbytes // self.shape[0]
        return self._read((stop - first, *self.shape[1:]), self.offset + first * size, (stop - first) * size)

    def _read(self, shape: tuple[int, ...], offset: int, nbytes: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        _read_into(self.file, tensor, offset, nbytes)
        return tensor


def _read_into(file: Path, tensor: Tensor, offset: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    target = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with file.open("rb", buffering=0) as f:
            f.seek(offset)
            done = 0
            while done < nbytes:  # one system call reads at most 2 GiB
                n = f.readinto(target[done:])
                if not n:
                    raise DataError(f"{file} is damaged: it ends before byte {offset + nbytes}.")
                done += n
    except OSError as e:
        raise DataError(f"{file} cannot be read ({reason(e)}).") from e


def entries_of(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name, from its header."""
    header, first = _header(file)
    size = file.stat().st_size
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        kind = value.get("dtype") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in _DTYPES:
            raise DataError(f"{file}: {name!r} has the type {kind}, expected one of {', '.join(_DTYPES)}.")
        entry = _entry(file, value, first)
        if entry is None or entry.offset + entry.nbytes > size:
            raise DataError(f"{file} is damaged: the header entry of {name!r} does not fit the file.")
        entries[name] = entry
    return entries


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the offset of the first byte after it."""
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            text = f.read(length) if length <= _MAX_HEADER else b""
    except OSError as e:
        raise DataError(f"{file} cannot be read ({reason(e)}).") from e
    if len(text) < max(length, 2):
        raise DataError(f"{file} is damaged: expected a safetensors file with a header.")
    header = parse_json(text.decode("utf-8", "replace"), file, DataError)
    if not isinstance(header, dict):
        raise DataError(f"{file} is damaged: its header is not a mapping.")
    return header, 8 + length


def _entry(file: Path, value: Any, first: int) -> Entry | None:
    """The entry of a header, or None if it contradicts itself."""
    try:
        dtype, shape, (begin, end) = _DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        fits = 0 <= begin <= end and end - begin == math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        return None
    return Entry(file, dtype, shape, first + begin, end - begin) if fits else None


def find_entries(folder: Path) -> dict[str, Entry]:
    """The tensors of a folder that `save_pretrained` wrote: one file, or shards with an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return entries_of(single)
    if not index.is_file():
        other = sorted(p.name for p in folder.glob("*.bin")) or sorted(p.name for p in folder.glob("*.safetensors"))
        there = f"found {other[0]}" if other else "found no weights"
        raise DataError(
            f"{folder}: {there}, expected model.safetensors, or its shards with model.safetensors.index.json; load "
            "the model with transformers and save it with save_pretrained."
        )
    content = read_json(index, DataError)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise DataError(f"{index} is damaged: it has no weight_map.")
    shards = {file: entries_of(folder / file) for file in sorted(set(names.values()))}
    missing = next((name for name, file in names.items() if name not in shards[file]), None)
    if missing is not None:
        raise DataError(f"{folder / names[missing]} has no tensor {missing!r}, but {index.name} says so.")
    return {name: shards[file][name] for name, file in names.items()}


def fingerprint(entries: dict[str, Entry], settings: str) -> str:
    """A hash of the settings, of every name, type and shape, and of samples of every tensor; not of every byte."""
    digest = hashlib.sha256(settings.encode())
    by_file: dict[Path, list[tuple[str, Entry]]] = {}
    for name, entry in sorted(entries.items()):
        by_file.setdefault(entry.file, []).append((name, entry))
    for file, tensors in sorted(by_file.items()):
        with file.open("rb", buffering=0) as f:
            for name, entry in tensors:
                digest.update(json.dumps([name, str(entry.dtype), entry.shape]).encode())
                for at in range(0, entry.nbytes, _SAMPLE_EVERY):
                    digest.update(os.pread(f.fileno(), min(_SAMPLE, entry.nbytes - at), entry.offset + at))
    return digest.hexdigest()
