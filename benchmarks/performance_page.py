"""docs/performance.md and its plot, from train_throughput.json: every figure there was measured.

python benchmarks/performance_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
TOKENS = 16 * 256


def main() -> None:
    record = json.loads((HERE / "train_throughput.json").read_text())
    (DOCS / "performance.md").write_text(page(record), encoding="utf-8")
    (DOCS / "growth.svg").write_text(plot(record["growth"]), encoding="utf-8")


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seconds(race: dict[str, Any], name: str) -> float:
    return float(race["timings"][name]["median_s"])


def page(record: dict[str, Any]) -> str:
    environment = record["environment"]
    return f"""\
# How fast it is

Made by `python benchmarks/train_throughput.py` and `python benchmarks/performance_page.py` from
[the record](../benchmarks/train_throughput.json); look at ratios, not at absolute times. Measured on
{environment["cores"]} cores of {environment["processor"]}, torch {environment["packages"]["torch"]}, commit
`{(environment["commit"] or "unknown")[:12]}`. Every contestant is a process of its own; they take turns, seven rounds
each, and the median counts (± half the distance of the quartiles). A step is forward + backward + AdamW of the paper's
small model on 16×256 tokens. Mixtral has the same width, depth, experts and parameter count.

## Against targets

{targets(record)}
## Tokens per second

{rivals(record)}
`floor` is the step's matrix products alone, at their shapes, into memory that is there already.

## What each lever brought

Time of a step without the lever, over the time with all of them; above 1 the lever helps.

{levers(record)}
- **Fused head** (`models/head.py`): logits of a few rows at a time, turned into gradients while they are in cache.
  Without it the full logits are held several times over: see the memory column.
- **Kept memory** (`training/memory.py`): glibc is told, by the program itself, not to return big blocks after every
  step.
- **Sorted experts** (`models/moe.py`): rows sorted by expert, gradients written once into their stack. It pays with the
  number of experts: see below.
- **Fused AdamW** and **sleeping threads** (`OMP_WAIT_POLICY=passive`) are within the noise or worse; the first is
  kept since it costs nothing, the second is not used.
- `torch.compile` is not used: it needs a C++ compiler on the user's machine, and the two hand-written functions that
  hold most of the step are opaque to it.

## The expert layer alone

Milliseconds, forward + backward, 4,096 tokens, two experts each.

{experts(record)}
Rows sorted by expert with one product per expert are fastest at every count measured, and are what the model uses.

## How the cost grows

![Tokens per second against sequence length, experts and vocabulary](growth.svg)

{growth(record)}"""


def targets(record: dict[str, Any]) -> str:
    at = {(r["vocab"], r["threads"]): r for r in record["rivals"]}
    big, small = at[50_257, 2], at[4096, 2]
    processes = record["processes"]
    alone, together = processes["one process, two threads"], processes["two processes, one thread each"]
    terms = seconds(record["terms"], "terms") / seconds(record["terms"], "ours")
    evaluation = seconds(record["evaluation"], "eval") / seconds(record["evaluation"], "eval bare")
    memory = big["timings"]["ours"]["peak_mb"] / 1000
    rows = [
        ("ours : Mixtral eager, vocabulary 50,257", seconds(big, "hf-eager") / seconds(big, "ours"), "≥", 2.5, ".2f"),
        (
            "ours : Mixtral eager, vocabulary 4,096",
            seconds(small, "hf-eager") / seconds(small, "ours"),
            "≥",
            1.5,
            ".2f",
        ),
        (
            "step : matrix-product floor, vocabulary 50,257",
            seconds(big, "ours") / seconds(big, "floor"),
            "≤",
            1.6,
            ".2f",
        ),
        (
            "step : matrix-product floor, vocabulary 4,096",
            seconds(small, "ours") / seconds(small, "floor"),
            "≤",
            1.6,
            ".2f",
        ),
        ("consistency + anchor terms : step", terms, "≤", 0.01, ".2%"),
        ("peak memory above import, GB", memory, "≤", 1.2, ".2f"),
        ("evaluation with every metric : bare perplexity", evaluation, "≤", 1.3, ".2f"),
        ("two one-thread processes : one of two threads", together / alone, "≥", 1.1, ".2f"),
    ]
    lines = []
    for name, value, sign, goal, form in rows:
        met = value >= goal if sign == "≥" else value <= goal
        lines.append([name, format(value, form), f"{sign} {format(goal, form)}", "met" if met else "missed"])
    return table(["what", "measured", "target", ""], lines)


def rivals(record: dict[str, Any]) -> str:
    races = record["rivals"]
    headings = ["", *(f"vocabulary {r['vocab']:,}, {r['threads']} thread{'s' * (r['threads'] > 1)}" for r in races)]
    rows = []
    for name in races[0]["timings"]:
        timings = [race["timings"][name] for race in races]
        rows.append([name, *(f"{t['tokens_per_s']:,} ± {t['spread']:.0%}" for t in timings)])
    return table(headings, rows)


def levers(record: dict[str, Any]) -> str:
    races = record["levers"]
    rows = []
    for name in races[0]["timings"]:
        if name != "ours":
            ratios = [f"{seconds(race, name) / seconds(race, 'ours'):.2f}" for race in races]
            rows.append([name, *ratios, f"{races[0]['timings'][name]['peak_mb']:,.0f}"])
    rows.append(["all levers", "1.00", "1.00", f"{races[0]['timings']['ours']['peak_mb']:,.0f}"])
    return table(["", *(f"vocabulary {race['vocab']:,}" for race in races), "peak MB at 50,257"], rows)


def experts(record: dict[str, Any]) -> str:
    races = record["experts"]
    rows = [
        [name.removeprefix("experts "), *(f"{1000 * seconds(race, name):.0f}" for race in races)]
        for name in races[0]["timings"]
    ]
    return table(["", *(f"N = {race['experts']}" for race in races)], rows)


def growth(record: dict[str, Any]) -> str:
    rows = [
        [f"{r['length']:,}", str(r["experts"]), f"{r['vocab']:,}", f"{t['tokens_per_s']:,}", f"{t['peak_mb']:,.0f}"]
        for r in record["growth"]
        for t in [r["timings"]["ours"]]
    ]
    return table(["tokens per sequence", "experts", "vocabulary", "tokens/s", "peak MB"], rows)


def plot(races: list[dict[str, Any]]) -> str:
    import altair
    import vl_convert

    base = {"length": 256, "experts": 4, "vocab": 4096}
    names = {"length": "tokens per sequence T", "experts": "experts N", "vocab": "vocabulary"}
    points = [
        {"axis": names[key], "size": race[key], "tokens/s": race["timings"]["ours"]["tokens_per_s"]}
        for race in races
        for key in base
        if all(race[other] == base[other] for other in base if other != key)
    ]
    chart = (
        altair.Chart(altair.Data(values=points))
        .mark_line(point=True, color="#0072B2")
        .encode(
            x=altair.X("size:Q", scale=altair.Scale(type="log", base=2), title=None),
            y=altair.Y("tokens/s:Q", title="tokens per second"),
            facet=altair.Facet("axis:N", columns=3, title=None),
        )
        .properties(width=200, height=170)
        .resolve_scale(x="independent")
    )
    svg: str = vl_convert.vegalite_to_svg(chart.to_json())
    return svg + "\n"


if __name__ == "__main__":
    main()
