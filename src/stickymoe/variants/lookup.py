"""Rows in slow memory beside the experts: capacity that costs kilobytes per token instead of an expert."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import (
    COUNT,
    COUNT_OR_NONE,
    SWITCH,
    WEIGHT,
    Balanced,
    Check,
    Site,
    hyper,
    register,
)

if TYPE_CHECKING:
    from stickymoe.routing.layer import SidePart

_ORDERS = Check(
    lambda ns: len(set(ns)) == len(ns) and all(type(n) is int and 2 <= n <= 8 for n in ns),
    "different whole numbers from 2 to 8",
)


@register
@dataclass(frozen=True)
class LookupVariant(Balanced):
    """Every layer adds a row keyed by the token; the first layers also add rows keyed by the last n tokens."""

    name: ClassVar[str] = "lookup"
    equation: ClassVar[str] = (
        "x ← x + (1 + W·h) ⊙ r,  r = table[token] + Σ_n table_n[hash(last n tokens)];  L = L_CE + μ·L_bal"
    )

    ngrams: tuple[int, ...] = hyper((2, 3), "n", "lengths of the n-grams that have rows; none for tokens only", _ORDERS)
    table_rows: int = hyper(65_536, "rows", "rows of each n-gram table and head", COUNT, minor=True)
    table_heads: int = hyper(2, "heads", "hashes per n-gram, each with a part of the width", COUNT, minor=True)
    table_layers: int = hyper(2, "layers", "how many of the first layers have n-gram rows", COUNT_OR_NONE, minor=True)
    table_width: int = hyper(0, "width", "width of a row; 0 for the width of the model", COUNT_OR_NONE, always=False)
    token_rows: bool = hyper(True, "token rows", "a row for every token and layer", SWITCH, minor=True)
    table_gate: bool = hyper(True, "gated", "scale rows by 1 + W·h", SWITCH, minor=True)
    table_lr: float = hyper(1.0, "row lr", "learning rate of the rows, relative to train.lr", WEIGHT, always=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ngrams", tuple(self.ngrams))
        super().__post_init__()
        some = self.token_rows or (self.ngrams and self.table_layers)
        require(bool(some), "variant.token_rows", self.token_rows, "true where there are no n-gram rows")

    def side(self, site: Site) -> "SidePart | None":
        from stickymoe.routing.lookup import Lookup

        ngrams = self.ngrams if site.layer < self.table_layers else ()
        if not ngrams and not self.token_rows:
            return None
        return Lookup(
            site.d_model,
            site.vocab_size,
            tokens=self.token_rows,
            ngrams=ngrams,
            rows=self.table_rows,
            heads=self.table_heads,
            width=self.table_width,
            gated=self.table_gate,
            lr_scale=self.table_lr,
        )
