"""The recorder: what it collects is the concatenation of what was added, in memory or on disk."""

import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stickymoe.errors import StickyError
from stickymoe.locality.formats import load_table
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.replay import simulate
from stickymoe.locality.table import RouteTable
from strategies import documents, masks, seeds, sticky_choices

in_a_folder = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
OPTIONAL = ("doc", "weights", "phase", "tokens", "predicted", "residents")


@st.composite
def parts(draw):
    """Tables of one model, with the same arrays and any number of sequences and tokens."""
    rng, known = draw(seeds()), draw(st.sets(st.sampled_from(OPTIONAL)))
    L, N = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    k = draw(st.integers(1, 2))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        B, T = draw(st.integers(1, 3)), draw(st.integers(1, 6))
        more = {
            "doc": draw(documents(B, T)),
            "weights": rng.random((L, B, T, k), dtype=np.float32),
            "phase": rng.integers(0, 2, (B, T), dtype=np.uint8),
            "tokens": rng.integers(0, 50_000, (B, T), dtype=np.int32),
            "predicted": rng.integers(0, N + 1, (L, B, T, 3), dtype=np.uint8),
            "residents": rng.integers(0, N + 1, (L, B, T, 2), dtype=np.uint8),
        }
        S = sticky_choices(rng, (L, B, T, k), N, stay=0.5).astype(np.uint8)
        found.append(RouteTable(S=S, n_experts=N, mask=draw(masks(B, T)), **{name: more[name] for name in known}))
    return found


def joined(tables, name, padding):
    """By hand: every sequence padded to the longest, one below another."""
    length = max(t.mask.shape[1] for t in tables)
    padded = []
    for t in tables:
        array = getattr(t, name)
        if array is None:
            return None
        axis = 2 if array.ndim == 4 else 1
        width = [(0, 0)] * array.ndim
        width[axis] = (0, length - array.shape[axis])
        padded.append(np.pad(array, width, constant_values=padding))
    return np.concatenate(padded, axis=1 if padded[0].ndim == 4 else 0)


@pytest.mark.parametrize("on_disk", [False, True])
@in_a_folder
@given(tables=parts())
def test_the_table_is_what_was_added(tables, on_disk, tmp_path):
    folder = tmp_path / "routes" if on_disk else None
    recorder = Recorder(folder)
    for t in tables:
        recorder.add(t)
    found = recorder.finish(expert_bytes=(7,) * tables[0].n_layers, other_bytes=3)
    paddings = {"S": 0, "mask": False, "doc": -1, "weights": 0, "phase": 0, "tokens": 0}
    for name, padding in (paddings | dict.fromkeys(("predicted", "residents"), tables[0].n_experts)).items():
        expected, got = joined(tables, name, padding), getattr(found, name)
        assert (got is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(got, expected)
            assert got.dtype == expected.dtype
    assert (found.n_experts, found.expert_bytes, found.other_bytes) == (
        tables[0].n_experts,
        (7,) * tables[0].n_layers,
        3,
    )
    if folder is not None:
        again = load_table(folder)
        np.testing.assert_array_equal(again.S, found.S)
        assert again.other_bytes == 3
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
    misses = sum(simulate(replace(t, phase=None), capacity=2).misses for t in tables)
    assert simulate(replace(found, phase=None), capacity=2).misses == misses


def a_table(shape=(2, 1, 4, 2), n_experts=4, **more):
    S = sticky_choices(np.random.default_rng(0), shape, n_experts, stay=0.5).astype(np.uint8)
    return RouteTable(S=S, n_experts=n_experts, mask=np.ones(shape[1:3], bool), **more)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"shape": (3, 1, 4, 2)}, "got layers 3, expected 2"),
        ({"n_experts": 5}, "got experts 5, expected 4"),
        ({"shape": (2, 1, 4, 1)}, "got experts per token 1, expected 2"),
        ({"tokens": np.zeros((1, 4), int)}, "got arrays S, mask, tokens, expected S, mask"),
        ({"predicted": np.zeros((2, 1, 4, 3), int)}, "got prefetched experts per token 3, expected 0"),
        ({"residents": np.zeros((2, 1, 4, 3), int)}, "got residents of a router 3, expected 0"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(other, says):
    recorder = Recorder()
    recorder.add(a_table())
    with pytest.raises(StickyError, match=rf"^The table to add does not fit: {says} as in the tables before\.$"):
        recorder.add(a_table(**other))
    assert recorder.finish().mask.shape == (1, 4)


def test_nothing_recorded_is_refused(tmp_path):
    for recorder in (Recorder(), Recorder(tmp_path / "routes")):
        with pytest.raises(StickyError, match=r"^Nothing was recorded: add at least one table before finish\.$"):
            recorder.finish()


def test_a_wider_type_that_comes_later_is_kept():
    recorder = Recorder()
    for tokens in (np.full((1, 4), 3, np.int16), np.full((1, 4), 70_000, np.int32)):
        recorder.add(a_table(tokens=tokens))
    assert recorder.finish().tokens.max() == 70_000


def test_padding_prefetches_nothing_where_its_mark_needs_a_wider_type():
    recorder = Recorder()
    for length in (4, 2):
        shape = (1, 1, length, 1)
        recorder.add(a_table(shape, n_experts=256, predicted=np.zeros(shape, np.uint8)))
    assert recorder.finish().predicted[0, :, :, 0].tolist() == [[0, 0, 0, 0], [0, 0, 256, 256]]


def test_memory_is_bounded_with_a_folder(tmp_path):
    """80 parts of 1 MB: in memory all of it counts, on disk a few parts do."""
    part = a_table(shape=(4, 8, 8192, 4), n_experts=8)

    def peak(folder):
        tracemalloc.start()
        recorder = Recorder(folder)
        for _ in range(40):
            recorder.add(replace(part, S=part.S.copy()))
        recorder.finish()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    whole = 40 * part.S.nbytes
    assert peak(None) > whole
    assert peak(tmp_path / "routes") < whole / 8


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from stickymoe.locality import recorder
from stickymoe.locality.table import RouteTable

part = RouteTable(S=np.zeros((1, 1, 4, 1), np.uint8), n_experts=2, mask=np.ones((1, 4), bool))
recording = recorder.Recorder(Path(sys.argv[1]))
for _ in range(3):
    recording.add(part)
if sys.argv[2] == "finish":
    recorder._pad_and_copy = lambda *a: os._exit(9)
    recording.finish()
os._exit(9)
"""


@pytest.mark.parametrize("when", ["add", "finish"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "over another table"])
def test_a_killed_recorder_leaves_no_complete_table(tmp_path, when, before):
    folder = tmp_path / "routes"
    if before:
        recorder = Recorder(folder)
        recorder.add(a_table())
        recorder.finish()
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), when], check=False)
    assert done.returncode == 9
    with pytest.raises(StickyError, match=r"header\.json"):
        load_table(folder)
    again = Recorder(folder)
    again.add(a_table())
    assert again.finish().mask.shape == (1, 4)
