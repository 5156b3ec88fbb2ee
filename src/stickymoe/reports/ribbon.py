"""The ribbon: a text in which the colour of each token shows its expert."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import Integer
from tokenizers import Tokenizer

from stickymoe.errors import RunError
from stickymoe.locality.cache import Cache
from stickymoe.locality.formats import load_table
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord

# The palette of Okabe and Ito: colour-blind readers can distinguish all eight. With more experts, colours repeat.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


@dataclass(frozen=True)
class Ribbon:
    """The start of a validation sequence and the top-1 expert of each token and layer, in one run.

    `loads` counts the experts that each token loads into an LRU cache with `capacity` slots per layer.
    """

    label: str
    tokens: tuple[str, ...]
    experts: Integer[np.ndarray, "L n"]
    loads: Integer[np.ndarray, "L n"]
    n_experts: int
    capacity: int

    def switches(self, layer: int) -> int:
        line = self.experts[layer]
        return int((line[1:] != line[:-1]).sum())


def read_ribbon(run: Path, *, sequence: int = 0, length: int = 96, capacity: int = 2) -> Ribbon:
    """Read how a run routed the first `length` tokens of a validation sequence."""
    folder = RunFolder(run)
    config = RunConfig.from_dict(RunRecord.read(folder.record).config)
    table = load_table(folder.routes)
    if table.tokens is None:
        raise RunError(f"{folder.routes} has no tokens, so its text cannot be shown.")
    real = np.asarray(table.mask[sequence, :length])
    try:
        tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    except Exception as e:  # the tokenizers library raises plain Exception
        raise RunError(f"{folder.tokenizer} is missing or damaged: {e}.") from e
    tokens = tuple(tokenizer.decode([int(t)]) for t in table.tokens[sequence, :length][real])
    S = np.asarray(table.S[:, sequence, :length])[:, real]  # [L, n, k]
    loads = np.array([_loads(layer, capacity) for layer in S])
    return Ribbon(config.variant.label, tokens, S[..., 0], loads, table.n_experts, capacity)


def _loads(S: Integer[np.ndarray, "n k"], capacity: int) -> list[int]:
    cache = Cache(capacity=capacity)
    return [len(cache.request([int(e) for e in experts]).loads) for experts in S]


def ribbon_svg(ribbons: Sequence[Ribbon], *, layer: int, width: int = 860) -> str:
    """The same text as routed by several runs, as a standalone SVG."""
    letter, row, pad = 7.25, 22, 16
    y, parts = pad, []
    for ribbon in ribbons:
        n = len(ribbon.tokens) - 1
        title = (
            f"{ribbon.label}: the top-1 expert of layer {layer} changes {ribbon.switches(layer)} times in {n} steps, "
            f"{int(ribbon.loads[layer].sum())} loads into {ribbon.capacity} slots"
        )
        parts.append(f'<text class="t" x="{pad}" y="{y + 12}">{escape(title)}</text>')
        x, y = float(pad), y + row
        for i, token in enumerate(ribbon.tokens):
            shown = _NOT_XML.sub("·", token.replace("\n", " ")) or "·"
            w = letter * max(len(shown), 1)
            if x + w > width - pad:
                x, y = float(pad), y + row
            expert = int(ribbon.experts[layer, i])
            colour = PALETTE[expert % len(PALETTE)]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{row - 4}" fill="{colour}" fill-opacity=".45"/>'
            )
            if ribbon.loads[layer, i]:
                parts.append(f'<rect x="{x:.1f}" y="{y + row - 6}" width="{w:.1f}" height="2" fill="#222"/>')
            if i and expert != int(ribbon.experts[layer, i - 1]):
                parts.append(f'<rect x="{x - 0.75:.2f}" y="{y}" width="1.5" height="{row - 4}" fill="#222"/>')
            parts.append(f'<text xml:space="preserve" x="{x:.1f}" y="{y + 13}">{escape(shown)}</text>')
            x += w
        y += row + pad
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}">'
        "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#111}"
        ".t{font-family:system-ui,'DejaVu Sans',sans-serif;font-size:13px;font-weight:600}</style>"
        f'<rect width="{width}" height="{y}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
