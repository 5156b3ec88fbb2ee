"""Other tools' traces: files written as their documentation says are read; what is damaged or unknown is refused."""

import json

import numpy as np
import pytest

from stickymoe.errors import StickyError
from stickymoe.locality.foreign import READERS, read_foreign
from stickymoe.locality.formats import load_table, open_trace, save_table

PREAMBLE = """\
# route_trace v1
# model=/models/a.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=900
# layer=1 expert_bytes=4096 dense_bytes=10
# layer=2 expert_bytes=2048 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
"""
# Two prompt tokens, of which the last layer routes the second only; one decoded token; then a second turn.
ROWS = """\
0,0,0,1,0,3,0.75,0,4096,0
0,0,0,1,1,5,0.25,0,4096,0
0,0,1,1,0,5,0.5,1,0,0
0,0,1,1,1,3,0.5,1,0,0
0,0,1,2,0,7,0.9,0,4096,0
0,0,1,2,1,0,0.1,0,4096,0
0,1,2,1,1,4,0.4,0,4096,0
0,1,2,1,0,3,0.6,1,0,0
0,1,2,2,0,7,0.9,1,0,0
0,1,2,2,1,1,0.1,0,4096,1
1,1,9,1,0,2,0.6,0,4096,0
1,1,9,1,1,1,0.4,0,4096,0
1,1,9,2,0,6,0.6,0,4096,0
1,1,9,2,1,5,0.4,0,4096,0
"""


@pytest.fixture
def bigmoe(tmp_path):
    def write(text):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return path

    return write


def cacheable(path, experts, meta, **more):
    np.savez_compressed(path, experts=experts, meta=json.dumps(meta), **more)
    return path


def test_a_route_trace_of_bigmoeonedge(bigmoe, tmp_path):
    table = read_foreign(bigmoe(PREAMBLE + ROWS))
    assert table.S.shape == (2, 2, 3, 2)
    assert table.mask.tolist() == [[False, True, True], [True, False, False]]
    assert table.S[0, 0].tolist() == [[3, 5], [5, 3], [3, 4]]
    assert table.S[1, 0, 1:].tolist() == [[7, 0], [7, 1]]
    assert table.S[:, 1, 0].tolist() == [[2, 1], [6, 5]]
    assert table.phase[0].tolist() == [0, 0, 1]
    assert table.weights[0, 0, 2].tolist() == pytest.approx([0.6, 0.4])
    assert (table.n_experts, table.expert_bytes, table.other_bytes) == (8, (4096, 2048), 920)
    save_table(table, tmp_path / "out")
    again = load_table(tmp_path / "out")
    assert (again.expert_bytes, again.other_bytes) == ((4096, 2048), 920)
    np.testing.assert_array_equal(again.S, table.S)


def test_columns_are_read_by_name_and_unknown_weights_are_unknown(bigmoe):
    lines = ["expert,slot,layer,step,phase,turn,weight,extra", "3,0,1,0,1,0,nan,x", "2,1,1,0,1,0,nan,y"]
    table = read_foreign(bigmoe(PREAMBLE.rsplit("turn", 1)[0] + "\n".join(lines) + "\n"))
    assert table.S.tolist() == [[[[3, 2]]]]
    assert table.weights is None


@pytest.mark.parametrize(
    ("layer", "expected"),
    [("# layer=2 expert_bytes=0 dense_bytes=10", 920), ("# other=1", 910)],
    ids=["of no bytes", "missing"],
)
def test_a_routed_layer_of_unknown_size_leaves_the_sizes_unknown(bigmoe, layer, expected):
    table = read_foreign(bigmoe(PREAMBLE.replace("# layer=2 expert_bytes=2048 dense_bytes=10", layer) + ROWS))
    assert (table.expert_bytes, table.other_bytes) == (None, expected)


