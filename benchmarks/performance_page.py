"""Write docs/performance.md and its plot from the records of the benchmarks: python benchmarks/performance_page.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import median_interval
from offload import CAPACITIES, PRECISIONS, row_text

HERE = Path(__file__).parent


def main(docs: Path = HERE.parent / "docs") -> None:
    names = ("train_throughput", "replay", "report_page", "attach", "routers", "offload", "sticky", "rows")
    record, replay, report, attach, routers, offload, sticky, rows = (
        json.loads((HERE / f"{name}.json").read_text()) for name in names
    )
    text = page(record) + replay_section(replay) + report_section(report) + attach_section(attach)
    text += routers_section(routers)
    text += rows_section(rows) + offload_section(offload) + sticky_section(sticky)
    (docs / "performance.md").write_text(text, encoding="utf-8")
    (docs / "growth.svg").write_text(plot(record["growth"]), encoding="utf-8")


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seconds(race: dict[str, Any], name: str) -> float:
    return float(race["timings"][name]["median_s"])


def page(record: dict[str, Any]) -> str:
    environment = record["environment"]
    big = model_race(record, 50_257)
    reach = seconds(big, fastest_mixtral(big)) / seconds(big, "floor")
    used = seconds(big, "floor") / seconds(big, "ours")
    products = record["breakdown"]["4096"]["matrix products"]
    compiled = record["levers"][1]["timings"]["with compile"]
    return f"""\
# Performance

`python benchmarks/train_throughput.py` measures training and writes [the record](../benchmarks/train_throughput.json).
`python benchmarks/performance_page.py` writes this page from the records. Compare ratios, not absolute times.

Machine: {environment["cores"]} cores of {environment["processor"]}, torch {environment["packages"]["torch"]}, commit
`{(environment["commit"] or "unknown")[:12]}`. Each candidate runs in its own process, and the candidates take turns.
Times are medians over rounds, ± half of the interquartile range; the record has every round. A step is forward +
backward + AdamW of the paper's small model on 16×256 tokens. The baseline is Hugging Face's Mixtral with the same
width, depth, experts and parameter count, and both of its expert implementations, eager and grouped. `plain` is our
model without the fast path.

## Targets

{targets(record)}
- With a vocabulary of 50,257, the matrix products of the step alone would be {reach:.2f} times as fast as the faster
  Mixtral. Our step runs at {used:.0%} of the speed of that floor. Of the rest, {largest_rest(record)} takes the most
  time.
