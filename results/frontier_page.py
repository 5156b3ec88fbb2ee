"""docs/frontier.md and its figures, from the committed records: python results/frontier_page.py."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import vl_convert

from stickymoe.paper import frontier
from stickymoe.paper.frontier import EVEN, FEWER, KEPT, Point
from stickymoe.paper.grids import GRIDS
from stickymoe.reports import figures, tables
from stickymoe.reports.collection import Collection, Group, Row, Value, collect, common_seeds, kept_gain
from stickymoe.reports.tables import ALL_SLOTS, NOTHING, Table
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runs.settings import config_from
from stickymoe.sweeps.grid import configs, load_grid
from stickymoe.variants import variant_class, variant_names

HERE = Path(__file__).parent
CACHES = (2, 3)
CHANCE = 1.0  # per cent of perplexity by which two runs may differ by chance: three times what seeds vary by


def main(docs: Path = HERE.parent / "docs") -> None:
    collection = collect([HERE])
    drawn = docs / "frontier"
    shutil.rmtree(drawn, ignore_errors=True)
    drawn.mkdir(parents=True)
    (docs / "frontier.md").write_text(page(collection, drawn), encoding="utf-8")


def page(collection: Collection, drawn: Path) -> str:
    def find(**wanted: object) -> Group | None:
        return next((g for g in collection.groups if _is(g, **wanted)), None)

    def find_longer(experts: int) -> Group | None:
        longer = (g for g in collection.groups if g.config.train.steps > 1000)
        return next((g for g in longer if _is(g, experts=experts, corpus="wikitext-2")), None)

    whole = find(steps=1000, experts=4, corpus="wikitext-2")
    screen = find(steps=300, experts=4, corpus="wikitext-2")
    sixteen = find(steps=1000, experts=16, corpus="wikitext-2")
    longer, three_longer, sixteen_longer = find_longer(4), find_longer(3), find_longer(16)
    factbook = find(experts=4, corpus="factbook")
    three = find(steps=1000, experts=3, corpus="wikitext-2")
    sections = {
        "Against the targets": _targets(
            (whole, 3, three), (sixteen, 4, whole), (longer, 3, three_longer), (factbook, 3, None)
        ),
        "The recommendation": _recommended(
            (whole, three), (longer, three_longer), (sixteen, whole), (sixteen_longer, longer)
        ),
        "The frontier": _compared(whole, drawn, "small", CACHES, three) + _on_the_papers_axes(whole, drawn),
        "What each idea taught": _lessons((whole, 3), (sixteen, 4)),
        "Or simply fewer experts?": _fits(whole, three, 3) + _fits(sixteen, whole, 4),
        "Is every row of the paper beaten?": _beaten(whole),
        "Sixteen experts, a cache of four": _compared(sixteen, drawn, "sixteen", (4,), whole),
        "A longer schedule": _compared(longer, drawn, "longer", CACHES),
        "Another corpus": _compared(factbook, drawn, "factbook", CACHES),
        "The screening": _screened(screen, drawn),
        "Does sticky mean topical?": "\n".join(filter(None, (_topical(factbook), _topical(whole)))),
        "Experts that layers share": _shared(collection),
        "Signs": _signs(collection),
    }
    parts = [INTRODUCTION, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]
    if missing := [title for title, text in sections.items() if not text]:
        parts.append("## Not run yet\n\n" + "".join(f"- {title}\n" for title in missing))
    return "\n".join(parts)


INTRODUCTION = f"""\
# Past the paper: what sticky routing costs, and who pays least

Made by `python results/frontier_page.py` from [the records](../results); `stickymoe frontier results` prints its
tables. A loss that makes routing stick costs perplexity, and a perplexity 3 % above vanilla's can be half of what the
mixture is worth over a dense model of the same active width. So a router is placed by the share of that gain it
**keeps**, (PPL_dense − PPL) / (PPL_dense − PPL_vanilla) over common seeds, and by its **misses**: accesses of all k
experts of a token that an LRU cache of C experts a layer does not hold. The target is {KEPT:.0%} of the gain at
{FEWER:g} times fewer misses than vanilla, with experts used evenly (at least {EVEN:.0%} of full entropy, none
neglected).

