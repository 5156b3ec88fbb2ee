"""What routers with a resident set have in common: how it is annealed during training."""

from dataclasses import dataclass

from stickymoe.errors import require
from stickymoe.variants.base import FRACTION, hyper
from stickymoe.variants.slots import Slots


@dataclass(frozen=True)
class Resident(Slots):
    """Only C experts of a layer can be chosen, and at most one of them is replaced per token."""

    free: float = hyper(0.0, "free", "fraction of training in which all experts can be chosen", FRACTION, always=False)
    anneal: float = hyper(
        0.0,
        "anneal",
        "fraction of training, after free, over which the resistance to loads grows to full strength",
        FRACTION,
        always=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = 1 - self.free
        require(self.free + self.anneal <= 1, "variant.anneal", self.anneal, f"at most {rest:g} (1 − free)")