- With a vocabulary of 4,096, matrix products take {products:.0%} of the step. [The profile](#profile-of-a-step) shows
  the rest.

## Tokens per second

{models(record)}
`floor` is the matrix products of the step alone, with the same shapes, each by the library that the step uses.

## Profile of a step

Share of the time in torch's profiler, two threads.

{parts(record)}
## Effect of each optimisation

Time of a step with one optimisation changed, divided by the time of our step in the same round: median over rounds
(95 % interval). "no difference" means that the interval includes 1; the machine is noisy. `plain` above has neither the
fused head nor sorted experts.

{optimisations(record)}
- **Fused head** (`models/head.py`): computes the logits of a few rows at a time and turns them into gradients while
  they are in cache. The full logits are never in memory: see the memory column.
- **Kept memory** (`training/memory.py`): sets an option of glibc, so that large freed blocks stay in the process.
- **Sorted experts** (`models/moe.py`): sorts rows by expert and writes each gradient once. The benefit grows with the
  number of experts: see below.
- **oneDNN** (`products.py`): multiplies where it is faster than MKL, on AMD processors with AVX-512. Elsewhere
  products are torch's own.
- **torch.compile** is not used: it takes {compiled["warm_up_s"]:.0f} s to warm up and needs a C++ compiler on the
  user's machine.
- **Passive threads** (`OMP_WAIT_POLICY=passive`) are not used.
- **A compiled softmax** (`benchmarks/compiled_softmax.py`) is not used: numba's loops over a row are no faster than
  torch's.

## The expert layer

Milliseconds for forward + backward of the layer alone, 4,096 tokens, two experts per token.

{experts(record)}
The model uses `sorted`: rows sorted by expert, one matrix product per expert and matrix.

## Scaling

![Tokens per second against sequence length, experts and vocabulary](growth.svg)

{growth(record)}
These runs had fewer rounds than those above, so compare only within this table.
"""


def replay_section(record: dict[str, Any]) -> str:
    main = record["main"]
    goals = [[g["what"], f"{g['value']:.2f}", g["target"], "met" if g["met"] else "missed"] for g in record["targets"]]
    return f"""
## Cache replay

`python benchmarks/replay.py` measures this ([record](../benchmarks/replay.json)) on one core with a synthetic trace,
one expert per request: {main["accesses"]:,} accesses, {main["experts"]} experts, {main["capacity"]} slots. libCacheSim
runs in two ways: called from Python once per request (`per request`), and with its own trace reader (`whole`).

{table(["what", "measured", "target", ""], goals)}
{_replays([main])}
Scaling with the number of accesses and of experts, with slots for a quarter of the experts. `curve` computes all
capacities at once:

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
## Report

`python benchmarks/report_page.py` measures this: `stickymoe report` on {record["runs"]} runs took
{record["seconds"]:.1f} s (target 20) and wrote a page of {record["page_bytes"] / 1e6:.2f} MB (target 5).
"""


def attach_section(record: dict[str, Any]) -> str:
    """What attaching costs a transformers model."""
    train, read, attach = record["train"], record["profile"]["ratio"], record["attach_ms"]
    time = train["ratio"]
    rows = [
        [
            "attached with `soft` : bare, time of forward + backward",
            f"{time['median']:.3f} ({time['low']:.3f} to {time['high']:.3f})",
            "≤ 1.03",
        ],
        ["the same, peak memory", f"{train['memory']:.3f}", "≤ 1.02"],
        [
            "`profile` : bare forward, tokens/s",
            f"{1 / read['median']:.3f} ({1 / read['high']:.3f} to {1 / read['low']:.3f})",
            "≥ 0.95",
        ],
        [
            "attach to a model of 48 layers",
            f"{attach['median']:.1f} ms ({attach['first']:.1f} the first time)",
            "≤ 50 ms",
        ],
    ]
    return f"""
## Hugging Face models

`python benchmarks/attach.py` measures this: a Mixtral of 4 layers with 8 experts, 4 × 256 tokens, two threads, on
{record["environment"]["processor"]}. The bare forward pass computes the loss too. Medians over rounds, with 95 %
intervals.

{table(["what", "measured", "target"], rows)}"""


def routers_section(record: dict[str, Any]) -> str:
    """The time that each variant adds to a training step and to a decoded token, with 4 and with 16 experts."""
    races, environment = record["routers"], record["environment"]
    goals = {"training": 0.03, "decoding": 0.01}
    columns = [(race, kind) for kind in goals for race in races]
    variants = [variant for variant in races[0]["training"]["added"] if variant != "vanilla"]
    rows = []
    for variant in variants:
        found = [race[kind]["added"].get(variant) for race, kind in columns]
        cells = [f"{row['added']:+.2%} ({_interval(row)})" if row else "same as vanilla" for row in found]
        rows.append([f"`{variant}`", *cells])
    verdicts = {kind: _against(goal, [race[kind]["added"] for race in races]) for kind, goal in goals.items()}
    noise = max(
        abs(row["added"]) for race in races for name, row in race["decoding"]["added"].items() if "vanilla" in name
    )
    token = races[0]["decoding"]["timings"]["decode"]["median_s"] / races[0]["tokens"]
    headings = ["variant", *(f"{kind}, N={race['experts']}" for race, kind in columns)]
    return f"""
## Cost of a router

`python benchmarks/routers.py` measures the time that a variant adds to vanilla, with one thread on
{environment["processor"]}, commit `{(environment["commit"] or "unknown")[:12]}`. Training: forward + backward of its
routers and loss terms, minus those of vanilla, divided by the vanilla training step (target 3 %). Decoding: forward of
its routers, minus those of vanilla, divided by the time of a decoded token (target 1 %). Both are medians over rounds
(95 % interval); each round compares with vanilla in the same round.

- Training: {verdicts["training"]}.
- Decoding: {verdicts["decoding"]}.

The router of vanilla was timed three times; in decoding it is up to {noise:.2%} away from its mean. A token of this
small model is decoded in {token * 1e3:.1f} ms. In larger models the share of the router is smaller. `recommended` is
the variant of `stickymoe train --recommended`.

{table(headings, rows)}"""


def rows_section(record: dict[str, Any]) -> str:
    settings, environment = record["settings"], record["environment"]
    steps = [
        [f"step with {name} : step without", f"{_ratio_text(row['ratio'], 3)}", "≤ 1.03"]
        for name, row in record["training"].items()
        if name != "hash"
    ]
    tokens = [
        [
            slots.removesuffix(" slots"),
            name,
            f"{row['ms_per_token']:.3f}",
            _ratio_text(row["ratio"], 3),
            "" if name == "in memory" else "≤ 1.05",
            f"{row['row_hits'] / row['rows']:.0%}" if row["rows"] else "–",
            f"{1000 * row['row_stall_s'] / settings['tokens']:.3f}",
        ]
        for slots, rows in record["decoding"].items()
        for name, row in rows.items()
    ]
    headings = ["slots", "tables", "ms per token", "relative to in memory", "target", "hot", "ms stalled"]
    return f"""
## Rows in slow memory

`python benchmarks/rows.py` measures this ([record](../benchmarks/rows.json)) on {environment["processor"]}, one thread:
the model of `cpu-small` with `hash` and `hash+lookup`. Ratios are of the same round, medians with 95 % intervals.

{table(["training", "measured", "target"], steps)}
Decoding from slow memory of {settings["throttle"]} per second, with the tables in memory or on disk. "Hot" is the share
of rows that were in memory, "stalled" the time of a token in which the model waited for rows. A token reads nine blocks
of 4 kB. With four slots all experts are in memory, and the compiled token takes less time than these reads.

{table(headings, tokens)}"""


def offload_section(record: dict[str, Any]) -> str:
    """Decoding with experts on disk."""
    environment, memory = record["environment"], record["memory"]
    rows = [[row["what"], *row_text(row)] for row in record["rows"]]
    return f"""
## Experts on disk

`python benchmarks/offload.py` measures this ([record](../benchmarks/offload.json)) on {environment["cores"]} cores of
{environment["processor"]}, commit `{(environment["commit"] or "unknown")[:12]}`: a Mixtral of 8 layers with 8 experts
of 11 MB, fp32, batch 1. C is the number of slots per layer. Ratios are of tokens per second in the same round, medians
with 95 % intervals; two threads unless stated. All candidates with fp32 experts generated the same text in every round.

{table(["what", "measured", "target", ""], rows)}
- HF default is `grouped_mm` with all weights in private memory, and the faster of spinning and waiting OpenMP threads.
- accelerate maps the fused experts of a layer from disk in every forward pass. "Evicted": its file is dropped from the
  page cache after each token, so it has no cache at all, while C slots keep their experts. At 200 MB/s, its tokens are
  charged at least the time of the bytes that they read.
- The weights are random, so routing has no locality: with C slots, about 1 − C/8 of the requests miss. Trained models
  miss less. The router of the next layer is also easier to predict than in trained models.
- Prefetch: a compiled token computes for a tenth of its time and reads for the rest, so there is little to hide reads
  behind. With the slower kernel there is more.
- The GPT in torch takes 1.1 ms on this processor. The compiled token reads 7 MB of weights, most of its time.
- Bandwidth: bytes divided by the time in which at least one read runs, checksums included, against one plain direct
  read after another between the tokens.
- Peak memory: that of a generation minus what was resident after all imports and a tiny model, minus
  {memory["slots_mb"]:.0f} MB of slots and {memory["dense_mb"]:.0f} MB of dense weights; the store has
  {memory["store_mb"]:,.0f} MB of experts.

Tokens per second, and MB read from disk per token:

{table(["", *PRECISIONS, *(f"{p}, MB" for p in PRECISIONS)], _capacity_rows(record["tokens_per_s"]))}
{table(["", "tokens/s", "MB"], _other_rows(record["tokens_per_s"]))}"""


def sticky_section(record: dict[str, Any]) -> str:
    """Sticky routing on a device with slow memory, and how well a plan predicts speeds."""
    settings, compared = record["settings"], record["compare"]
    rows = [
        [what, _ratio_text(compared[key]), target]
        for what, key, target in (
            ("tokens/s, sticky : vanilla", "speed", ""),
            ("misses, vanilla : sticky", "misses", ""),
            ("ratio of tokens/s : ratio of misses", "share", "≥ 0.85"),
        )
    ]
    planned = [
        [row["model"], str(row["slots"]), f"{row['tokens_per_s']:,.1f}", _ratio_text(row["plan"]), "0.85 to 1.15"]
        for row in record["plan"]
    ]
    return f"""
## Sticky routing on a device, and the plan for it

`python benchmarks/sticky.py` measures this ([record](../benchmarks/sticky.json)): two models of the preset `demo`, with
plain routing and with the recommended router, {settings["slots"]} of 4 experts of a layer in memory, slow memory of
{settings["throttle"]} per second, LRU, sampled text of {settings["tokens"]} tokens. Both take turns; ratios are of the
same round, {settings["rounds"]} rounds. These are small models after 300 steps;
[frontier](frontier.md) says what the router costs and what a model of three experts, which loads nothing, does.

{table(["what", "measured", "target"], rows)}
What `plan` predicts from `stickymoe device MODEL`, divided by what the engine does:

{table(["model", "slots", "tokens/s", "plan : measured", "target"], planned)}"""


def _ratio_text(interval: dict[str, float], digits: int = 2) -> str:
    median, low, high = (f"{interval[end]:.{digits}f}" for end in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _capacity_rows(speeds: dict[str, Any]) -> list[list[str]]:
    rows = []
    for C in ("N", *CAPACITIES):
        cells = [speeds[p if C == "N" else f"{p} C={C}"] for p in PRECISIONS]
        rows.append([f"C = {C}", *(_speed(cell) for cell in cells), *(f"{cell['mb']:.0f}" for cell in cells)])
    cells = [speeds[f"{p}, 1 thread"] for p in PRECISIONS]
    return [*rows, ["C = N, 1 thread", *map(_speed, cells), *(f"{cell['mb']:.0f}" for cell in cells)]]


def _other_rows(speeds: dict[str, Any]) -> list[list[str]]:
    names = {
        "HF": "HF default",
        "HF, spinning": "HF default, spinning threads",
        "HF, 1 thread": "HF default, 1 thread",
        "HF eager": "HF eager",
        "torch kernel": "C = N, fp32, torch kernel",
        "accelerate": "accelerate, evicted",
        "fp32 C=4 slow": "C = 4, fp32, 200 MB/s",
        "none": "C = 4, int8, 1 GB/s, 1 thread",
        "next_layer": "the same with prefetch of the next layer",
        "GPT": "our GPT, compiled, 1 thread",
        "GPT torch": "our GPT in torch, 1 thread",
        "GPT torch, 2 threads": "our GPT in torch, 2 threads",
    }
    return [[text, _speed(speeds[name]), f"{speeds[name]['mb']:.0f}"] for name, text in names.items()]


def _speed(cell: dict[str, float]) -> str:
    return f"{cell['median']:,.1f} ({cell['low']:,.1f} to {cell['high']:,.1f})"


def _interval(row: dict[str, float]) -> str:
    return f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}"


def _against(goal: float, races: list[dict[str, dict[str, float]]]) -> str:
    """Which variants exceed the goal, significantly or only in the median."""
    cells = [(f"`{name}`", row) for race in races for name, row in race.items()]
    over = dict.fromkeys(name for name, row in cells if row["low"] > goal)
    near = dict.fromkeys(name for name, row in cells if row["added"] > goal and name not in over)
    parts = [f"{', '.join(over)} exceed the target"] if over else []
    parts += [f"the median of {', '.join(near)} exceeds the target, not significantly"] if near else []
    return "; ".join(parts) or "all variants meet the target"


def model_race(record: dict[str, Any], vocab: int) -> dict[str, Any]:
    race: dict[str, Any] = next(r for r in record["rivals"] if (r["vocab"], r["threads"]) == (vocab, 2))
    return race


def fastest_mixtral(race: dict[str, Any]) -> str:
    return min(("hf-eager", "hf-grouped"), key=lambda name: seconds(race, name))


def largest_rest(record: dict[str, Any]) -> str:
    """The kind of operation that takes the most time after matrix products, with the large vocabulary."""
    shares = {part: share for part, share in record["breakdown"]["50257"].items() if part != "matrix products"}
    return max(list(shares)[:-1], key=lambda part: shares[part])


def targets(record: dict[str, Any]) -> str:
    big, small = model_race(record, 50_257), model_race(record, 4096)
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
    for race, goal in ((big, 1.2), (small, 1.35)):
        what = f"step : matrix-product floor, vocabulary {race['vocab']:,}"
        rows.append((what, seconds(race, "ours") / seconds(race, "floor"), "≤", goal, ".2f"))
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


def models(record: dict[str, Any]) -> str:
    races = record["rivals"]
    headings = ["", *(f"vocabulary {r['vocab']:,}, {r['threads']} thread{'s' * (r['threads'] > 1)}" for r in races)]
    rows = []
    for name in races[0]["timings"]:
        timings = [race["timings"][name] for race in races]
        rows.append([name, *(f"{t['tokens_per_s']:,} ± {t['spread']:.0%}" for t in timings)])
    return table(headings, rows)


def optimisations(record: dict[str, Any]) -> str:
    races = record["levers"]
    names = {name for race in races for name in race["timings"]} - {"ours"}
    rows = []
    for name in sorted(names):
        cells = [_ratio(race["timings"], name) for race in races]
        memory = races[0]["timings"].get(name)
        rows.append([name, *cells, "–" if memory is None else f"{memory['peak_mb']:,.0f}"])
    rows.append(["ours", "1", "1", f"{races[0]['timings']['ours']['peak_mb']:,.0f}"])
    return table(["", *(f"vocabulary {race['vocab']:,}" for race in races), "peak MB at 50,257"], rows)


def _ratio(timings: dict[str, Any], name: str) -> str:
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