N experts of which a token uses k · SR: how often the heaviest expert changes from token to token · CHR: its hit rate
with two slots, the paper's metrics. Perplexity is that of the validation split, on which settings were chosen too; ±
behind a percentage is half of its 95 % interval over seeds.
The signs in a row's name are explained [below](#signs).
"""


def _is(group: Group, **wanted: object) -> bool:
    data, model = group.config.data, group.config.model
    facts = {"steps": group.config.train.steps, "experts": model.n_experts, "corpus": data.corpus}
    whole = data.fraction == 1 and model.d_model == 128 and model.layers_per_pool == 1
    return whole and all(facts[key] == value for key, value in wanted.items())


def _compared(
    group: Group | None, drawn: Path, name: str, caches: tuple[int, ...], smaller: Group | None = None
) -> str:
    """A group's table of gain and misses, and a figure for each cache, beside a mixture that fits one of them."""
    table = None if group is None else frontier.kept_table(group)
    if group is None or table is None:
        return ""
    explained = frontier.EXPLAINED if name == "small" else "Columns as in [the frontier](#the-frontier)."
    out = [f"{group.title}. {explained}\n", tables.markdown(table)]
    for C in caches:
        fits = smaller if smaller is not None and smaller.config.model.n_experts == C else None
        chart = figures.kept_gain(group, C, smaller=fits)
        out.append(_drawn(chart, drawn / f"{name}-c{C}.svg", f"Gain kept against misses, C={C}"))
    return "\n".join(filter(None, out)) + _noise(group)


def _noise(group: Group) -> str:
    """How far seeds are apart, where some row has several."""
    off = [(value.sd / value.mean, value.n) for row in group.routed if (value := row.metric("ppl")) and value.sd]
    if not off:
        return ""
    spread = math.sqrt(sum((n - 1) * x * x for x, n in off) / sum(n - 1 for _, n in off))
    return (
        f"\nFrom seed to seed perplexity varies by {spread:.1%} (standard deviation, {len(off)} rows with several): "
        f"of rows with one seed, differences under {3 * spread:.0%} may be chance. A seed fixes the order of the text; "
        "initial weights are the same only among routers with as many gates.\n"
    )


def _on_the_papers_axes(group: Group | None, drawn: Path) -> str:
    """Perplexity against the two metrics that the paper draws, both of the top expert alone."""
    if group is None:
        return ""
    hits = figures.pareto(group, "cache_hit_rate", "cache hit rate, top-1, C=2 (higher is better)", better="higher")
    switches = figures.pareto(group, "switch_rate", "switch rate (lower is better)", better="lower")
    shown = [
        _drawn(hits, drawn / "small-chr.svg", "Perplexity against the paper's hit rate"),
        _drawn(switches, drawn / "small-sr.svg", "Perplexity against the switch rate"),
    ]
    if not any(shown):
        return ""
    words = "The paper's own axes count the heaviest expert of a token alone, as if a device loaded no other:\n"
    return "\n".join(("", words, *filter(None, shown)))


def _drawn(chart: figures.Chart | None, file: Path, words: str) -> str:
    """A chart as a file, and the line of Markdown that shows it; nothing of no chart."""
    if chart is None:
        return ""
    file.write_text(vl_convert.vegalite_to_svg(figures.themed(chart)), encoding="utf-8")
    return f"![{words}]({file.parent.name}/{file.name})\n"


def _screened(group: Group | None, drawn: Path) -> str:
    """Every method in few steps, by its perplexity: what the mixture is worth so early may be too little to share."""
    dense = group.find("dense") if group is not None else None
    if group is None or dense is None or group.baseline is None or (gain := group.baseline.change(dense)) is None:
        return ""
    rows = sorted((row for row in group.rows if row.mean("ppl") is not None), key=lambda row: row.mean("ppl") or 0.0)
    planned = configs(load_grid("frontier", GRIDS), seeds=[42], flags=["--data.path", "text"], source="")
    missing = [f"`{run.variant.label}`" for run in planned if group.find(run.variant.key) is None]
    title = "misses per access, all slots, C=3 (log, lower is better)"
    chart = figures.pareto(group, f"{ALL_SLOTS}3", title, better="lower", misses=True)
    words = (
        f"{len(planned) - len(missing)} of the {len(planned)} rows of `stickymoe sweep frontier`: every method at "
        f"three strengths, {group.config.train.steps} steps, one seed; leads, not results (siblings by hash came of "
        "it, and are not among them). Vanilla is "
        f"{gain.mean:+.1f} % of perplexity from dense so early, so rows are ordered by perplexity, and no gain is "
        "shared out. In brackets: perplexity against vanilla, times fewer misses at C=3.\n"
    )
    figure = _drawn(chart, drawn / "screening-c3.svg", "Perplexity against misses after 300 steps")
    table = tables.markdown(tables.results(rows, group.baseline))
    not_run = f"Not run: {', '.join(missing)}.\n" if missing else ""
    return "\n".join(filter(None, (words, figure, _leads(rows, group.baseline), table, not_run)))


