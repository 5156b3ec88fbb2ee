"""`AdaptConfig`: how a checkpoint of transformers is adapted. No torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from stickymoe.errors import require

METHODS = ("soft", "soft_hard", "remoe", "remoe_full")
TRAINED = ("routers", "all", "lora")


@dataclass(frozen=True)
class AdaptConfig:
    """How a checkpoint is adapted.

    method: soft and soft_hard are the paper's losses; remoe is the paper's simulation of ReMoE (L_cons and L_bal);
        remoe_full is ReMoE as published: KL to the gates of the original model, reuse, KL at lags and entropy of
        windows, no L_bal
    train: the gates alone, all parameters, or LoRA on attention beside the gates
    lam, alpha, window: weights of L_cons and of the anchor loss, and the window of the anchor loss
    kl, reuse, lags, entropy: weights of the terms of remoe_full, which its authors did not publish
    """

    method: str = "soft"
    train: str = "routers"
    steps: int = 200
    batch_size: int = 4
    lr: float = 1e-4
    seed: int = 42
    lam: float = 0.1
    alpha: float = 0.1
    window: int = 4
    kl: float = 1.0
    reuse: float = 0.1
    lags: float = 0.1
    entropy: float = 0.02
    save_every: int = 50

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        require(self.train in TRAINED, "train", self.train, f"one of {', '.join(TRAINED)}")
        for name in ("steps", "batch_size", "window", "save_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number ≥ 1")
        for name in ("lam", "alpha", "kl", "reuse", "lags", "entropy"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "a number ≥ 0")
        require(self.lr > 0, "lr", self.lr, "a number > 0")

    @property
    def needs_reference(self) -> bool:
        """Whether a term compares with the frozen gates."""
        return self.method == "remoe_full"
