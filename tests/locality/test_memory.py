"""A trace larger than memory: replaying one needs no more of it than a small one does."""

import subprocess
import sys

import numpy as np
import pytest

from stickymoe.locality.formats import create_table

PEAK = """
import sys
from pathlib import Path

from stickymoe.locality.formats import load_table
from stickymoe.locality.replay import miss_curve, simulate


def peak_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


small, large = (load_table(Path(p)) for p in sys.argv[1:])
simulate(small, capacity=2), miss_curve(small)
before = peak_mb()
result = simulate(large, capacity=2)
curve = miss_curve(large)
print(result.misses, curve.misses[:, 1].sum(), peak_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_trace(tmp_path):
    """200 MB of routing, in files with holes: mapped whole it would all count."""
    for name, length in (("small", 6_000_000), ("large", 40_000_000)):
        with create_table(tmp_path / name, (4, 1, length, 1), n_experts=4) as (S, mask):
            S[:, :, -1] = 1
            for start in range(0, length, 1 << 20):
                mask[:, start : start + (1 << 20)] = True
        assert (np.load(tmp_path / name / "S.npy", mmap_mode="r")[:, 0, -1, 0] == 1).all()
    argv = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    misses, same, grown = done.stdout.split()
    assert misses == same == "8"
    assert float(grown) < 60
