"""The demo on its own rows, with a model of seconds."""

from __future__ import annotations

from stickymoe.paper import demo as room
from stickymoe.paper.grids import DEMO_ROWS, GRIDS


def test_compares_its_variants_draws_the_ribbon_and_says_what_next(tmp_path, monkeypatch, corpus, capsys):
    short = {
        "preset": "tiny",
        "data": {"path": str(corpus), "vocab_size": 300},
        "model": {"d_model": 16, "d_ff": 16, "seq_len": 64, "n_layers": 3},
        "train": {"steps": 4, "warmup": 1, "eval_every": 4},
        "rows": DEMO_ROWS,
    }
    monkeypatch.setitem(GRIDS, "demo", short)
    monkeypatch.setattr(room, "SEQUENCE", 1)
    room.demo(tmp_path, command="./stickymoe")
    table = (tmp_path / "comparison.md").read_text()
    for row in DEMO_ROWS:
        name = row["variant"] if isinstance(row["variant"], str) else row["variant"]["name"]
        assert f"| {name}" in table
    assert "failed" not in table
    ribbon = (tmp_path / "ribbon.svg").read_text()
    assert all(f"{label}: the top-1 expert" in ribbon for label in ("vanilla", "soft λ=0.5", "oracle"))
    printed = capsys.readouterr().out
    assert printed.count("  ./stickymoe ") == 4
    assert "ΔPPL %" in printed
