"""StickyMoE: mixture-of-experts models whose routing stays local.

Public names load on first use, so importing the package never loads torch. A name that needs a package of an extra
raises `MissingExtraError` where that package is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stickymoe.extras import extras_for

__version__ = "0.2.0"

# Each public name with its module. Type checkers read the imports below, which list the same names.
_PUBLIC = {
    "Access": "stickymoe.locality.streams",
    "Cache": "stickymoe.locality.cache",
    "Recorder": "stickymoe.locality.recorder",
    "RouteTable": "stickymoe.locality.table",
    "RoutingTrace": "stickymoe.routing.trace",
    "RunConfig": "stickymoe.runs.config",
    "StickyError": "stickymoe.errors",
    "StickySFTTrainer": "stickymoe.huggingface.sft",
    "StickyTrainer": "stickymoe.huggingface.trainer",
    "StickyTrainerMixin": "stickymoe.huggingface.trainer",
    "anchor_loss": "stickymoe.routing.losses",
    "attach": "stickymoe.huggingface.attached",
    "balance_loss": "stickymoe.routing.losses",
    "consistency_loss": "stickymoe.routing.losses",
    "load_table": "stickymoe.locality.formats",
    "measure": "stickymoe.locality.measure",
    "miss_curve": "stickymoe.locality.replay",
    "objective": "stickymoe.routing.losses",
    "offload": "stickymoe.runtime.engine",
    "plan": "stickymoe.locality.plan",
    "register": "stickymoe.variants",
    "register_policy": "stickymoe.locality.policies",
    "replay": "stickymoe.locality.replay",
    "save_table": "stickymoe.locality.formats",
    "simulate": "stickymoe.locality.replay",
    "study": "stickymoe.locality.study",
    "switch_rate": "stickymoe.locality.metrics",
    "train": "stickymoe.training.loop",
    "utilisation_entropy": "stickymoe.locality.metrics",
    "variant": "stickymoe.variants",
}

__all__ = sorted([*_PUBLIC, "__version__"])

if TYPE_CHECKING:
    from stickymoe.errors import StickyError as StickyError
    from stickymoe.huggingface.attached import attach as attach
    from stickymoe.huggingface.sft import StickySFTTrainer as StickySFTTrainer
    from stickymoe.huggingface.trainer import StickyTrainer as StickyTrainer
    from stickymoe.huggingface.trainer import StickyTrainerMixin as StickyTrainerMixin
    from stickymoe.locality.cache import Cache as Cache
    from stickymoe.locality.formats import load_table as load_table
    from stickymoe.locality.formats import save_table as save_table
    from stickymoe.locality.measure import measure as measure
    from stickymoe.locality.metrics import switch_rate as switch_rate
    from stickymoe.locality.metrics import utilisation_entropy as utilisation_entropy
    from stickymoe.locality.plan import plan as plan
    from stickymoe.locality.policies import register_policy as register_policy
    from stickymoe.locality.recorder import Recorder as Recorder
    from stickymoe.locality.replay import miss_curve as miss_curve
    from stickymoe.locality.replay import replay as replay
    from stickymoe.locality.replay import simulate as simulate
    from stickymoe.locality.streams import Access as Access
    from stickymoe.locality.study import study as study
    from stickymoe.locality.table import RouteTable as RouteTable
    from stickymoe.routing.losses import anchor_loss as anchor_loss
    from stickymoe.routing.losses import balance_loss as balance_loss
    from stickymoe.routing.losses import consistency_loss as consistency_loss
    from stickymoe.routing.losses import objective as objective
    from stickymoe.routing.trace import RoutingTrace as RoutingTrace
    from stickymoe.runs.config import RunConfig as RunConfig
    from stickymoe.runtime.engine import offload as offload
    from stickymoe.training.loop import train as train
    from stickymoe.variants import register as register
    from stickymoe.variants import variant as variant
else:
    # Hidden from type checkers, which would take any misspelt name for it.
    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'stickymoe' has no attribute '{name}'")
        with extras_for(name):
            return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
