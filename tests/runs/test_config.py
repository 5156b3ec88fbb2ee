"""Which settings make a run, which are refused, and which name it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stickymoe.errors import ConfigError
from stickymoe.runs.config import DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig
from stickymoe.runs.folder import run_id
from stickymoe.runs.presets import PRESETS
from stickymoe.runs.settings import read_config
from stickymoe.variants import hypers, variant, variant_names

# What YAML can write; a path with a control character is not worth a test.
names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=5)
weights = st.floats(0, 1e6, allow_nan=False)
fractions = st.floats(0.001, 0.999)
BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    float: fractions,
    int: st.integers(1, 64),
    bool: st.booleans(),
    str: st.sampled_from(["lru", "lfu"]),  # the only text is a cache policy
}


@st.composite
def variant_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Any variant, with any of its numbers and switches; whatever else it has stays as it is."""
    name = draw(st.sampled_from(variant_names()))
    drawn = {
        key: draw(BY_TYPE[declared.type]) if declared.type in BY_TYPE else list(declared.default)  # one per layer
        for key, declared in hypers(name).items()
    }
    return {"name": name} | drawn


@st.composite
def run_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that make a config. Not the config itself: the type checks draw lots, which strategies must not."""
    n_experts, n_heads = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    accumulate = draw(st.integers(1, 3))
    plain = {
        section: {f.name: f.default for f in dataclasses.fields(cls)}
        for section, cls in (("data", DataConfig), ("model", ModelConfig), ("train", TrainConfig), ("eval", EvalConfig))
    }
    plain["data"] |= {
        "corpus": draw(names),
        "path": draw(st.none() | names),
        "tokenizer": draw(st.sampled_from(["gpt2", "bpe"])),
        "vocab_size": draw(st.integers(257, 60_000)),
        "documents": draw(st.booleans()),
    }
    plain["model"] |= {
        "d_model": n_heads * draw(st.integers(1, 64)),
        "n_heads": n_heads,
        "n_experts": n_experts,
        "top_k": draw(st.integers(1, n_experts)),
    }
    plain["train"] |= {
        "steps": draw(st.integers(1, 10**6)),
        "batch_size": accumulate * draw(st.integers(1, 16)),
        "accumulate": accumulate,
        "lr": draw(fractions),
        "weight_decay": draw(weights),
        "precision": draw(st.sampled_from(["fp32", "bf16"])),
    }
    plain["eval"]["capacities"] = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chosen = draw(variant_settings())
    top_k = plain["model"]["top_k"]
    for slots in {"capacity", "slots"} & set(chosen):
        chosen[slots] = min(max(chosen[slots], top_k), n_experts)
    if "pinned" in chosen:
        chosen["pinned"] = min(chosen["pinned"], chosen["capacity"] - 1)
    if "anneal" in chosen:
        chosen["anneal"] = min(chosen["anneal"], 1 - chosen["free"])
    if "groups" in chosen:
        chosen["groups"] = min(chosen["groups"], n_experts)
    return {**plain, "variant": chosen, "seed": draw(st.integers(0, 2**32 - 1))}


class TestRoundTrip:
    @given(run_settings())
    def test_through_a_dict(self, settings: dict[str, Any]) -> None:
        config = RunConfig.from_dict(settings)
        assert config.as_dict() == settings
        assert RunConfig.from_dict(config.as_dict()) == config

    @given(run_settings())
    def test_through_json_and_yaml(self, settings: dict[str, Any]) -> None:
        config = RunConfig.from_dict(settings)
        plain = config.as_dict()
        assert RunConfig.from_dict(json.loads(json.dumps(plain))) == config
        assert RunConfig.from_dict(yaml.safe_load(yaml.safe_dump(plain, allow_unicode=True))) == config

    def test_a_dict_is_no_part_of_the_config(self) -> None:
        config = RunConfig()
        config.as_dict()["eval"]["capacities"].append(7)
        config.as_dict()["train"]["steps"] = 1
        assert config == RunConfig()


class TestValidation:
    @pytest.mark.parametrize(
        ("section", "settings", "message"),
        [
            (ModelConfig, {"top_k": 5, "n_experts": 4}, "model.top_k: got 5, expected at most n_experts=4."),
            (ModelConfig, {"top_k": 0}, "model.top_k: got 0, expected a whole number ≥ 1."),
            (ModelConfig, {"d_model": 10, "n_heads": 4}, "model.n_heads: got 4, expected a divisor of d_model=10."),
            (ModelConfig, {"seq_len": 0}, "model.seq_len: got 0"),
            (ModelConfig, {"n_layers": -1}, "model.n_layers: got -1"),
            (TrainConfig, {"steps": 0}, "train.steps: got 0, expected a whole number ≥ 1."),
            (TrainConfig, {"batch_size": 6, "accumulate": 4}, "train.accumulate: got 4, expected a divisor of"),
            (TrainConfig, {"warmup": -1}, "train.warmup: got -1"),
            (TrainConfig, {"lr": 0.0}, "train.lr: got 0.0"),
            (TrainConfig, {"lr": math.nan}, "train.lr: got nan"),
            (TrainConfig, {"lr": math.inf}, "train.lr: got inf"),
            (TrainConfig, {"clip": -1.0}, "train.clip: got -1.0"),
            (TrainConfig, {"weight_decay": math.nan}, "train.weight_decay: got nan"),
            (TrainConfig, {"weight_decay": -0.1}, "train.weight_decay: got -0.1"),
            (TrainConfig, {"final_lr": 1.1}, "train.final_lr: got 1.1"),
            (TrainConfig, {"final_lr": math.nan}, "train.final_lr: got nan"),
            (TrainConfig, {"beta1": 1.0}, "train.beta1: got 1.0"),
            (TrainConfig, {"beta2": math.nan}, "train.beta2: got nan"),
            (TrainConfig, {"checkpoint_every": 0}, "train.checkpoint_every: got 0"),
            (DataConfig, {"vocab_size": 256}, "data.vocab_size: got 256, expected at least 257"),
            (EvalConfig, {"batch_size": 0}, "eval.batch_size: got 0"),
            (EvalConfig, {"capacities": ()}, "eval.capacities: got ()"),
            (EvalConfig, {"capacities": (2, 0)}, "eval.capacities: got (2, 0)"),
            (RunConfig, {"seed": -1}, "seed: got -1"),
            (RunConfig, {"seed": 2**32}, "seed: got 4294967296"),
        ],
    )
    def test_names_key_given_and_expected(self, section: Any, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            section(**settings)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_preset_is_a_config_of_every_variant(self, preset: str) -> None:
        config = read_config(preset=preset)
        for name in variant_names():
            other = replace(config, variant=variant(name))
            assert RunConfig.from_dict(other.as_dict()) == other
        assert read_config(preset=preset, variant="soft") == replace(config, variant=variant("soft"))


class TestPresets:
    def test_papers(self) -> None:
        small, medium = (read_config(preset=f"paper-{size}") for size in ("small", "medium"))
        assert (small.data.corpus, small.data.tokenizer) == ("wikitext-2", "gpt2")
        train = small.train
        assert (train.steps, train.warmup, train.lr, train.final_lr) == (10_000, 500, 3e-4, 0.1)
        assert (train.beta1, train.beta2, train.weight_decay, train.clip) == (0.9, 0.95, 0.1, 1.0)
        assert (train.batch_size, small.model.seq_len, small.seed) == (16, 256, 42)
        assert medium.train == train
        assert (medium.model.d_model, medium.model.d_ff) == (256, 1024)
        assert not small.data.documents

    def test_cpu(self) -> None:
        for size in ("small", "medium"):
            cpu, paper = read_config(preset=f"cpu-{size}"), read_config(preset=f"paper-{size}")
            assert cpu.model == paper.model
            assert (cpu.data.corpus, cpu.data.tokenizer, cpu.data.vocab_size) == ("wikitext-2", "bpe", 4096)
            assert (cpu.train.steps, cpu.train.warmup) == (1000, 50)
            assert not cpu.data.documents


class TestRunId:
    base = RunConfig()

    def id(self, config: RunConfig, data: str = "tokens") -> str:
        return run_id(config, data)

    @pytest.mark.parametrize(
        "other",
        [
            replace(base, data=replace(base.data, path="/elsewhere")),
            replace(base, data=replace(base.data, corpus="wikitext-2")),
            replace(base, data=replace(base.data, cache_dir="/cache")),
            replace(base, train=replace(base.train, checkpoint_every=7)),
        ],
    )
    def test_ignores_where_a_run_is_and_how_often_it_is_saved(self, other: RunConfig) -> None:
        assert self.id(other) == self.id(self.base)

    def test_differs_for_whatever_changes_the_numbers(self) -> None:
        others = [
            replace(self.base, seed=43),
            replace(self.base, variant=variant("soft")),
            replace(self.base, variant=variant("soft", lam=0.2)),
            replace(self.base, variant=variant("vanilla", mu=0.02)),
            replace(self.base, data=replace(self.base.data, documents=True)),
            replace(self.base, model=replace(self.base.model, top_k=1)),
            replace(self.base, train=replace(self.base.train, steps=9_999)),
            replace(self.base, train=replace(self.base.train, lr=1e-4)),
            replace(self.base, train=replace(self.base.train, accumulate=2)),
            replace(self.base, train=replace(self.base.train, precision="bf16")),
            replace(self.base, train=replace(self.base.train, eval_every=500)),
            replace(self.base, train=replace(self.base.train, log_every=5)),
            replace(self.base, eval=EvalConfig(capacities=(2,))),
        ]
        ids = [self.id(config) for config in [self.base, *others]]
        assert len(set(ids)) == len(ids)
        assert self.id(self.base, "other tokens") not in ids

    def test_of_soft_without_weight_is_not_vanillas(self) -> None:
        """The same numbers, yet another row of the table."""
        soft = replace(self.base, variant=variant("soft", lam=0.0))
        assert self.id(soft) != self.id(self.base)

    def test_changes_where_hashed_slots_came_to_follow_their_size(self) -> None:
        """Ids of earlier versions: equal slots keep theirs, since they keep their numbers."""
        before = {2: "86446f579602f61c", 3: "68ac924aa7875ef5", 4: "b17a08376d1528be"}
        now = {
            slots: self.id(replace(self.base, variant=variant("siblings", capacity=slots, hashed=True)))
            for slots in before
        }
        assert [slots for slots in before if now[slots] != before[slots]] == [3]
        pool = replace(self.base.model, universal=True)  # of 16, in 6 slots or 8
        chosen = [variant("siblings", capacity=C, hashed=True) for C in (6, 8)]
        ids = [self.id(replace(self.base, model=pool, variant=one)) for one in chosen]
        assert ids[0] != "9836af79bf7b6475"
        assert ids[1] == "4240cc19ac432552"

    def test_of_a_hash_changes_with_its_salt_alone(self) -> None:
        """Ids of earlier versions, which had no salt."""
        hashed = [replace(self.base, variant=variant("hash", salt=salt)) for salt in (0, 1)]
        assert self.id(hashed[0]) == "55cb85214873a7c2"
        assert self.id(hashed[1]) != "55cb85214873a7c2"

    @given(run_settings())
    def test_survives_the_disk(self, settings: dict[str, Any]) -> None:
        config = RunConfig.from_dict(settings)
        again = RunConfig.from_dict(json.loads(json.dumps(config.as_dict())))
        assert self.id(again) == self.id(config)
        assert re.fullmatch(r"[0-9a-f]{16}", self.id(config))


def test_the_order_of_combined_names_keeps_a_files_settings(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("variant: {name: smooth+soft, decay: 0.9, lam: 0.7}\n")
    assert read_config(variant="soft+smooth", file=file) == read_config(file=file)


class TestRenamedSettings:
    """Old flags, files and records keep working, and run ids are computed from the earlier names."""

    OLD: ClassVar[dict[str, dict[str, Any]]] = {
        "siblings": {"kin": 0.5, "apart": 0.25},
        "residency": {"free": 0.25, "rise": 0.5},
    }
    NEW: ClassVar[dict[str, dict[str, Any]]] = {
        "siblings": {"shared_gradient": 0.5, "untie_after": 0.25},
        "residency": {"free": 0.25, "anneal": 0.5},
    }

    @pytest.mark.parametrize("name", OLD)
    def test_from_flags_files_and_records(self, name: str, tmp_path: Path) -> None:
        expected = RunConfig(variant=variant(name, **self.NEW[name]))
        flags = [f"--variant.{key}={value}" for key, value in self.OLD[name].items()]
        assert read_config(flags, variant=name) == expected
        assert read_config([part for flag in flags for part in flag.split("=")], variant=name) == expected
        file = tmp_path / "old.yaml"
        file.write_text(yaml.safe_dump({"variant": {"name": name, **self.OLD[name]}}))
        assert read_config(file=file) == expected
        recorded = expected.as_dict()
        recorded["variant"] = {"name": name, **variant(name).settings(), **self.OLD[name]}
        for new in self.NEW[name].keys() - self.OLD[name].keys():
            del recorded["variant"][new]
        assert RunConfig.from_dict(recorded) == expected

    def test_keep_their_run_ids(self) -> None:
        """Ids of runs that earlier versions made."""
        ids = {name: run_id(RunConfig(variant=variant(name, **self.NEW[name])), "data") for name in self.NEW}
        assert ids == {"siblings": "d27b4230feec2749", "residency": "02989c8b690c156d"}
