"""The tables of the examples follow from their records."""

from __future__ import annotations

import json

import pytest

from examples.olmoe import compare
from examples.smollm2 import compare as smollm2


def write(folder, method, seed, ppl, misses=0.5):
    metrics = {"ppl": ppl, "switch_rate": 0.6, "misses_c4": misses, "effective_experts": 12.0, "gate_entropy": 2.0}
    record = {"method": method, "seed": seed, "metrics": {"test": metrics}, "answer": "A\nlanguage.", "prompt": "?"}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(record))


@pytest.fixture
def records(tmp_path):
    for seed, ppl in ((1, 50.0), (2, 60.0), (3, 70.0)):
        write(tmp_path / f"vanilla-{seed}", "vanilla", seed, ppl)
        write(tmp_path / f"soft-{seed}", "soft", seed, ppl * 1.1, misses=0.25)
    write(tmp_path / "other-1", "other", 1, 55.0)
    write(tmp_path / "remoe-9", "remoe", 9, 55.0)  # a seed that vanilla does not have
    compare.take(tmp_path, tmp_path / "records")
    return tmp_path / "records"


def test_values_are_means_with_intervals(records):
    rows = compare.values_table(compare.read(records)).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| vanilla", "| soft", "| remoe", "| other"]
    # t = 4.303 for three seeds, deviation 10
    assert rows[2].startswith("| vanilla | 3 | 60.00 ± 24.84 | 0.600 ± 0.000 |")


def test_differences_are_paired(records):
    vanilla = {s: m["ppl"] for s, m in compare.read(records)["vanilla"].items()}
    assert vanilla == {1: 50.0, 2: 60.0, 3: 70.0}
    rows = compare.differences_table(compare.read(records)).splitlines()[2:]
    assert rows[0] == "| soft | 3 | +10.00 ± 0.00 | +0.00 ± 0.00 | -50.00 ± 0.00 | +0.00 ± 0.00 |"
    assert rows[1] == "| remoe | 0 | – | – | – | – |"
    assert rows[2] == "| other | 1 | +10.00 | +0.00 | +0.00 | +0.00 |"


def test_answers_stand_under_the_table(records):
    made = smollm2.tables(records)
    assert "| soft, seed 2 | – | 66.00 | 0.600 | 0.250 |" in made
    assert "- **soft, seed 2**: A language." in made


@pytest.mark.parametrize("module", [compare, smollm2], ids=["olmoe", "smollm2"])
def test_the_page_follows_from_the_committed_records(module):
    page = (module.HERE / "README.md").read_text()
    assert compare.with_tables(page, module.tables(module.HERE / "records")) == page


def test_a_page_without_markers_is_refused():
    with pytest.raises(SystemExit, match="markers"):
        compare.with_tables("# Title", "table")
