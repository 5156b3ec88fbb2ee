"""What every variant promises. A new file in `variants/` is held to it with no edit here."""

import contextlib
import dataclasses
import json
import re
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import ClassVar

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stickymoe.cli import main
from stickymoe.errors import ConfigError
from stickymoe.models.gpt import DecodeCache
from stickymoe.routing.losses import LossContext
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.settings import read_config
from stickymoe.training.build import build_model
from stickymoe.variants import base, hyper, register, variant_class, variant_names
from stickymoe.variants.base import Routed

every_variant = pytest.mark.parametrize("name", variant_names())
FIELDS = [(name, f) for name in variant_names() for f in dataclasses.fields(variant_class(name))]
NUMBERS = [(n, f) for n, f in FIELDS if isinstance(f.default, int | float) and not isinstance(f.default, bool)]


def over(fields):
    return pytest.mark.parametrize(("name", "field"), fields, ids=[f"{name}.{f.name}" for name, f in fields])


every_field, every_number = over(FIELDS), over(NUMBERS)
every_main = over([(name, f) for name, f in FIELDS if f.metadata.get("always")])
PAPER = {"dense", "hard_window", "oracle", "remoe", "soft", "soft_hard", "vanilla"}
VOCAB = 31
SIZES = ModelConfig(d_model=16, n_layers=3, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)
LOGGED_BESIDE_TERMS = {"loss", "ce", "switch_rate", "grad_norm"}


