"""Variants combined by name: one config, the parts and terms of all, and what cannot be combined refused."""

import json
import pickle

import pytest
import torch
import yaml

from stickymoe.cli import main
from stickymoe.errors import ConfigError
from stickymoe.routing.losses import objective
from stickymoe.routing.sequential import Hysteresis, Smooth
from stickymoe.routing.terms import Term
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.folder import run_id
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model
from stickymoe.variants import Site, variant

SITE = Site(layer=0, d_model=8, n_experts=4, top_k=2, vocab_size=31)
SIZES = ModelConfig(d_model=16, n_layers=3, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)


def terms(chosen):
    return {term.symbol: term for term in chosen.terms()}


def test_parts_terms_and_settings_are_those_of_all():
    combined = variant("smooth+hysteresis+soft", decay=0.25, bonus=2.0, lam=0.3, mu=0.5)
    rule = combined.parts(SITE).rule
    assert isinstance(rule.filter, Smooth)
    assert rule.filter.decay == 0.25
    assert rule.choice == Hysteresis(bonus=2.0)
    assert {symbol: term.weight for symbol, term in terms(combined).items()} == {"bal": 0.5, "cons": 0.3}
    assert combined.label == "hysteresis+smooth+soft μ=0.5 λ=0.3 d=0.25 m=2"


def test_the_order_of_the_names_makes_no_difference():
    assert variant("soft+smooth") == variant("smooth+soft")
    runs = [RunConfig(variant=variant(name, lam=0.3)) for name in ("soft+smooth", "smooth+soft")]
    assert run_id(runs[0], "data") == run_id(runs[1], "data")
    assert run_id(runs[0], "data") != run_id(RunConfig(variant=variant("soft", lam=0.3)), "data")


