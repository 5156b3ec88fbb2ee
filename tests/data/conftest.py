"""Small corpora on disk, and a user cache that is not the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stickymoe.runs.config import DataConfig


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes files into a fresh folder: `folder({"train.txt": "…"})`."""

    def write(files: dict[str, str | bytes], name: str = "corpus") -> Path:
        root = tmp_path / name
        root.mkdir()
        for file, content in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return write


@pytest.fixture
def small(folder: Callable[..., Path], tmp_path: Path) -> DataConfig:
    """A corpus of two training articles, its cache in a folder of its own."""
    path = folder(
        {
            "train.txt": " = Lobster = \n \n The lobster walks . \n The lobster rests . \n"
            " \n = Crab = \n\n A crab . \n",
            "valid.txt": "The lobster walks .\n",
            "test.txt": "A crab — naïve 蟹 .\n",
        }
    )
    return DataConfig(path=str(path), vocab_size=280, cache_dir=str(tmp_path / "cache"))
