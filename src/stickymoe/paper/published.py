"""The published numbers of the paper, next to ours.

Perplexities are compared only if corpus, tokenizer and steps match. Otherwise only changes relative to the own
baseline, switch rates, hit rates and utilisation are compared.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

from stickymoe.reports.collection import Group, Row, Value
from stickymoe.reports.tables import MISSING, Cell, Number, Table
from stickymoe.variants import variant_class

SOURCE = "StickyMoE, sticky_routing.tex, tables of main results and of per-layer switch rates"
_VALID_TOKENS = 242_643  # of the raw WikiText-2 with GPT-2's tokenizer, as the paper counts them


@dataclass(frozen=True)
class PaperRow:
    """One row of the table in the paper, with the label of our variant."""

    label: str
    ppl: float
    delta_ppl_pct: float | None
    switch_rate: float
    cache_hit_rate: float
    utilisation_entropy: float
    per_layer: tuple[float, ...]


def paper_rows(size: str) -> dict[str, PaperRow]:
    """The table of the paper for `small` or `medium`, by variant key, in the order of the paper."""
    text = resources.files("stickymoe.paper").joinpath("data", f"results_{size}.csv").read_text(encoding="utf-8")
    rows = {}
    for line in csv.DictReader(text.splitlines()):
        given = {name: float(line[name]) for name in ("lam", "alpha") if line[name]}
        if line["window"]:
            given["window"] = int(line["window"])
        variant = variant_class(line["variant"])(**given)
        rows[variant.key] = PaperRow(
            label=variant.label,
            ppl=float(line["ppl"]),
            delta_ppl_pct=float(line["delta_ppl_pct"]) if line["delta_ppl_pct"] else None,
            switch_rate=float(line["switch_rate"]),
            cache_hit_rate=float(line["cache_hit_rate"]),
            utilisation_entropy=float(line["utilisation_entropy_bits"]),
            per_layer=tuple(float(line[f"sr_l{layer}"]) for layer in range(4)),
        )
    return rows


def same_protocol(group: Group) -> bool:
    """Whether perplexities can be compared: same corpus, tokenizer and steps as in the paper."""
    config, data = group.config, group.runs[0].record.data
    same_text = config.data.tokenizer == "gpt2" and data["tokens"]["valid"] == _VALID_TOKENS
    return same_text and config.data.fraction == 1 and config.train.steps == 10_000


def beside_the_paper(group: Group, *, name: str) -> Table | None:
    """The numbers of the paper and ours, column by column; None if the model has another size."""
    if group.size is None:
        return None
    comparable = same_protocol(group)
    theirs = paper_rows(group.size)
    lines = []
    for key, paper in theirs.items():
        row = _ours(group, key)
        cells: list[Cell] = [paper.label]
        for there, here, form in _pairs(paper, theirs["vanilla"], row, group.baseline, comparable):
            cells += [MISSING if there is None else format(there, form), _cell(row, here, form)]
        lines.append(tuple(cells))
    measured = [*(["PPL ↓"] if comparable else []), "ΔPPL %", "SR ↓", "CHR ↑", "× top-1 ↑", "UE ↑"]
    why = "" if comparable else " Corpus, tokenizer or steps differ from the paper, so perplexities are not compared."
    return Table(name, f"The paper and our runs, {group.title}.{why}", _both(measured), tuple(lines))


def layers_beside_the_paper(group: Group, *, name: str) -> Table | None:
    """The switch rate of every layer in the paper and in our runs; None if the model has another size."""
    if group.size is None:
        return None
    lines = []
    for key, paper in paper_rows(group.size).items():
        row = _ours(group, key)
        ours = row.per_layer("switch_rate") if row is not None else None
        cells: list[Cell] = [paper.label]
        for layer, there in enumerate(paper.per_layer):
            here = None if row is None or ours is None else Value(ours[layer], None, len(row.complete))
            cells += [format(there, ".3f"), _cell(row, here, ".3f")]
        lines.append(tuple(cells))
    caption = f"Switch rate by layer in the paper and in our runs, {group.title}."
    return Table(name, caption, _both([f"L{layer} ↓" for layer in range(4)]), tuple(lines))


def _ours(group: Group, key: str) -> Row | None:
    return next((row for row in group.rows if row.variant.key == key), None)


def _both(measured: list[str]) -> tuple[str, ...]:
    return ("variant", *(f"{heading} {who}" for heading in measured for who in ("paper", "ours")))


def _cell(row: Row | None, value: Value | None, form: str) -> Cell:
    if row is None:
        return "not run"
    if not row.complete:
        return row.status
    return MISSING if value is None else Number(value, form)


def _pairs(
    paper: PaperRow, paper_base: PaperRow, row: Row | None, base: Row | None, comparable: bool
) -> list[tuple[float | None, Value | None, str]]:
    """For each column: the value of the paper, ours, and the number format."""
    fewer = None if paper is paper_base else (1 - paper_base.cache_hit_rate) / (1 - paper.cache_hit_rate)

    def measured(metric: str) -> Value | None:
        return None if row is None else row.metric(metric)

    other = None if row is base else row
    return [
        *([(paper.ppl, measured("ppl"), ".2f")] if comparable else []),
        (paper.delta_ppl_pct, other.change(base) if other and base else None, "+.1f"),
        (paper.switch_rate, measured("switch_rate"), ".3f"),
        (paper.cache_hit_rate, measured("cache_hit_rate"), ".3f"),
        (fewer, other.fewer_misses(base, "cache_hit_rate") if other and base else None, ".2f"),
        (paper.utilisation_entropy, measured("utilisation_entropy"), ".3f"),
    ]
