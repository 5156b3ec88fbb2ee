"""Versions and machine of a run, for its record. Nothing here loads torch."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stickymoe import __version__

_PACKAGES = ("torch", "numpy", "numba", "accelerate", "tokenizers", "safetensors")


def describe_environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {"stickymoe": __version__} | {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
    }


def resumed_environment(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The environment of a resumed run; if it has changed, `began_as` holds the one that the run started in."""
    unchanged = {key: value for key, value in before.items() if key != "began_as"} == now
    return before if unchanged else now | {"began_as": before}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree of this package, marked if files were changed; None outside a repository."""
    source = Path(__file__)
    package = source.parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(source))
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
