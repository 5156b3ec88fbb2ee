"""StickyMoE for transformers: objectives, measurements and rules on any mixture-of-experts model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Attached": "stickymoe.huggingface.attach",
    "StickySFTTrainer": "stickymoe.huggingface.sft",
    "StickyTrainer": "stickymoe.huggingface.trainer",
    "StickyTrainerMixin": "stickymoe.huggingface.trainer",
    "attach": "stickymoe.huggingface.attach",
    "supported_families": "stickymoe.huggingface.families",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from stickymoe.huggingface.attach import Attached as Attached
    from stickymoe.huggingface.attach import attach as attach
    from stickymoe.huggingface.families import supported_families as supported_families
    from stickymoe.huggingface.sft import StickySFTTrainer as StickySFTTrainer
    from stickymoe.huggingface.trainer import StickyTrainer as StickyTrainer
    from stickymoe.huggingface.trainer import StickyTrainerMixin as StickyTrainerMixin
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'stickymoe.huggingface' has no attribute '{name}'")
        return getattr(importlib.import_module(_PUBLIC[name]), name)
