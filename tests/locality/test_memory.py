"""A trace larger than memory: replaying one needs no more of it than a small one does."""

import subprocess
import sys

import numpy as np
import pytest

from stickymoe.locality.formats import create_table
from stickymoe.locality.table import release

PEAK = """
import sys
import threading
from pathlib import Path

import psutil

from stickymoe.locality.formats import load_table
from stickymoe.locality.replay import simulate


def peak_mb(work):
    done, seen = threading.Event(), [0]

    def look():
        while not done.wait(0.002):
            seen[0] = max(seen[0], psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=look)
    watcher.start()
    result = work()
    seen[0] = max(seen[0], psutil.Process().memory_info().rss)
    done.set()
    watcher.join()
    return result, seen[0] / 2**20


small, large = (load_table(Path(p)) for p in sys.argv[1:])
_, before = peak_mb(lambda: simulate(small, capacity=2))
result, after = peak_mb(lambda: simulate(large, capacity=2))
print(result.misses, after - before)
"""


def test_memory_does_not_grow_with_the_trace(tmp_path):
    """180 MB, mostly holes in files: mapped whole it would all count."""
    for name, length in (("small", 6_000_000), ("large", 60_000_000)):
        arrays = {"S": ((2, 1, length, 1), np.uint8), "mask": ((1, length), np.bool_)}
        with create_table(tmp_path / name, arrays, n_experts=4) as written:
            written["S"][:, :, -1] = 1
            for start in range(0, length, 1 << 20):
                written["mask"][:, start : start + (1 << 20)] = True
        assert (np.load(tmp_path / name / "S.npy", mmap_mode="r")[:, 0, -1, 0] == 1).all()
    argv = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    misses, grown = done.stdout.split()
    assert misses == "4"
    assert float(grown) < 60


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_letting_go_of_pages_loses_nothing(tmp_path, mode):
    np.save(tmp_path / "a.npy", np.zeros(1 << 16, np.uint8))
    array = np.load(tmp_path / "a.npy", mmap_mode=mode)
    if mode != "r":
        array[:] = 3
    release(array)
    release(np.zeros(3))
    assert (array == (0 if mode == "r" else 3)).all()