def _leads(rows: list[Row], vanilla: Row, capacity: int = 3) -> str:
    """What each method taught, with its rows: their perplexity and their misses with C slots against vanilla's."""
    told: dict[str, list[str]] = {}
    for row in rows:
        change, fewer = row.change(vanilla), row.fewer_misses(vanilla, f"{ALL_SLOTS}{capacity}")
        if row is not vanilla and change is not None and fewer is not None:
            told.setdefault(row.variant.name, []).append(f"`{row.label}` ({change.mean:+.1f} %, {fewer.mean:.2f} ×)")
    return "".join(f"- **{name}**: {SCREENED.get(name, '')} {', '.join(rows)}.\n" for name, rows in told.items())


def _targets(*groups: tuple[Group | None, int, Group | None]) -> str:
    """Which rows reach the target with C slots, and what a mixture of C experts, which loads nothing, is worth."""
    lines = []
    for group, C, smaller in groups:
        found = frontier.points(group) if group is not None else []
        if group is None or len(found) < 2:  # nothing beside vanilla
            continue
        solved = [p for p in found if C in p.fewer and p.solves(C)]
        solved.sort(key=lambda p: not p.surely_solves(C))
        near = frontier.nearest([p for p in found if p.row is not group.baseline], C)
        where = f"N={group.config.model.n_experts}, C={C}{_where(group)}"
        if solved:
            enough = [p for p in found if C in p.fewer and p.kept.mean >= KEPT and p.fewer[C].mean >= FEWER]
            uneven = "; ".join(_told(p, C) for p in enough if not p.even)
            one = ", with one seed" if all(p.kept.n == 1 for p in solved) else " by the mean, not beyond chance"
            reached = f"reached{'' if solved[0].surely_solves(C) else one}"
            lines.append(
                f"- **{where}: {reached}** by {'; '.join(_told(p, C) for p in solved)}."
                + (f" Not used evenly: {uneven}." if uneven else "")
                + _beside_all(solved[0].row, group)
                + _beside_fewer(solved[0].row, smaller)
            )
            continue
        fewest = max(
            (p for p in found if p.even and C in p.fewer and p.row is not group.baseline),
            key=lambda p: min(1, p.kept.mean / KEPT) * p.fewer[C].mean,
            default=None,
        )
        lines.append(
            f"- **{where}: not reached.**"
            + (f" The fewest misses with {KEPT:.0%} kept: {_told(near, C)}." if near else "")
            + (f" Nearest by the product of both: {_told(fewest, C)}." if fewest else "")
        )
    return "\n".join(lines) + "\n" if lines else ""


def _beside_all(row: Row, group: Group) -> str:
    """What is kept of a better mixture's gain than vanilla's: that of the recommended router with a slot for each."""
    dense, alone = group.find("dense"), _like_recommended(group, alone=True)
    kept = kept_gain(row, baseline=alone[0], dense=dense) if dense is not None and alone else None
    if kept is None:
        return ""
    half = frontier.interval(kept)
    share = f"{100 * kept.mean:.0f}{'' if half is None else f' ± {100 * half:.0f}'} %"
    return (
        f" Of what the recommended router gains with all {group.config.model.n_experts} in memory `{row.label}` keeps "
        f"{share} ({_seeds(kept.n)})."
    )


