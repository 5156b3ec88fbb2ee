"""LRU and Belady on the routing of a trained model, beside libCacheSim."""

import libcachesim
import numpy as np
import pytest

from stickymoe.cli import main
from stickymoe.locality import kernels
from stickymoe.locality.formats import open_trace
from stickymoe.locality.replay import replay

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


@pytest.fixture(scope="module")
def layers(corpus, tmp_path_factory):
    """The heaviest expert of every token, for each layer of a small trained model with eight experts."""
    run = tmp_path_factory.mktemp("real") / "run"
    sizes = ["--model.d_model", "16", "--model.d_ff", "16", "--model.seq_len", "16", "--model.n_experts", "8"]
    steps = ["--train.steps", "12", "--train.eval_every", "12", "--data.vocab_size", "300", "--data.path", str(corpus)]
    assert main(["train", "--preset", "tiny", "--quiet", *sizes, *steps, "--out", str(run)]) == 0
    table = open_trace(run)
    return [np.array(S[..., 0][table.mask]) for S in table.S]


def oracle_reader(path, entries):
    """libCacheSim's own trace file, with the next use that its Belady asks for."""
    future = kernels.next_uses(entries[:, None], np.ones(len(entries), np.uint8), 1, 8)[:, 0]
    rows = np.zeros(len(entries), RECORD)
    rows["time"], rows["id"], rows["size"] = np.arange(len(entries)), entries, 1
    rows["next"] = np.where(future == kernels.NEVER, -1, future)
    rows.tofile(path)
    return libcachesim.TraceReader(
        str(path),
        trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        reader_init_params=libcachesim.ReaderInitParam(ignore_obj_size=True),
    )


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_they_agree_on_a_real_trace(layers, policy, capacity, tmp_path):
    for entries in layers:
        other = {"lru": libcachesim.LRU, "belady": libcachesim.Belady}[policy](cache_size=capacity, hashpower=8)
        expected, _ = other.process_trace(oracle_reader(tmp_path / "t.oracleGeneral.bin", entries))
        found = replay(entries[None], capacity=capacity, n_experts=8, policy=policy).miss_rate
        assert found == pytest.approx(expected, abs=1e-9)
        assert 0 < found <= 1
