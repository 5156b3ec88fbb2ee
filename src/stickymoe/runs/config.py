"""`RunConfig`: everything that decides a run, the same object from Python, YAML and flags."""

import dataclasses
import math
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from stickymoe.errors import ConfigError, require, shown
from stickymoe.variants import Phase, Variant, hypers, variant
from stickymoe.variants.vanilla import Vanilla

# Renamed hyper-parameters: earlier name → current name. Old flags, YAML files and records keep working, and run ids
# are still computed from the earlier names.
RENAMED = {"kin": "shared_gradient", "apart": "untie_after", "rise": "anneal"}


def current_names(variant: dict[str, Any]) -> dict[str, Any]:
    """The settings of a variant under their current names."""
    return {RENAMED.get(name, name): value for name, value in variant.items()}


def earlier_names(variant: dict[str, Any]) -> dict[str, Any]:
    """The settings of a variant under the names that run ids are computed from."""
    earlier = {current: name for name, current in RENAMED.items()}
    return {earlier.get(name, name): value for name, value in variant.items()}


@dataclass(frozen=True)
class DataConfig:
    """The text and its tokens.

    Args:
        corpus: factbook (embedded), wikitext-2 (from the hub), or a name with a slash, which datasets streams:
            NAME or NAME:SUBSET on the hub, or a folder
        path: a folder of text to read instead of a named corpus
        tokenizer: gpt2, or bpe to train one on the corpus
        vocab_size: size of the trained vocabulary (bpe only)
        limit: documents to read from the train split of a streamed corpus; 0 for all
        fraction: fraction of the training tokens to use, from the start
        documents: keep losses, router state and attention inside documents
        cache_dir: where token files are kept; by default the user's cache folder
    """

    corpus: str = "factbook"
    path: str | None = None
    tokenizer: Literal["gpt2", "bpe"] = "bpe"
    vocab_size: int = 4096
    limit: int = 0
    fraction: float = 1.0
    documents: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        require(self.vocab_size >= 257, "data.vocab_size", self.vocab_size, "at least 257 (256 bytes and a merge)")
        require(self.limit >= 0, "data.limit", self.limit, "a whole number ≥ 0")
        require(0 < self.fraction <= 1, "data.fraction", self.fraction, "a fraction in (0, 1]")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Args:
        d_model: width of the residual stream
        n_layers: number of layers L
        n_heads: attention heads
        n_experts: experts per layer N
        top_k: experts per token k
        d_ff: width of one expert
        seq_len: tokens per sequence T
        share_block: number of adjacent layers that share one set of experts; 1 for no sharing
        universal: one pool of n_experts × n_layers experts for all layers
    """

    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_experts: int = 4
    top_k: int = 2
    d_ff: int = 512
    seq_len: int = 256
    share_block: int = 1
    universal: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            require(f.type is bool or value >= 1, f"model.{f.name}", value, "a whole number ≥ 1")
        require(self.top_k <= self.n_experts, "model.top_k", self.top_k, f"at most n_experts={self.n_experts}")
        require(
            self.d_model % self.n_heads == 0,
            "model.n_heads",
            self.n_heads,
            f"a divisor of d_model={self.d_model}",
        )
        require(
            self.n_layers % self.share_block == 0,
            "model.share_block",
            self.share_block,
            f"a divisor of n_layers={self.n_layers}",
        )
        require(not self.universal or self.share_block == 1, "model.share_block", self.share_block, "1 if universal")

    @property
    def pool_size(self) -> int:
        """Experts that a router chooses from."""
        return self.n_experts * self.n_layers if self.universal else self.n_experts

    @property
    def layers_per_pool(self) -> int:
        """Number of adjacent layers that use the same expert weights."""
        return self.n_layers if self.universal else self.share_block


@dataclass(frozen=True)
class TrainConfig:
    """The training protocol.

    Args:
        steps: optimiser steps
        batch_size: sequences per step, over all processes and micro-batches
        accumulate: micro-batches per step
        lr: peak learning rate
        final_lr: learning rate at the end, as a fraction of the peak
        warmup: steps of linear warm-up
        beta1: AdamW β₁
        beta2: AdamW β₂
        weight_decay: weight decay of matrices and embeddings
        clip: maximum global gradient norm
        precision: fp32 or bf16
        log_every: steps between lines of metrics.jsonl
        eval_every: steps between evaluations
        checkpoint_every: steps between checkpoints
    """

    steps: int = 10_000
    batch_size: int = 16
    accumulate: int = 1
    lr: float = 3e-4
    final_lr: float = 0.1
    warmup: int = 500
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    log_every: int = 10
    eval_every: int = 1000
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "a whole number ≥ 1")
        require(self.warmup >= 0, "train.warmup", self.warmup, "a whole number ≥ 0")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"train.{name}", value, "a finite number > 0")
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            "train.weight_decay",
            self.weight_decay,
            "a finite number ≥ 0",
        )
        require(0 <= self.final_lr <= 1, "train.final_lr", self.final_lr, "a fraction in [0, 1]")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train.{name}", value, "a number in [0, 1)")
        require(
            self.batch_size % self.accumulate == 0,
            "train.accumulate",
            self.accumulate,
            f"a divisor of batch_size={self.batch_size}",
        )


@dataclass(frozen=True)
class EvalConfig:
    """How a model is evaluated.

    Args:
        batch_size: sequences per forward pass
        capacities: slots per layer for the hit rates of all k experts
    """

    batch_size: int = 16
    capacities: tuple[int, ...] = (2, 3)

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "eval.batch_size", self.batch_size, "a whole number ≥ 1")
        ok = len(self.capacities) > 0 and all(c >= 1 for c in self.capacities)
        require(ok, "eval.capacities", self.capacities, "one or more whole numbers ≥ 1")


@dataclass(frozen=True)
class RunConfig:
    """The config of one run.

    Args:
        data: the text and its tokens
        model: sizes of the model
        variant: the method
        train: the training protocol
        eval: how the model is evaluated
        seed: fixes the initial weights and the order of the text
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    variant: Variant = field(default_factory=Vanilla)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 42

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "seed", self.seed, "a whole number in [0, 2³²)")
        sizes = {"n_layers": self.model.n_layers, "n_experts": self.model.pool_size, "top_k": self.model.top_k}
        self.variant.require_fit(**sizes)

    def steps_of(self, phase: Phase) -> int:
        return max(round(phase.share * self.train.steps), 1)

    @property
    def total_steps(self) -> int:
        """Steps of all phases of the variant."""
        return sum(self.steps_of(phase) for phase in self.variant.phases())

    def as_dict(self) -> dict[str, Any]:
        """Plain nested settings; `from_dict` is the inverse."""
        hyper = {k: list(v) if isinstance(v, tuple) else v for k, v in self.variant.settings().items()}
        return {
            "data": dataclasses.asdict(self.data),
            "model": dataclasses.asdict(self.model),
            "variant": {"name": self.variant.name, **hyper},
            "train": dataclasses.asdict(self.train),
            "eval": {**dataclasses.asdict(self.eval), "capacities": list(self.eval.capacities)},
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """From complete settings: a parsed command line or `as_dict`, also of earlier versions."""
        sections = {name: kind(**_checked(values, name, _types(kind))) for name, kind in SECTIONS.items()}
        named = current_names(_mapping(values, "variant"))
        name = named.get("name")
        require(isinstance(name, str), "variant.name", name, "the name of a variant")
        types = {"name": str} | {key: hyper.type for key, hyper in hypers(str(name)).items()}
        chosen = variant(**_checked({"variant": named}, "variant", types))
        seed: Any = values.get("seed")
        require(type(seed) is int, "seed", seed, "int")
        return cls(**sections, variant=chosen, seed=seed)


SECTIONS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig}


def _mapping(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: got {shown(section)}, expected settings such as '{name}: {{name: value}}'.")
    return section


def _types(kind: Any) -> dict[str, Any]:
    return {f.name: f.type for f in dataclasses.fields(kind)}


def _checked(values: dict[str, Any], name: str, types: dict[str, Any]) -> dict[str, Any]:
    """The settings of a section, each known and of its type."""
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in _mapping(values, name).items()}
    for key, value in settings.items():
        require(key in types, f"{name}.{key}", value, f"one of {', '.join(types)}")
        expected = getattr(types[key], "__name__", str(types[key]))
        require(_has_type(value, types[key]), f"{name}.{key}", value, expected)
    return settings


def _has_type(value: Any, expected: Any) -> bool:
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if get_origin(expected) is UnionType:
        return any(_has_type(value, kind) for kind in get_args(expected))
    if get_origin(expected) is tuple:
        return isinstance(value, tuple) and all(_has_type(item, get_args(expected)[0]) for item in value)
    return type(value) in ((int, float) if expected is float else (expected,))
