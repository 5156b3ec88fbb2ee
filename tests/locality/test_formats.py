"""Route tables on disk: what is saved is loaded, and what is damaged is refused in one line."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stickymoe.errors import DataError
from stickymoe.locality.formats import create_table, load_table, save_table
from stickymoe.locality.metrics import switch_rate
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.locality.table import RouteTable, index_dtype
from strategies import seeds, tables

ARRAYS = ("S", "mask", "doc", "weights", "phase", "tokens", "predicted", "residents")
in_a_folder = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def full_tables(draw):
    """Tables with any of the arrays that may be unknown."""
    table, rng = draw(tables()), draw(seeds())
    known = draw(st.sets(st.sampled_from(["weights", "phase", "tokens", "predicted", "residents"])))
    sets = (*table.S.shape[:3], draw(st.integers(1, 4)))
    more = {
        "weights": rng.random(table.S.shape, dtype=np.float32),
        "phase": rng.integers(0, 2, table.mask.shape, dtype=np.uint8),
        "tokens": rng.integers(0, 50_000, table.mask.shape, dtype=np.int32),
        "predicted": rng.integers(0, table.n_experts, sets, dtype=np.uint8, endpoint=True),
        "residents": rng.integers(0, table.n_experts, sets, dtype=np.uint8, endpoint=True),
    }
    return replace(table, **{name: more[name] for name in known})


def assert_equal(a, b):
    assert a.n_experts == b.n_experts
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y)


def refusal(folder):
    """The one line with which a folder is refused."""
    with pytest.raises(DataError) as e:
        load_table(folder)
    message = str(e.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert str(folder) in message
    return message


@pytest.fixture
def saved(tmp_path):
    """A folder with a table of 2 layers, 3 sequences, 4 steps and 4 experts."""
    S = np.arange(2 * 3 * 4 * 2, dtype=np.uint8).reshape(2, 3, 4, 2) % 4
    folder = tmp_path / "routes"
    save_table(RouteTable(S=S, n_experts=4, mask=np.ones((3, 4), dtype=bool)), folder)
    return folder


def edit_header(folder, **changes):
    header = json.loads((folder / "header.json").read_text())
    header.update(changes)
    (folder / "header.json").write_text(json.dumps(header))


# Round trip


@in_a_folder
@given(table=full_tables())
def test_what_is_saved_is_loaded(table, tmp_path):
    """Also over an earlier table, whose arrays must not remain."""
    save_table(table, tmp_path / "deep" / "routes")
    loaded = load_table(tmp_path / "deep" / "routes")
    assert_equal(loaded, table)
    np.testing.assert_array_equal(loaded.pairs, table.pairs)


def test_many_experts_keep_their_wide_type(tmp_path):
    table = RouteTable(S=np.array([[[[299, 0]]]], dtype=np.uint16), n_experts=300, mask=np.ones((1, 1), dtype=bool))
    save_table(table, tmp_path)
    assert_equal(load_table(tmp_path), table)


def test_arrays_are_mapped_not_read(saved):
    loaded = load_table(saved)
    for array in (loaded.S, loaded.mask):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
    assert 0 <= switch_rate(loaded) <= 1


def test_the_folder_is_as_documented(saved):
    assert sorted(p.name for p in saved.iterdir()) == ["S.npy", "header.json", "mask.npy"]
    assert json.loads((saved / "header.json").read_text()) == {
        "format": "stickymoe-routes",
        "version": 1,
        "n_experts": 4,
        "arrays": {"S": [2, 3, 4, 2], "mask": [3, 4]},
        "share_block": 1,
    }


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_bytes": None, "other_bytes": None, "share_block": 1},
        {"expert_bytes": (4096, 2048), "other_bytes": 77, "share_block": 2},
        {"expert_bytes": (1, 2**40), "other_bytes": 0, "share_block": 1},
    ],
)
def test_sizes_are_kept(saved, sizes):
    save_table(replace(load_table(saved), **sizes), saved)
    loaded = load_table(saved)
    assert {name: getattr(loaded, name) for name in sizes} == sizes


def test_one_size_for_all_layers_as_in_version_0_1_is_read(saved):
    edit_header(saved, expert_bytes=4096)
    assert load_table(saved).expert_bytes == (4096, 4096)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expert_bytes": [4096]}, r"expert_bytes: got \(4096,\), expected 2 whole numbers ≥ 1, one for each layer"),
        ({"expert_bytes": []}, r"expert_bytes: got \(\), expected 2 whole numbers"),
        ({"expert_bytes": [1, 0]}, r"got expert_bytes 0, expected an integer ≥ 1"),
        ({"expert_bytes": [1, 2.5]}, r"got expert_bytes 2.5, expected an integer ≥ 1"),
        ({"expert_bytes": [1, [2]]}, r"got expert_bytes \[2\], expected an integer ≥ 1"),
        ({"other_bytes": -1}, r"got other_bytes -1, expected an integer ≥ 0"),
        ({"other_bytes": True}, r"got other_bytes True, expected an integer ≥ 0"),
        ({"share_block": 3}, r"share_block: got 3, expected a whole number of layers from 1 to 2"),
        ({"share_block": 0}, r"got share_block 0, expected an integer ≥ 1"),
    ],
)
def test_impossible_sizes_are_refused(saved, changes, says):
    edit_header(saved, **changes)
    assert re.search(says, refusal(saved))


def test_an_interrupted_save_leaves_no_header(saved, monkeypatch):
    table = load_table(saved)
    table = RouteTable(S=np.array(table.S), n_experts=4, mask=np.array(table.mask))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match="No space left"):
        save_table(table, saved)
    monkeypatch.undo()
    assert "header.json" in refusal(saved)


# Refusals


def test_no_folder(tmp_path):
    assert refusal(tmp_path / "nowhere").endswith(
        "nowhere is not a folder: expected a run folder or a folder with a route table."
    )


def test_no_header(saved):
    (saved / "header.json").unlink()
    assert "has no route table (header.json): pass a run folder" in refusal(saved)


@pytest.mark.parametrize("text", ["", "{", "routes", '{"format": "stickymoe-routes",'])
def test_a_header_that_is_not_json(saved, text):
    (saved / "header.json").write_text(text)
    assert "header.json is damaged" in refusal(saved)


def test_a_header_that_is_not_text(saved):
    (saved / "header.json").write_bytes(b"\x93NUMPY\xff\xfe")
    assert "header.json is damaged" in refusal(saved)


@pytest.mark.parametrize("header", [{}, [], 3, None, {"format": "other", "version": 1}, {"version": 1}])
def test_foreign_json(saved, header):
    (saved / "header.json").write_text(json.dumps(header))
    assert "header.json: expected format 'stickymoe-routes' version 1." in refusal(saved)


def test_a_later_version(saved):
    edit_header(saved, version=2)
    assert "version 1" in refusal(saved)


@pytest.mark.parametrize("missing", ["arrays", "n_experts"])
def test_a_header_without_a_field(saved, missing):
    header = json.loads((saved / "header.json").read_text())
    del header[missing]
    (saved / "header.json").write_text(json.dumps(header))
    assert missing in refusal(saved)


@pytest.mark.parametrize("n_experts", ["4", 4.5, None])
def test_a_header_with_no_number_of_experts(saved, n_experts):
    edit_header(saved, n_experts=n_experts)
    assert "n_experts" in refusal(saved)


@pytest.mark.parametrize("arrays", [[], {"S": [2, 3, 4, 2]}, {"mask": [3, 4]}, {}])
def test_a_header_without_the_needed_arrays(saved, arrays):
    edit_header(saved, arrays=arrays)
    refusal(saved)


def test_a_header_with_an_unknown_array(saved):
    np.save(saved / "secret.npy", np.zeros(3))
    edit_header(saved, arrays={"S": [2, 3, 4, 2], "mask": [3, 4], "secret": [3]})
    assert "secret" in refusal(saved)


@pytest.mark.parametrize("name", ["S", "mask"])
def test_a_missing_array(saved, name):
    (saved / f"{name}.npy").unlink()
    assert f"{name}.npy cannot be read (No such file" in refusal(saved)


@pytest.mark.parametrize("name", ["S", "mask"])
@pytest.mark.parametrize("kept", ["nothing", "part of the preamble", "the preamble", "all but a byte"])
def test_a_truncated_array(saved, name, kept):
    file = saved / f"{name}.npy"
    content = file.read_bytes()
    length = {"nothing": 0, "part of the preamble": 20, "the preamble": 128, "all but a byte": len(content) - 1}[kept]
    file.write_bytes(content[:length])
    assert f"{name}.npy is damaged: " in refusal(saved)


def test_a_file_that_is_not_an_array(saved):
    (saved / "S.npy").write_text("0 1 2 3\n")
    assert "S.npy is damaged: " in refusal(saved)


def test_a_pickle_is_never_opened(saved):
    np.save(saved / "S.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "S.npy is damaged: " in refusal(saved)


@pytest.mark.parametrize(("name", "shape"), [("S", (2, 3, 5, 2)), ("S", (2, 3, 4)), ("mask", (4, 3)), ("mask", (12,))])
def test_an_array_of_another_shape_than_the_header_says(saved, name, shape):
    said = list(np.load(saved / f"{name}.npy").shape)
    np.save(saved / f"{name}.npy", np.zeros(shape, dtype=np.uint8 if name == "S" else bool))
    assert f"{name}.npy: got shape {list(shape)}, but header.json says {said}." in refusal(saved)


def test_an_expert_out_of_range(saved):
    edit_header(saved, n_experts=3)
    with pytest.raises(
        DataError, match=r"routes: The route table names expert 3, but there are 3 experts \(0 … 2\)\.$"
    ):
        load_table(saved)


@pytest.mark.parametrize("shape", [(2, 3, 5, 1), (2, 3, 4), (12,), (2, 3, 4, 1, 1)])
def test_prefetches_of_another_shape_than_the_routes(saved, shape):
    np.save(saved / "predicted.npy", np.zeros(shape, np.uint8))
    edit_header(saved, arrays={"S": [2, 3, 4, 2], "mask": [3, 4], "predicted": list(shape)})
    assert "expected" in refusal(saved)


def test_prefetches_may_be_empty_and_wider_than_the_routes(saved):
    """With 256 experts, the mark of an empty place needs two bytes."""
    predicted = np.full((2, 3, 4, 3), 256, np.uint16)
    save_table(replace(load_table(saved), n_experts=256, predicted=predicted), saved)
    assert_equal(load_table(saved), replace(load_table(saved), predicted=predicted))
    table = load_table(saved)
    assert simulate(table, capacity=2, access=Access(prefetch="recorded")) == simulate(table, capacity=2)


def test_an_expert_below_zero(saved):
    S = np.zeros((2, 3, 4, 2), dtype=np.int8)
    S[1, 2, 3, 1] = -1
    np.save(saved / "S.npy", S)
    with pytest.raises(
        DataError, match=r"routes: The route table names expert -1, but there are 4 experts \(0 … 3\)\.$"
    ):
        load_table(saved)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"S": np.zeros((2, 3, 1), np.uint8)}, r"experts: got uint8 \(2, 3, 1\), expected whole numbers \[layers"),
        ({"S": np.zeros((1, 2, 3, 1))}, r"experts: got float64"),
        ({"S": np.zeros((1, 2, 3, 0), np.uint8)}, r"chooses 0 of 4 experts, expected 1 ≤ k ≤ experts ≤ 65536"),
        ({"S": np.zeros((1, 2, 3, 5), np.uint8)}, r"chooses 5 of 4 experts"),
        ({"n_experts": 65_537}, r"chooses 1 of 65537 experts"),
        ({"mask": np.full((2, 3), 255, np.uint8)}, r"mask: got uint8 \(2, 3\), expected bool \(2, 3\)"),
        ({"mask": np.ones((2, 3))}, r"mask: got float64"),
        ({"mask": np.ones((3, 2), bool)}, r"mask: got bool \(3, 2\), expected bool \(2, 3\)"),
        ({"doc": np.zeros((2, 3))}, r"doc: got float64 \(2, 3\), expected whole numbers \(2, 3\)"),
        ({"tokens": np.zeros((2, 4), int)}, r"tokens: got int64 \(2, 4\)"),
        ({"phase": np.zeros((2, 3), bool)}, r"phase: got bool"),
        ({"weights": np.zeros((1, 2, 3, 2))}, r"weights: got float64 \(1, 2, 3, 2\), expected \(1, 2, 3, 1\) as in S"),
        (
            {"predicted": np.zeros((1, 2, 3, 2))},
            r"predicted: got float64 \(1, 2, 3, 2\), expected whole numbers \[1, 2",
        ),
        (
            {"predicted": np.zeros((1, 2, 3), int)},
            r"predicted: got int64 \(1, 2, 3\), expected whole numbers \[1, 2, 3, …",
        ),
        ({"predicted": np.full((1, 2, 3, 1), 5)}, r"prefetches expert 5, but there are 4 experts \(0 … 3\)\.$"),
        ({"predicted": np.full((1, 2, 3, 1), -1)}, r"prefetches expert -1, but"),
        (
            {"residents": np.zeros((1, 2, 3), int)},
            r"residents: got int64 \(1, 2, 3\), expected whole numbers \[1, 2, 3, …",
        ),
        ({"residents": np.full((1, 2, 3, 1), 5)}, r"keeps resident expert 5, but there are 4 experts \(0 … 3\)\.$"),
    ],
)
def test_arrays_that_are_not_routes_are_refused(changes, says):
    fields = {"S": np.zeros((1, 2, 3, 1), np.uint8), "n_experts": 4, "mask": np.ones((2, 3), bool)}
    table = object.__new__(RouteTable)  # without the type checks that only the tests have
    unknown = dict.fromkeys(("doc", "weights", "phase", "tokens", "predicted", "residents"))
    for name, value in {**unknown, **fields, **changes}.items():
        object.__setattr__(table, name, value)
    with pytest.raises(DataError, match=rf"^The route table('s)? {says}"):
        table.__post_init__()


def test_no_index_wraps():
    assert np.iinfo(index_dtype(1 << 16)).max == (1 << 16) - 1
    with pytest.raises(DataError, match=r"^n_experts: got 65537, expected 1 … 65536\.$"):
        index_dtype((1 << 16) + 1)


def test_a_folder_that_cannot_be_written(tmp_path):
    table = RouteTable(S=np.zeros((1, 2, 3, 1), np.uint8), n_experts=4, mask=np.ones((2, 3), bool))
    arrays = {"S": (table.S.shape, table.S.dtype), "mask": (table.mask.shape, np.bool_)}
    (tmp_path / "S.npy").mkdir()  # in the way of the array
    says = rf"^{tmp_path} cannot be written \(Is a directory\)\.$"
    with pytest.raises(DataError, match=says):
        save_table(table, tmp_path)
    with pytest.raises(DataError, match=says), create_table(tmp_path, arrays, n_experts=4):
        pass
