"""What a variant is: a router, the loss terms trained with it, and the phases of its training.

A variant is data. Its hyper-parameters are dataclass fields, so flags, YAML, sweep keys and report labels come from
one place. Torch is imported only inside the factories, and annotations are not postponed, since resolving those would
import it too: listing variants and parsing flags stay instant.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stickymoe.errors import ConfigError, require, unknown
from stickymoe.routing.families import Families

if TYPE_CHECKING:
    from torch import Tensor

    from stickymoe.routing.losses import LossContext
    from stickymoe.routing.routers import Choice, Filter, Router, Source
    from stickymoe.routing.trace import RoutingTrace


@dataclass(frozen=True)
class RouterSite:
    """Where a router sits, and the sizes it is built for."""

    layer: int
    d_model: int
    n_experts: int
    top_k: int


@dataclass(frozen=True)
class Term:
    """One summand `weight · fn(trace, context)` of the training loss.

    `fn` answers one value per layer, whose mean counts, or a scalar. `layers` are factors on the layers' values, if
    there are such; the weight rises to its full size over the share `warmup` of the phase.
    """

    symbol: str
    weight: float
    fn: "Callable[[RoutingTrace, LossContext], Tensor]"
    layers: tuple[float, ...] = ()
    warmup: float = 0.0

    def weighed(self, value: "Tensor", done: float = 1.0) -> "Tensor":
        """The summand of `value` = fn(…), when the share `done` of the phase is over."""
        if self.layers and value.ndim:
            value = value * value.new_tensor(self.layers)
        rise = min(done / self.warmup, 1.0) if self.warmup else 1.0
        return (rise * self.weight * value).mean()


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own optimiser.

    `share` is its length as a fraction of `train.steps`; `lr` is a constant learning rate, or None for the schedule
    of the protocol (warm-up, then cosine).
    """

    name: str
    terms: tuple[Term, ...]
    share: float = 1.0
    trains: Literal["all", "gates"] = "all"
    lr: float | None = None


def hyper(default: Any, symbol: str, *, always: bool = True, minor: bool = False) -> Any:
    """A hyper-parameter with its symbol, the paper's if it has one: shown always, or if it is not the default.

    A `minor` one is always in file names, and in labels if it is not the default.
    """
    return dataclasses.field(default=default, metadata={"symbol": symbol, "always": always, "minor": minor})


@dataclass(frozen=True)
class Variant:
    """Base of all variants: a name, an equation, and what follows from the hyper-parameters of a subclass."""

    name: ClassVar[str]
    equation: ClassVar[str]
    acts_on_terms: ClassVar[bool] = False  # whether `terms` changes those of the variants it is combined with

    def __post_init__(self) -> None:
        """Refuse values that cannot be used."""

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        """Refuse values that cannot be used with a model of these sizes."""

    def router(self, site: RouterSite) -> "Router | None":
        """The router of one layer; None stands for a dense layer of the same active width."""
        return None

    def terms(self) -> tuple[Term, ...]:
        """The loss terms beside cross-entropy."""
        return ()

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", self.terms()),)

    @property
    def families(self) -> Families | None:
        """Which experts begin as one, if any."""
        return None

    @property
    def first_phase_is(self) -> "Variant | None":
        """The variant whose whole training is this one's first phase, so that it need not be done twice."""
        return None

    @property
    def label(self) -> str:
        """`soft λ=0.1`: the name and the hyper-parameters under the paper's symbols; a switch shows when it is on."""
        parts = [self.name]
        for f, value in self.shown():
            if f.metadata.get("minor") and value == f.default:
                continue
            symbol = f.metadata.get("symbol", f.name)
            parts.append(symbol if isinstance(value, bool) else f"{symbol}={_text(value, ',')}")
        return " ".join(parts)

    @property
    def key(self) -> str:
        """`soft-lam0.1`: the label in plain letters, for file names."""
        return "-".join([self.name, *(f"{f.name}{_text(value, '_')}" for f, value in self.shown())])

    def shown(self) -> list[tuple[dataclasses.Field[Any], Any]]:
        """The hyper-parameters that tell this variant from its kin, with their fields."""
        values = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return [(f, value) for f, value in values if f.metadata.get("always") or value != f.default]


