"""Rows in slow memory, keyed by the token and by the last two or three tokens, added to the residual stream.

The address of a row is known before the first layer computes, so a device can read rows while it computes. A row has
kilobytes where an expert has megabytes. B sequences, T tokens, d width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stickymoe.errors import ConfigError
from stickymoe.locality.rows import RowKey
from stickymoe.products import Linear
from stickymoe.routing.layer import SidePart
from stickymoe.routing.rules import RouterInput, RouterState


class RowTable(nn.Embedding):
    """Rows with sparse gradients: only the rows that a batch reads have one. The row `nothing` stays 0."""

    def __init__(self, rows: int, width: int, *, nothing: int | None = None) -> None:
        super().__init__(rows, width, padding_idx=nothing, sparse=True)

    @property
    def row_bytes(self) -> int:
        return self.weight[0].nbytes


class NgramTable(nn.Module):
    """Rows keyed by a hash of the last n tokens. Each of H heads has its own hash and holds 1/H of the width.

    Two n-grams that collide in one head are distinguished by the others. The salts of the hash are drawn with the
    initial weights, so they differ between seeds.
    """

    salts: Tensor

    def __init__(self, n: int, rows: int, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"variant.table_heads: got {heads}, expected a divisor of the row width {width}.")
        self.n, self.rows = n, rows
        self.table = RowTable(heads * rows + 1, width // heads, nothing=heads * rows)
        self.register_buffer("salts", torch.randint(2**31, (heads,)))

    def forward(self, history: Int[Tensor, "B length"], known: Bool[Tensor, "B T"]) -> Float[Tensor, "B T width"]:
        """The rows of the last T n-grams of `history`; 0 where `known` is false, since the text is shorter."""
        T = known.shape[1]
        key = self.salts.expand(*known.shape, -1)  # [B, T, H]
        for back in range(self.n):
            end = history.shape[1] - back
            key = _mix(key ^ history[:, end - T : end, None])
        head = torch.arange(len(self.salts), device=key.device)
        index = torch.where(known[..., None], key.remainder(self.rows) + head * self.rows, len(head) * self.rows)
        rows: Tensor = self.table(index)
        return rows.flatten(2)

    @property
    def row_bytes(self) -> int:
        return len(self.salts) * self.table.row_bytes


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """An invertible hash of 64-bit numbers: odd factors and shifts."""
    x = x * -4658895280553007687
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * -7723592293110705685
    return x ^ ((x >> 29) & 0x7FFFFFFFF)


class Lookup(SidePart):
    """y = (1 + W·h) ⊙ r, where r is the sum of the token's row and the rows of its n-grams.

    W starts at 0. N-grams do not cross document borders. Rows narrower than the model are projected up.

    In training, a token reads its n-gram rows only in a share 1 − `drop` of the passes over the text: spread evenly,
    and the same passes in every layer. A row that a token has read before knows what came next there, and the model
    would learn to trust it more than it may on new text.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tokens: bool,
        ngrams: Sequence[int],
        rows: int,
        heads: int,
        width: int,
        gated: bool,
        lr_scale: float,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        width = width or d_model
        self.lr_scale, self.drop = lr_scale, drop
        self.tokens = RowTable(vocab_size, width) if tokens else None
        self.ngrams = nn.ModuleList(NgramTable(n, rows, width, heads) for n in ngrams)
        self.longest = max(ngrams, default=1)
        self.up = Linear(width, d_model, bias=False) if width != d_model else None
        self.gate = Linear(d_model, d_model, bias=False) if gated else None

    def forward(self, x: RouterInput, state: RouterState | None) -> tuple[Float[Tensor, "B T d"], RouterState]:
        if x.tokens is None or x.position is None:
            raise ConfigError("RouterInput: tokens or position is missing, but lookup reads both; pass them.")
        history, state = self._history(x.tokens, x.position, state or RouterState())
        r: Tensor | float = 0.0 if self.tokens is None else self.tokens(x.tokens)
        for table in self._ngram_tables():
            known = x.position >= table.n - 1
            r = r + table(history, known if x.visit is None else known & self._reads(x.visit))
        assert isinstance(r, Tensor)
        r = r if self.up is None else self.up(r)
        return (r if self.gate is None else (1 + self.gate(x.h)) * r), state

    def _reads(self, visit: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Whether a token reads its n-gram rows in this pass."""
        share = 1 - self.drop
        visit = visit.double()
        return ((visit + 1) * share).floor() > (visit * share).floor()

    def _history(
        self, tokens: Int[Tensor, "B T"], position: Int[Tensor, "B T"], state: RouterState
    ) -> tuple[Int[Tensor, "B length"], RouterState]:
        """The tokens with those that come before them, and the state for the next ones."""
        before = self.longest - 1
        if not before:
            return tokens, RouterState()
        recent = state.values.get("recent")
        if recent is None:
            if position.is_cpu and bool(position[:, 0].any()):  # elsewhere the host would wait for the device
                raise ConfigError(
                    f"RouterState: got tokens from position {int(position[:, 0].max())} without the state of the "
                    "tokens before them; pass that state, or start at position 0."
                )
            recent = tokens.new_zeros(len(tokens), before)
        history = torch.cat([recent, tokens], dim=1)
        return history, RouterState({"recent": history[:, -before:]})

    def initialise(self) -> None:
        """N-gram rows start at 0, since rows that training never reads would add noise."""
        for ngram in self._ngram_tables():
            nn.init.zeros_(ngram.table.weight)
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)

    def slow_parameters(self) -> Iterator[nn.Parameter]:
        return (p for table in self._tables() for p in table.parameters())

    def row_keys(self) -> tuple[RowKey, ...]:
        keys = [] if self.tokens is None else [RowKey(1, 0, self.tokens.num_embeddings, self.tokens.row_bytes)]
        for table in self._ngram_tables():
            keys += [RowKey(table.n, salt, table.rows, table.table.row_bytes) for salt in table.salts.tolist()]
        return tuple(keys)

    @property
    def bytes_per_token(self) -> int:
        return sum(table.row_bytes for table in self._ngram_tables()) + (
            0 if self.tokens is None else self.tokens.row_bytes
        )

    def _ngram_tables(self) -> Iterator[NgramTable]:
        return (module for module in self.ngrams if isinstance(module, NgramTable))

    def _tables(self) -> Iterator[RowTable]:
        return (module for module in self.modules() if isinstance(module, RowTable))
