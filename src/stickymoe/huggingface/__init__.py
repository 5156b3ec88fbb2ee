"""StickyMoE and transformers: objectives, measurements and rules on MoE checkpoints, and our models as theirs.

Importing this package registers our models with the Auto classes of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM

from stickymoe.huggingface.attached import Attached, attach
from stickymoe.huggingface.families import supported_families
from stickymoe.huggingface.model import StickyMoEConfig, StickyMoEForCausalLM

AutoConfig.register(StickyMoEConfig.model_type, StickyMoEConfig)
AutoModelForCausalLM.register(StickyMoEConfig, StickyMoEForCausalLM)

# Trainers load on first use: they import far more than the rest.
_TRAINERS = {
    "StickySFTTrainer": "stickymoe.huggingface.sft",
    "StickyTrainer": "stickymoe.huggingface.trainer",
    "StickyTrainerMixin": "stickymoe.huggingface.trainer",
}

__all__ = [
    "Attached",
    "StickyMoEConfig",
    "StickyMoEForCausalLM",
    "StickySFTTrainer",
    "StickyTrainer",
    "StickyTrainerMixin",
    "attach",
    "supported_families",
]

if TYPE_CHECKING:
    from stickymoe.huggingface.sft import StickySFTTrainer as StickySFTTrainer
    from stickymoe.huggingface.trainer import StickyTrainer as StickyTrainer
    from stickymoe.huggingface.trainer import StickyTrainerMixin as StickyTrainerMixin
else:

    def __getattr__(name: str) -> Any:
        if name not in _TRAINERS:
            raise AttributeError(f"module 'stickymoe.huggingface' has no attribute '{name}'")
        return getattr(importlib.import_module(_TRAINERS[name]), name)