def _text(value: float | tuple[float, ...], comma: str) -> str:
    """Short where that says it all: two settings never read the same."""
    if isinstance(value, tuple):
        return comma.join(_text(x, comma) for x in value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


@dataclass(frozen=True)
class Gated(Variant):
    """A mixture of experts whose router is made of parts: each None is the standard one, unless a subclass differs."""

    def source(self, site: RouterSite) -> "Source | None":
        """What the gate reads."""
        return None

    def filter(self, site: RouterSite) -> "Filter | None":
        """What becomes of the gate's logits."""
        return None

    def choice(self, site: RouterSite) -> "Choice | None":
        """How the logits become experts."""
        return None

    def gates_alone(self) -> bool:
        """Whether a term asks for gates whose gradient reaches no hidden state."""
        return False

    def router(self, site: RouterSite) -> "Router":
        from stickymoe.routing.routers import Router

        return Router(
            site.d_model,
            site.n_experts,
            site.top_k,
            source=self.source(site),
            filter=self.filter(site),
            choice=self.choice(site),
            gate_only=self.gates_alone(),
        )


@dataclass(frozen=True)
class Routed(Gated):
    """A mixture of experts with the load-balancing loss.

    Args:
        mu: weight μ of the load-balancing loss
    """

    mu: float = hyper(0.01, "μ", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("mu", self.mu)

    def balance(self) -> Term:
        """What keeps experts in use."""
        from stickymoe.routing.losses import balance_by_layer

        return Term("bal", self.mu, lambda trace, ctx: balance_by_layer(trace, load=ctx.load))

    def terms(self) -> tuple[Term, ...]:
        return (*super().terms(), self.balance())


def require_weight(key: str, value: float) -> None:
    ok = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    require(ok, f"variant.{key}", value, "a finite number ≥ 0")


def require_window(key: str, value: int) -> None:
    require(type(value) is int and value >= 1, f"variant.{key}", value, "a whole number ≥ 1")


def require_slots(key: str, value: int, *, n_experts: int, top_k: int) -> None:
    """A cache that holds the experts of a token, and no more than there are."""
    require(value >= top_k, f"variant.{key}", value, f"at least the {top_k} experts of a token")
    require(value <= n_experts, f"variant.{key}", value, f"at most the {n_experts} experts there are to choose from")


def require_share(key: str, value: float, *, below_one: bool = False) -> None:
    ok = isinstance(value, int | float) and 0 <= value <= 1 and not (below_one and value == 1)
    require(ok, f"variant.{key}", value, f"a number in [0, 1{')' if below_one else ']'}")


_REGISTRY: dict[str, type[Variant]] = {}


def register(cls: type[Variant]) -> type[Variant]:
    """Make a variant known under its `name`; a name can be taken once."""
    if cls.name in _REGISTRY:
        raise ConfigError(f"Variant '{cls.name}' is registered twice: {_REGISTRY[cls.name]} and {cls}.")
    _REGISTRY[cls.name] = cls
    return cls


def variant_class(name: str) -> type[Variant]:
    """The variant of that name; `smooth+soft` has the parts, terms and hyper-parameters of both."""
    if "+" in name:
        from stickymoe.variants.compose import combined

        return combined(tuple(sorted(name.split("+"))))
    if name not in _REGISTRY:
        raise ConfigError(unknown("variant", name, _REGISTRY))
    return _REGISTRY[name]


def variant_names() -> tuple[str, ...]:
    """Vanilla, then the others by name."""
    return tuple(sorted(_REGISTRY, key=lambda name: (name != "vanilla", name)))
