"""Grids: which runs make a table."""

from __future__ import annotations

import pytest

from stickymoe.errors import ConfigError
from stickymoe.paper.grids import GRIDS
from stickymoe.runs.folder import run_id
from stickymoe.runs.settings import read_config
from stickymoe.sweeps.grid import chosen_rows, configs, load_grid
from stickymoe.variants import variant_names


def runs_of(grid, seeds=(42,), flags=()):
    return configs(grid, seeds=list(seeds), flags=list(flags), source="here")


@pytest.mark.parametrize("size", ["paper-small", "paper-medium", "cpu-small", "cpu-medium"])
def test_the_papers_rows_in_its_order_and_the_control(size):
    labels = [run.variant.label for run in runs_of(load_grid(size, GRIDS))]
    assert labels == [
        "vanilla",
        *(f"soft λ={lam}" for lam in ("0.01", "0.05", "0.1", "0.2", "0.5")),
        *(f"hard_window W={W} β=10" for W in (2, 4, 8)),
        *(f"soft_hard λ=0.1 α={alpha} W=4" for alpha in ("0.05", "0.1", "0.5", "1")),
        "remoe λ=0.1",
        "oracle",
        "dense",
    ]


def test_ablations_are_those_the_paper_lacks():
    labels = [run.variant.label for run in runs_of(load_grid("ablations", GRIDS))]
    assert "soft λ=0.5 gate only" in labels
    assert "soft μ=0 λ=0.5" in labels
    assert "soft_hard λ=0 α=1 W=4" in labels
    quarter = [run for run in runs_of(load_grid("ablations", GRIDS)) if run.data.fraction == 0.25]
    assert {run.variant.name for run in quarter} == {"vanilla", "soft"}


def test_the_frontier_has_every_variant_and_no_run_twice():
    runs = runs_of(load_grid("frontier", GRIDS))
    named = {part for run in runs for part in run.variant.name.split("+")}
    in_the_papers_table, no_router = {"hard_window", "oracle", "remoe", "soft_hard"}, {"lookup", "delta"}
    without_training = {"cache_prior", "max_rank", "tau_reroute", "drop_cold"}
    assert set(variant_names()) - named == in_the_papers_table | no_router | without_training
    assert {run.train.steps for run in runs} == {300}
    ids = [run_id(run, "data") for run in runs]
    assert len(set(ids)) == len(ids)


def test_sixteen_experts_have_the_active_weights_of_four():
    small, sixteen = (read_config(preset=name).model for name in ("cpu-small", "cpu-16"))
    assert sixteen.top_k * sixteen.d_ff == small.top_k * small.d_ff
    assert (sixteen.n_experts, sixteen.top_k) == (16, 2)
    assert 4 in read_config(preset="cpu-16").eval.capacities


def test_every_seed_and_flags_over_all_rows():
    runs = runs_of(load_grid("demo", GRIDS), seeds=(1, 2), flags=["--train.steps", "7"])
    n = len(GRIDS["demo"]["rows"])
    assert {run.train.steps for run in runs} == {7}
    assert [run.seed for run in runs] == [1] * n + [2] * n


def test_each_seed_has_a_hash_of_its_own_in_the_same_row():
    rows = [
        {"variant": "hash+lookup"},
        {"variant": {"name": "siblings", "hashed": True, "salt": 3}},
        {"variant": "siblings"},
        {"variant": "soft"},
    ]
    runs = runs_of({"rows": rows}, seeds=(42, 43))
    assert [run.variant.settings().get("salt") for run in runs] == [0, 3, 0, None, 43, 3, 0, None]
    assert [run.variant.key for run in runs[:4]] == [run.variant.key for run in runs[4:]]
    assert runs[0].variant.label == runs[4].variant.label


@pytest.mark.parametrize("grid", [{"seed": 7, "rows": [{}]}, {"rows": [{"seed": 7}]}])
def test_a_seed_in_a_grid_is_refused(grid):
    with pytest.raises(ConfigError, match="use --seeds in a sweep"):
        configs(grid, seeds=[42], flags=[], source="mine.yaml")


def test_a_value_out_of_range_is_said_with_its_row():
    with pytest.raises(ConfigError, match=r"train.steps: got -1.*\(in row 2 of mine.yaml\)"):
        configs({"rows": [{}, {"train": {"steps": -1}}]}, seeds=[42], flags=[], source="mine.yaml")


def test_a_yaml_grid_merges_common_settings_with_the_rows(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "preset: tiny\ntrain: {steps: 9, warmup: 1}\nrows:\n"
        "  - variant: vanilla\n"
        "  - variant: {name: soft, lam: 0.3}\n    train: {steps: 5}\n"
    )
    first, second = runs_of(load_grid(str(file), GRIDS))
    assert (first.variant.label, first.train.steps, first.train.warmup) == ("vanilla", 9, 1)
    assert (second.variant.label, second.train.steps, second.train.warmup) == ("soft λ=0.3", 5, 1)
    assert first.model.d_model == 32


def test_an_unknown_grid_names_near_ones():
    with pytest.raises(ConfigError, match=r"^Unknown grid 'cpu-smal'. Did you mean 'cpu-small'"):
        load_grid("cpu-smal", GRIDS)


@pytest.mark.parametrize("text", ["", "preset: tiny\n", "rows: 3\n", "rows: []\n", "rows: [soft]\n"])
def test_a_yaml_without_rows_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"mine.yaml: expected 'rows:'"):
        load_grid(str(file), GRIDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows:\n  - variant: sfot\n", "Unknown variant 'sfot'. Did you mean 'soft'"),
        ("rows:\n  - variant: {name: soft, lamda: 1}\n", r"lamda.*row 1 of here"),
        ("rows:\n  - variant: soft\n  - train: {stepz: 3}\n", r"stepz.*row 2 of here"),
        ("rows:\n  - train: {steps: many}\n", r"train.steps: got 'many', expected int"),
        ("presett: tiny\nrows:\n  - variant: soft\n", "presett"),
    ],
)
def test_a_typo_in_a_yaml_grid_is_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        runs_of(load_grid(str(file), GRIDS))
    assert "\n" not in str(refused.value)


def test_rows_can_be_chosen_by_name_label_or_key():
    runs = runs_of(load_grid("cpu-small", GRIDS))
    assert len(chosen_rows(runs, "soft")) == 5
    assert [run.variant.label for run in chosen_rows(runs, "soft λ=0.1, dense")] == ["soft λ=0.1", "dense"]
    assert [run.variant.label for run in chosen_rows(runs, "soft-lam0.5")] == ["soft λ=0.5"]
    with pytest.raises(ConfigError, match=r"Unknown row .dens.\. Did you mean .dense."):
        chosen_rows(runs, "dens")