def _beside_fewer(row: Row, smaller: Group | None) -> str:
    """A row beside the best mixture of as many experts as there are slots, over common seeds."""
    found = [(r, change) for r in smaller.routed if (change := row.change(r)) is not None] if smaller else []
    if smaller is None or not found:
        return ""
    best, change = max(found, key=lambda pair: pair[1].mean)
    same = best in _like_recommended(smaller, alone=True)
    by = "the recommended router without siblings" if same else f"`{best.label}`"
    return (
        f" The best mixture of {smaller.config.model.n_experts}, which loads nothing, is that of {by}, and "
        f"`{row.label}` is {_percent(change)} it ({_seeds(change.n)})."
    )


def _where(group: Group) -> str:
    """How it differs from most groups of this page: the corpus and the steps."""
    steps = group.config.train.steps
    corpus = "" if _is(group, corpus="wikitext-2") else f", {group.config.data.corpus}"
    return corpus + ("" if steps == 1000 else f", {steps:,} steps")


def _told(point: Point, capacity: int) -> str:
    half = frontier.interval(point.kept)
    spread = f" ± {100 * half:.0f}" if half is not None else ""
    kept = f"{100 * point.kept.mean:.0f}{spread} % kept"
    return f"`{point.row.label}` ({kept}, {point.fewer[capacity].mean:.1f} × fewer, {_seeds(point.kept.n)})"


# What 300 steps taught of each variant.
SCREENED = {
    "hash": "Experts are apart from the first step on: far below all others so early.",
    "two_speed": "Below vanilla already, at about as many misses.",
    "hysteresis": "A small bonus is nearly free and buys little; a large one saves most misses at a price.",
    "smooth": "Longer averages save more and cost more; a learned decay does no better than its fixed start.",
    "residency": "Only C experts can be chosen, and one may move a token: most misses are gone for a small price.",
    "siblings": "Slots are chosen at once, who is in them slowly: the best trade of the screening.",
    "rent": "Who moves in has to have been missed for some time: level with residency.",
    "soft": "The paper's loss costs at every weight, hardly moves the misses of all k, and ends in uniform gates.",
    "boundary": "Released at the ends of sentences it is the same loss: few pairs are ends.",
    "graded+soft": "With λ rising late, or sparing layer 0, it costs a little less and saves a little less.",
    "grouped": "Switches inside groups are cheap, and it is single experts that miss.",
    "cross_layer": "The same experts in adjacent layers save nothing where layers have experts of their own.",
    "blockffn": "Saves more than `soft` at λ=0.5, with experts used unevenly; at 2 its gates are uniform too.",
    "bles": "Ends in uniform gates, and saves little.",
    "dot": "Asks gates to be sure of themselves, and they collapse: nearly always the same expert in front.",
    "cache_loss": "Paying for expected misses makes routing stick hard, by giving up experts.",
    "segment": "A choice for W tokens from those before them is as dear as one by hash, which is `trajectory`.",
    "trajectory": "A bound, with nothing to learn: experts fixed for a span.",
}

