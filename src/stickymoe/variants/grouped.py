"""Consistency over expert groups: a switch inside a group costs less than one between groups."""

from dataclasses import dataclass
from typing import ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import Routed, Term, hyper, register, require_share, require_weight, require_window


@register
@dataclass(frozen=True)
class Grouped(Routed):
    """The consistency loss of groups of experts, and a part of it of the experts themselves.

    Args:
        mu: weight μ of the load-balancing loss
        lam: weight λ of the loss
        groups: number of groups of adjacent experts
        inside: cost δ of a switch inside a group, against 1 between groups
    """

    name: ClassVar[str] = "grouped"
    equation: ClassVar[str] = "L = L_CE + μ·L_bal + λ·((1−δ)·‖G_t − G_t−1‖² + δ·‖g_t − g_t−1‖²),  G sums g over a group"

    lam: float = hyper(0.1, "λ")
    groups: int = hyper(2, "G")
    inside: float = hyper(0.25, "δ")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)
        require_window("groups", self.groups)
        require_share("inside", self.inside)

    def require_fit(self, *, n_layers: int, n_experts: int, top_k: int) -> None:
        super().require_fit(n_layers=n_layers, n_experts=n_experts, top_k=top_k)
        require(self.groups <= n_experts, "variant.groups", self.groups, f"at most the {n_experts} experts")

    def terms(self) -> tuple[Term, ...]:
        from stickymoe.routing.losses import grouped_by_layer

        group = Term(
            "group",
            self.lam,
            lambda trace, ctx: grouped_by_layer(trace, groups=self.groups, inside=self.inside),
        )
        return (*super().terms(), group)
