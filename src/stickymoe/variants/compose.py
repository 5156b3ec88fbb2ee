"""`smooth+hysteresis+soft`: variants combined by name.

A combination is data: its parts are the variants themselves. Router parts come from the variant that has them, loss
terms add up, and hyper-parameters are the union; one that several parts inherit, such as μ, is a single setting. The
order of the names makes no difference. Two variants cannot be combined if both replace the same part of the router,
if they have different settings of the same name, or if one has phases of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from stickymoe.errors import ConfigError
from stickymoe.routing.deltas import Deltas
from stickymoe.routing.terms import Term
from stickymoe.routing.ties import TiedExperts
from stickymoe.variants.base import Hyper, Site, Variant, hypers_of, variant_class
from stickymoe.variants.cached import Cached

if TYPE_CHECKING:
    from stickymoe.routing.layer import SidePart
    from stickymoe.routing.rules import Choice, Filter, Skip

# What only one variant of a combination may replace, and its name in messages.
_EXCLUSIVE = {
    "source": "the router's input",
    "filter": "the router's logits",
    "choice": "the router's choice",
    "skip": "what is skipped",
    "balance": "the load-balancing loss",
    "ties": "the ties of experts",
    "deltas": "the weights of experts",
    "side": "the part beside the experts",
}


def variant(name: str, **settings: Any) -> Variant:
    """A variant by its name, or several combined as `smooth+soft`, with the given hyper-parameters."""
    names = _sorted_names(name)
    known = hypers(name)
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"variant.{setting}: '{name}' has no such setting; it has {', '.join(known) or 'none'}.")
    made = [
        cls(**{key: value for key, value in settings.items() if key in hypers_of(cls)})
        for cls in map(variant_class, names)
    ]
    return made[0] if len(made) == 1 else Combined(tuple(made))


def hypers(name: str) -> dict[str, Hyper]:
    """The hyper-parameters of a variant or combination."""
    found: dict[str, Hyper] = {}
    for part in reversed(_sorted_names(name)):
        found |= hypers_of(variant_class(part))
    return found


def _sorted_names(name: str) -> list[str]:
    """The names of a combination; refused if they cannot be combined."""
    names = sorted(name.split("+"))
    classes = [variant_class(part) for part in names]
    if len(classes) > 1:
        for cls in classes:
            if not cls.routes or cls.phases is not Variant.phases:
                raise ConfigError(f"Variant '{name}': '{cls.name}' cannot be combined with others.")
        for one, other in combinations(classes, 2):
            _require_compatible("+".join(names), one, other)
    return names


def _require_compatible(whole: str, one: type[Variant], other: type[Variant]) -> None:
    if issubclass(one, other) or issubclass(other, one):
        general, special = (one, other) if issubclass(other, one) else (other, one)
        raise ConfigError(f"Variant '{whole}': '{general.name}' is already part of '{special.name}'.")
    both = f"'{one.name}' and '{other.name}' both"
    if issubclass(one, Cached) and issubclass(other, Cached):
        raise ConfigError(f"Variant '{whole}': {both} keep a cache of their own; combine only one of them.")
    for part, description in _EXCLUSIVE.items():
        owners = {_owner(one, part), _owner(other, part)}
        if len(owners) == 2 and not any(_is_default(owner, part) for owner in owners):
            raise ConfigError(f"Variant '{whole}': {both} replace {description}; combine only one of them.")
    for field in sorted({f.name for f in fields(one)} & {f.name for f in fields(other)}):
        if _owner(one, field) is not _owner(other, field):
            raise ConfigError(f"Variant '{whole}': {both} have a setting '{field}'; combine only one of them.")


def _owner(cls: type[Variant], attribute: str) -> type:
    """The class that defines an attribute of a variant."""
    return next(c for c in cls.__mro__ if attribute in c.__dict__)


def _is_default(owner: type, part: str) -> bool:
    """Whether a part is the standard one: of the base class, or the load-balancing loss that most variants have."""
    return owner is Variant or (part == "balance" and "name" not in owner.__dict__)


@dataclass(frozen=True)
class Combined(Variant):
    """Several variants as one."""

    combined: tuple[Variant, ...]

    def __post_init__(self) -> None:
        """The parts have checked themselves."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return "+".join(part.name for part in self.combined)

    @property
    def equation(self) -> str:  # type: ignore[override]
        return ";  ".join(part.equation for part in self.combined)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        for part in self.combined:
            part.require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)

    @property
    def source(self) -> Literal["h", "attended"]:  # type: ignore[override]
        return self._replacing("source").source

    def filter(self, site: Site) -> Filter | None:
        return self._replacing("filter").filter(site)

    def choice(self, site: Site) -> Choice | None:
        return self._replacing("choice").choice(site)

    def skip(self, site: Site) -> Skip | None:
        return self._replacing("skip").skip(site)

    def ties(self) -> TiedExperts | None:
        return self._replacing("ties").ties()

    def deltas(self) -> Deltas | None:
        return self._replacing("deltas").deltas()

    def side(self, site: Site) -> SidePart | None:
        return self._replacing("side").side(site)

    def balance(self) -> Term | None:
        return self._replacing("balance").balance()

    def needs_gate_only(self) -> bool:
        return any(part.needs_gate_only() for part in self.combined)

    def own_terms(self) -> tuple[Term, ...]:
        """The terms of all parts, one for each symbol: parts that inherit the same term share it."""
        terms = {term.symbol: term for part in reversed(self.combined) for term in part.own_terms()}
        return tuple(terms.values())

    def adapt(self, term: Term) -> Term:
        for part in self.combined:
            term = part.adapt(term)
        return term

    def hypers(self) -> dict[str, Hyper]:
        return hypers(self.name)

    def settings(self) -> dict[str, Any]:
        values = {key: value for part in self.combined for key, value in part.settings().items()}
        return {key: values[key] for key in self.hypers()}

    def _replacing(self, part: str) -> Variant:
        """The variant that replaces a part of the router; any of them where none does."""
        ranked = sorted(self.combined, key=lambda v: self._rank(type(v), part))
        return ranked[0]

    @staticmethod
    def _rank(cls: type[Variant], part: str) -> int:
        """0 if a class has its own version of a part, 1 if it has a default that others also inherit, 2 if none."""
        owner = _owner(cls, part)
        return 2 if owner is Variant else 1 if _is_default(owner, part) else 0
