"""Consistency over expert groups: a switch inside a group costs less than one between groups."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.errors import require
from stickymoe.routing.terms import Term
from stickymoe.variants.base import COUNT, FRACTION, WEIGHT, Balanced, hyper, register


@register
@dataclass(frozen=True)
class Grouped(Balanced):
    """The consistency loss of groups of experts, plus a fraction of that of the experts themselves."""

    name: ClassVar[str] = "grouped"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·((1−δ)·‖G_t − G_t−1‖² + δ·‖g_t − g_t−1‖²),  G sums g over a group"

    lam: float = hyper(0.1, "λ", "weight λ of the loss", WEIGHT)
    groups: int = hyper(2, "G", "number of groups of adjacent experts", COUNT)
    inside: float = hyper(0.25, "δ", "cost δ of a switch inside a group; a switch between groups costs 1", FRACTION)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        require(self.groups <= n_experts, "variant.groups", self.groups, f"at most the {n_experts} experts")

    def own_terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import grouped_by_layer

        group = Term(
            "group",
            self.lam,
            lambda trace, context: grouped_by_layer(trace, groups=self.groups, inside=self.inside),
        )
        return (group,)
