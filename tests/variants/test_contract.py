"""What every variant promises. A new file in `variants/` is held to it with no edit here."""

import dataclasses
import json
import re
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import ClassVar, get_origin

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from stickymoe.cli import main
from stickymoe.errors import ConfigError
from stickymoe.models.gpt import DecodeCache
from stickymoe.routing.losses import objective
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model
from stickymoe.variants import base, hyper, hypers, register, variant, variant_class, variant_names
from stickymoe.variants.base import (
    ABOVE_ZERO,
    BELOW_ONE,
    COUNT,
    COUNT_OR_NONE,
    FRACTION,
    SWITCH,
    WEIGHT,
    WEIGHTS,
    Balanced,
    Check,
)

every_variant = pytest.mark.parametrize("name", variant_names())
every_tunable = pytest.mark.parametrize("name", [name for name in variant_names() if hypers(name)])
PAPER = {"dense", "hard_window", "oracle", "remoe", "soft", "soft_hard", "vanilla"}
VOCAB = 31
SIZES = ModelConfig(d_model=16, n_layers=3, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)
LOGGED_BESIDE_TERMS = {"loss", "ce", "switch_rate", "grad_norm"}


def config_of(name: str, **settings) -> RunConfig:
    return RunConfig(model=SIZES, variant=variant(name, **settings))


def tokens_for(seed: int, B: int = 4, T: int = SIZES.seq_len) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def test_the_paper_is_complete():
    assert set(variant_names()) >= PAPER


# Trace and gradients


