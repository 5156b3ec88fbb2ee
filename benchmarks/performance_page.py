"""docs/performance.md and its plot, from the benchmarks' records: every figure there was measured.

python benchmarks/performance_page.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import median_interval

HERE = Path(__file__).parent


def main(docs: Path = HERE.parent / "docs") -> None:
    record, replay, report, routers = (
        json.loads((HERE / f"{name}.json").read_text())
        for name in ("train_throughput", "replay", "report_page", "routers")
    )
    text = page(record) + replay_section(replay) + report_section(report) + routers_section(routers)
    (docs / "performance.md").write_text(text, encoding="utf-8")
    (docs / "growth.svg").write_text(plot(record["growth"]), encoding="utf-8")


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seconds(race: dict[str, Any], name: str) -> float:
    return float(race["timings"][name]["median_s"])


def page(record: dict[str, Any]) -> str:
    environment = record["environment"]
    big = rival_race(record, 50_257)
    reach = seconds(big, best_rival(big)) / seconds(big, "floor")
    used = seconds(big, "floor") / seconds(big, "ours")
    products = record["breakdown"]["4096"]["matrix products"]
    compiled = record["levers"][1]["timings"]["with compile"]
    return f"""\
# How fast it is

Made by `python benchmarks/train_throughput.py` and `python benchmarks/performance_page.py` from
[the record](../benchmarks/train_throughput.json); look at ratios, not at absolute times. Measured on
{environment["cores"]} cores of {environment["processor"]}, torch {environment["packages"]["torch"]}, commit
`{(environment["commit"] or "unknown")[:12]}`. Every contestant is a process of its own; they take turns, and the median
over rounds counts (± half the distance of the quartiles; the record holds every round). A step is forward + backward +
AdamW of the paper's small model on 16×256 tokens. The rival is Hugging Face's Mixtral of the same width, depth,
experts and parameter count, with its two ways to run experts, eager and grouped; `plain` is our model without the fast
path.

## Against targets

{targets(record)}
- At the vocabulary of 50,257 the step's matrix products alone, without anything around them, would be {reach:.2f} times
  as fast as the faster Mixtral; ours runs at {used:.0%} of that floor. The softmax over the vocabulary is the largest
  part of what lies between.
- At 4,096 matrix products are {products:.0%} of the step: see where the rest goes below.

## Tokens per second

{rivals(record)}
`floor` is the step's matrix products alone, at their shapes, into memory that is there already.

## Where the step goes

Share of the time that torch's profiler sees, two threads.

{parts(record)}
## What each lever brought

Time of a step with the lever changed over ours of the same round: the median over rounds (its 95 % interval). "no
difference" is an interval that holds 1: the machine is noisy. `plain` above is without fused head and sorted experts
both.

{levers(record)}
- **Fused head** (`models/head.py`): logits of a few rows at a time, turned into gradients while they are in cache, and
  never held whole: see the memory column.
- **Kept memory** (`training/memory.py`): glibc is told, by the program itself, not to return big blocks after every
  step.
- **Sorted experts** (`models/moe.py`): rows sorted by expert, gradients written once into their stack. It pays with the
  number of experts: see below.
- **torch.compile** takes {compiled["warm_up_s"]:.0f} s to warm up and needs a C++ compiler on the user's machine; it is
  not used.
- **Sleeping threads** (`OMP_WAIT_POLICY=passive`) are not used either.

## The expert layer alone

Milliseconds, forward + backward, 4,096 tokens, two experts each.

{experts(record)}
The model uses rows sorted by expert, with one product per expert and matrix.

## How the cost grows

![Tokens per second against sequence length, experts and vocabulary](growth.svg)

{growth(record)}
Another race than those above, with fewer rounds: compare within the table.
"""


def replay_section(record: dict[str, Any]) -> str:
    main = record["main"]
    goals = [[g["what"], f"{g['value']:.2f}", g["target"], "met" if g["met"] else "missed"] for g in record["targets"]]
    return f"""
## Replaying a trace

Made by `python benchmarks/replay.py` ([record](../benchmarks/replay.json)): a synthetic trace, one expert a request,
one core. {main["accesses"]:,} accesses over {main["experts"]} experts with {main["capacity"]} slots, per access;
libCacheSim is called from Python once per request, and by its own whole-trace reader.

{table(["what", "measured", "target", ""], goals)}
{_replays([main])}
How it grows with accesses, and with experts (a quarter of them in slots); `curve` is all capacities at once:

{_replays(record["by accesses"] + record["by experts"])}"""


def _replays(races: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{race['accesses']:,}",
            str(race["experts"]),
            name,
            f"{t['ns_per_access']:.1f} ± {t['spread']:.0%}",
            f"{t['peak_mb']:,.0f}",
        ]
        for race in races
        for name, t in race["timings"].items()
    ]
    return table(["accesses", "experts", "what", "ns per access", "peak MB"], rows)


def report_section(record: dict[str, Any]) -> str:
    return f"""
## The report

