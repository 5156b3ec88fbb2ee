"""Data files of other PyPI packages, found without running the code of these packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from stickymoe.errors import DataError


def package_folder(module: str, distribution: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"'{distribution}' is not installed, and its data is needed. Run: pip install \"stickymoe[train]\""
        )
    return Path(spec.submodule_search_locations[0])
