"""TRL's SFTTrainer with routing objectives and expert statistics."""

from __future__ import annotations

from trl import SFTTrainer  # type: ignore[attr-defined]

from stickymoe.huggingface.trainer import StickyTrainerMixin


class StickySFTTrainer(StickyTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer; the family's own load-balancing loss is off unless `router_aux_loss_coef` is set."""
