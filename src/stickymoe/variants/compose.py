"""`smooth+hysteresis+soft`: variants put together by name, so that a combination is a config and not a class.

Router parts come from the variants that have them, loss terms add up, hyper-parameters are the union. The order of
the names makes no difference. What cannot be put together is refused in one line: two variants that replace the same
part of the router, or that have a setting of the same name, or one with phases of its own.
"""

import functools
import re
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

from stickymoe.errors import ConfigError
from stickymoe.variants.base import Gated, Variant, variant_class

_ROUTER_PARTS = {"source": "input", "filter": "logits", "choice": "choice"}


@functools.cache
def combined(names: tuple[str, ...]) -> type[Variant]:
    """The one class of a sorted tuple of names."""
    classes = [variant_class(name) for name in names]
    whole = "+".join(names)
    for cls in classes:
        if not issubclass(cls, Gated) or cls.phases is not Variant.phases:
            raise ConfigError(f"Variant '{whole}': '{cls.name}' cannot be combined with others.")
    for one, other in combinations(classes, 2):
        _refuse_clash(whole, one, other)
    # Those that act on the others' terms come first, where super() leads to all of them.
    classes.sort(key=lambda cls: not cls.acts_on_terms)
    members = {
        "name": whole,
        "equation": ";  ".join(cls.equation for cls in classes),
        "__doc__": _doc(classes),
        "__module__": __name__,
        "__reduce__": lambda self: (_again, (whole, {f.name: getattr(self, f.name) for f in fields(self)})),
    }
    return dataclass(frozen=True)(type(whole, tuple(classes), members))


def _again(name: str, settings: dict[str, Any]) -> Variant:
    """A combination from a pickle, where its class has no name that could be imported."""
    return variant_class(name)(**settings)


def _refuse_clash(whole: str, one: type[Variant], other: type[Variant]) -> None:
    if issubclass(one, other) or issubclass(other, one):
        general, special = (one, other) if issubclass(other, one) else (other, one)
        raise ConfigError(f"Variant '{whole}': '{general.name}' is already part of '{special.name}'.")
    both = f"'{one.name}' and '{other.name}' both"
    for part, words in _ROUTER_PARTS.items():
        if Gated not in (owners := {_owner(one, part), _owner(other, part)}) and len(owners) == 2:
            raise ConfigError(f"Variant '{whole}': {both} replace the router's {words}; combine only one of them.")
    for field in sorted({f.name for f in fields(one)} & {f.name for f in fields(other)}):
        if _owner(one, field) is not _owner(other, field):
            raise ConfigError(f"Variant '{whole}': {both} have a setting '{field}'; combine only one of them.")


def _owner(cls: type[Variant], attribute: str) -> type:
    return next(c for c in cls.__mro__ if attribute in c.__dict__)


def _doc(classes: list[type[Variant]]) -> str:
    """The parts' summaries, and under Args what each says of its settings; from there `train --help` has its words."""
    summaries = [(cls.__doc__ or "").strip().splitlines()[0] for cls in classes]
    settings = {line.strip(): None for cls in classes for line in re.findall(r"^ +\w+: .+$", cls.__doc__ or "", re.M)}
    return "\n".join([" ".join(summaries), "", "Args:", *(f"    {line}" for line in settings)])