def test_a_preamble_without_sizes_leaves_them_unknown(bigmoe):
    lines = [line for line in PREAMBLE.splitlines() if not line.startswith("# layer")]
    table = read_foreign(bigmoe("\n".join(lines) + "\n" + ROWS))
    assert (table.expert_bytes, table.other_bytes) == (None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PREAMBLE, r"contains no routing, only a preamble"),
        (PREAMBLE + ROWS[:-20], r"row 14 is cut off or damaged"),
        (
            PREAMBLE + ROWS.replace("0,0,0,1,1,5,0.25,0,4096,0\n", ""),
            r"got slots \[0\] for turn 0, step 0, layer 1, expected 2 \(0 … 1\)",
        ),
        (PREAMBLE + ROWS.replace(",7,0.9", ",8,0.9"), r"got expert 8 in row 5, expected experts 0 … 7"),
        (PREAMBLE + ROWS.replace("1,1,9,", "1,1,-1,"), r"got step -1 in row 11, expected steps ≥ 0"),
        (PREAMBLE.replace("n_expert=8", "n_expert=x") + ROWS, r"got n_expert 'x' in the preamble"),
        (PREAMBLE.replace("n_expert_used=2", "") + ROWS, r"got n_expert_used '' in the preamble"),
        (
            PREAMBLE.replace("expert_bytes=4096", "expert_bytes=big") + ROWS,
            r"got expert_bytes 'big' in the preamble, expected an integer ≥ 0",
        ),
        (PREAMBLE.replace("expert_bytes=4096", "expert_bytes=-1") + ROWS, r"got expert_bytes '-1' in the preamble"),
        (PREAMBLE.replace("dense_bytes=900", "dense_bytes=?") + ROWS, r"got dense_bytes '\?' in the preamble"),
        (PREAMBLE.replace("layer=0", "layer=a") + ROWS, r"got layer 'a' in the preamble"),
        (PREAMBLE.replace("n_expert=8", "n_expert=²") + ROWS, r"got n_expert '²' in the preamble"),
        (
            PREAMBLE.replace("used=2", "used=9") + ROWS,
            r"got n_expert_used 9 in the preamble, expected at most n_expert=8",
        ),
        (PREAMBLE + ROWS.replace("0,1,2,", "0,300,2,"), r"got phase 300 in row 7, expected 0 \(prefill\) or 1"),
        (PREAMBLE + ROWS + "x" * 200_000, r"is damaged: field larger than field limit"),
        (PREAMBLE.replace("slot,", "") + ROWS, r"column slot is missing"),
        ("turn,phase\n1,2\n", r"has no known trace format\. Known: .*bigmoeonedge, cacheable-by-design"),
        ("", r"has no known trace format"),
    ],
)
def test_a_damaged_or_foreign_text_is_refused(bigmoe, text, says):
    with pytest.raises(StickyError, match=rf"^[^\n]*trace\.csv[^\n]*{says}[^\n]*$"):
        read_foreign(bigmoe(text))


def test_a_trace_of_cacheable_by_design(tmp_path):
    experts = np.array([[[3, 1], [1, 3], [0, 2]]] * 2, np.int16)
    path = cacheable(
        tmp_path / "code.npz", experts, {"num_experts": 4, "top_k": 2}, hidden=np.zeros((3, 5), np.float16)
    )
    table = open_trace(path)
    assert table.S.shape == (2, 1, 3, 2)
    assert table.S.dtype == np.uint8
    np.testing.assert_array_equal(table.S[:, 0], experts)
    assert table.mask.all()
    assert table.n_experts == 4


@pytest.mark.parametrize(
    ("experts", "meta", "says"),
    [
        (np.zeros((1, 3, 2), np.int16), {}, r"got num_experts None in meta"),
        (np.zeros((1, 3, 2), np.int16), [1], r"got num_experts None in meta"),
        (np.zeros((3, 2), np.int16), {"num_experts": 4}, r"got experts int16 \(3, 2\), expected integers"),
        (np.zeros((1, 3, 2)), {"num_experts": 4}, r"got experts float64"),
        (np.full((1, 3, 2), 4, np.int16), {"num_experts": 4}, r"names expert 4, but there are 4 experts"),
        (np.full((1, 3, 2), -1, np.int16), {"num_experts": 4}, r"names expert -1"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path, experts, meta, says):
    with pytest.raises(StickyError, match=rf"^[^\n]*{says}[^\n]*$"):
        read_foreign(cacheable(tmp_path / "a.npz", experts, meta))


def test_a_truncated_npz_and_one_of_another_kind_are_refused(tmp_path):
    whole = cacheable(tmp_path / "a.npz", np.zeros((1, 3, 2), np.int16), {"num_experts": 4}).read_bytes()
    (tmp_path / "b.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "c.npz", other=np.zeros(3))
    at = whole.index(b"experts.npy") + 40
    (tmp_path / "d.npz").write_bytes(whole[:at] + b"\xff" * 20 + whole[at + 20 :])
    for name in ("b.npz", "c.npz", "d.npz"):
        with pytest.raises(StickyError, match=rf"^[^\n]*{name} (\(experts\.npy\) )?is damaged: [^\n]*$"):
            read_foreign(tmp_path / name)


def test_a_missing_file_and_an_unknown_format(tmp_path):
    with pytest.raises(StickyError, match=r"nowhere cannot be read \(No such file"):
        read_foreign(tmp_path / "nowhere")
    with pytest.raises(StickyError, match=r"^Unknown trace format 'vlm'\. Known: bigmoeonedge, cacheable-by-design\.$"):
        read_foreign(tmp_path / "nowhere", "vlm")
    (tmp_path / "noise").write_bytes(b"\xff\xfe" * 9)
    for name in READERS:
        with pytest.raises(StickyError, match=r"noise"):
            read_foreign(tmp_path / "noise", name)