# What was tried, by the name of its variant, and what it taught. Rows that are not there are left out.
LESSONS = (
    (
        ("smooth",),
        "A gate that reads an average of the last few tokens chooses **better**, not only more steadily: light "
        "smoothing beats vanilla in perplexity and in misses at once. The tokens before tell a layer what the token "
        "alone does not.",
    ),
    (
        ("residency",),
        "Only C experts can be chosen, and they change slowly: misses fall by an order of magnitude. Leaving routing "
        "free for the first half of training, so that experts specialise first, made no difference beyond chance.",
    ),
    (
        ("residency+smooth",),
        "Smoothing and residency together are no better than residency alone. Where experts come and go, each has to "
        "stand in for the others, and what smoothing won is gone. With all but one slot pinned, and inertia from the "
        "first step on, more is kept. There the balance loss asks experts that share a slot to be used as much as "
        "pinned ones; with a tenth of it, and a smaller margin, perplexity is lower and use less even.",
    ),
    (
        ("cache_loss+residency",),
        "Paying for expected misses by gradient makes routing stick hard, and at this weight costs more than the "
        "mixture is worth.",
    ),
    (
        ("siblings",),
        "Experts take turns in a slot: one gate chooses slots token by token, a slower one who is in them, within a "
        "budget of loads. Roles stay apart, since a slot keeps its role whoever is in it. Each sibling sees only a "
        "part of the text, so most of every gradient goes to the whole family, lest each learn the same things again "
        "(κ; what it brings has no published row). Without the hash, N=4 in three slots is level with a mixture of "
        "three, and N=16 in four slots is no better than a mixture of four, and those load nothing. With `token` the "
        "gate of the slots reads the token beside the average, which helps it as it helps two_speed. With `hashed` a "
        "hash of the token says which slots it uses, and the gate only weighs them: slots are apart from the first "
        "step on, and the slow gate has nothing to learn but who is in them. Being one for half of training (`apart`), "
        "and then sharing less, was no better over the common seed. What learning apart must beat is as many experts "
        "as slots ([does it?](#the-recommendation)).",
    ),
    (("rent",), "An outsider moves in when the gate weight it missed adds up to the price of a load."),
    (
        ("two_speed", "residency+two_speed"),
        "Two gates, one for the token and one for the average of those before it, choose better than either alone. "
        "Their choices change nearly as often as vanilla's, so this is for experts that are all in memory, as many as "
        "there are slots, and for choosing among slots.",
    ),
    (("hysteresis", "hysteresis+smooth"), "A bonus for the experts of the previous token."),
    (
        ("hash",),
        "A hash of the word, which no training moves, has lower perplexity than every learned gate tried with N=4: "
        "its experts are apart from the first step on, while learned gates spend much of so short a training on "
        "telling tokens apart. With three experts it is only level with smoothing, and with sixteen its lead is far "
        "larger (`siblings C=16`, the hash with a gate that weighs). It switches slightly more often than vanilla, so "
        "like two_speed it is for slots that are all in memory, and that is what siblings make of it.",
    ),
    (("trajectory",), "A bound: experts fixed by a hash of the span."),
)


def _recommended(*pairs: tuple[Group | None, Group | None]) -> str:
    """What `train --recommended` is, buys and costs, beside vanilla, and beside fewer experts that all stay.

    Pairs of a group and that of fewer experts, the one it is recommended from first.
    """
    group = pairs[0][0]
    key = config_from({"variant": RECOMMENDED}).variant.key
    found = frontier.points(group) if group is not None else []
    point = next((p for p in found if p.row.variant.key == key), None)
    if group is None or group.baseline is None or point is None:
        return ""
    change = point.row.change(group.baseline)
    assert change is not None
    fewer = " and ".join(f"{point.fewer[C].mean:.2f} × fewer misses with {C} slots a layer" for C in CACHES)
    sizes = [
        f"C={row.variant.capacity}, B={row.variant.budget:g} of N={g.config.model.n_experts}"
        for g, _ in pairs
        if g is not None
        for row in _like_recommended(g, alone=False)
    ]
    paragraphs = (
        f"`stickymoe train --recommended` trains `{point.row.label}`. Each layer has C slots, and expert i can only "
        "sit in slot i mod C; those that share a slot are siblings, a family. A hash of the token picks its k slots, "
        "and a gate weighs them. A slow gate decides which sibling sits in each slot, and swaps one at most every 1/B "
        "tokens; siblings share most of their gradients, since each sees only a part of the text.",
        f"**What it buys**: perplexity {_percent(change)} vanilla's, with {fewer} ({_seeds(change.n)}). A layer loads "
        "C experts at the start of a sequence and then at most one every 1/B tokens, at most B/k + (C+1)/(k·T) an "
        "access over T tokens. That needs a runtime that evicts the sibling; the LRU cache of the tables may load "
        "more.",
        "**What it costs**: two small gates in each layer; decoding remembers an average for each slot and expert, and "
        f"who is in place ([time](performance.md)). {_beside_hash(key, *(g for g, _ in pairs))}",
        _or_fewer(*pairs),
        "**For your device**: `--variant.capacity` is C = (memory − other weights) / (layers · bytes of an expert), "
        "and `--variant.budget` at most B, the loads per token and layer that the wanted speed leaves time for. "
        "`stickymoe plan TRACE --device NAME --tokens_per_s X` tells both; as TRACE a short run of vanilla will do, "
        "or one of `stickymoe trace make`. Train with the C of the device: with fewer slots little is left of it. "
        f"Run so far: {'; '.join(dict.fromkeys(sizes))}.",
    )
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _beside_hash(key: str, *groups: Group | None) -> str:
    """What is left of the hash alone, which is what most of the perplexity comes from."""
    told = []
    for group in groups:
        ours, plain = (group.find(key), group.find("hash")) if group is not None else (None, None)
        if group is None or ours is None or plain is None:
            continue
        by, of_vanilla = plain.change(ours), plain.change(group.baseline) if group.baseline is not None else None
        if by is not None and of_vanilla is not None:
            told.append(f"{_percent(by)} it and {_percent(of_vanilla)} vanilla{_where(group)} ({_seeds(by.n)})")
    if not told:
        return ""
    return f"Its low perplexity is that of the hash: `hash`, which saves no loads, is {'; '.join(told)}."


