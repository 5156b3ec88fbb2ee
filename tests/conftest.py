"""One thread per test process (two busy ones ruin each other), and one token cache for all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a busy machine is not a bug. The same examples every time, so that a failure can be looked into.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Before torch is imported, and for child processes.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # numba's threads would spin while other processes hold the cores
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines announce AMX without having it

# A test run in the background of a shell ignores Ctrl-C, and so would the child processes that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the test run's own, shared by its processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    os.environ["XDG_CACHE_HOME"] = str(shared)
    return shared


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train, valid and test files of a small invented language."""
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"{a}{b}{c}" for a in "bdklm" for b in "aeiou" for c in ("", "n", "rt")]
    state = 7
    for name, n_rows in (("train", 400), ("valid", 40), ("test", 30)):
        rows = []
        for _ in range(n_rows):
            row = []
            for _ in range(12):
                state = (1103515245 * state + 12345) % 2**31
                row.append(words[(state >> 16) % len(words)])
            rows.append(" ".join(row) + ".")
        (folder / f"{name}.txt").write_text("\n".join(rows) + "\n")
    return folder
