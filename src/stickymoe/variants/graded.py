"""Loss weights that differ between layers and grow during training, for any loss it is combined with."""

from dataclasses import dataclass, replace
from typing import ClassVar

from stickymoe.errors import require
from stickymoe.routing.terms import Term
from stickymoe.variants.base import FRACTION, WEIGHTS, Balanced, hyper, register


@register
@dataclass(frozen=True)
class Graded(Balanced):
    """Per-layer weights and a warm-up of every loss but load balancing; alone it is vanilla."""

    name: ClassVar[str] = "graded"
    equation: ClassVar[str] = "λ → λ·f_layer·min(1, step / (warmup·steps));  L = L_CE + μ·L_bal + …"

    warmup: float = hyper(0.25, "warmup", "fraction of training over which the weights grow from 0", FRACTION)
    layers: tuple[float, ...] = hyper(
        (),
        "layers",
        "a factor on the loss weights for each layer, empty for 1 everywhere; it does not affect losses between layers",
        WEIGHTS,
        always=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(float(factor) for factor in self.layers))  # 1 and 1.0 are one run

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        fits = len(self.layers) in (0, n_layers)
        require(fits, "variant.layers", self.layers, f"{n_layers} factors, one per layer")

    def adapt(self, term: Term) -> Term:
        return replace(term, layers=self.layers, warmup=self.warmup)