def test_a_combination_is_a_config_in_flags_yaml_and_json(tmp_path, capsys):
    flags = ["--variant.decay=0.25", "--variant.capacity=4", "--variant.lam=0.3"]
    config = read_config(flags, variant="residency+smooth+soft")
    given = config.variant.settings()
    assert (given["decay"], given["capacity"], given["lam"]) == (0.25, 4, 0.3)
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config.as_dict(), allow_unicode=True))
    assert read_config(file=file) == config
    file.write_text("variant: smooth+soft\n")
    assert read_config(file=file).variant == variant("smooth+soft")
    assert main(["train", "--variant", "smooth+soft", "--help"]) == 0
    out = capsys.readouterr().out
    assert "weight λ of the consistency loss" in out
    assert "decay d of the average" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smooth+sfot", "Unknown variant 'sfot'. Did you mean 'soft'?"),
        ("smooth+", "Unknown variant ''."),
        ("hysteresis+residency", "'hysteresis' and 'residency' both replace the router's choice; combine only one"),
        ("dot+soft", "'dot' and 'soft' both have a setting 'lam'; combine only one of them."),
        ("soft+soft_hard", "'soft' is already part of 'soft_hard'."),
        ("soft+soft", "'soft' is already part of 'soft'."),
        ("dense+soft", "'dense' cannot be combined with others."),
        ("remoe+smooth", "'remoe' cannot be combined with others."),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as refused:
        variant(name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_of_every_part_are_checked():
    with pytest.raises(ConfigError, match=r"^variant.decay: got 1.0, expected a number in \[0, 1\)\.$"):
        variant("smooth+soft", decay=1.0)
    with pytest.raises(ConfigError, match=r"^variant.lam: got -1.0"):
        variant("smooth+soft", lam=-1.0)


@pytest.mark.parametrize(
    "name",
    [
        "hysteresis+smooth+soft",
        "residency+smooth+soft_hard",
        "cache_loss+residency+smooth",
        "oracle+segment+smooth+bles",
        "cross_layer+hard_window+graded",
        "boundary+cache_loss+graded+smooth+trajectory",
    ],
)
def test_a_combination_trains(name):
    combined = variant(name)
    model = build_model(RunConfig(model=SIZES, variant=combined), 31)
    tokens = torch.randint(0, 31, (3, 25), generator=torch.Generator().manual_seed(0))
    doc = (torch.arange(24) // 7).expand(3, -1)
    boundary = (torch.arange(24) % 5 == 0).expand(3, -1)
    out = model(tokens[:, :-1], tokens[:, 1:], doc=doc, boundary=boundary)
    result = objective(out.trace, combined.terms(), progress=0.5)
    assert all(value.requires_grad for value in result.values.values())
    loss = out.loss + result.total
    loss.backward()
    assert loss.isfinite()
    for weight, p in model.named_parameters():
        assert p.grad.isfinite().all(), weight
        assert p.grad.abs().max() > 0, weight


def test_a_learned_decay_is_one_number_per_layer_that_learns():
    model = build_model(RunConfig(model=SIZES, variant=variant("smooth", decay=0.75, learned=True)), 31)
    learned = {name: p for name, p in model.named_parameters() if "decay" in name}
    assert len(learned) == SIZES.n_layers
    assert all(p.item() == 0.0 for p in learned.values()), "it starts at the given decay"
    tokens = torch.randint(0, 31, (2, 21), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    assert all(p.grad.abs() > 0 for p in learned.values())
    with pytest.raises(
        ConfigError, match=r"^variant.decay: got 0.0, expected a number in \(0, 1\) if variant\.learned is true\.$"
    ):
        variant("smooth", decay=0.0, learned=True)


# Weights by layer and over time


def test_graded_acts_on_every_loss_but_balance():
    graded = terms(variant("graded+soft_hard", warmup=0.5, layers=(0.0, 1.0)))
    assert (graded["bal"].layers, graded["bal"].warmup) == ((), 0.0)
    for symbol in ("cons", "hard"):
        assert (graded[symbol].layers, graded[symbol].warmup) == ((0.0, 1.0), 0.5)


def test_a_weight_warms_up_and_differs_between_layers():
    value = torch.tensor([1.0, 3.0])
    term = Term("x", 2.0, lambda trace, ctx: value, layers=(0.5, 2.0), warmup=0.5)
    assert [term.weighted(value, progress).item() for progress in (0.0, 0.25, 0.5, 1.0)] == [0.0, 3.25, 6.5, 6.5]
    assert Term("x", 2.0, lambda trace, ctx: value).weighted(value, 0.0).item() == 4.0


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("graded+soft", ["--variant.layers=[1,2,3]"], r"variant.layers: got \(1.0, 2.0, 3.0\), expected 2 factors"),
        ("residency", ["--variant.capacity=1"], "variant.capacity: got 1, expected at least the 2 experts"),
        ("cache_loss", ["--variant.slots=1"], "variant.slots: got 1, expected at least the 2 experts"),
        *(
            (name, ["--variant.capacity=5"], "variant.capacity: got 5, expected at most the 4 experts")
            for name in ("residency", "rent", "siblings")
        ),
        ("cache_loss", ["--variant.slots=99"], "variant.slots: got 99, expected at most the 4 experts"),
        ("grouped+smooth", ["--variant.groups=5"], "variant.groups: got 5, expected at most the 4 experts"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(name, flags, message):
    with pytest.raises(ConfigError, match=message):
        read_config(flags, preset="tiny", variant=name)


def test_factors_leave_a_term_without_layers_alone():
    term = Term("x", 2.0, lambda trace, ctx: torch.ones(()), layers=(3.0, 4.0))
    assert term.weighted(torch.ones(())).item() == 2.0


def test_layers_show_in_label_key_and_flags():
    flags = ["--variant.layers=[0,1.5]", "--variant.warmup=0.5"]
    config = read_config(flags, preset="tiny", variant="graded+soft")
    assert config.variant.settings()["layers"] == (0.0, 1.5)
    assert config.variant.label == "graded+soft λ=0.1 warmup=0.5 layers=0,1.5"
    assert config.variant.key == "graded+soft-lam0.1-warmup0.5-layers0_1.5"


def test_a_combination_survives_a_pickle():
    combined = variant("smooth+soft", decay=0.25, lam=0.3)
    assert pickle.loads(pickle.dumps(RunConfig(variant=combined))).variant == combined


def test_a_setting_that_no_part_has_is_refused():
    with pytest.raises(ConfigError, match=r"^variant.gamma: 'smooth\+soft' has no such setting; it has .*lam.*\.$"):
        variant("smooth+soft", gamma=0.1)
