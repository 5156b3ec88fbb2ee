"""The demo on its own rows, with a model of seconds."""

from __future__ import annotations

import re
import shutil

import pytest

from stickymoe.paper import demo as room
from stickymoe.paper import generation
from stickymoe.paper.grids import DEMO_ROWS, GRIDS
from stickymoe.reports.collection import collect
from stickymoe.runtime.store import Store


@pytest.fixture
def short(monkeypatch, corpus):
    """The grid, the ribbon and the texts of the demo, for a model of seconds."""
    grid = {
        "preset": "tiny",
        "data": {"path": str(corpus), "vocab_size": 300},
        "model": {"d_model": 16, "d_ff": 16, "seq_len": 64, "n_layers": 3},
        "train": {"steps": 4, "warmup": 1, "eval_every": 4},
        "rows": DEMO_ROWS,
    }
    monkeypatch.setitem(GRIDS, "demo", grid)
    monkeypatch.setattr(room, "SEQUENCE", 1)
    for name, value in {"PROMPT": "ban", "TOKENS": 24, "TEXTS": 2, "MEMORY": "38kB", "THROTTLE": "2MB"}.items():
        monkeypatch.setattr(generation, name, value)
    return grid


def rows(table: str, *names: str) -> dict[str, list[str]]:
    """The cells of the rows of a table in Markdown."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines() if "|" in line]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in names}


def test_compares_draws_the_ribbon_generates_and_says_what_next(tmp_path, short, capsys):
    room.demo(tmp_path, command="./stickymoe")
    table, generated = (tmp_path / "comparison.md").read_text().split("Experts on disk")
    for row in DEMO_ROWS:
        name = row["variant"] if isinstance(row["variant"], str) else row["variant"]["name"]
        assert f"| {name}" in table
    assert "failed" not in table
    ribbon = (tmp_path / "ribbon.svg").read_text()
    assert all(f"{label}: the top-1 expert" in ribbon for label in ("vanilla", "soft λ=0.5", "oracle"))

    found = rows(generated, "model", "vanilla", "sticky")
    assert len(found["model"]) == len(found["vanilla"]) == len(found["sticky"]) == 6
    assert "3 of 4 experts per layer" in generated
    assert found["vanilla"][0] in next(line for line in table.splitlines() if line.startswith("| vanilla"))
    assert float(found["sticky"][1]) < float(found["vanilla"][1])
    counts = re.search(r"simulated and counted: vanilla (\d+) and (\d+); sticky (\d+) and (\d+)\.", generated)
    assert counts[1] == counts[2]
    assert counts[3] == counts[4]

    printed = capsys.readouterr().out
    assert printed.count("  ./stickymoe ") == 5
    assert all(text in printed for text in ("ΔPPL %", "tokens/s ↑", "vanilla  ban", "sticky   ban"))
    assert f"serve {tmp_path}/stores/vanilla {tmp_path}/stores/sticky --memory" in printed

    assert len(collect([tmp_path]).runs) == len(DEMO_ROWS)  # stores are no runs
    stores = [tmp_path / "stores" / name for name in ("vanilla", "sticky")]
    assert Store.open(stores[0]).slot_bytes == Store.open(stores[1]).slot_bytes
    written = (stores[0] / "experts.bin").stat().st_mtime_ns
    shutil.rmtree(stores[1])
    shutil.copytree(stores[0], stores[1])  # a store of another model
    room.demo(tmp_path)
    again = (tmp_path / "comparison.md").read_text()
    assert (stores[0] / "experts.bin").stat().st_mtime_ns == written
    assert Store.open(stores[1]).contents.name.startswith("siblings")
    counted = [text.split("counted: ")[1] for text in (generated, again)]
    assert counted[0] == counted[1]


def test_without_a_run_to_generate_with_it_ends_after_the_table(tmp_path, short, monkeypatch, capsys):
    monkeypatch.setitem(GRIDS, "demo", {**short, "rows": DEMO_ROWS[:1]})
    room.demo(tmp_path)
    assert not (tmp_path / "stores").exists()
    assert "serve" not in capsys.readouterr().out
