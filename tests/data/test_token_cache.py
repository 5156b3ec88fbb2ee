"""The cache returns only what was stored, whatever happens to its files."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from stickymoe.data.cache import Entry, read_entry, write_entry
from stickymoe.data.tokens import load_tokens
from stickymoe.errors import DataError
from stickymoe.runs.config import DataConfig

FILES = [
    *(
        f"{split}.{kind}.npy"
        for split in ("train", "valid", "test")
        for kind in ("tokens", "doc", "row_start", "boundary")
    ),
    "tokenizer.json",
    "meta.json",
]


def only_entry(config: DataConfig) -> Path:
    assert config.cache_dir is not None
    (entry,) = Path(config.cache_dir).iterdir()
    return entry


def test_an_entry_contains_arrays_tokenizer_and_meta(small: DataConfig) -> None:
    data = load_tokens(small)
    entry = only_entry(small)
    assert sorted(file.name for file in entry.iterdir()) == sorted(FILES)
    assert np.array_equal(np.load(entry / "train.tokens.npy"), data.train.tokens)
    assert {np.load(entry / f"train.{kind}.npy").dtype.str for kind in ("tokens", "doc")} == {"<i4"}
    meta = json.loads((entry / "meta.json").read_text())
    assert set(meta["files"]) == set(FILES) - {"meta.json"}
    assert meta["about"]["splits"]["train"]["tokens"] == len(data.train.tokens)


def test_the_default_is_the_cache_folder_of_the_user(small: DataConfig, user_cache: Path) -> None:
    load_tokens(replace(small, cache_dir=None))
    assert len(list((user_cache / "stickymoe" / "tokens").iterdir())) == 1


def test_other_text_or_tokenizer_is_another_entry(small: DataConfig) -> None:
    assert small.path is not None
    assert small.cache_dir is not None
    load_tokens(small)
    load_tokens(replace(small, vocab_size=270))
    load_tokens(replace(small, documents=True))
    (Path(small.path) / "valid.txt").write_text("Another text .")
    load_tokens(small)
    assert len(list(Path(small.cache_dir).iterdir())) == 3


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_byte, truncate, empty, Path.unlink])
def test_damage_is_detected_and_repaired(
    small: DataConfig, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    before = load_tokens(small).fingerprint
    damage(only_entry(small) / name)
    with caplog.at_level(logging.WARNING, "stickymoe"):
        assert load_tokens(small).fingerprint == before
    (message,) = caplog.messages
    assert name in message
    assert "is rebuilt" in message
    assert "\n" not in message

    caplog.clear()
    load_tokens(small)
    assert not caplog.messages
    only_entry(small)


def test_interrupted_writing_leaves_nothing_behind(small: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def interrupted(_: int) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_tokens(small)
    assert small.cache_dir is not None
    assert list(Path(small.cache_dir).iterdir()) == []
    load_tokens(small)
    only_entry(small)


def test_a_full_disk_is_one_line(small: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cache': No space left on device\. Pass a writable.*--data\.cache_dir DIR"):
        load_tokens(small)


def test_a_cache_folder_that_cannot_be_written(small: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for blocked in ("file", "file/below"):
        with pytest.raises(DataError, match=r"Cannot write the token cache '.*file.*--data\.cache_dir DIR\.$"):
            load_tokens(replace(small, cache_dir=str(tmp_path / blocked)))


@pytest.mark.parametrize("damaged", [False, True])
def test_writers_and_readers_at_once(tmp_path: Path, damaged: bool) -> None:
    files, about = {"one": b"1" * 1000, "two": b"2" * 1000}, {"topics": [None, "a"]}

    def fill(folder: Path) -> dict[str, Any]:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return about

    n = 6
    for round_ in range(5):
        folder = tmp_path / f"entry-{round_}"
        if damaged:
            write_entry(folder, fill)
            flip_a_byte(folder / "two")
        barrier = Barrier(n)

        def race(barrier: Barrier = barrier, folder: Path = folder) -> Entry | None:
            barrier.wait()
            write_entry(folder, fill)
            return read_entry(folder)

        with ThreadPoolExecutor(n) as pool:
            found = [future.result() for future in [pool.submit(race) for _ in range(n)]]
        assert all(each in (Entry(about, folder), None) for each in found)
        assert read_entry(folder) == Entry(about, folder)
        assert {name: (folder / name).read_bytes() for name in files} == files
    assert len(list(tmp_path.iterdir())) == 5


def test_two_processes_at_once(small: DataConfig) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from stickymoe.runs.config import DataConfig; from stickymoe.data.tokens import load_tokens\n"
        f"print(load_tokens({small!r}).fingerprint)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prints = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert prints == [load_tokens(small).fingerprint] * 2
    only_entry(small)


@pytest.mark.parametrize("what", ["file", "link"])
def test_something_else_in_the_place_of_an_entry_is_replaced(small: DataConfig, what: str) -> None:
    before = load_tokens(small).fingerprint
    entry = only_entry(small)
    shutil.rmtree(entry)
    if what == "file":
        entry.write_text("in the way")
    else:
        entry.symlink_to("nowhere")
    assert load_tokens(small).fingerprint == before
    assert only_entry(small).is_dir()
