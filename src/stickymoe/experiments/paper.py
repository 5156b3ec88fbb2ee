"""The paper's own figures, to stand beside ours.

Perplexities may be compared only where corpus, tokenizer and steps match; otherwise the changes against each one's own
baseline, switch rates, hit rates and utilisation.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

from stickymoe.experiments.collection import Group, Value
from stickymoe.experiments.tables import NOTHING, Cell, Figure, Table
from stickymoe.variants import variant_class

SOURCE = "StickyMoE, sticky_routing.tex, tables of main results and of per-layer switch rates"
_VALID_TOKENS = 242_643  # of the raw WikiText-2 with GPT-2's tokenizer, as the paper counts them


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's table; `key` is that of our variant."""

    key: str
    ppl: float
    delta_ppl_pct: float | None
    switch_rate: float
    cache_hit_rate: float
    utilisation_entropy: float
    per_layer: tuple[float, ...]


def paper_rows(size: str) -> dict[str, PaperRow]:
    """The paper's table for `small` or `medium`, by variant key, in its order."""
    text = resources.files("stickymoe.experiments").joinpath("paper", f"results_{size}.csv").read_text(encoding="utf-8")
    rows = {}
    for line in csv.DictReader(text.splitlines()):
        given = {name: float(line[name]) for name in ("lam", "alpha") if line[name]}
        if line["window"]:
            given["window"] = int(line["window"])
        key = variant_class(line["variant"])(**given).key
        rows[key] = PaperRow(
            key=key,
            ppl=float(line["ppl"]),
            delta_ppl_pct=float(line["delta_ppl_pct"]) if line["delta_ppl_pct"] else None,
            switch_rate=float(line["switch_rate"]),
            cache_hit_rate=float(line["cache_hit_rate"]),
            utilisation_entropy=float(line["utilisation_entropy_bits"]),
            per_layer=tuple(float(line[f"sr_l{layer}"]) for layer in range(4)),
        )
    return rows


def same_protocol(group: Group) -> bool:
    """Whether perplexities may be compared: the paper's corpus, tokenizer and steps."""
    config, data = group.config, group.runs[0].record.data
    same_text = config.data.tokenizer == "gpt2" and data["tokens"]["valid"] == _VALID_TOKENS
    return same_text and config.data.fraction == 1 and config.train.steps == 10_000


def beside_the_paper(group: Group, *, name: str) -> Table | None:
    """The paper's figure and ours, column by column; None where the model is not the paper's."""
    base = group.baseline
    if group.size is None or base is None:
        return None
    theirs = paper_rows(group.size)
    baseline = theirs["vanilla"]
    comparable = same_protocol(group)
    lines = []
    for row in group.rows:
        paper = theirs.get(row.variant.key)
        if paper is None:
            continue
        fewer = (1 - baseline.cache_hit_rate) / (1 - paper.cache_hit_rate)
        pairs: list[tuple[float | None, Value | None, str]] = [
            (paper.delta_ppl_pct, None if row is base else row.change(base), "+.1f"),
            (paper.switch_rate, row.metric("switch_rate"), ".3f"),
            (paper.cache_hit_rate, row.metric("cache_hit_rate"), ".3f"),
            (
                None if paper is baseline else fewer,
                None if row is base else row.fewer_misses(base, "cache_hit_rate"),
                ".2f",
            ),
            (paper.utilisation_entropy, row.metric("utilisation_entropy"), ".3f"),
        ]
        if comparable:
            pairs.insert(0, (paper.ppl, row.metric("ppl"), ".2f"))
        cells: list[Cell] = [row.label]
        for there, here, form in pairs:
            cells.append(NOTHING if there is None else format(there, form))
            cells.append(row.status if not row.complete else NOTHING if here is None else Figure(here, form))
        lines.append(tuple(cells))
    measured = [*(["PPL ↓"] if comparable else []), "ΔPPL %", "SR ↓", "CHR ↑", "× top-1 ↑", "UE ↑"]
    headings = ("variant", *(f"{heading} {who}" for heading in measured for who in ("paper", "ours")))
    why = "" if comparable else " Corpus, tokenizer or steps differ from the paper's, so perplexities are not compared."
    return Table(name, f"The paper beside ours, {group.title}.{why}", headings, tuple(lines))
