"""Models at equal fast memory: what they keep, what they load, and the share of the gap, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.records import a_run
from stickymoe.cli import main
from stickymoe.paper import yardstick
from stickymoe.reports import tables
from stickymoe.reports.collection import grouped
from tests.reports.records import write

EXPERT, OTHER = 1000, 10_000
MEMORY = float(OTHER + 4 * 4 * EXPERT)  # four experts in each of four layers


def a_model(variant, experts, bits, *, row_bytes=0, layers=4, **settings):
    """A run with N experts of 1,000 bytes per layer and 10,000 bytes beside them."""
    metrics, expert, other = settings.pop("metrics", {}), settings.pop("expert", EXPERT), settings.pop("other", OTHER)
    chosen = {"model": {"n_experts": experts}}
    named = {key: settings.pop(key) for key in ("fingerprint",) if key in settings}
    run = a_run(variant, settings={**chosen, **settings}, bits_per_byte=bits, ppl=100 * bits, **named, **metrics)
    expert_bytes = [] if variant == "dense" else [expert] * layers
    sizes = {"expert_bytes": expert_bytes, "other_bytes": other, **({"row_bytes": row_bytes} if row_bytes else {})}
    return replace(run, record=replace(run.record, sizes=sizes))


def the_yardstick(*runs):
    (found,) = yardstick.yardsticks(grouped(runs))
    return found


FLOOR = a_model("vanilla", 4, 2.0)
CEILING = a_model(
    "vanilla",
    16,
    1.5,
    metrics={
        "cache_hit_rate_all_c2": 0.1,
        "cache_hit_rate_all_c3": None,
        "cache_hit_rate_all_c4": 0.25,
        "warm_loads_c2": 7.0,
    },
)
ROWS = a_model("hash+lookup", 4, 1.4, row_bytes=300)
DENSE = a_model("dense", 4, 2.1)


def test_a_model_is_resident_with_its_slots_and_loads_what_misses():
    chosen = {c.slots: c for c in the_yardstick(CEILING).choices}
    assert {slots: c.fast_bytes for slots, c in chosen.items()} == {
        2: OTHER + 4 * 2 * EXPERT,
        4: OTHER + 4 * 4 * EXPERT,
        16: OTHER + 4 * 16 * EXPERT,
    }
    assert chosen[2].loaded == pytest.approx(7.0 * EXPERT)  # measured on a warm stream
    assert chosen[4].loaded == pytest.approx(0.75 * 2 * 4 * EXPERT)  # k = 2, four layers, each sequence cold
    assert chosen[16].loaded == 0
    assert (chosen[2].bound, chosen[4].bound, chosen[16].bound) == (False, True, False)


def test_rows_are_loaded_by_a_model_that_is_resident():
    (resident,) = (c for c in the_yardstick(ROWS).choices if c.resident)
    assert resident.loaded == 300
    assert not resident.loads_nothing


def test_the_gap_is_between_what_fits_and_all_in_memory():
    found = the_yardstick(FLOOR, CEILING, ROWS, DENSE)
    assert found.memory == MEMORY
    assert found.floor(MEMORY).label == "vanilla, N=4, all in memory"
    assert found.ceiling.label == "vanilla, N=16, all in memory"
    closed = {c.label: found.closed(c, MEMORY) for c in found.fitting(MEMORY)}
    assert closed == {
        "hash+lookup n=2,3, N=4, all in memory": pytest.approx(1.2),
        "vanilla, N=16, 4 slots": pytest.approx(1.0),
        "vanilla, N=4, all in memory": 0.0,
        "dense": pytest.approx(-0.2),
    }
    assert found.warning(MEMORY) is None


def test_each_row_has_as_many_slots_as_fit():
    found = the_yardstick(FLOOR, CEILING)
    fits = {c.row.runs[0].config.model.n_experts: c.slots for c in found.fitting(float(OTHER + 4 * 3 * EXPERT))}
    assert fits == {4: 3, 16: 2}
    assert found.fitting(OTHER - 1000.0) == ()


def test_a_missing_control_is_named():
    assert "no model fits into 26 kB and loads nothing" in the_yardstick(CEILING, ROWS).warning(MEMORY)
    assert "no model with all experts in memory exceeds 26 kB" in the_yardstick(FLOOR, ROWS).warning(MEMORY)
    level = replace(CEILING, record=replace(CEILING.record, metrics={**CEILING.record.metrics, "bits_per_byte": 1.995}))
    found = the_yardstick(FLOOR, level)
    assert "is not better than the floor" in found.warning(MEMORY)
    assert found.closed(found.fitting(MEMORY)[0], MEMORY) is None


def test_other_steps_data_or_compute_are_apart():
    others = [
        a_model("vanilla", 4, 2.0, train={"steps": 2000}),
        a_model("vanilla", 4, 2.0, fingerprint="e" * 64),
    ]
    assert len(yardstick.yardsticks(grouped([FLOOR, CEILING, *others]))) == 3


COLD = {"cache_hit_rate_all_c2": None, "cache_hit_rate_all_c3": None}  # not measured
FINE = a_model(
    {"name": "residency", "capacity": 16, "pinned": 8},
    64,
    1.6,
    model={"n_experts": 64, "top_k": 8, "d_ff": 128},
    expert=EXPERT // 4,
    metrics={**COLD, "warm_loads_c12": 3.0, "warm_loads_c16": 2.0},
)


def test_many_narrow_experts_stand_beside_few_wide_ones():
    """Eight of 64 experts of a quarter of the width compute, keep and know as much as two of sixteen."""
    found = the_yardstick(FLOOR, CEILING, ROWS, DENSE, FINE)
    assert found.title == the_yardstick(FLOOR).title
    assert "active width 1,024" in found.title
    assert found.experts == 16
    assert found.memory == MEMORY
    (fine,) = (c for c in found.fitting(MEMORY) if c.row.variant.name == "residency")
    assert (fine.slots, fine.fast_bytes, fine.loaded) == (16, MEMORY, 2.0 * EXPERT / 4)
    assert fine.label.endswith(", N=64 of width 128, 16 slots")
    assert found.closed(fine, MEMORY) == pytest.approx(0.8)
    assert found.ceiling.label == "vanilla, N=16, all in memory"
    better = replace(FINE, record=replace(FINE.record, metrics={**FINE.record.metrics, "bits_per_byte": 1.4}))
    assert the_yardstick(FLOOR, CEILING, better).ceiling.label.endswith("N=64 of width 128, all in memory")


def test_narrow_experts_alone_are_not_called_narrow():
    assert the_yardstick(FINE).choices[0].label.endswith(", N=64, all in memory")
    assert the_yardstick(FINE).experts == 64


def test_experts_with_a_wider_sum_are_apart():
    wide = a_model("vanilla", 16, 1.5, model={"n_experts": 16, "d_ff": 1024})
    assert len(yardstick.yardsticks(grouped([FLOOR, CEILING, wide]))) == 2


def test_a_base_in_memory_makes_a_load_small():
    """Experts that are differences: the bases are resident beside the slots, as the record says."""
    delta = a_model(
        {"name": "siblings+delta", "capacity": 4},
        16,
        1.55,
        expert=EXPERT // 10,
        other=OTHER + 4 * 4 * EXPERT,
        metrics={**COLD, "warm_loads_c4": 0.5},
    )
    found = the_yardstick(FLOOR, CEILING, delta)
    assert found.memory == MEMORY
    chosen = {c.slots: (c.fast_bytes, c.loaded) for c in found.choices if c.row.variant.name != "vanilla"}
    assert chosen == {
        4: (MEMORY + 4 * 4 * EXPERT // 10, 0.5 * EXPERT / 10),
        16: (MEMORY + 4 * 16 * EXPERT // 10, 0.0),
    }


def test_the_table_shows_bounds_controls_and_the_ceiling():
    found = the_yardstick(FLOOR, CEILING, ROWS, DENSE)
    shown = {row[0]: [str(cell) for cell in row[1:]] for row in yardstick.table(found, MEMORY, most=1).rows}
    assert list(shown) == [
        "hash+lookup n=2,3, N=4, all in memory",
        "vanilla, N=16, 4 slots",
        "vanilla, N=4, all in memory (floor)",
        "dense",
        "vanilla, N=16, all in memory (ceiling)",
    ]
    assert shown["hash+lookup n=2,3, N=4, all in memory"] == ["1", "26 kB", "300 B", "1.400", "140.00", "120"]
    assert shown["vanilla, N=16, 4 slots"][2] == "≤ 6 kB"
    assert shown["vanilla, N=16, all in memory (ceiling)"] == ["1", "74 kB", "0", "1.500", "150.00", "100"]


def test_rounded_experts_are_a_control_and_no_floor():
    """Sixteen experts in int8 take the bytes of four."""
    rounded = {"ppl": 155.0, "bits_per_byte": 1.55, "targets": 9, "expert_bytes": [EXPERT // 4] * 4}
    evaluations = {"valid int8": rounded, "test int8": {**rounded, "bits_per_byte": 1.7}}
    ceiling = replace(CEILING, record=replace(CEILING.record, evaluations=evaluations))
    found = the_yardstick(FLOOR, ceiling, ROWS)
    control = found.rounded(MEMORY)
    assert (control.label, control.fast_bytes) == ("vanilla, N=16 in int8, all in memory", MEMORY)
    assert (control.bits.mean, control.test.mean, control.loads_nothing) == (1.55, 1.7, True)
    assert found.floor(MEMORY).label == "vanilla, N=4, all in memory"
    assert found.ceiling.label == "vanilla, N=16, all in memory"
    assert control.label in [row[0] for row in yardstick.table(found, MEMORY, most=1).rows]
    assert found.rounded(MEMORY - 1000) is None


def test_a_model_that_fits_as_it_is_needs_no_rounding():
    evaluations = {"valid int8": {"ppl": 1.0, "bits_per_byte": 2.0, "targets": 9, "expert_bytes": [250] * 4}}
    floor = replace(FLOOR, record=replace(FLOOR.record, evaluations=evaluations))
    assert the_yardstick(floor, CEILING).rounded(MEMORY) is None


def test_bits_on_the_test_split_have_a_column_if_a_row_has_them():
    evaluations = {"test": {"ppl": 1.0, "bits_per_byte": 1.45, "targets": 9, "expert_bytes": []}}
    tested = replace(ROWS, record=replace(ROWS.record, evaluations=evaluations))
    table = yardstick.table(the_yardstick(FLOOR, CEILING, tested), MEMORY)
    column = table.headings.index("test bits ↓")
    shown = {row[0].split(",")[0]: str(row[column]) for row in table.rows}
    assert shown["hash+lookup n=2"] == "1.450"
    assert shown["vanilla"] == tables.MISSING
    assert "test bits ↓" not in yardstick.table(the_yardstick(FLOOR, CEILING, ROWS), MEMORY).headings


def test_the_figure_draws_what_fits_and_the_lines():
    found = the_yardstick(FLOOR, CEILING, ROWS, DENSE)
    drawn = repr(yardstick.figure(found, MEMORY, [("3-gram", 1.6)]).to_dict())
    for name in ("hash+lookup n=2,3, N=4", "3-gram", "ceiling: vanilla, N=16, all in memory", "loads rows"):
        assert name in drawn
    assert yardstick.figure(the_yardstick(FLOOR), MEMORY) is None


def test_records_of_earlier_versions_are_left_out():
    old = replace(FLOOR, record=replace(FLOOR.record, sizes={}))
    assert yardstick.yardsticks(grouped([old])) == ()


def test_the_command_compares_at_a_memory(tmp_path, capsys):
    for run in (FLOOR, CEILING, ROWS, DENSE):
        write(run, tmp_path)
    main(["frontier", str(tmp_path)])
    shown = capsys.readouterr()
    assert "fast memory 26 kB" in shown.out
    assert tables.MISSING not in shown.err
    for memory, says in (("3", "--memory: got 3 B, expected at least 10 kB"), ("much", "--memory: got 'much'")):
        assert main(["frontier", str(tmp_path), "--memory", memory]) == 2
        assert says in capsys.readouterr().err
