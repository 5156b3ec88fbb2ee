"""Runs are put together only where they may be compared; nothing that was found is lost."""

from __future__ import annotations

import dataclasses
import json

import pytest

from reports.records import a_run, write
from stickymoe.errors import RunError
from stickymoe.reports.collection import Row, Value, collect, grouped

VARIANTS_BY_NAME = [
    "vanilla",
    "dense",
    "hard_window W=4 β=10",
    "oracle",
    "remoe λ=0.1",
    "soft λ=0.05",
    "soft λ=0.5",
    "soft λ=0.5 gate only",
    "soft_hard λ=0.1 α=1 W=4",
    "soft_hard λ=0 α=1 W=4",
    "smooth+soft λ=0.1 d=0.5",
]


def test_vanilla_is_first_then_variants_by_name_with_ablations_after_their_variant():
    soft = {"name": "soft", "lam": 0.5}
    variants = [
        "dense",
        "oracle",
        {**soft, "gate_only": True},
        soft,
        {"name": "soft", "lam": 0.05},
        {"name": "soft_hard", "lam": 0.0, "alpha": 1.0},
        {"name": "soft_hard", "alpha": 1.0},
        "remoe",
        "hard_window",
        "smooth+soft",
        "vanilla",
    ]
    (group,) = grouped(a_run(variant) for variant in variants)
    assert sorted(row.label for row in group.rows) == sorted(VARIANTS_BY_NAME)
    assert [row.label for row in group.rows] == VARIANTS_BY_NAME


def test_the_caller_can_name_variants_that_come_first():
    runs = [a_run(name) for name in ("dense", "oracle", "soft", "vanilla", "hash")]
    (group,) = grouped(runs, order=["soft", "dense"])
    assert [row.variant.name for row in group.rows] == ["soft", "dense", "vanilla", "hash", "oracle"]


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "e" * 64},
        {"settings": {"train": {"steps": 2000}}},
        {"settings": {"model": {"d_model": 256}}},
        {"settings": {"data": {"documents": True}}},
        {"settings": {"train": {"lr": 0.1}}},
    ],
)
def test_what_differs_in_data_model_or_protocol_stands_apart(other):
    groups = grouped([a_run("vanilla"), a_run("oracle"), a_run("vanilla", **other)])
    assert [len(group.rows) for group in groups] == [2, 1]


def test_the_dense_control_stands_beside_every_number_of_experts():
    sixteen = {"model": {"n_experts": 16}}
    other = {"model": {"n_experts": 16}, "train": {"steps": 2000}}
    runs = [a_run("vanilla"), a_run("dense"), a_run("vanilla", settings=sixteen), a_run("oracle", settings=other)]
    by_size = {(g.config.model.n_experts, g.config.train.steps): g for g in grouped(runs)}
    assert {key: [row.label for row in g.rows] for key, g in by_size.items()} == {
        (4, 1000): ["vanilla", "dense"],
        (16, 1000): ["vanilla", "dense"],
        (16, 2000): ["oracle"],
    }


def test_how_often_a_run_was_looked_at_does_not_matter():
    often = {"train": {"eval_every": 10, "log_every": 1, "checkpoint_every": 7}}
    assert len(grouped([a_run("vanilla"), a_run("oracle", settings=often)])) == 1


def test_seeds_are_one_row_with_mean_and_deviation():
    (group,) = grouped(a_run("vanilla", seed=seed, ppl=ppl) for seed, ppl in ((42, 100.0), (43, 102.0), (44, 104.0)))
    assert group.rows[0].metric("ppl") == Value(mean=102.0, sd=2.0, n=3)
    assert group.rows[0].metric("nothing") is None


def test_changes_are_by_pairs_of_a_seed():
    base = Row.of([a_run("vanilla", seed=42, ppl=100.0), a_run("vanilla", seed=43, ppl=200.0)])
    row = Row.of(
        [a_run("soft", seed=42, ppl=110.0), a_run("soft", seed=43, ppl=220.0), a_run("soft", seed=44, ppl=1.0)]
    )
    change = row.change(base)
    assert (change.mean, change.sd, change.n) == (pytest.approx(10), pytest.approx(0, abs=1e-9), 2)
    assert Row.of([a_run("soft", seed=50, ppl=165.0)]).change(base) is None, "no seed in common"