def _or_fewer(*pairs: tuple[Group | None, Group | None]) -> str:
    """The same router over as many experts as there are slots, where it has no siblings and loads nothing."""
    told, pay = [], []
    for group, smaller in pairs:
        ours, alone = _like_recommended(group, alone=False), _like_recommended(smaller, alone=True)
        change = alone[0].change(ours[0]) if ours and alone else None
        if group is not None and smaller is not None and change is not None:
            few, many = smaller.config.model.n_experts, group.config.model.n_experts
            half = frontier.interval(change)
            sure = abs(change.mean) > (CHANCE if half is None else half)
            pay.append(sure and change.mean > 0)
            verdict = "more pay" if pay[-1] else "fewer are better" if sure else "within chance"
            told.append(
                f"N={few} is {_percent(change)} N={many} in {few} slots{_where(group)} ({_seeds(change.n)}: {verdict})"
            )
    if not told:
        return ""
    lesson = (
        "Where more do not pay, siblings learn too little apart in trainings as short as these: if the number of "
        "experts is yours to choose, train as many as the device holds."
    )
    return (
        "**Or fewer experts**: with as many experts as slots (`--model.n_experts C`) the same router has no siblings, "
        f"and loads nothing after the first tokens. Perplexity of {'; of '.join(told)}."
        + ("" if all(pay) else f" {lesson}")
    )


def _like_recommended(group: Group | None, *, alone: bool) -> list[Row]:
    """Its rows of the recommended router, whatever its slots and loads: with siblings, or with each expert `alone`."""
    wanted = config_from({"variant": RECOMMENDED}).variant
    rows = [row for row in group.routed if row.variant.name == wanted.name] if group is not None else []
    return [
        row
        for row in rows
        if replace(row.variant, capacity=wanted.capacity, budget=wanted.budget) == wanted
        and alone == (row.variant.capacity >= row.runs[0].config.model.n_experts)
    ]


def _percent(change: Value) -> str:
    half = frontier.interval(change)
    spread = "" if half is None else f" ± {half:.1f}"
    return f"{abs(change.mean):.1f}{spread} % {'below' if change.mean < 0 else 'above'}"


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def _lessons(*groups: tuple[Group | None, int]) -> str:
    """What each idea taught, with its rows in every group at that group's cache."""
    found = [(frontier.points(group), group.config.model.n_experts, C) for group, C in groups if group is not None]
    lines = []
    for names, words in LESSONS:
        told = [
            f"N={N}, C={C}: {'; '.join(_told(p, C) for p in rows)}."
            for points, N, C in found
            if (rows := [p for p in points if p.row.variant.name in names and C in p.fewer])
        ]
        if told:
            lines.append(f"- **{names[0]}**: {words} {' '.join(told)}")
    return "\n".join(lines) + "\n" if lines else ""


