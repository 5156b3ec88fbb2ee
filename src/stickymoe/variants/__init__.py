"""One file per row of the results table. A new file here is a new variant everywhere, with no other edit."""

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