@every_variant
@pytest.mark.parametrize("documents", [False, True], ids=["flat", "documents"])
def test_shapes_of_the_trace(name, documents):
    model = build_model(config_of(name), VOCAB)
    tokens = tokens_for(0)
    doc = (torch.arange(SIZES.seq_len) // 7).expand(4, -1) if documents else None
    trace = model(tokens, doc=doc).trace
    if trace is None:
        assert not any(phase.terms for phase in variant(name).phases()), "terms need routing"
        return
    L, B, T = SIZES.n_layers, *tokens.shape
    assert trace.g.shape == (L, B, T, SIZES.n_experts)
    assert trace.S.shape == (L, B, T, SIZES.top_k)
    assert trace.g.dtype == torch.float32
    assert (trace.g >= 0).all()
    torch.testing.assert_close(trace.g.sum(-1), torch.ones(L, B, T))
    assert (trace.S[..., 0] != trace.S[..., 1]).all(), "an expert is chosen once"
    weights = torch.tensor(trace.table().weights)
    assert (weights[..., 0] >= weights[..., 1]).all(), "heaviest first"
    torch.testing.assert_close(weights.sum(-1), torch.ones(L, B, T))


@every_variant
@pytest.mark.parametrize("documents", [False, True], ids=["flat", "documents"])
def test_loss_and_gradients_are_finite_and_reach_every_weight(name, documents):
    doc = (torch.arange(SIZES.seq_len) // 7).expand(4, -1) if documents else None
    for phase in variant(name).phases():
        model = build_model(config_of(name), VOCAB)
        out = model(tokens_for(0), tokens_for(1), doc=doc)
        loss = out.loss
        if out.trace is not None:
            terms = objective(out.trace, phase.terms)
            for symbol, value in terms.values.items():
                assert value.isfinite(), f"{phase.name}: {symbol}"
                assert value.requires_grad, f"{phase.name}: {symbol} trains nothing"
            loss = loss + terms.total
        assert loss.isfinite()
        loss.backward()
        for weight, p in model.named_parameters():
            assert p.grad is not None, f"{phase.name}: no gradient for {weight}"
            assert p.grad.to_dense().isfinite().all(), f"{phase.name}: {weight}"
            assert p.grad.to_dense().abs().max() > 0, f"{phase.name}: zero gradient for {weight}"


@every_variant
def test_every_term_reaches_every_gate_alone(name):
    """A term that is cut off from the routers of some layer would train nothing there."""
    for phase in variant(name).phases():
        for term in phase.terms:
            model = build_model(config_of(name), VOCAB)
            objective(model(tokens_for(0)).trace, [term]).values[term.symbol].backward()
            for block in model.blocks:
                grad = block.ffn.router.gate.weight.grad
                assert grad.isfinite().all(), f"{phase.name}: {term.symbol}"
                assert grad.abs().max() > 0, f"{phase.name}: {term.symbol}"


@every_variant
def test_a_step_of_one_token_trains(name):
    """No pair, no window: a term may be zero but not NaN."""
    model = build_model(config_of(name), VOCAB)
    out = model(tokens_for(0, B=1, T=1), tokens_for(1, B=1, T=1))
    loss = out.loss
    for phase in variant(name).phases():
        if out.trace is not None:
            loss = loss + objective(out.trace, phase.terms).total
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.to_dense().isfinite().all() for p in model.parameters())


@every_variant
@pytest.mark.parametrize("documents", [False, True], ids=["flat", "documents"])
def test_decode_equals_prefill(name, documents):
    model = build_model(config_of(name), VOCAB).double()
    with torch.no_grad():
        for block in model.blocks:
            if name != "dense":
                block.ffn.router.gate.weight *= 50  # choices that differ from token to token
        tokens = tokens_for(0, B=2)
        doc = (torch.arange(SIZES.seq_len) // 7).expand(2, -1) if documents else None
        whole = model(tokens, doc=doc)
        cache = DecodeCache.empty(SIZES.n_layers)
        for t in range(SIZES.seq_len):
            part = slice(t, t + 1)
            step = model(tokens[:, part], doc=None if doc is None else doc[:, part], cache=cache)
            torch.testing.assert_close(step.logits, whole.logits[:, part], rtol=0, atol=1e-9)
            if whole.trace is not None:
                assert torch.equal(step.trace.S, whole.trace.S[:, :, part])
                torch.testing.assert_close(step.trace.g, whole.trace.g[:, :, part], rtol=0, atol=1e-9)


# Labels and phases


@every_variant
def test_name_label_and_equation(name):
    chosen = variant(name)
    assert chosen.name == name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "a name is a flag and part of a folder's name"
    assert chosen.label.split()[0] == name
    assert "L" in chosen.equation
    assert variant_class(name).__doc__.strip()


DEPARTURES = {bool: lambda on: not on, int: lambda n: n + 1, float: lambda x: (x or 1) / 2, tuple: lambda _: (0.5, 1)}


@every_tunable
def test_label_and_key_show_every_departure_from_the_default_but_those_of_seeds(name):
    default = variant(name)
    for key, declared in hypers(name).items():
        examples = [value for value in declared.check.examples if value != declared.default]
        departure = examples[0] if examples else DEPARTURES[type(declared.default)](declared.default)
        other = variant(name, **{key: departure})
        if declared.seeded:
            assert (other.label, other.key) == (default.label, default.key)
            continue
        assert other.label != default.label
        assert other.key != default.key
        assert declared.symbol in other.label
        assert re.fullmatch(r"[A-Za-z0-9_.+-]+", other.key), "a key is part of a file name"


@every_tunable
def test_label_and_key_show_the_main_hyper_parameters(name):
    chosen = variant(name)
    for key, declared in hypers(name).items():
        if declared.always:
            in_label = f"{declared.symbol}={base._text(declared.default, ',')}" in chosen.label.split()
            assert in_label != declared.minor
            assert f"{key}{base._text(declared.default, '_')}" in chosen.key.split("-")


def test_labels_are_distinct():
    labels = [variant(name).label for name in variant_names()]
    assert len(set(labels)) == len(labels)


@every_variant
def test_phases(name):
    phases = variant(name).phases()
    assert phases[0].share == 1, "train.steps is the length of the first phase"
    assert phases[0].trains == "all"
    assert len({phase.name for phase in phases}) == len(phases)
    for phase in phases:
        assert phase.share > 0
        assert phase.lr is None or 0 < phase.lr < 1
        symbols = [term.symbol for term in phase.terms]
        assert all(symbols)
        assert len(set(symbols)) == len(symbols), "a symbol is a key of metrics.jsonl"
        assert not set(symbols) & LOGGED_BESIDE_TERMS
        assert all(isfinite(term.weight) and term.weight >= 0 for term in phase.terms)


@every_tunable
def test_help_explains_every_hyper_parameter(name, capsys):
    assert main(["train", "--variant", name, "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for key, declared in hypers(name).items():
        assert f"--variant.{key} " in printed
        assert " ".join(declared.help.split()) in printed


# Checks

CHECKS = {
    "weight": (WEIGHT, [0, 0.0, 1, 2.5, 1e300], [-1, -1e-9, nan, inf, -inf, True, "1", None]),
    "weights": (WEIGHTS, [(), (0.0, 2), [1.5]], [(1.0, -1.0), (nan,), ("1",), 1.0, None]),
    "fraction": (FRACTION, [0, 0.5, 1], [-0.1, 1.1, nan, inf, -inf, False, "0.5"]),
    "below one": (BELOW_ONE, [0, 0.999], [1, 1.0, -0.1, nan, inf]),
    "above zero": (ABOVE_ZERO, [1e-9, 1], [0, 0.0, 1.1, -1, nan, inf]),
    "count": (COUNT, [1, 10**9], [0, -1, 1.0, nan, True, "1", None]),
    "count or none": (COUNT_OR_NONE, [0, 1], [-1, 0.0, False, None]),
    "switch": (SWITCH, [True, False], [0, 1, "true", None]),
}


@pytest.mark.parametrize(("check", "good", "bad"), CHECKS.values(), ids=CHECKS.keys())
def test_a_check_accepts_and_refuses(check, good, bad):
    assert isinstance(check, Check)
    assert all(check.accepts(value) for value in good)
    assert not any(check.accepts(value) for value in bad)
    assert check.expected


@every_tunable
def test_every_hyper_parameter_has_its_check(name):
    """A value that the check refuses is refused by the variant, in one line."""
    refused = {id(check): bad[0] for check, _, bad in CHECKS.values()}
    for key, declared in hypers(name).items():
        assert declared.check.accepts(declared.default)
        value = refused.get(id(declared.check))  # no check accepts None
        with pytest.raises(ConfigError) as e:
            variant(name, **{key: value})
        assert str(e.value) == f"variant.{key}: got {value!r}, expected {declared.check.expected}."


@every_tunable
def test_every_hyper_parameter_has_the_type_of_its_default(name):
    for declared in hypers(name).values():
        assert get_origin(declared.type) is tuple or type(declared.default) is declared.type


# Configuration


@every_variant
def test_config_round_trip(name):
    config = config_of(name)
    assert RunConfig.from_dict(config.as_dict()) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@st.composite
def settings_of(draw, name):
    """Hyper-parameters that the variant accepts with a model of these SIZES."""
    values = {}
    for f in hypers(name).values():
        if f.check.examples:
            values[f.name] = draw(st.sampled_from(f.check.examples))
        elif isinstance(f.default, bool):
            values[f.name] = not f.default
        elif isinstance(f.default, int):
            values[f.name] = f.default + draw(st.integers(0, 1))
        elif isinstance(f.default, float):
            values[f.name] = draw(st.floats(1e-12, 0.999))
        elif isinstance(f.default, tuple):
            values[f.name] = tuple(draw(st.lists(st.floats(0, 9), min_size=SIZES.n_layers, max_size=SIZES.n_layers)))
    try:
        config_of(name, **values)
    except ConfigError:
        reject()
    return values


@every_variant
@settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_config_survives_yaml_and_flags(name, tmp_path, data):
    values = data.draw(settings_of(name))
    config = config_of(name, **values)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    from_file = read_config(file=file)
    assert from_file == config
    assert json.dumps(from_file.as_dict()) == json.dumps(config.as_dict()), "the run id hashes this"
    flags = [f"--variant.{key}={list(value) if isinstance(value, tuple) else value}" for key, value in values.items()]
    flags += [f"--model.{key}={value}" for key, value in dataclasses.asdict(SIZES).items()]
    assert read_config(flags, variant=name).variant == config.variant


def test_a_whole_number_for_a_fraction_is_the_same_setting(tmp_path):
    """`1` and `1.0` are one run, so one text of the config."""
    file, texts = tmp_path / "config.yaml", set()
    for written in ("1", "1.0"):
        texts.add(json.dumps(read_config([f"--variant.lam={written}"], variant="soft").as_dict()))
        file.write_text(f"variant:\n  name: soft\n  lam: {written}\n")
        texts.add(json.dumps(read_config(file=file).as_dict()))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("soft", "lam=-1", "variant.lam: got -1.0, expected a finite number ≥ 0."),
        ("soft", "lam=.nan", "variant.lam: got nan, expected a finite number ≥ 0."),
        ("soft", "lam=much", "variant.lam: got 'much', expected float."),
        ("soft_hard", "window=0", "variant.window: got 0, expected a whole number ≥ 1."),
        ("soft_hard", "window=1.5", "variant.window: got '1.5', expected int."),
        ("soft", "gate_only=perhaps", "variant.gate_only: got 'perhaps', expected bool."),
        ("graded", "layers=[1,-1]", "variant.layers: got (1.0, -1.0), expected a list of finite numbers ≥ 0."),
        ("graded", "layers=much", "variant.layers: got 'much', expected a list such as [2,3]."),
    ],
)
def test_a_bad_flag_is_refused_in_one_line(name, setting, expected):
    with pytest.raises(ConfigError) as e:
        read_config([f"--variant.{setting}"], variant=name)
    assert str(e.value) == expected


# Registration


@pytest.fixture
def drifting():
    """A variant of the test's own, as a new file would add it; removed afterwards."""

    @register
    @dataclass(frozen=True)
    class Drifting(Balanced):
        """Stays near g[t-1] (see [soft]), and drifts."""

        name: ClassVar[str] = "drifting"
        equation: ClassVar[str] = "L = L_CE + μ·L_bal + δ·drift[t]"

        drift: float = hyper(0.25, "δ", "weight δ of the drift", WEIGHT)

    yield Drifting
    del base._REGISTRY["drifting"]


def test_a_new_variant_is_in_the_config(drifting, tmp_path):
    assert read_config(variant="drifting").variant == drifting()
    assert read_config(["--variant.drift=0.5"], variant="drifting").variant == drifting(drift=0.5)
    file = tmp_path / "config.yaml"
    file.write_text("variant:\n  name: drifting\n  drift: 0.75\n")
    assert read_config(file=file).variant == drifting(drift=0.75)
    config = RunConfig(variant=drifting(drift=0.75))
    assert RunConfig.from_dict(config.as_dict()) == config
    assert config.variant.label == "drifting δ=0.75"


def test_a_new_variant_is_on_the_command_line(drifting, capsys):
    assert main(["variants"]) == 0
    out = capsys.readouterr().out
    assert "drifting" in out
    assert "L = L_CE + μ·L_bal + δ·drift[t]" in out
    assert "--variant.mu 0.01 (μ)  --variant.drift 0.25 (δ)" in out
    assert main(["train", "--variant", "drifting", "--variant.drift", "0.5", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["variant"] == {"name": "drifting", "mu": 0.01, "drift": 0.5}
    assert main(["train", "--variant", "drifting", "--help"]) == 0
    assert "weight δ of the drift" in capsys.readouterr().out


def test_every_variant_is_listed_with_its_summary_and_equation(capsys):
    assert main(["variants"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in variant_names():
        cls = variant_class(name)
        place = lines.index(f"{name}  {cls.__doc__.strip().splitlines()[0]}")
        assert lines[place + 1].strip() == cls.equation


def test_brackets_in_the_summary_of_a_variant_are_printed(drifting, capsys):
    assert main(["variants"]) == 0
    assert "drifting  Stays near g[t-1] (see [soft]), and drifts." in capsys.readouterr().out


def test_a_new_variant_builds_a_model(drifting):
    out = build_model(RunConfig(model=SIZES, variant=drifting()), VOCAB)(tokens_for(0))
    assert out.trace.g.shape[-1] == SIZES.n_experts


def test_a_name_is_registered_once(drifting):
    with pytest.raises(ConfigError, match=r"^Variant 'drifting' is registered twice: .+\.$"):
        register(drifting)
    assert variant_class("drifting") is drifting


def test_a_removed_variant_is_unknown():
    assert "drifting" not in variant_names()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("sfot", "Unknown variant 'sfot'. Did you mean 'soft'?"),
        ("soft_hrad", "Unknown variant 'soft_hrad'. Did you mean 'soft_hard'?"),
        ("hardwindow", "Unknown variant 'hardwindow'. Did you mean 'hard_window'?"),
    ],
)
def test_an_unknown_variant_is_refused_with_its_near_names(typed, message, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(f"variant: {typed}\n")
    for read in (lambda: variant_class(typed), lambda: read_config(variant=typed), lambda: read_config(file=file)):
        with pytest.raises(ConfigError) as e:
            read()
        assert str(e.value) == message
    assert main(["train", "--variant", typed]) == 2
    assert capsys.readouterr().err == f"stickymoe: {message}\n"


def test_a_variant_like_no_other_is_refused_with_all_names():
    with pytest.raises(ConfigError, match=r"^Unknown variant 'qqq'\. Known: (\w+, )+\w+\.$") as e:
        variant_class("qqq")
    assert all(name in str(e.value) for name in variant_names())