def _fits(group: Group | None, smaller: Group | None, capacity: int) -> str:
    """Mixtures of no more experts than the cache holds, by the gain of the larger one that they keep."""
    if group is None or smaller is None or not (rows := frontier.fitting(group, smaller)):
        return ""
    few, many = smaller.config.model.n_experts, group.config.model.n_experts
    most = 6
    words = (
        f"A device that holds {capacity} experts a layer can have a mixture of {few}, which loads nothing after its "
        f"first tokens. That is what a router over {many} must beat with so strict a cache"
        f"{' (the best six)' if len(rows) > most else ''}:\n\n"
    )
    cells = []
    for row, kept in rows[:most]:
        ppl = tables.number(row.metric("ppl", common_seeds(row, group.baseline, group.find("dense"))), ".2f")
        cells.append((f"{row.label}, N={few}", str(kept.n), ppl, f"{100 * kept.mean:.0f}", "first tokens only"))
    ours, alone = _like_recommended(group, alone=False), _like_recommended(smaller, alone=True)
    if alone:
        words += f"`{alone[0].label}` has a slot for each expert: the recommended router without siblings.\n\n"
    if ours and alone and (seeds := common_seeds(ours[0], alone[0], group.baseline, group.find("dense"))):
        ppl, hit = (ours[0].metric(name, seeds) for name in ("ppl", f"{ALL_SLOTS}{capacity}"))
        kept = kept_gain(ours[0], baseline=group.baseline, dense=group.find("dense"), seeds=seeds)
        share = NOTHING if kept is None else f"{100 * kept.mean:.0f}"
        misses = NOTHING if hit is None else f"{1 - hit.mean:.3f}"
        cells.insert(0, (f"{ours[0].label}, N={many}", str(len(seeds)), tables.number(ppl, ".2f"), share, misses))
    heads = ("variant", "common seeds", "PPL ↓", f"gain of N={many} kept % ↑", f"misses C={capacity} ↓")
    return words + tables.markdown(Table("fits", "", heads, tuple(cells))) + "\n"


def _beaten(group: Group | None) -> str:
    found = frontier.points(group) if group is not None else []
    if not found:
        return ""
    lines, rows = [], {}
    for C in CACHES:
        by = frontier.dominators(found, C)
        n = sum(point is not None for point in by.values())
        lines.append(
            f"- C={C}: {n} of the {len(by)} rows are beaten in perplexity and in misses by one from outside the paper: "
            "over several common seeds by more than half of the 95 % interval, over one by any amount."
        )
        for label, point in by.items():
            theirs = next(p for p in found if p.row.label == label)
            seeds = len(common_seeds(point.row, theirs.row)) if point else 0
            rows.setdefault(label, []).append(f"`{point.row.label}` ({seeds})" if point else "none")
    table = Table(
        "beaten",
        "",
        ("the paper's", *(f"beaten at C={C} by (common seeds)" for C in CACHES)),
        tuple((k, *v) for k, v in rows.items()),
    )
    words = (
        "These are the paper's methods run here, at a tenth of its steps, where they stick far less than it reports "
        "([results](results.md)); its own models are not compared.\n\n"
    )
    return words + "\n".join(lines) + "\n\n" + tables.markdown(table)


def _table(rows: list[Row], columns: list[tuple[str, str, str]], label: Callable[[Row], str]) -> str:
    """A line of each row, over the seeds that have the last of its columns."""
    lines = []
    for row in rows:
        seeds = row.by_seed(columns[-1][1])
        cells = (tables.number(row.metric(metric, seeds), form) for _, metric, form in columns)
        lines.append((label(row), str(len(seeds)), *cells))
    return tables.markdown(Table("", "", ("variant", "seeds", *(head for head, _, _ in columns)), tuple(lines)))


def _topical(group: Group | None) -> str:
    if group is None:
        return ""
    rows = [row for row in group.routed if row.mean("run_length") is not None]
    if not rows:
        return ""
    columns = [
        ("PPL ↓", "ppl", ".2f"),
        ("I(expert; topic) above chance, bits", "topic_information", ".4f"),
        ("word specialisation, × uniform", "word_specialisation", ".2f"),
        ("run length, tokens", "run_length", ".2f"),
    ]
    columns = [column for column in columns if any(row.mean(column[1]) is not None for row in rows)]
    words = f"{group.title}."
    if all(metric != "topic_information" for _, metric, _ in columns):
        words += " This text has no topics, so experts can only be asked for how long they stay and for which words."
    return f"{words}\n\n" + _table(rows, columns, lambda row: row.label) + _coherence(group.baseline, rows)


