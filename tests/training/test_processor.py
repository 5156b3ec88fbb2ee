"""A processor that lacks what it announces: tried in a child, and done without."""

import os

import pytest

from stickymoe.training import processor

ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.mark.parametrize(
    ("product", "setting", "then"),
    [
        (ILLEGAL, None, "AVX512_CORE_FP16"),
        (ILLEGAL, "AVX2", "AVX2"),
        ("pass", None, None),
        ("raise SystemExit(1)", None, None),
    ],
    ids=["lacking", "the user's own word", "there", "failing otherwise"],
)
def test_amx_is_switched_off_where_a_product_ends_the_process(monkeypatch, product, setting, then):
    monkeypatch.setattr(processor, "_PRODUCT", product)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if setting is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", setting)
    processor.disable_missing_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == then
