"""Loss weights that differ from layer to layer and rise over training, for whatever loss it is combined with."""

from dataclasses import dataclass, replace
from typing import ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Routed, Term, hyper, register, require_share, require_weight


@register
@dataclass(frozen=True)
class Graded(Routed):
    """Per-layer weights and a warm-up of every loss but load balancing; alone it is vanilla.

    Args:
        mu: weight μ of the load-balancing loss
        warmup: share of the training over which the weights rise from 0
        layers: a factor on the weights for each layer, none for 1 everywhere; a loss between layers has but one weight
    """

    name: ClassVar[str] = "graded"
    equation: ClassVar[str] = "λ → λ·f_layer·min(1, step / (warmup·steps));  L = L_CE + μ·L_bal + …"
    acts_on_terms: ClassVar[bool] = True

    warmup: float = hyper(0.25, "warmup")
    layers: tuple[float, ...] = hyper((), "layers", always=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("warmup", self.warmup)
        for factor in self.layers:
            require_weight("layers", factor)
        object.__setattr__(self, "layers", tuple(float(factor) for factor in self.layers))  # 1 and 1.0 are one run

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        fits = len(self.layers) in (0, n_layers)
        require(fits, "variant.layers", self.layers, f"{n_layers} factors, one per layer")

    def terms(self) -> tuple[Term, ...]:
        return tuple(
            term if term.symbol == "bal" else replace(term, layers=self.layers, warmup=self.warmup)
            for term in super().terms()
        )
