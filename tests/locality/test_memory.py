"""A trace larger than memory: replaying one needs no more of it than a small one does."""

import subprocess
import sys

import numpy as np
import pytest

from stickymoe.locality.formats import create_table
from stickymoe.locality.table import release

PEAK = """
import sys
from pathlib import Path

from stickymoe.locality.formats import load_table
from stickymoe.locality.replay import simulate


def peak_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


small, large = (load_table(Path(p)) for p in sys.argv[1:])
simulate(small, capacity=2)
before = peak_mb()
result = simulate(large, capacity=2)
print(result.misses, peak_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_trace(tmp_path):
    """180 MB, mostly holes in files: mapped whole it would all count."""
    for name, length in (("small", 6_000_000), ("large", 60_000_000)):
        with create_table(tmp_path / name, (2, 1, length, 1), n_experts=4) as (S, mask):
            S[:, :, -1] = 1
            for start in range(0, length, 1 << 20):
                mask[:, start : start + (1 << 20)] = True
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
