"""Device profiles: the size of fast memory, the speed of loading experts into it, and the speed of computing."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from stickymoe.errors import ConfigError, shown, unknown
from stickymoe.reading import parse_yaml, read_text

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FIGURES = ("fast_memory", "load_bandwidth", "load_latency_ms", "compute_bandwidth")


@dataclass(frozen=True)
class Device:
    """A device profile.

    fast_memory: bytes of the memory that the device computes from
    load_bandwidth: bytes per second from slow memory into a slot of the cache, including the time to make room there
    load_latency_ms: milliseconds before the first byte of a load arrives
    compute_bandwidth: bytes of weights per second that decoding reads; a token reads its active weights
    overlap: fraction of the compute time in which the runtime also loads; 0 if it loads and computes in turn
    """

    name: str
    fast_memory: float
    load_bandwidth: float
    load_latency_ms: float
    compute_bandwidth: float
    overlap: float = 0.0
    sources: tuple[str, ...] = ()

    def load_ms(self, n_bytes: float) -> float:
        """Milliseconds to load one expert into fast memory."""
        return self.load_latency_ms + 1000 * n_bytes / self.load_bandwidth

    def compute_ms(self, active_bytes: float) -> float:
        """Milliseconds to compute one token when all its weights are resident."""
        return 1000 * active_bytes / self.compute_bandwidth

    def token_ms(self, compute_ms: float, loads_ms: float) -> float:
        """Milliseconds of a token that computes and loads for so long; overlap hides some of its loads."""
        return compute_ms + loads_ms - min(loads_ms, self.overlap * compute_ms)


def parse_bytes(text: str, key: str = "bytes") -> float:
    """Bytes from text such as 512MB, 1.5GiB or 4096, with decimal or binary units."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([KMGT]i?)?B?\s*", text.replace("k", "K"))
    try:
        value = float(match[1]) * _UNITS[match[2] or ""] if match else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{key}: got {shown(text)}, expected bytes such as 512MB, 1.5GiB or 4096.")
    return value


def device_names() -> list[str]:
    """The names of the profiles in the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _profiles().iterdir() if p.name.endswith(".yaml"))


def _profiles() -> Any:
    return resources.files("stickymoe.locality") / "profiles"


def load_device(name: str) -> Device:
    """A profile of the package by its name, or of a YAML file."""
    if name in device_names():
        return parse_device((_profiles() / f"{name}.yaml").read_text(encoding="utf-8"), name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(unknown("device", name, device_names()) + " A YAML file is also accepted.")
    return parse_device(read_text(path, ConfigError), name)


def parse_device(text: str, source: str) -> Device:
    """A profile from YAML; every number but `overlap` is required."""
    fields = parse_yaml(text, f"device {source}", ConfigError)
    known = [f.name for f in dataclasses.fields(Device)]
    if not isinstance(fields, dict):
        raise ConfigError(f"device {source}: got {shown(fields)}, expected {', '.join(known)}.")
    surplus = [key for key in fields if key not in known]
    if surplus:
        raise ConfigError(f"device {source}: {unknown('setting', surplus[0], known)}")
    figures = {key: _figure(fields, key, source) for key in _FIGURES}
    name, sources = fields.get("name", source), fields.get("sources") or []
    if not isinstance(name, str):
        raise ConfigError(f"device {source}: name: got {shown(name)}, expected text.")
    if not isinstance(sources, list) or not all(isinstance(s, str) for s in sources):
        raise ConfigError(f"device {source}: sources: got {shown(sources)}, expected a list of texts.")
    return Device(name=name, overlap=_fraction(fields.get("overlap", 0.0), source), sources=tuple(sources), **figures)


def _fraction(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"device {source}: overlap: got {shown(value)}, expected a number from 0 to 1.")
    return float(value)


def _figure(fields: dict[str, Any], key: str, source: str) -> float:
    if key not in fields:
        raise ConfigError(f"device {source}: {key} is missing, expected {', '.join(_FIGURES)}.")
    value = fields[key]
    expected = "milliseconds ≥ 0" if key == "load_latency_ms" else "bytes > 0 such as 500MB"
    try:
        figure = float(value) if key == "load_latency_ms" else parse_bytes(str(value), key)
    except (TypeError, ValueError, ConfigError):
        figure = math.nan
    least = 0.0 if key == "load_latency_ms" else 1.0
    if isinstance(value, bool) or not math.isfinite(figure) or figure < least:
        raise ConfigError(f"device {source}: {key}: got {shown(value)}, expected {expected}.")
    return figure


def as_yaml(device: Device) -> str:
    """A profile as YAML, which `load_device` reads."""
    fields = dataclasses.asdict(device) | {"sources": list(device.sources)}
    return str(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True))


def measure_device(folder: Path, *, megabytes: int = 256) -> Device:
    """Measure this machine: experts are loaded from the disk of `folder` and computed from main memory."""
    if megabytes < 1:
        raise ConfigError(f"megabytes: got {megabytes}, expected an integer ≥ 1.")
    bandwidth, latency_ms = _measure_disk(folder, megabytes << 20)
    return Device(
        name="this machine",
        fast_memory=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        load_bandwidth=bandwidth,
        load_latency_ms=latency_ms,
        compute_bandwidth=_measure_memory(megabytes << 20),
        sources=(
            f"load: {megabytes} MiB read once, and single pages, from a file that was dropped from the page cache",
            f"compute: matrix-vector products over {megabytes} MiB of fp32, {os.cpu_count()} cores",
        ),
    )


def _measure_disk(folder: Path, size: int) -> tuple[float, float]:
    """Bytes per second of a long read, and milliseconds of a short read."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            chunk = os.urandom(1 << 20)
            for _ in range(0, size, len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            _drop_from_page_cache(file.fileno())
            start = time.perf_counter()
            for at in range(0, size, len(chunk)):
                os.pread(file.fileno(), len(chunk), at)
            seconds = time.perf_counter() - start
            _drop_from_page_cache(file.fileno())
            spots = np.random.default_rng(0).integers(0, size >> 12, 64)
            waits = [_timed_read(file.fileno(), int(spot) << 12) for spot in spots]
    except OSError as e:
        raise ConfigError(f"device: {folder} cannot be written ({e.strerror}). Choose a folder with --folder.") from e
    return size / seconds, 1000 * median(waits)


def _drop_from_page_cache(descriptor: int) -> None:
    """Drop a file from the page cache, if the system supports it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _timed_read(descriptor: int, at: int) -> float:
    start = time.perf_counter()
    os.pread(descriptor, 1 << 12, at)
    return time.perf_counter() - start


def _measure_memory(size: int) -> float:
    """Bytes of weights per second that matrix-vector products read."""
    weights = np.ones((size >> 12, 1 << 10), np.float32)
    vector = np.ones(1 << 10, np.float32)
    weights @ vector
    times = []
    for _ in range(5):
        start = time.perf_counter()
        weights @ vector
        times.append(time.perf_counter() - start)
    return weights.nbytes / median(times)