def test_fewer_misses_is_the_papers_factor():
    base = Row.of([a_run("vanilla", cache_hit_rate=0.5376)])
    row = Row.of([a_run("soft", cache_hit_rate=0.8817)])
    assert row.fewer_misses(base, "cache_hit_rate").mean == pytest.approx(3.91, abs=0.01)
    never = Row.of([a_run("oracle", cache_hit_rate=1.0, seed=seed) for seed in (42, 43)])
    both = Row.of([a_run("vanilla", seed=seed) for seed in (42, 43)])
    assert never.fewer_misses(both, "cache_hit_rate") == Value(float("inf"), None, 2)


def test_a_seed_counts_once_however_often_it_was_run():
    often = {"train": {"eval_every": 500}}
    row = Row.of([a_run("vanilla"), a_run("vanilla", settings=often), a_run("vanilla", seed=43, status="failed")])
    assert row.metric("ppl") == Value(100.0, None, 1)
    assert [run.config.seed for run in row.runs] == [42, 43]


def test_of_two_complete_runs_of_a_seed_the_current_one_counts():
    current = a_run("soft", ppl=101.0)
    before = dataclasses.replace(current.record, run_id="0" * 16, metrics={**current.record.metrics, "ppl": 99.0})
    for runs in ([current, type(current).of(before)], [type(current).of(before), current]):
        assert Row.of(runs).mean("ppl") == 101.0


def test_groups_alike_in_title_say_what_tells_them_apart():
    groups = grouped([a_run("vanilla"), a_run("vanilla", settings={"train": {"lr": 0.1}})])
    assert sorted(group.note for group in groups) == ["train.lr 0.0003", "train.lr 0.1"]
    assert len({group.title for group in groups}) == 2


def test_a_variant_of_the_users_own_comes_last(monkeypatch):
    monkeypatch.setattr("stickymoe.reports.collection.variant_names", lambda: ())
    (group,) = grouped([a_run("vanilla"), a_run("remoe")])
    assert [row.label for row in group.rows] == ["vanilla", "remoe λ=0.1"]


def test_a_run_found_twice_counts_once_and_the_complete_one_wins(tmp_path):
    write(a_run("vanilla", status="interrupted"), tmp_path / "old")
    write(a_run("vanilla"), tmp_path / "new")
    collection = collect([tmp_path, tmp_path / "new"])
    assert [run.complete for run in collection.runs] == [True]


def test_a_damaged_record_is_named_and_the_rest_goes_on(tmp_path):
    write(a_run("vanilla"), tmp_path)
    good = dataclasses.asdict(a_run("soft").record)
    bad = {
        "cut": '{"run_id": "a',
        "foreign": json.dumps({"schema": 99}),
        "metrics": json.dumps({**good, "metrics": 3}),
        "value": json.dumps({**good, "metrics": {"ppl": "abc"}}),
        "data": json.dumps({**good, "data": {}}),
        "variant": json.dumps({**good, "config": {**good["config"], "variant": {"name": "gone"}}}),
    }
    for name, text in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    collection = collect([tmp_path])
    assert len(collection.runs) == 1
    assert sorted(bad.path.parent.name for bad in collection.damaged) == sorted(bad)
    assert all(bad.reason for bad in collection.damaged)


def test_a_run_counts_without_a_log_that_is_damaged(tmp_path):
    path = write(a_run("vanilla"), tmp_path)
    (path / "metrics.jsonl").write_text("{}\nnonsense\n")
    collection = collect([tmp_path])
    assert [run.log for run in collection.runs] == [[]]
    assert [bad.path.name for bad in collection.damaged] == ["metrics.jsonl"]


def test_nothing_to_report_is_refused_in_one_line(tmp_path):
    with pytest.raises(RunError, match=r"There is no run in .* \(no record.json\)"):
        collect([tmp_path])
    with pytest.raises(RunError, match="is not a folder"):
        collect([tmp_path / "nowhere"])
    write(a_run("vanilla", status="failed"), tmp_path)
    write(a_run("soft", status="interrupted"), tmp_path)
    with pytest.raises(RunError, match=r"No run in .* is complete \(1 failed, 1 interrupted\): The loss became nan"):
        collect([tmp_path])


def test_groups_of_one_size_have_names_of_their_own(tmp_path):
    write(a_run("vanilla"), tmp_path)
    write(a_run("vanilla", fingerprint="e" * 64), tmp_path)
    assert list(collect([tmp_path]).names()) == ["small-1000", "small-1000-2"]
