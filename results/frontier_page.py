"""Write docs/frontier.md and its figures from the committed records: python results/frontier_page.py."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import torch
import vl_convert

from stickymoe.locality.plan import bytes_text
from stickymoe.paper import frontier, yardstick
from stickymoe.paper.figures import kept_gain as kept_gain_figure
from stickymoe.paper.frontier import EVEN, MISSES_FACTOR, TARGET_GAIN, Point, kept_gain
from stickymoe.paper.grids import GRIDS, PAPER_ORDER
from stickymoe.paper.yardstick import Choice, Yardstick
from stickymoe.reports import figures, tables
from stickymoe.reports.charts import Chart, colour_by, inline, rounded, themed
from stickymoe.reports.collection import Collection, Group, Row, Run, Value, collect, common_seeds, grouped
from stickymoe.reports.tables import ALL_SLOTS, MISSING, Table
from stickymoe.runs.presets import RECOMMENDED
from stickymoe.runs.settings import config_from
from stickymoe.sweeps.grid import configs, load_grid
from stickymoe.training.build import build_model
from stickymoe.variants import hypers, variant_names

HERE = Path(__file__).parent
CACHES = (2, 3)
NOISE = 1.0  # per cent of perplexity: smaller differences between two single runs count as noise (three deviations)


def main(docs: Path = HERE.parent / "docs") -> None:
    collection = collect([HERE], order=PAPER_ORDER)
    collection = replace(collection, groups=grouped(map(_with_sizes, collection.runs), order=PAPER_ORDER))
    folder = docs / "frontier"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (docs / "frontier.md").write_text(page(collection, folder), encoding="utf-8")


def _with_sizes(run: Run) -> Run:
    """A run with the bytes of its model: records of earlier versions lack them, so its model is built without data."""
    if run.record.sizes:
        return run
    with torch.device("meta"):
        sizes = build_model(run.config, run.record.data["vocab_size"]).sizes()
    return replace(run, record=replace(run.record, sizes=sizes))


def page(collection: Collection, folder: Path) -> str:
    # Rows in slow memory are no experts: misses do not say what they cost.
    runs = (run for run in collection.runs if not run.record.sizes.get("row_bytes"))
    groups = grouped(runs, order=PAPER_ORDER)

    def find(**wanted: object) -> Group | None:
        return next((g for g in groups if _is(g, **wanted)), None)

    def find_longer(experts: int) -> Group | None:
        longer = (g for g in groups if g.config.train.steps > 1000)
        return next((g for g in longer if _is(g, experts=experts, corpus="wikitext-2")), None)

    whole = find(steps=1000, experts=4, corpus="wikitext-2")
    screen = find(steps=300, experts=4, corpus="wikitext-2")
    sixteen = find(steps=1000, experts=16, corpus="wikitext-2")
    longer, three_longer, sixteen_longer = find_longer(4), find_longer(3), find_longer(16)
    factbook = find(experts=4, corpus="factbook")
    three = find(steps=1000, experts=3, corpus="wikitext-2")
    sections = {
        "Equal fast memory": _equal_memory(collection, folder),
        "Is the target reached?": _targets(
            (whole, 3, three), (sixteen, 4, whole), (longer, 3, three_longer), (factbook, 3, None)
        ),
        "The recommendation": _recommended(
            (whole, three), (longer, three_longer), (sixteen, whole), (sixteen_longer, longer)
        ),
        "The frontier": _compared(whole, folder, "small", CACHES, three) + _on_the_papers_axes(whole, folder),
        "What each idea showed": _lessons((whole, 3), (sixteen, 4)),
        "Are fewer experts as good?": _fits(whole, three, 3) + _fits(sixteen, whole, 4),
        "Is every row of the paper beaten?": _beaten(whole),
        "Sixteen experts, a cache of four": _compared(sixteen, folder, "sixteen", (4,), whole),
        "A longer schedule": _compared(longer, folder, "longer", CACHES),
        "Another corpus": _compared(factbook, folder, "factbook", CACHES),
        "Screening": _screened(screen, folder),
        "Does sticky mean topical?": "\n".join(filter(None, (_topical(factbook), _topical(whole)))),
        "Layers that share experts": _shared(collection),
        "Symbols": _symbols(collection),
    }
    parts = [_advice(collection), INTRODUCTION, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]
    if missing := [title for title, text in sections.items() if not text]:
        parts.append("## Not run yet\n\n" + "".join(f"- {title}\n" for title in missing))
    return "\n".join(parts)


def _advice(collection: Collection) -> str:
    """The first lines of the page: what to do with a device, on what evidence, and what was not tried."""
    title = "# Beyond the paper: what sticky routing costs\n\n"
    found = _yardsticks(collection)
    memory = found[0].memory if found else None
    if memory is None:
        return title
    lines = []
    long = [y for y in yardstick.yardsticks(g for g in collection.groups if _is(g)) if y.steps >= LONG]
    for y in [*(y for y in long if y not in found and any(c.row_bytes for c in y.choices)), *found]:
        fits = y.fitting(memory)
        plain = next((c for c in fits if not c.resident and c.control), None)
        sticky = next((c for c in fits if not c.resident and plain and c.loaded <= plain.loaded / 10), None)
        rows = next((c for c in fits if c.row_bytes), None)
        ceiling = y.ceiling if y.experts == EXPERTS else None
        passes = y.choices[0].row.runs[0].epochs
        costs = (_cost(c) for c in (y.floor(memory), plain, sticky, rows, ceiling))
        lines.append((f"{y.corpus}, {y.steps:,} steps, {passes:.1f} passes", *costs))
    headings = ("training", "all fit", "swaps, vanilla", "swaps, sticky", "reads rows", f"all {EXPERTS} in memory")
    table = Table("advice", "", headings, tuple(lines))
    return f"""\
{title}What should a device with M bytes of fast memory run? Here, M is {bytes_text(memory)}: {SLOTS} of {EXPERTS}
experts per layer, and everything outside the experts. Perplexity, and bytes that a token loads from slow memory:

