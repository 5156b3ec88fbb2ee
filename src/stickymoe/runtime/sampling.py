"""How the next token is chosen from logits: the most likely one, or a random one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from stickymoe.errors import require


@dataclass(frozen=True)
class Sampling:
    """Greedy, or a draw from the softmax at `temperature` among the `top_k` most likely (0: all) and the smallest set
    with probability `top_p`. The same seed gives the same text.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature", self.temperature, "a number > 0; for greedy text, omit sampling")
        require(self.top_k >= 0, "top_k", self.top_k, "a whole number ≥ 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a fraction in (0, 1]")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2⁶³ − 1")

    def chooser(self) -> Chooser:
        return Chooser(self)


class Chooser:
    """Chooses the tokens of one text."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def __call__(self, logits: Float[np.ndarray, " V"]) -> int:
        s = self.sampling
        if not s.do_sample:
            return int(logits.argmax())
        if not s.top_k and s.top_p == 1:  # no need to sort
            return self._draw(logits)
        order = np.argsort(-logits, kind="stable")[: s.top_k or None]
        below = logits[order].astype(np.float64) - float(logits[order[0]])
        with np.errstate(over="ignore"):  # at a very low temperature only the first one is left
            p = np.exp(below / s.temperature)
        p /= p.sum()
        kept = int(np.searchsorted(p.cumsum(), s.top_p)) + 1
        return int(self._random.choice(order[:kept], p=p[:kept] / p[:kept].sum()))

    def _draw(self, logits: Float[np.ndarray, " V"]) -> int:
        """A draw among all tokens."""
        below = logits.astype(np.float64) - float(logits.max())
        with np.errstate(over="ignore"):
            total = np.exp(below / self.sampling.temperature).cumsum()
        return int(np.searchsorted(total, self._random.random() * total[-1], side="right"))
