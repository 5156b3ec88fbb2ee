"""One file per variant. Flags, sweeps, reports and tests find a new file without another edit."""

import importlib
import pkgutil

from stickymoe.variants.base import Hyper, Phase, Site, Variant, hyper, register, variant_class, variant_names
from stickymoe.variants.compose import hypers, variant

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Hyper",
    "Phase",
    "Site",
    "Variant",
    "hyper",
    "hypers",
    "register",
    "variant",
    "variant_class",
    "variant_names",
]