{tables.markdown(table)}
- **Train as many experts as fit, and keep all of them in memory** ("all fit"). They load nothing.
- **More experts than fit** cost megabytes per token with plain routing. Sticky routing reads a tenth of that, but a
  model with just the experts that fit is then as good. It is for checkpoints whose number of experts is given.
- **Rows of a table in slow memory** (`--variant hash+lookup`) cost kilobytes per token, and had the lowest perplexity
  in every training tried (one seed each). If training makes many passes over the text, each token must read its n-gram
  rows in one pass only; otherwise they overfit ([does the gain last?](#does-the-gain-last)).

All of this was measured with models of 4 layers of width 128, on two corpora of English. Not tried: larger models, more
than 10,000 steps, texts of billions of tokens.

"""


def _cost(choice: Choice | None) -> str:
    """The perplexity of a model and what its tokens load."""
    if choice is None:
        return MISSING
    loaded = "" if choice.loads_nothing else f", {'≤ ' if choice.bound else ''}{bytes_text(choice.loaded)}"
    return f"{choice.ppl.mean:.2f}{loaded}"


INTRODUCTION = f"""\
`python results/frontier_page.py` writes this page from [the records](../results). `stickymoe frontier results` prints
the tables of routers.

The first section asks which model is best for a device: with the same fast memory, how many bytes does each model load
per token, and what is its bits per byte? The sections after it judge routers alone.

A loss that makes routing sticky raises perplexity. If perplexity is 3 % above vanilla, that can cost half of what the
mixture gains over a dense model with the same active width. So each router is judged by two numbers:

- **gain kept**: the share of that gain that the router keeps, (PPL_dense − PPL) / (PPL_dense − PPL_vanilla), over
  common seeds;
- **misses**: the share of accesses (all k experts of every token) that an LRU cache with C slots per layer misses.

The target is {TARGET_GAIN:.0%} of the gain with {MISSES_FACTOR:g} times fewer misses than vanilla, and even use of the
experts: utilisation entropy of at least {EVEN:.0%} of the maximum, no neglected expert.

N is the number of experts per layer, and k the number of experts per token. SR (switch rate) and CHR (cache hit rate)
are the paper's metrics: how often the top-1 expert changes between adjacent tokens, and its hit rate with two slots.
Perplexity is measured on the validation split, on which settings were also chosen. ± after a percentage is half of its
95 % interval over seeds. Row names are explained [below](#symbols), terms in the [glossary](glossary.md).
"""


def _is(group: Group, **wanted: object) -> bool:
    data, model = group.config.data, group.config.model
    facts = {"steps": group.config.train.steps, "experts": model.n_experts, "corpus": data.corpus}
    whole = data.fraction == 1 and _small(group)
    return whole and all(facts[key] == value for key, value in wanted.items())


def _small(group: Group) -> bool:
    """Whether a group has the paper's small model, whose layers share nothing."""
    return group.config.model.d_model == 128 and group.config.model.layers_per_pool == 1


SLOTS, EXPERTS = 4, 16  # the fast memory of the first table: four of sixteen experts per layer
MOST_ROWS = 6  # of a table of models at equal fast memory, controls apart


def _yardsticks(collection: Collection) -> list[Yardstick]:
    """The comparisons of the first section: those with rows in slow memory first, long trainings first."""
    found = yardstick.yardsticks(g for g in collection.groups if _is(g))
    shown = [y for y in found if y.experts == EXPERTS and y.steps >= 1000]
    return sorted(shown, key=lambda y: (not any(c.row_bytes for c in y.choices), -y.steps, y.title))


def _equal_memory(collection: Collection, folder: Path) -> str:
    """For each corpus and length of training: the models that fit, what their tokens load, and what counting does."""
    found = _yardsticks(collection)
    memory = found[0].memory if found else None
    if memory is None:
        return ""
    counted = json.loads((HERE / "ngrams.json").read_text(encoding="utf-8"))
    text = f"""\
A device has fast memory for {SLOTS} experts per layer and everything outside the experts: {bytes_text(memory)} in fp32.
Which model is best, and what does a token load from slow memory?

- **fast memory**: everything resident, in fp32 unless the row says int8; a row may exceed the budget by 3 % (gates).
  An int8 row is a trained model whose experts were rounded afterwards.
- **loaded**: bytes per token from slow memory, on a warm stream; ≤: an upper bound from an older record, of sequences
  that start with empty slots.
- **gap closed**: (floor − bits) / (floor − ceiling). The floor is the best model that fits and loads nothing, the
  ceiling the best one with all experts in memory. More than 100 %: better than the ceiling.
- **hash+lookup** keeps four experts per layer in memory and reads rows from tables in slow memory: one keyed by the
  token in every layer, and with n=2,3 rows keyed by the last two and three tokens in the first two layers. A disk reads
  whole blocks, so it reads more than the rows ([runtime](runtime.md#3-rows-on-disk)).

Bits and perplexity are those of the validation split, on which settings were chosen. Where a table has a column for the
test split, its rows were evaluated there once. ± is half of the 95 % interval over seeds.
"""
    parts = [text, *(_at_equal_memory(y, memory, counted, folder) for y in found), _lengths(collection, folder)]
    return "\n".join(filter(None, parts))


def _at_equal_memory(found: Yardstick, memory: float, counted: list[dict[str, Any]], folder: Path) -> str:
    fingerprint = found.choices[0].row.runs[0].record.data["fingerprint"]
    models = [m for entry in counted if entry["data"]["fingerprint"] == fingerprint for m in entry["models"]]
    lines = [(f"{m['order']}-gram", m["bits_per_byte"]) for m in models]
    file = folder / f"memory-{found.corpus}-{found.steps}.svg"
    chart = yardstick.figure(found, memory, lines)
    warning = found.warning(memory)
    return "\n".join(
        filter(
            None,
            (
                f"### {found.corpus}, {found.steps:,} steps\n",
                f"{found.title}.\n",
                _verdict(found, memory, models),
                tables.markdown(yardstick.table(found, memory, most=MOST_ROWS)),
                None if warning is None else f"{_sentence(warning.removeprefix(f'{found.title}: '))}.\n",
                _drawn(chart, file, f"Bits per byte against bytes loaded per token, {found.corpus}"),
            ),
        )
    )


def _verdict(found: Yardstick, memory: float, models: list[dict[str, Any]]) -> str:
    """The best model that fits, beside the floor, the ceiling and the n-gram models."""
    best, floor, ceiling = found.fitting(memory)[0], found.floor(memory), found.ceiling
    loads = "nothing" if best.loads_nothing else f"{bytes_text(best.loaded)} per token"
    text = (
        f"**{best.label}** has the lowest perplexity of the models that fit, {best.ppl.mean:.2f} "
        f"({_seeds(best.ppl.n)}), and loads {loads}"
    )
    if floor is not None and floor is not best:
        text += f"; the best that loads nothing, {floor.label}, has {floor.ppl.mean:.2f}"
    if ceiling is not None:
        text += f"; {ceiling.label} ({bytes_text(ceiling.fast_bytes)}) has {ceiling.ppl.mean:.2f}"
    rounded = found.rounded(memory)
    if rounded is not None and rounded is not best:
        text += f"; {rounded.label} ({bytes_text(rounded.fast_bytes)}), has {rounded.ppl.mean:.2f}"
    counts = ", ".join(f"{m['ppl']:.2f} ({m['order']}-gram)" for m in models)
    return f"{text}. Count-based (Kneser-Ney) n-gram models of the same text: {counts}.\n" if counts else f"{text}.\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


LONG = 4000  # steps of a training at about the paper's length
MANY = 8  # passes over the text from which on the course of a training is shown
SHOWN = ("vanilla", "hash", "hash+lookup")


def _lengths(collection: Collection, folder: Path) -> str:
    """Rows in slow memory over many passes, beside experts alone: does the gain last?"""
    kinds: dict[tuple[str, float, int], list[Run]] = {}
    for group in collection.groups:
        data, steps = group.config.data, group.config.train.steps
        if _small(group) and group.runs[0].epochs >= MANY:
            runs = (run for row in group.rows if row.variant.name in SHOWN for run in row.runs)
            kinds.setdefault((data.corpus, data.fraction, steps), []).extend(runs)
    parts = [_length(runs, folder) for _, runs in sorted(kinds.items(), key=lambda kind: -kind[0][2])]
    if not any(parts):
        return ""
    return "### Does the gain last?\n\n" + "\n".join((LASTS, *filter(None, parts)))


LASTS = """\
Rows learn fast, and over many passes they overfit: a token that reads an n-gram row again reads what came next at its
own place, and the model learns to trust the rows more than it may on new text. The remedy is to let each token read its
n-gram rows once: with `table_drop` = 1 − 1 / passes it reads them in one of the passes, and those of all tokens are
spread evenly over training. Each reading then counts, so the rows need a higher learning rate (`table_lr`).
"""


def _length(runs: list[Run], folder: Path) -> str:
    """The perplexity of some runs of the same length over their steps."""
    lines = {f"{run.config.variant.label}, N={run.config.model.n_experts}": (run, _validation(run)) for run in runs}
    if not any("lookup" in name for name in lines) or len(lines) < 2:
        return ""
    config = runs[0].config
    text = "".join(f"- `{name}`: {_course(*found)}\n" for name, found in lines.items())
    part = "" if config.data.fraction == 1 else f", {config.data.fraction:.0%} of it"
    title = f"{config.data.corpus}{part}, {config.train.steps:,} steps, {runs[0].epochs:.1f} passes over the text"
    file = folder / f"length-{config.data.corpus}-{config.train.steps}.svg"
    chart = _over_steps({name: line for name, (_, line) in lines.items()})
    drawn = _drawn(chart, file, f"Validation perplexity over the steps, {config.data.corpus}")
    return f"{title}, one seed, all experts in memory. Validation perplexity:\n\n{text}\n{drawn}"


def _course(run: Run, line: list[tuple[int, float]]) -> str:
    """The best and the last perplexity of a run, and whether it was stopped."""
    step, best = min(line, key=lambda point: point[1])
    last, ppl = line[-1]
    stopped = "" if run.complete else ", where it was stopped"
    if step == last:
        return f"{best:.2f} at step {step:,}, its best{stopped}."
    return f"{best:.2f} at step {step:,}, its best; {ppl:.2f} at step {last:,}{stopped}."


def _validation(run: Run) -> list[tuple[int, float]]:
    return [(line["step"], line["valid"]["ppl"]) for line in run.log if "valid" in line]


def _over_steps(lines: dict[str, list[tuple[int, float]]]) -> Chart:
    shown = [{"row": row, "step": s, "ppl": rounded(ppl)} for row, line in lines.items() for s, ppl in line]
    return (
        alt.Chart(inline(shown))
        .mark_line(point=True)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y(
                "ppl:Q",
                title="validation perplexity (log)",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(values=[10 * n for n in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 60, 80)], format="d"),
            ),
            color=colour_by("row", list(lines)),
        )
        .properties(width=560, height=260)
    )


def _compared(
    group: Group | None, folder: Path, name: str, caches: tuple[int, ...], smaller: Group | None = None
) -> str:
    """The table of gain and misses of a group, and one figure per cache size; `smaller` is a control that fits."""
    table = None if group is None else frontier.kept_table(group)
    if group is None or table is None:
        return ""
    explained = frontier.EXPLAINED if name == "small" else "Columns as in [the frontier](#the-frontier)."
    out = [f"{group.title}. {explained}\n", tables.markdown(table)]
    for C in caches:
        fits = smaller if smaller is not None and smaller.config.model.n_experts == C else None
        chart = kept_gain_figure(group, C, smaller=fits)
        out.append(_drawn(chart, folder / f"{name}-c{C}.svg", f"Gain kept against misses, C={C}"))
    return "\n".join(filter(None, out)) + _noise(group)


def _noise(group: Group) -> str:
    """The spread over seeds, if a row has several."""
    off = [(value.sd / value.mean, value.n) for row in group.routed if (value := row.metric("ppl")) and value.sd]
    if not off:
        return ""
    spread = math.sqrt(sum((n - 1) * x * x for x, n in off) / sum(n - 1 for _, n in off))
    return (
        f"\nPerplexity varies by {spread:.1%} between seeds (standard deviation, {len(off)} rows with several seeds). "
        f"For rows with one seed, differences under {3 * spread:.0%} may be noise. A seed fixes the order of the text. "
        "Two routers start from the same weights only if they have the same number of gates.\n"
    )


def _on_the_papers_axes(group: Group | None, folder: Path) -> str:
    """Perplexity against the two metrics of the paper, which count only the top-1 expert."""
    if group is None:
        return ""
    hits = figures.pareto(group, "cache_hit_rate", "cache hit rate, top-1, C=2 (higher is better)", better="higher")
    switches = figures.pareto(group, "switch_rate", "switch rate (lower is better)", better="lower")
    shown = [
        _drawn(hits, folder / "small-chr.svg", "Perplexity against the paper's hit rate"),
        _drawn(switches, folder / "small-sr.svg", "Perplexity against the switch rate"),
    ]
    if not any(shown):
        return ""
    text = "The paper's own axes count only the top-1 expert of a token, as if a device loaded no other expert:\n"
    return "\n".join(("", text, *filter(None, shown)))


def _drawn(chart: Chart | None, file: Path, title: str) -> str:
    """Write a chart to a file and return the Markdown that shows it; empty without a chart."""
    if chart is None:
        return ""
    file.write_text(vl_convert.vegalite_to_svg(themed(chart)), encoding="utf-8")
    return f"![{title}]({file.parent.name}/{file.name})\n"


def _screened(group: Group | None, folder: Path) -> str:
    """Every method after few steps, by perplexity: the gain over dense is still too small to compute shares of it."""
    dense = group.find("dense") if group is not None else None
    if group is None or dense is None or group.baseline is None or (gain := group.baseline.change(dense)) is None:
        return ""
    rows = sorted((row for row in group.rows if row.mean("ppl") is not None), key=lambda row: row.mean("ppl") or 0.0)
    planned = configs(load_grid("frontier", GRIDS), seeds=[42], flags=["--data.path", "text"], source="")
    missing = [f"`{run.variant.label}`" for run in planned if group.find(run.variant.key) is None]
    axis = "misses per access, all k experts, C=3 (log, lower is better)"
    chart = figures.pareto(group, f"{ALL_SLOTS}3", axis, better="lower", misses=True)
    text = (
        f"{len(planned) - len(missing)} of the {len(planned)} rows of `stickymoe sweep frontier`: every method at "
        f"three strengths, {group.config.train.steps} steps, one seed. These are leads, not results. Hashed `siblings` "
        "were developed later and are not included. After so few steps the perplexity of vanilla is "
        f"{gain.mean:+.1f} % relative to dense, so rows are ordered by perplexity and no share of the gain is shown. "
        "In brackets: perplexity relative to vanilla, and how many times fewer misses at C=3.\n"
    )
    figure = _drawn(chart, folder / "screening-c3.svg", "Perplexity against misses after 300 steps")
    table = tables.markdown(tables.results(rows, group.baseline))
    not_run = f"Not run: {', '.join(missing)}.\n" if missing else ""
    return "\n".join(filter(None, (text, figure, _leads(rows, group.baseline), table, not_run)))


def _leads(rows: list[Row], vanilla: Row, capacity: int = 3) -> str:
    """What the screening showed for each method, with the perplexity and the misses of its rows."""
    by_method: dict[str, list[str]] = {}
    for row in rows:
        change, fewer = row.change(vanilla), row.fewer_misses(vanilla, f"{ALL_SLOTS}{capacity}")
        if row is not vanilla and change is not None and fewer is not None:
            numbers = f"`{row.label}` ({change.mean:+.1f} %, {fewer.mean:.2f} ×)"
            by_method.setdefault(row.variant.name, []).append(numbers)
    return "".join(f"- **{name}**: {SCREENED.get(name, '')} {', '.join(rows)}.\n" for name, rows in by_method.items())


def _targets(*groups: tuple[Group | None, int, Group | None]) -> str:
    """For each group: which rows reach the target with C slots, and how good a mixture of C experts is."""
    return "".join(_target(group, C, smaller) for group, C, smaller in groups if group is not None)


def _target(group: Group, C: int, smaller: Group | None) -> str:
    found = [p for p in frontier.points(group) if C in p.fewer]
    others = [p for p in found if p.row is not group.baseline]
    if not others:
        return ""
    where = f"N={group.config.model.n_experts}, C={C}{_where(group)}"
    reached = sorted((p for p in found if p.reaches_target(C)), key=lambda p: not p.clearly_reaches_target(C))
    if not reached:
        return f"- **{where}: not reached.**{_closest(others, C)}\n"
    enough = [p for p in found if p.kept.mean >= TARGET_GAIN and p.fewer[C].mean >= MISSES_FACTOR]
    uneven = "; ".join(_numbers(p, C) for p in enough if not p.even)
    one = ", with one seed" if all(p.kept.n == 1 for p in reached) else " by the mean, not significantly"
    return (
        f"- **{where}: reached{'' if reached[0].clearly_reaches_target(C) else one}** by "
        f"{'; '.join(_numbers(p, C) for p in reached)}."
        + (f" Reached with uneven use of experts: {uneven}." if uneven else "")
        + _against_all_in_memory(reached[0].row, group)
        + _against_fewer_experts(reached[0].row, smaller)
        + "\n"
    )


def _closest(others: list[Point], C: int) -> str:
    """The rows closest to a target that no row reaches."""
    near = frontier.nearest(others, C)
    best = max(
        (p for p in others if p.even), key=lambda p: min(1, p.kept.mean / TARGET_GAIN) * p.fewer[C].mean, default=None
    )
    return (f" The fewest misses with {TARGET_GAIN:.0%} kept: {_numbers(near, C)}." if near else "") + (
        f" Closest by the product of both: {_numbers(best, C)}." if best else ""
    )


def _against_all_in_memory(row: Row, group: Group) -> str:
    """The share of a larger gain that a row keeps: that of the recommended router with one slot per expert."""
    dense, alone = group.find("dense"), _like_recommended(group, alone=True)
    kept = kept_gain(row, baseline=alone[0], dense=dense) if dense is not None and alone else None
    if kept is None:
        return ""
    half = frontier.interval(kept)
    share = f"{100 * kept.mean:.0f}{'' if half is None else f' ± {100 * half:.0f}'} %"
    return (
        f" With all {group.config.model.n_experts} experts in memory the recommended router has lower perplexity: "
        f"`{row.label}` keeps {share} of its gain ({_seeds(kept.n)})."
    )


def _against_fewer_experts(row: Row, smaller: Group | None) -> str:
    """A row and the best mixture with as many experts as slots, over common seeds."""
    found = [(r, change) for r in smaller.routed if (change := row.change(r)) is not None] if smaller else []
    if smaller is None or not found:
        return ""
    best, change = max(found, key=lambda pair: pair[1].mean)
    same = best in _like_recommended(smaller, alone=True)
    router = "the recommended router with one expert per slot" if same else f"`{best.label}`"
    return (
        f" Control: a mixture of {smaller.config.model.n_experts} experts loads nothing. The best is {router}; the "
        f"perplexity of `{row.label}` is {_percent(change)} it ({_seeds(change.n)})."
    )


def _where(group: Group) -> str:
    """Corpus and steps, if they differ from those of most groups on this page."""
    steps = group.config.train.steps
    corpus = "" if _is(group, corpus="wikitext-2") else f", {group.config.data.corpus}"
    return corpus + ("" if steps == 1000 else f", {steps:,} steps")


def _numbers(point: Point, capacity: int) -> str:
    half = frontier.interval(point.kept)
    spread = f" ± {100 * half:.0f}" if half is not None else ""
    kept = f"{100 * point.kept.mean:.0f}{spread} % kept"
    return f"`{point.row.label}` ({kept}, {point.fewer[capacity].mean:.1f} × fewer misses, {_seeds(point.kept.n)})"


# What 300 steps showed for each variant.
SCREENED = {
    "hash": "Experts differ from the first step: after so few steps, its perplexity is far below all others.",
    "two_speed": "Perplexity is already below vanilla, with about as many misses.",
    "hysteresis": "A small bonus costs almost nothing and saves little; a large one avoids most misses at a cost.",
    "smooth": "Longer averages save more and cost more; a learned decay is no better than a fixed one.",
    "residency": "Only C experts can be chosen, at most one load per token: most misses disappear at a small cost.",
    "siblings": "Slots change with every token, their residents slowly: the best trade-off of the screening.",
    "rent": "A non-resident is loaded only after it was missed for some time: as good as residency.",
    "soft": "The paper's loss costs at every weight, hardly reduces the misses over all k, and ends in uniform gates.",
    "boundary": "With weight 0 on pairs across sentence ends it acts like `soft`: there are few such pairs.",
    "graded+soft": "With a late warm-up of λ, or without layer 0, it costs a little less and saves a little less.",
    "grouped": "Switches inside a group are cheap, but the cache misses single experts.",
    "cross_layer": "Choosing the same experts in adjacent layers saves nothing if each layer has its own experts.",
    "blockffn": "Saves more than `soft` at λ=0.5, with uneven use of experts; at λ=2 its gates are uniform too.",
    "bles": "Ends in uniform gates and saves little.",
    "dot": "Rewards confident gates, and they collapse: almost always the same top-1 expert.",
    "cache_loss": "A loss on expected misses makes routing very sticky, because it abandons experts.",
    "segment": "One choice for W tokens, from the tokens before them, costs as much as a hash (`trajectory`).",
    "trajectory": "A bound without learning: experts are fixed for a span.",
}

# What each idea showed, by the names of its variants. Ideas without rows are not shown.
LESSONS = (
    (
        ("smooth",),
        "A gate that reads an average of the last few tokens chooses **better** experts, not only steadier ones: light "
        "smoothing beats vanilla in perplexity and in misses. The preceding tokens carry information that the token "
        "alone does not.",
    ),
    (
        ("residency",),
        "Only C experts can be chosen, and they change slowly: misses fall by an order of magnitude. Free routing in "
        "the first half of training, so that experts specialise first, made no significant difference.",
    ),
    (
        ("residency+smooth",),
        "Smoothing and residency together are no better than residency alone. Where experts are loaded and evicted, "
        "each must at times replace the others, and the gain of smoothing is lost. With all slots but one pinned, and "
        "full resistance to loads from the first step, more gain is kept. In this setting the balance loss pushes "
        "the experts that share a slot to be used as much as the pinned ones; with a tenth of its weight and a smaller "
        "margin, perplexity is lower and use is less even.",
    ),
    (
        ("cache_loss+residency",),
        "A loss on expected misses makes routing very sticky. At this weight it costs more than the mixture gains.",
    ),
    (
        ("siblings",),
        "Several experts share a slot: one gate chooses slots token by token, a slower gate chooses the resident of "
        "each slot, within a budget of loads. A slot keeps its role whichever expert is resident. Each expert sees "
        "only a part of the text, so the experts of a slot share most of their gradients; otherwise each would learn "
        "the same things again (κ; no published row measures its effect). Without the hash, N=4 in three slots is as "
        "good as a mixture of three, and N=16 in four slots is no better than a mixture of four; those mixtures load "
        "nothing. With `token`, the gate of the slots also reads the token itself, which helps as in two_speed. With "
        "`hashed`, a hash of the token chooses its slots and the gate only sets their weights: slots differ from the "
        "first step, and the slow gate only has to learn which expert is resident. Keeping the experts of a slot tied "
        "for half of training (`untie`), and sharing less afterwards, was no better on the common seed. The control to "
        "beat is a mixture with as many experts as slots ([is it beaten?](#the-recommendation)).",
    ),
    (("rent",), "A non-resident is loaded when the gate weight it missed adds up to the price of a load."),
    (
        ("two_speed", "residency+two_speed"),
        "Two gates, one on the token and one on the average of the preceding tokens, choose better than either alone. "
        "Their choices change almost as often as those of vanilla, so use this for models with all experts in memory, "
        "one per slot, or to choose among slots.",
    ),
    (("hysteresis", "hysteresis+smooth"), "A bonus for the experts of the previous token."),
    (
        ("hash",),
        "A hash of the token, fixed before training, has lower perplexity than every learned gate tested with N=4: its "
        "experts differ from the first step, while learned gates spend much of such a short training on separating "
        "tokens. With three experts it is only as good as smoothing; with sixteen its lead is far larger "
        "(`siblings C=16`, the hash with a gate for the weights). It switches slightly more often than vanilla, so, "
        "like two_speed, it must choose among entries that are all in memory, such as the slots of `siblings`.",
    ),
    (("trajectory",), "A bound: a hash fixes the experts for a span."),
)


def _recommended(*pairs: tuple[Group | None, Group | None]) -> str:
    """What `train --recommended` is, gains and costs, compared with vanilla and with fewer experts that all fit.

    Each pair is a group and one with fewer experts. The recommendation is based on the first pair.
    """
    group = pairs[0][0]
    key = config_from({"variant": RECOMMENDED}).variant.key
    found = frontier.points(group) if group is not None else []
    point = next((p for p in found if p.row.variant.key == key), None)
    if group is None or group.baseline is None or point is None:
        return ""
    change = point.row.change(group.baseline)
    assert change is not None
    fewer = " and ".join(f"{point.fewer[C].mean:.2f} × fewer misses with {C} slots per layer" for C in CACHES)
    sizes = [
        f"C={row.variant.capacity}, B={row.variant.budget:g} of N={g.config.model.n_experts}"
        for g, _ in pairs
        if g is not None
        for row in _like_recommended(g, alone=False)
    ]
    paragraphs = (
        f"`stickymoe train --recommended` trains `{point.row.label}`. Each layer has C slots. Expert i can only use "
        "slot i mod C, so several experts share a slot, and one of them is resident. A hash of the token chooses its k "
        "slots, and a gate sets their weights. A second, slower gate chooses the resident of each slot, and replaces "
        "one at most every 1/B tokens. The experts of a slot share most of their gradients, because each sees only a "
        "part of the text.",
        f"**What it gains**: perplexity {_percent(change)} vanilla, with {fewer} ({_seeds(change.n)}). A layer loads C "
        "experts at the start of a sequence and then at most one every 1/B tokens: at most B/k + (C+1)/(k·T) loads per "
        "access over T tokens. For this bound the runtime must evict the expert that was replaced in its slot. The LRU "
        "cache of the tables does not know the slots and may load more.",
        "**What it costs**: two more small gates in each layer. Decoding stores an average for each slot and expert, "
        f"and the residents ([time](performance.md)). {_against_hash(key, *(g for g, _ in pairs))}",
        _or_fewer(*pairs),
        "**For your device**: set `--variant.capacity` to C = (memory − other weights) / (layers · bytes of an expert) "
        "and `--variant.budget` to at most B, the loads per token and layer that the required speed allows. "
        "`stickymoe plan TRACE --device NAME --tokens_per_s X` prints both; TRACE can be a short run of vanilla or the "
        "output of `stickymoe trace make`. Train with the C of the device: with fewer slots, most of the saving is "
        f"lost. Tested so far: {'; '.join(dict.fromkeys(sizes))}.",
    )
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _against_hash(key: str, *groups: Group | None) -> str:
    """The hash alone, which most of the low perplexity comes from."""
    lines = []
    for group in groups:
        ours, plain = (group.find(key), group.find("hash")) if group is not None else (None, None)
        if group is None or ours is None or plain is None:
            continue
        by, of_vanilla = plain.change(ours), plain.change(group.baseline) if group.baseline is not None else None
        if by is not None and of_vanilla is not None:
            lines.append(f"{_percent(by)} it and {_percent(of_vanilla)} vanilla{_where(group)} ({_seeds(by.n)})")
    if not lines:
        return ""
    return f"The low perplexity comes from the hash: the variant `hash`, which saves no loads, is {'; '.join(lines)}."


def _or_fewer(*pairs: tuple[Group | None, Group | None]) -> str:
    """The same router with as many experts as slots, where no slot is shared and nothing is loaded."""
    lines, helps = [], []
    for group, smaller in pairs:
        ours, alone = _like_recommended(group, alone=False), _like_recommended(smaller, alone=True)
        change = alone[0].change(ours[0]) if ours and alone else None
        if group is not None and smaller is not None and change is not None:
            few, many = smaller.config.model.n_experts, group.config.model.n_experts
            half = frontier.interval(change)
            significant = abs(change.mean) > (NOISE if half is None else half)
            helps.append(significant and change.mean > 0)
            verdict = "more experts help" if helps[-1] else "fewer are better" if significant else "not significant"
            lines.append(
                f"N={few} is {_percent(change)} N={many} in {few} slots{_where(group)} ({_seeds(change.n)}: {verdict})"
            )
    if not lines:
        return ""
    lesson = (
        "Where more experts do not help, the experts of a slot learn too little of their own in such short training. "
        "If you can choose the number of experts, train as many as the device holds."
    )
    return (
        "**Or fewer experts**: with as many experts as slots (`--model.n_experts C`), no slot is shared, and the same "
        f"router loads nothing after the first tokens. Perplexity: {'; '.join(lines)}."
        + ("" if all(helps) else f" {lesson}")
    )


def _like_recommended(group: Group | None, *, alone: bool) -> list[Row]:
    """Rows of the recommended router with any C and B: with shared slots, or with each expert `alone` in its slot."""
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
    """What each idea showed, with its rows in every group at the cache size of that group."""
    found = [(frontier.points(group), group.config.model.n_experts, C) for group, C in groups if group is not None]
    lines = []
    for names, lesson in LESSONS:
        rows = [
            f"N={N}, C={C}: {'; '.join(_numbers(p, C) for p in shown)}."
            for points, N, C in found
            if (shown := [p for p in points if p.row.variant.name in names and C in p.fewer])
        ]
        if rows:
            lines.append(f"- **{names[0]}**: {lesson} {' '.join(rows)}")
    return "\n".join(lines) + "\n" if lines else ""


def _fits(group: Group | None, smaller: Group | None, capacity: int) -> str:
    """Mixtures with at most as many experts as slots, by the share of the gain of the larger mixture."""
    if group is None or smaller is None or not (rows := frontier.fitting(group, smaller)):
        return ""
    few, many = smaller.config.model.n_experts, group.config.model.n_experts
    most = 6
    text = (
        f"A device that holds {capacity} experts per layer can run a mixture of {few}, which loads nothing after its "
        f"first tokens. A router over {many} experts in {capacity} slots must beat it"
        f"{' (the best six)' if len(rows) > most else ''}:\n\n"
    )
    cells = []
    for row, kept in rows[:most]:
        ppl = tables.number(row.metric("ppl", common_seeds(row, group.baseline, group.find("dense"))), ".2f")
        cells.append((f"{row.label}, N={few}", str(kept.n), ppl, f"{100 * kept.mean:.0f}", "first tokens only"))
    ours, alone = _like_recommended(group, alone=False), _like_recommended(smaller, alone=True)
    if alone:
        text += f"`{alone[0].label}` is the recommended router with one expert per slot.\n\n"
    if ours and alone and (seeds := common_seeds(ours[0], alone[0], group.baseline, group.find("dense"))):
        ppl, hit = (ours[0].metric(name, seeds) for name in ("ppl", f"{ALL_SLOTS}{capacity}"))
        kept = kept_gain(ours[0], baseline=group.baseline, dense=group.find("dense"), seeds=seeds)
        share = MISSING if kept is None else f"{100 * kept.mean:.0f}"
        misses = MISSING if hit is None else f"{1 - hit.mean:.3f}"
        cells.insert(0, (f"{ours[0].label}, N={many}", str(len(seeds)), tables.number(ppl, ".2f"), share, misses))
    heads = ("variant", "common seeds", "PPL ↓", f"gain of N={many} kept % ↑", f"misses C={capacity} ↓")
    return text + tables.markdown(Table("fits", "", heads, tuple(cells))) + "\n"


def _beaten(group: Group | None) -> str:
    found = frontier.points(group) if group is not None else []
    if not found:
        return ""
    lines, rows = [], {}
    for C in CACHES:
        by = frontier.dominators(found, C)
        n = sum(point is not None for point in by.values())
        lines.append(
            f"- C={C}: {n} of the {len(by)} rows are beaten in perplexity and in misses by a row beyond the paper. "
            "With several common seeds the 95 % intervals of both differences exclude 0; with one, any difference "
            "counts."
        )
        for label, point in by.items():
            theirs = next(p for p in found if p.row.label == label)
            seeds = len(common_seeds(point.row, theirs.row)) if point else 0
            rows.setdefault(label, []).append(f"`{point.row.label}` ({seeds})" if point else "none")
    table = Table(
        "beaten",
        "",
        ("row of the paper", *(f"beaten at C={C} by (common seeds)" for C in CACHES)),
        tuple((k, *v) for k, v in rows.items()),
    )
    text = (
        "These are the paper's methods as run here, with a tenth of its steps. In these runs they are far less sticky "
        "than in the paper ([results](results.md)). The models of the paper itself are not compared.\n\n"
    )
    return text + "\n".join(lines) + "\n\n" + tables.markdown(table)


def _table(rows: list[Row], columns: list[tuple[str, str, str]], label: Callable[[Row], str]) -> str:
    """One line per row, over the seeds that have the last column."""
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
    text = f"{group.title}."
    if all(metric != "topic_information" for _, metric, _ in columns):
        text += " This corpus has no topics, so only word specialisation and run length are measured."
    return f"{text}\n\n" + _table(rows, columns, lambda row: row.label) + _coherence(group.baseline, rows)


def _coherence(vanilla: Row | None, rows: list[Row]) -> str:
    """Run length and topic information of each row relative to vanilla: do experts that stay longer know the topic?"""

    def measured(row: Row) -> tuple[float, float] | None:
        run, topic = row.mean("run_length"), row.mean("topic_information")
        return None if run is None or topic is None else (run, topic)

    plain = measured(vanilla) if vanilla is not None else None
    if plain is None:
        return ""
    lines = []
    for row in rows:
        found = measured(row)
        if row is not vanilla and found is not None:
            difference = found[1] - plain[1]
            similar = abs(difference) < 0.1 * abs(plain[1])
            carries = "about as much" if similar else "more" if difference > 0 else "less"
            seeds = _seeds(len(row.by_seed("topic_information")))
            lines.append(
                f"- `{row.label}`: runs are {found[0] / plain[0]:.2f} × as long as in vanilla, and an expert carries "
                f"{carries} information about the topic: {found[1]:.4f} bits instead of {plain[1]:.4f} ({seeds})."
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
        blocks = f"shared by {model.share_block} layers" if model.share_block > 1 else "not shared"
        kind = "universal" if model.universal else blocks
        return f"{kind}, {model.pool_size * model.n_layers // model.layers_per_pool} experts"

    trained = {row.variant.key for g in groups if g.config.model.layers_per_pool > 1 for row in g.routed}
    rows = [row for g in groups for row in g.routed if row.variant.key in trained]
    rows = [row for row in rows if row.mean("pool_hit_rate_c2") is not None]
    columns = [("PPL ↓", "ppl", ".2f"), ("SR ↓", "switch_rate", ".3f")]
    columns += [(f"pool of {C}·L ↑", f"pool_hit_rate_c{C}", ".3f") for C in CACHES]
    columns += [(f"all C={C} ↑", f"{ALL_SLOTS}{C}", ".3f") for C in CACHES]
    text = (
        "`pool` is one LRU cache for all layers in decode order (token by token through the layers); experts that "
        "layers share are one entry. `all C` is one cache per layer. "
        f"{max(steps)} steps: leads, not results.\n"
    )
    table = _table(rows, columns, lambda row: f"{row.label}: {pool(row)}")
    lines = [_cross_layer(row, plain, pool(row)) for row in rows for plain in rows if pool(row) == pool(plain)]
    return text + "\n" + table + "\n" + "".join(filter(None, lines))


def _cross_layer(row: Row, plain: Row, pool: str) -> str:
    """The effect of the cross-layer loss on one kind of pool."""
    change, fewer = row.change(plain), row.fewer_misses(plain, "pool_hit_rate_c2")
    if row.variant.name != "cross_layer" or plain.variant.name != "vanilla" or change is None or fewer is None:
        return ""
    as_many = abs(fewer.mean - 1) < 0.005
    misses = "as many misses as" if as_many else f"{fewer.mean:.2f} × fewer misses than"
    return (
        f"- {pool}: `{row.label}` has {misses} vanilla with 2·L slots, at {change.mean:+.1f} % perplexity"
        f"{'; the pool holds all experts' if (plain.mean('pool_hit_rate_c2') or 0.0) > 0.99 else ''}.\n"
    )


def _symbols(collection: Collection) -> str:
    """The symbols in the names of the rows, from the hyper-parameters of their variants."""
    used = {name for group in collection.groups for row in group.rows for name in row.variant.name.split("+")}
    lines = [
        "Each symbol is a hyper-parameter of its variant: B of `siblings` is `--variant.budget`. Brackets show its "
        "name and its default. The default applies if the name of a row does not show the symbol. μ (`mu`) is the "
        "weight of the load-balancing loss.\n"
    ]
    for name in filter(used.__contains__, variant_names()):
        shown = " · ".join(
            f"{hyper.symbol} (`{hyper.name}`, {_default(hyper.default)}) {hyper.help}"
            for hyper in hypers(name).values()
            if hyper.name != "mu"
        )
        if shown:
            lines.append(f"- `{name}`: {shown}.")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    return "off" if value is False else "1 for every layer" if value == () else str(value)


if __name__ == "__main__":
    main(*(Path(arg) for arg in sys.argv[1:]))
