"""TRL's SFTTrainer with routing objectives and expert statistics."""

from __future__ import annotations

from typing import Any

from trl import SFTTrainer  # type: ignore[attr-defined]

from stickymoe.huggingface.trainer import StickyTrainerMixin


class StickySFTTrainer(StickyTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer; the family's own load-balancing loss is off unless `router_aux_loss_coef` is set."""

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variant is not None and self.args.router_aux_loss_coef is None:
            self.router_aux_loss_coef, self.aux_loss_enabled = 0.0, False
            config = self.model.config.get_text_config()
            if hasattr(config, "output_router_logits"):
                config.output_router_logits = False
