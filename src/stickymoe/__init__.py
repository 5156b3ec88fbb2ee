"""StickyMoE: mixture-of-experts models whose routing stays put.

Public names load on first use, so importing the package never loads torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "RoutingTrace": "stickymoe.routing.trace",
    "balance_loss": "stickymoe.routing.losses",
    "consistency_loss": "stickymoe.routing.losses",
    "anchor_loss": "stickymoe.routing.losses",
    "RouteTable": "stickymoe.locality.table",
    "switch_rate": "stickymoe.locality.metrics",
    "utilisation_entropy": "stickymoe.locality.metrics",
    "replay": "stickymoe.locality.replay",
    "simulate": "stickymoe.locality.replay",
    "miss_curve": "stickymoe.locality.replay",
    "RunConfig": "stickymoe.runs.config",
    "StickyError": "stickymoe.errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'stickymoe' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