def config_of(name: str, **settings) -> RunConfig:
    return RunConfig(model=SIZES, variant=variant_class(name)(**settings))


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
        assert not any(phase.terms for phase in variant_class(name)().phases()), "terms need routing"
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
    variant = variant_class(name)()
    doc = (torch.arange(SIZES.seq_len) // 7).expand(4, -1) if documents else None
    for phase in variant.phases():
        model = build_model(config_of(name), VOCAB)
        out = model(tokens_for(0), tokens_for(1), doc=doc)
        loss = out.loss
        for term in phase.terms:
            value = term.fn(out.trace, LossContext())
            assert value.shape in ((), (SIZES.n_layers,))
            assert value.isfinite().all(), f"{phase.name}: {term.symbol}"
            assert value.requires_grad, f"{phase.name}: {term.symbol} trains nothing"
            loss = loss + (term.weight * value).mean()
        assert loss.isfinite()
        loss.backward()
        for weight, p in model.named_parameters():
            assert p.grad is not None, f"{phase.name}: no gradient for {weight}"
            assert p.grad.isfinite().all(), f"{phase.name}: {weight}"
            assert p.grad.abs().max() > 0, f"{phase.name}: zero gradient for {weight}"


@every_variant
def test_every_term_reaches_every_gate_alone(name):
    """A term that is cut off from the routers of some layer would train nothing there."""
    variant = variant_class(name)()
    for phase in variant.phases():
        for term in phase.terms:
            model = build_model(config_of(name), VOCAB)
            term.fn(model(tokens_for(0)).trace, LossContext()).mean().backward()
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
    for phase in variant_class(name)().phases():
        for term in phase.terms:
            loss = loss + (term.weight * term.fn(out.trace, LossContext())).mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


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


# Words and phases


@every_variant
def test_label_and_equation_say_something(name):
    variant = variant_class(name)()
    assert variant.name == name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "a name is a flag and part of a folder's name"
    assert variant.label.split()[0] == name
    assert "L" in variant.equation
    assert variant_class(name).__doc__.strip()


@every_field
def test_label_and_key_tell_every_departure_from_the_default(name, field):
    cls = variant_class(name)
    departures = {
        bool: lambda on: not on,
        int: lambda n: n + 1,
        float: lambda x: (x or 1) / 2,
        tuple: lambda _: (0.5, 1),
    }
    other = cls(**{field.name: departures[type(field.default)](field.default)})
    assert other.label != cls().label
    assert other.key != cls().key
    assert field.metadata.get("symbol", field.name) in other.label
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", other.key), "a key is part of a file name"


@every_main
def test_labels_and_keys_tell_the_main_hyper_parameters(name, field):
    variant = variant_class(name)()
    in_label = f"{field.metadata['symbol']}={field.default:g}" in variant.label.split()
    assert in_label != field.metadata["minor"]
    assert f"{field.name}{field.default:g}" in variant.key.split("-")


def test_labels_are_distinct():
    labels = [variant_class(name)().label for name in variant_names()]
    assert len(set(labels)) == len(labels)


@every_variant
def test_phases(name):
    phases = variant_class(name)().phases()
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


@every_field
def test_every_hyper_parameter_is_explained(name, field):
    """`train --help` takes the words from the docstring."""
    assert re.search(rf"^\s+{field.name}: \S", variant_class(name).__doc__, re.MULTILINE)


# Configuration


@every_variant
def test_config_round_trip(name):
    config = config_of(name)
    assert RunConfig.from_dict(config.as_dict()) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


LIMITS = {
    "capacity": (SIZES.top_k, SIZES.n_experts),
    "slots": (SIZES.top_k, SIZES.n_experts),
    "groups": (1, SIZES.n_experts),
    "pinned": (1, SIZES.top_k - 1),
    "free": (0, 0.5),
    "rise": (0, 0.5),
}


@st.composite
def settings_of(draw, cls):
    """Hyper-parameters that the variant takes with a model of these SIZES, each another than its default."""
    values = {}
    for f in dataclasses.fields(cls):
        if isinstance(f.default, bool):
            values[f.name] = not f.default
        elif isinstance(f.default, int):
            least, most = LIMITS.get(f.name, (1, 64))
            values[f.name] = draw(st.integers(least, most))
        elif isinstance(f.default, float):
            values[f.name] = draw(st.floats(1e-12, LIMITS.get(f.name, (0, 0.999))[1], exclude_min=True))
        elif isinstance(f.default, tuple):
            values[f.name] = tuple(draw(st.lists(st.floats(0, 9), min_size=SIZES.n_layers, max_size=SIZES.n_layers)))
    return values


@every_variant
@settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_config_survives_yaml_and_flags(name, tmp_path, data):
    values = data.draw(settings_of(variant_class(name)))
    config = config_of(name, **values)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    from_file = read_config(file=file)
    assert from_file == config
    assert json.dumps(from_file.as_dict()) == json.dumps(config.as_dict()), "the run id hashes this"
    flags = [f"--variant.{key}={list(value) if isinstance(value, tuple) else value}" for key, value in values.items()]
    flags += [f"--model.{key}={value}" for key, value in dataclasses.asdict(SIZES).items()]
    assert read_config(flags, variant=name).variant == config.variant


@every_number
def test_a_whole_number_for_a_fraction_is_the_same_setting(name, field, tmp_path):
    """`1` and `1.0` are one run, so one text of the config."""
    if isinstance(field.default, int):
        with pytest.raises(ConfigError, match=rf"^variant\.{field.name}: got .*1\.5.*, expected .*int.*\.$"):
            read_config([f"--variant.{field.name}=1.5"], variant=name)
        return
    file, texts = tmp_path / "config.yaml", set()
    for written in ("1", "1.0"):
        with contextlib.suppress(ConfigError):  # a few must be below 1
            texts.add(json.dumps(read_config([f"--variant.{field.name}={written}"], variant=name).as_dict()))
            file.write_text(f"variant:\n  name: {name}\n  {field.name}: {written}\n")
            texts.add(json.dumps(read_config(file=file).as_dict()))
    assert len(texts) <= 1


@every_number
@pytest.mark.parametrize("bad", [-1, nan, inf, -inf])
def test_below_zero_and_no_number_are_refused(name, field, bad):
    """From Python, in the field's own type; from flags, whatever was typed."""
    if isinstance(field.default, float) or isfinite(bad):
        value = type(field.default)(bad)
        with pytest.raises(ConfigError, match=rf"^variant\.{field.name}: got {value!r}, expected .+\.$"):
            variant_class(name)(**{field.name: value})
    with pytest.raises(ConfigError, match=rf"^variant\.{field.name}: got .*{bad}.*, expected .+\.$"):
        read_config([f"--variant.{field.name}={bad}"], variant=name)


@every_number
def test_a_word_for_a_number_is_refused_in_one_line(name, field):
    with pytest.raises(ConfigError, match=rf"^variant\.{field.name}: got .*much.*, expected .+\.$"):
        read_config([f"--variant.{field.name}=much"], variant=name)


# Registration


@pytest.fixture
def drifting():
    """A variant of the test's own, as a new file would add it; forgotten afterwards."""

    @register
    @dataclass(frozen=True)
    class Drifting(Routed):
        """Stays near g[t-1] (see [soft]), and drifts.

        Args:
            mu: weight μ of the load-balancing loss
            drift: weight δ of the drift
        """

        name: ClassVar[str] = "drifting"
        equation: ClassVar[str] = "L = L_CE + μ·L_bal + δ·drift[t]"

        drift: float = hyper(0.25, "δ")

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


@every_variant
def test_every_variant_is_listed_with_its_words(name, capsys):
    assert main(["variants"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cls = variant_class(name)
    place = lines.index(f"{name}  {cls.__doc__.strip().splitlines()[0]}")
    assert lines[place + 1].strip() == cls.equation


def test_a_new_variant_is_listed_in_its_own_words(drifting, capsys):
    """Brackets are the author's, not the terminal's."""
    assert main(["variants"]) == 0
    assert "drifting  Stays near g[t-1] (see [soft]), and drifts." in capsys.readouterr().out


def test_a_new_variant_builds_a_model(drifting):
    out = build_model(RunConfig(model=SIZES, variant=drifting()), VOCAB)(tokens_for(0))
    assert out.trace.g.shape[-1] == SIZES.n_experts


def test_a_name_is_taken_once(drifting):
    with pytest.raises(ConfigError, match=r"^Variant 'drifting' is registered twice: .+\.$"):
        register(drifting)
    assert variant_class("drifting") is drifting


def test_a_forgotten_variant_is_unknown():
    assert "drifting" not in variant_names()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("sfot", "Unknown variant 'sfot'. Did you mean 'soft'?"),
        ("soft_hrad", "Unknown variant 'soft_hrad'. Did you mean 'soft_hard'?"),
        ("hardwindow", "Unknown variant 'hardwindow'. Did you mean 'hard_window'?"),
    ],
)
def test_an_unknown_variant_is_told_its_near_names(typed, message, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(f"variant: {typed}\n")
    for read in (lambda: variant_class(typed), lambda: read_config(variant=typed), lambda: read_config(file=file)):
        with pytest.raises(ConfigError) as e:
            read()
        assert str(e.value) == message
    assert main(["train", "--variant", typed]) == 2
    assert capsys.readouterr().err == f"stickymoe: {message}\n"


def test_a_variant_like_no_other_is_told_all_names():
    with pytest.raises(ConfigError, match=r"^Unknown variant 'qqq'\. Known: (\w+, )+\w+\.$") as e:
        variant_class("qqq")
    assert all(name in str(e.value) for name in variant_names())
