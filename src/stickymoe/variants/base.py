"""What a variant is: parts of a router, the loss terms trained with it, and the phases of its training.

A variant is data. Its hyper-parameters are dataclass fields that carry their symbol, help and check, so flags, YAML,
sweep keys and report labels come from one place. Torch is imported only inside the methods that build parts: listing
variants and parsing flags stay instant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from stickymoe.errors import ConfigError, require, unknown
from stickymoe.routing.deltas import Deltas
from stickymoe.routing.terms import Term
from stickymoe.routing.ties import TiedExperts

if TYPE_CHECKING:
    from stickymoe.routing.layer import LayerParts, SidePart
    from stickymoe.routing.rules import Choice, Filter, Skip


@dataclass(frozen=True)
class Site:
    """The layer that parts are built for, and its sizes."""

    layer: int
    d_model: int
    n_experts: int
    top_k: int
    vocab_size: int


@dataclass(frozen=True)
class Phase:
    """A part of training with its own optimiser.

    `share` is its length as a fraction of `train.steps`. `lr` is a constant learning rate, or None for the schedule
    of the protocol (warm-up, then cosine).
    """

    name: str
    terms: tuple[Term, ...]
    share: float = 1.0
    trains: Literal["all", "gates"] = "all"
    lr: float | None = None


@dataclass(frozen=True)
class Check:
    """Which values of a hyper-parameter are accepted, as code and as text.

    A variant that defines its own check adds `examples` of accepted values for the contract test.
    """

    accepts: Callable[[Any], bool]
    expected: str
    examples: tuple[Any, ...] = ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int


WEIGHT = Check(lambda x: _is_number(x) and x >= 0, "a finite number ≥ 0")
WEIGHTS = Check(
    lambda xs: isinstance(xs, tuple | list) and all(WEIGHT.accepts(x) for x in xs), "a list of finite numbers ≥ 0"
)
FRACTION = Check(lambda x: _is_number(x) and 0 <= x <= 1, "a number in [0, 1]")
BELOW_ONE = Check(lambda x: _is_number(x) and 0 <= x < 1, "a number in [0, 1)")
ABOVE_ZERO = Check(lambda x: _is_number(x) and 0 < x <= 1, "a number in (0, 1]")
COUNT = Check(lambda n: _is_whole(n) and n >= 1, "a whole number ≥ 1")
COUNT_OR_NONE = Check(lambda n: _is_whole(n) and n >= 0, "a whole number ≥ 0")
SWITCH = Check(lambda on: isinstance(on, bool), "true or false")


def hyper(
    default: Any,
    symbol: str,
    help: str,
    check: Check,
    *,
    always: bool = True,
    minor: bool = False,
    seeded: bool = False,
) -> Any:
    """A hyper-parameter: its default, its symbol (the paper's if it has one), its help and its check.

    Labels and file names show it always, or only if it differs from the default (`always=False`). File names always
    show a `minor` one; labels show it if it differs from the default. Neither shows a `seeded` one, which differs
    between the seeds of a row.
    """
    about = {"symbol": symbol, "help": help, "check": check, "always": always, "minor": minor, "seeded": seeded}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter as declared with `hyper`."""

    name: str
    type: Any
    default: Any
    symbol: str
    help: str
    check: Check
    always: bool
    minor: bool
    seeded: bool


@dataclass(frozen=True)
class Variant:
    """Base of all variants: a name, an equation, and the parts that follow from the hyper-parameters.

    A method that returns None selects the standard part. A subclass overrides the parts that it changes.
    """

    name: ClassVar[str]
    equation: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse values that cannot be used."""
        for name, declared in hypers_of(type(self)).items():
            value = getattr(self, name)
            require(declared.check.accepts(value), f"variant.{name}", value, declared.check.expected)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        """Refuse values that cannot be used with a model of these sizes."""

    # Parts of a layer

    routes: ClassVar[bool] = True  # False for the dense control
    source: ClassVar[Literal["h", "attended"]] = "h"  # what the gate reads

    def filter(self, site: Site) -> Filter | None:
        """The filter of the gate's logits."""
        return None

    def choice(self, site: Site) -> Choice | None:
        """The choice of experts."""
        return None

    def skip(self, site: Site) -> Skip | None:
        """Which chosen experts are skipped."""
        return None

    def ties(self) -> TiedExperts | None:
        """Which experts share a slot and are tied in training."""
        return None

    def deltas(self) -> Deltas | None:
        """How experts differ from bases that stay in fast memory."""
        return None

    def side(self, site: Site) -> SidePart | None:
        """A part beside the experts."""
        return None

    def needs_gate_only(self) -> bool:
        """Whether a term reads gates whose gradient reaches the gate's weights alone."""
        return False

    def parts(self, site: Site) -> LayerParts:
        """Everything that a layer is made of."""
        from stickymoe.routing.layer import LayerParts
        from stickymoe.routing.rules import RoutingRule, TopK, Unfiltered

        if not self.routes:
            return LayerParts(side=self.side(site))
        rule = RoutingRule(
            site.top_k,
            filter=self.filter(site) or Unfiltered(),
            choice=self.choice(site) or TopK(),
            source=self.source,
            skip=self.skip(site),
        )
        return LayerParts(rule, self.ties(), self.deltas(), self.side(site), self.needs_gate_only())

    # Loss terms and phases

    def balance(self) -> Term | None:
        """The term that keeps experts in use."""
        return None

    def own_terms(self) -> tuple[Term, ...]:
        """The loss terms of this method, without load balancing."""
        return ()

    def adapt(self, term: Term) -> Term:
        """Change a loss term of the variants that this one is combined with."""
        return term

    def terms(self) -> tuple[Term, ...]:
        """All loss terms except cross-entropy."""
        balance = self.balance()
        own = tuple(self.adapt(term) for term in self.own_terms())
        return own if balance is None else (balance, *own)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", self.terms()),)

    @property
    def first_phase_is(self) -> Variant | None:
        """The variant whose whole training equals the first phase of this one, so that its run can be reused."""
        return None

    # Names

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters with their values."""
        return {name: getattr(self, name) for name in self.hypers()}

    def hypers(self) -> Mapping[str, Hyper]:
        """The hyper-parameters as declared."""
        return hypers_of(type(self))

    def shown(self) -> list[tuple[Hyper, Any]]:
        """The hyper-parameters that distinguish this variant, with their values."""
        values = [(declared, self.settings()[name]) for name, declared in self.hypers().items()]
        return [(d, value) for d, value in values if not d.seeded and (d.always or value != d.default)]

    @property
    def label(self) -> str:
        """`soft λ=0.1`: the name and the hyper-parameters under their symbols; a switch shows when it is on."""
        parts = [self.name]
        for declared, value in self.shown():
            if declared.minor and value == declared.default:
                continue
            parts.append(declared.symbol if isinstance(value, bool) else f"{declared.symbol}={_text(value, ',')}")
        return " ".join(parts)

    @property
    def key(self) -> str:
        """`soft-lam0.1`: the label in plain letters, for file names."""
        return "-".join([self.name, *(f"{declared.name}{_text(value, '_')}" for declared, value in self.shown())])


def _text(value: float | str | tuple[float, ...], comma: str) -> str:
    """A short text if it is exact: two different values never have the same text."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return comma.join(_text(x, comma) for x in value) or "none"
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def hypers_of(cls: type[Variant]) -> dict[str, Hyper]:
    """The hyper-parameters that a variant class declares, in order."""
    types = get_type_hints(cls)
    return {f.name: Hyper(f.name, types[f.name], f.default, **f.metadata) for f in dataclasses.fields(cls)}


@dataclass(frozen=True)
class Balanced(Variant):
    """A mixture of experts with the load-balancing loss."""

    mu: float = hyper(0.01, "μ", "weight μ of the load-balancing loss", WEIGHT, always=False)

    def balance(self) -> Term | None:
        from stickymoe.routing.losses import balance_by_layer

        return Term("bal", self.mu, lambda trace, context: balance_by_layer(trace, load=context.load))


def require_slots(name: str, value: int, *, n_experts: int, top_k: int) -> None:
    """Refuse a cache that cannot hold the experts of a token, or that has more slots than experts."""
    require(value >= top_k, f"variant.{name}", value, f"at least the {top_k} experts of a token")
    require(value <= n_experts, f"variant.{name}", value, f"at most the {n_experts} experts of a layer")


_REGISTRY: dict[str, type[Variant]] = {}


def register(cls: type[Variant]) -> type[Variant]:
    """Register a variant under its `name`. A name can be registered once."""
    if cls.name in _REGISTRY:
        raise ConfigError(f"Variant '{cls.name}' is registered twice: {_REGISTRY[cls.name]} and {cls}.")
    _REGISTRY[cls.name] = cls
    return cls


def variant_class(name: str) -> type[Variant]:
    """The class of a single variant."""
    if name not in _REGISTRY:
        raise ConfigError(unknown("variant", name, _REGISTRY))
    return _REGISTRY[name]


def variant_names() -> tuple[str, ...]:
    """Vanilla, then the others by name."""
    return tuple(sorted(_REGISTRY, key=lambda name: (name != "vanilla", name)))
