"""Rows in slow memory beside the experts: capacity that costs kilobytes per token instead of an expert."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stickymoe.errors import require
from stickymoe.variants.base import (
    BELOW_ONE,
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
    lambda ns: isinstance(ns, tuple) and len(set(ns)) == len(ns) and all(type(n) is int and 2 <= n <= 8 for n in ns),
    "a list of different whole numbers from 2 to 8",
    examples=((2,), (2, 3, 4), (3, 2)),
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
    ngrams_only: bool = hyper(False, "n-grams only", "no rows keyed by the token alone", SWITCH, always=False)
    ungated: bool = hyper(False, "ungated", "add rows as they are, without the factor 1 + W·h", SWITCH, always=False)
    table_lr: float = hyper(1.0, "row lr", "learning rate of the rows, relative to train.lr", WEIGHT, always=False)
    table_drop: float = hyper(
        0.0,
        "drop",
        "share of the passes over the training text in which a token reads no n-gram rows",
        BELOW_ONE,
        always=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        some = not self.ngrams_only or (self.ngrams and self.table_layers)
        require(bool(some), "variant.ngrams_only", self.ngrams_only, "false if there are no n-gram rows")

    def side(self, site: Site) -> "SidePart | None":
        from stickymoe.routing.lookup import Lookup

        ngrams = self.ngrams if site.layer < self.table_layers else ()
        if not ngrams and self.ngrams_only:
            return None
        return Lookup(
            site.d_model,
            site.vocab_size,
            tokens=not self.ngrams_only,
            ngrams=ngrams,
            rows=self.table_rows,
            heads=self.table_heads,
            width=self.table_width,
            gated=not self.ungated,
            lr_scale=self.table_lr,
            drop=self.table_drop,
        )