`stickymoe report` over {record["runs"]} runs took {record["seconds"]:.1f} s (target 20) and made a page of
{record["page_bytes"] / 1e6:.2f} MB (target 5), by `python benchmarks/report_page.py`.
"""


def routers_section(record: dict[str, Any]) -> str:
    """What each variant adds to a training step and to a decoded token, with 4 and with 16 experts."""
    races, environment = record["routers"], record["environment"]
    goals = {"training": 0.03, "decoding": 0.01}
    columns = [(race, kind) for kind in goals for race in races]
    variants = [variant for variant in races[0]["training"]["added"] if variant != "vanilla"]
    rows = []
    for variant in variants:
        found = [race[kind]["added"].get(variant) for race, kind in columns]
        cells = [f"{row['added']:+.2%} ({_interval(row)})" if row else "vanilla's router" for row in found]
        rows.append([f"`{variant}`", *cells])
    told = {kind: _against(goal, [race[kind]["added"] for race in races]) for kind, goal in goals.items()}
    noise = max(
        abs(row["added"]) for race in races for name, row in race["decoding"]["added"].items() if "vanilla" in name
    )
    token = races[0]["decoding"]["timings"]["decode"]["median_s"] / races[0]["tokens"]
    headings = ["variant", *(f"{kind}, N={race['experts']}" for race, kind in columns)]
    return f"""
## What a router adds

Its own forward + backward, loss terms included, less vanilla's, over the vanilla training step (target 3 %), and its
own forward over a decoded token (target 1 %), by `python benchmarks/routers.py` with one thread on
{environment["processor"]}, commit `{(environment["commit"] or "unknown")[:12]}`: median over rounds (its 95 %
interval, within a round beside vanilla). Training: {told["training"]}. Decoding: {told["decoding"]}.
Vanilla's router itself, timed three times, is up to {noise:.2%} off its mean in decoding. A token of
this small model is decoded in {token * 1e3:.1f} ms; with larger models the share of the router falls. `recommended` is
what `stickymoe train --recommended` trains.

{table(headings, rows)}"""


def _interval(row: dict[str, float]) -> str:
    return f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}"


def _against(goal: float, races: list[dict[str, dict[str, float]]]) -> str:
    """Who is over the goal in some race, by the whole interval or by its median alone."""
    cells = [(f"`{name}`", row) for race in races for name, row in race.items()]
    over = dict.fromkeys(name for name, row in cells if row["low"] > goal)
    near = dict.fromkeys(name for name, row in cells if row["added"] > goal and name not in over)
    said = [f"over the target {', '.join(over)}"] if over else []
    said += [f"over it by the median, within chance, {', '.join(near)}"] if near else []
    return "; ".join(said) or "all at or under the target"


def rival_race(record: dict[str, Any], vocab: int) -> dict[str, Any]:
    race: dict[str, Any] = next(r for r in record["rivals"] if (r["vocab"], r["threads"]) == (vocab, 2))
    return race


def best_rival(race: dict[str, Any]) -> str:
    return min(("hf-eager", "hf-grouped"), key=lambda name: seconds(race, name))


def targets(record: dict[str, Any]) -> str:
    big, small = rival_race(record, 50_257), rival_race(record, 4096)
    alone, together = (t["tokens_per_s"] for t in record["processes"].values())
    terms = seconds(record["terms"], "terms") / seconds(record["terms"], "ours")
    terms_small = record["terms, small vocabulary"]
    evaluation = seconds(record["evaluation"], "eval") / seconds(record["evaluation"], "eval bare")
    rows = []
    for race in (big, small):
        for name in ("hf-eager", "hf-grouped"):
            goal = 2.5 if race is big else 1.5
            what = f"ours : Mixtral {name.removeprefix('hf-')}, vocabulary {race['vocab']:,}"
            rows.append((what, seconds(race, name) / seconds(race, "ours"), "≥", goal, ".2f"))
    for race in (big, small):
        what = f"step : matrix-product floor, vocabulary {race['vocab']:,}"
        rows.append((what, seconds(race, "ours") / seconds(race, "floor"), "≤", 1.6, ".2f"))
    rows += [
        ("consistency + anchor terms : step, vocabulary 50,257", terms, "≤", 0.01, ".2%"),
        (
            "consistency + anchor terms : step, vocabulary 4,096",
            seconds(terms_small, "terms") / seconds(terms_small, "ours"),
            "≤",
            0.01,
            ".2%",
        ),
        ("peak memory above import, GB", big["timings"]["ours"]["peak_mb"] / 1000, "≤", 1.2, ".2f"),
        ("evaluation with every metric : bare perplexity", evaluation, "≤", 1.3, ".2f"),
        ("two one-thread processes : one of two threads", together / alone, "≥", 1.1, ".2f"),
    ]
    lines = []
    for what, value, sign, goal, form in rows:
        met = value >= goal if sign == "≥" else value <= goal
        lines.append([what, format(value, form), f"{sign} {format(goal, form)}", "met" if met else "missed"])
    return table(["what", "measured", "target", ""], lines)


def parts(record: dict[str, Any]) -> str:
    shares = record["breakdown"]
    rows = [[part, *(f"{shares[vocab][part]:.1%}" for vocab in shares)] for part in shares["4096"]]
    return table(["", *(f"vocabulary {int(vocab):,}" for vocab in shares)], rows)


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
    names = {name for race in races for name in race["timings"]} - {"ours"}
    rows = []
    for name in sorted(names):
        cells = [_lever(race["timings"], name) for race in races]
        memory = races[0]["timings"].get(name)
        rows.append([name, *cells, "–" if memory is None else f"{memory['peak_mb']:,.0f}"])
    rows.append(["ours", "1", "1", f"{races[0]['timings']['ours']['peak_mb']:,.0f}"])
    return table(["", *(f"vocabulary {race['vocab']:,}" for race in races), "peak MB at 50,257"], rows)


def _lever(timings: dict[str, Any], name: str) -> str:
    if name not in timings:
        return "–"
    rounds = zip(timings[name]["seconds"], timings["ours"]["seconds"], strict=True)
    low, ratio, high = median_interval([changed / ours for changed, ours in rounds])
    verdict = "slower" if low > 1 else "faster" if high < 1 else "no difference"
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}), {verdict}"


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