def _coherence(vanilla: Row | None, rows: list[Row]) -> str:
    """Vanilla against each other row: does who stays longer know more of the topic?"""

    def asked(row: Row) -> tuple[float, float] | None:
        run, topic = row.mean("run_length"), row.mean("topic_information")
        return None if run is None or topic is None else (run, topic)

    plain = asked(vanilla) if vanilla is not None else None
    if plain is None:
        return ""
    lines = []
    for row in rows:
        found = asked(row)
        if row is not vanilla and found is not None:
            more = found[1] - plain[1]
            knows = "about as much" if abs(more) < 0.1 * abs(plain[1]) else "more" if more > 0 else "less"
            seeds = _seeds(len(row.by_seed("topic_information")))
            lines.append(
                f"- `{row.label}` stays {found[0] / plain[0]:.2f} × as long as vanilla and knows {knows} of the topic: "
                f"{found[1]:.4f} bits against {plain[1]:.4f} ({seeds})."
            )
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _shared(collection: Collection) -> str:
    groups = [g for g in collection.groups if g.config.model.layers_per_pool > 1]
    if not groups:
        return ""
    steps = {g.config.train.steps for g in groups}
    groups += [g for g in collection.groups if g.config.train.steps in steps and _is(g, experts=4, corpus="wikitext-2")]
    groups.sort(key=lambda g: (g.config.model.universal, g.config.model.layers_per_pool))

    def pool(row: Row) -> str:
        model = row.runs[0].config.model
        kind = "universal" if model.universal else f"shared by {model.share_block}" if model.share_block > 1 else "own"
        return f"{kind}, {model.pool_size * model.n_layers // model.layers_per_pool} experts"

    asked = {row.variant.key for g in groups if g.config.model.layers_per_pool > 1 for row in g.routed}
    rows = [row for g in groups for row in g.routed if row.variant.key in asked]
    rows = [row for row in rows if row.mean("pool_hit_rate_c2") is not None]
    columns = [("PPL ↓", "ppl", ".2f"), ("SR ↓", "switch_rate", ".3f")]
    columns += [(f"pool of {C}·L ↑", f"pool_hit_rate_c{C}", ".3f") for C in CACHES]
    columns += [(f"all C={C} ↑", f"{ALL_SLOTS}{C}", ".3f") for C in CACHES]
    words = (
        "One cache for all layers, asked token by token through the layers as in decoding, where a tensor that layers "
        f"share is one entry; beside it the cache of each layer alone. {max(steps)} steps: leads, not results.\n"
    )
    table = _table(rows, columns, lambda row: f"{row.label}: {pool(row)}")
    told = [_cross_layer(row, plain, pool(row)) for row in rows for plain in rows if pool(row) == pool(plain)]
    return words + "\n" + table + "\n" + "".join(filter(None, told))


def _cross_layer(row: Row, plain: Row, pool: str) -> str:
    """What the loss for the same experts in adjacent layers does to one kind of pool."""
    change, fewer = row.change(plain), row.fewer_misses(plain, "pool_hit_rate_c2")
    if row.variant.name != "cross_layer" or plain.variant.name != "vanilla" or change is None or fewer is None:
        return ""
    as_many = abs(fewer.mean - 1) < 0.005
    return (
        f"- {pool}: `{row.label}` has {'as many misses' if as_many else f'{fewer.mean:.2f} × fewer misses'} of 2·L, at "
        f"{change.mean:+.1f} % of perplexity"
        f"{'; the pool holds them all' if (plain.mean('pool_hit_rate_c2') or 0.0) > 0.99 else ''}.\n"
    )


def _signs(collection: Collection) -> str:
    """What the signs in the rows' names stand for, from the variants themselves."""
    there = {name for group in collection.groups for row in group.rows for name in row.variant.name.split("+")}
    lines = [
        "Each is a setting of its variant, as `--variant.budget` of `siblings`; what a name does not say is as given "
        "here. μ (`mu`) weighs the balance loss.\n"
    ]
    for name in filter(there.__contains__, variant_names()):
        words = dict(re.findall(r"^ +(\w+): (.+)$", variant_class(name).__doc__ or "", re.M))
        own = [f for f in fields(variant_class(name)) if f.name != "mu"]
        told = " · ".join(
            f"{f.metadata.get('symbol', f.name)} (`{f.name}`, {_default(f.default)}) {words[f.name]}" for f in own
        )
        if told:
            lines.append(f"- `{name}`: {told}.")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    return "off" if value is False else "all alike" if value == () else str(value)


if __name__ == "__main__":
    main(*(Path(arg) for arg in sys.argv[1:]))
