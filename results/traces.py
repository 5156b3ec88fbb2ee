"""What real routing traces cost, and `plan` against a phone: the section of docs/locality.md.

`python results/traces.py FOLDER` replays the traces in FOLDER, writes traces.json, then the page. Without FOLDER, it
writes the page from the committed traces.json.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

import stickymoe
from stickymoe import Access
from stickymoe.locality.devices import load_device
from stickymoe.locality.figures import working_set
from stickymoe.locality.foreign import read_foreign
from stickymoe.locality.policies import policy_names
from stickymoe.locality.study import study
from stickymoe.locality.table import RouteTable
from stickymoe.reports.charts import inline, rounded, themed
from stickymoe.reports.ribbon import PALETTE
from stickymoe.reports.tables import Table, markdown
from stickymoe.runs.environment import describe_environment

HERE = Path(__file__).parent
RECORD = HERE / "traces.json"
BEGIN, END = "<!-- results/traces.py writes from here -->\n", "<!-- to here -->\n"
MIB = 2**20
POOL = Access(order="decode", pool=True)  # as BigMoeOnEdge: one cache for all layers
ONLINE = policy_names(online=True)
# Memory in multiples of the experts that one token uses; the table shows SHOWN, the figure all.
BUDGETS = (1, 1.5, 2, 3, 4, 6, 8)
SHOWN = (1, 2, 4, 8)
QWEN_BYTES, QWEN_DENSE = 2_856_960, 567_263_232  # preamble of the phone's trace: mean over layers, and their sum
GPT_OSS_BYTES = 13_219_200
SMALL_BYTES = 3 * 384 * 768 * 2  # gate, up and down of the 137M model (its model.py), fp16

CACHEABLE = "cacheable-by-design (Shriniwas410)"
BIGMOE = "BigMoeOnEdge (Helldez)"
MATRIX = f"{BIGMOE}, docs/benchmarks.md and docs/bench-data/2026-07-12/summary.md, measured 2026-07-12"
LATER = f"{BIGMOE}, docs/benchmarks.md, measured 2026-07-13"
COMPARED = f"{BIGMOE}, docs/bench-data/2026-07-20-cache-replay/layer-lfu-verdict.md, measured 2026-07-20"
GPT_OSS = f"{BIGMOE}, docs/benchmarks-gpt-oss.md, measured 2026-07-17"


@dataclass(frozen=True)
class Source:
    """A trace file, its name in the tables, and the bytes of one of its experts."""

    file: str
    name: str
    expert_bytes: int
    source: str
    cache_mib: int | None = None  # the cache of the phone when it recorded the trace


SOURCES = (
    Source("qwen3-30b-a3b-general.npz", "Qwen3-30B, general text", QWEN_BYTES, f"{CACHEABLE}, routing-lab/traces"),
    Source("qwen3-30b-a3b-code.npz", "Qwen3-30B, code", QWEN_BYTES, f"{CACHEABLE}, routing-lab/traces"),
    Source("moe-137m-vanilla-prose.npz", "137M model, no locality loss", SMALL_BYTES, f"{CACHEABLE}, runs/a-main-s1"),
    Source("moe-137m-sticky-prose.npz", "137M model, locality loss", SMALL_BYTES, f"{CACHEABLE}, runs/b-main-s1"),
    Source(
        "phone-qwen3-30b.route.csv",
        "Qwen3-30B, top-6, phone",
        QWEN_BYTES,
        f"{BIGMOE}, docs/bench-data/2026-07-15-route-trace",
        4000,
    ),
    Source(
        "phone-gpt-oss-120b.route.csv",
        "gpt-oss-120b, top-2, phone",
        GPT_OSS_BYTES,
        f"{BIGMOE}, docs/bench-data/2026-07-15-route-trace",
        3000,
    ),
)


@dataclass(frozen=True)
class Run:
    """A run that the phone measured; `compute_s` and `read_s` per token are known without overlap only."""

    model: str
    cache_mib: int
    overlap: bool
    tokens_per_s: float
    mib_per_token: float
    source: str
    hits: float | None = None
    compute_s: float | None = None
    read_s: float | None = None
    trace: str | None = None  # predicts this run


QWEN, GEMMA = "Qwen3-30B-A3B", "Gemma-4-26B-A4B"
GENERAL, PHONE_QWEN, PHONE_GPT_OSS = (SOURCES[i].file for i in (0, 4, 5))
RUNS = (
    Run(QWEN, 0, False, 1.71, 1051, MATRIX, None, 0.123, 0.462),
    Run(QWEN, 0, True, 1.27, 1051, MATRIX),
    Run(QWEN, 2000, False, 2.37, 480, MATRIX, 0.53, 0.181, 0.241, GENERAL),
    Run(QWEN, 4000, False, 3.47, 225, MATRIX, 0.76, 0.161, 0.127, GENERAL),
    Run(QWEN, 4000, True, 3.98, 225, MATRIX, 0.76, trace=GENERAL),
    Run(QWEN, 4000, False, 4.03, 224.65, LATER, 0.765, 0.127, 0.121, GENERAL),
    Run(f"{QWEN}, top-6", 4000, False, 5.01, 164.52, LATER, 0.767, 0.106, 0.093, PHONE_QWEN),
    Run(f"{QWEN}, top-6", 3000, True, 5.310, 211.48, COMPARED, 0.708, trace=PHONE_QWEN),
    Run(f"{QWEN}, top-6, again", 3000, True, 5.072, 211.48, COMPARED, 0.708, trace=PHONE_QWEN),
    Run("gpt-oss-120b, top-2, 8 lanes", 2000, True, 2.191, 590.3, GPT_OSS, 0.32, trace=PHONE_GPT_OSS),
    Run(GEMMA, 0, False, 1.61, 904, MATRIX, None, 0.172, 0.449),
    Run(GEMMA, 0, True, 1.81, 904, MATRIX),
    Run(GEMMA, 2000, False, 2.24, 366, MATRIX, 0.58, 0.226, 0.221),
    Run(GEMMA, 2000, True, 2.78, 365, MATRIX, 0.58),
)
DEVICE = "oneplus-15r"


def main(folder: Path | None = None, docs: Path = HERE.parent / "docs") -> None:
    if folder is not None:
        RECORD.write_text(json.dumps(measure(folder), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    page = docs / "locality.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(before + BEGIN + section(record) + END + rest.split(END)[1], encoding="utf-8")
    (docs / "traces.svg").write_text(vl_convert.vegalite_to_svg(themed(figure(record["traces"]))), encoding="utf-8")


# Measure


def measure(folder: Path) -> dict[str, Any]:
    tables = {source.file: read(folder / source.file) for source in SOURCES}
    return {
        "environment": describe_environment(),
        "traces": [
            asdict(source)
            | {"sha256": hashlib.sha256((folder / source.file).read_bytes()).hexdigest()}
            | replayed(tables[source.file], source.expert_bytes)
            | counted(folder / source.file, tables[source.file], source)
            for source in SOURCES
        ],
        "runs": [asdict(run) | predicted(run, tables) for run in RUNS],
    }


def read(path: Path) -> RouteTable:
    """A trace of another tool; of a generation its decoded tokens, because the prompt is not recorded completely."""
    table = read_foreign(path)
    return table if table.phase is None else replace(table, mask=table.mask & (table.phase == 1), phase=None)


def replayed(table: RouteTable, expert_bytes: int) -> dict[str, Any]:
    """Facts of a trace, and what every policy misses at every budget."""
    token = table.n_layers * table.top_k
    slots = {budget: round(budget * token) for budget in BUDGETS if budget * token < table.n_layers * table.n_experts}
    by_policy = study(table, policies=[*ONLINE, "belady"], capacities=list(slots.values()), access=POOL).results
    bypass = study(table, policies=ONLINE, capacities=list(slots.values()), access=replace(POOL, on_miss="bypass"))
    by_policy |= {f"{policy}, bypass": by for policy, by in bypass.results.items()}
    everything = table.n_layers * table.n_experts
    return {
        "layers": table.n_layers,
        "tokens": int(table.mask.sum()),
        "top_k": table.top_k,
        "experts": table.n_experts,
        "working_set_16": float(working_set(table, [16]).mean()),
        "first_uses": stickymoe.simulate(table, capacity=everything, access=POOL).miss_rate,
        "budgets": [
            {
                "tokens": budget,
                "slots": c,
                "bytes": c * expert_bytes,
                "miss_rates": {policy: by[c].miss_rate for policy, by in by_policy.items()},
                "lru_loads_per_token": by_policy["lru"][c].loads_per_token,
                "lru_bytes_per_token": by_policy["lru"][c].loads_per_token * expert_bytes,
            }
            for budget, c in slots.items()
        ],
    }


def counted(path: Path, table: RouteTable, source: Source) -> dict[str, Any]:
    """The hits that the phone counted in a trace, and those of its replay with the same memory."""
    if source.cache_mib is None:
        return {}
    with path.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        hits = [row["residency"] == "1" for row in rows if row["phase"] == "1"]
    slots = source.cache_mib * MIB // source.expert_bytes
    replayed_hits = 1 - stickymoe.simulate(table, capacity=slots, access=POOL).miss_rate
    return {"counted_hits": sum(hits) / len(hits), "replayed_hits": replayed_hits, "replayed_slots": slots}


def predicted(run: Run, tables: dict[str, RouteTable]) -> dict[str, Any]:
    """What `plan` predicts for a run; `serial` is without overlap, `plain` also counts only the read of a load."""
    if run.trace is None:
        return {}
    source = next(source for source in SOURCES if source.file == run.trace)
    table, slots = tables[run.trace], run.cache_mib * MIB // source.expert_bytes
    other = QWEN_DENSE if table.other_bytes is None else table.other_bytes
    fit, serial = fitted(RUNS), load_device(DEVICE)
    devices = {
        "tokens_per_s": replace(serial, overlap=round(fit["overlap"], 2)) if run.overlap else serial,
        "serial": serial,
        "plain": replace(serial, load_bandwidth=fit["read_bandwidth"]),
    }
    points = {
        name: stickymoe.plan(
            table, device, policies=["lru"], expert_bytes=source.expert_bytes, other_bytes=other, access=POOL
        ).points["lru"][slots - 1]
        for name, device in devices.items()
    }
    point = points["serial"]
    return {
        "predicted": {
            "slots": slots,
            "expert_bytes": source.expert_bytes,
            "active_bytes": table.top_k * table.n_layers * source.expert_bytes + other,
            "hits": 1 - point.miss_rate,
            "loads_per_token": point.loads_per_token,
            "mib_per_token": point.bytes_per_token / MIB,
            **{name: point.tokens_per_s for name, point in points.items()},
        }
    }


def fitted(runs: Iterable[Run]) -> dict[str, float]:
    """The figures of the profile: from Qwen3 without a cache, and from what a cache and overlap change for Gemma.

    Without a cache the engine reads into fixed buffers. With one, every load also maps and clears pages, and releases
    those of the evicted expert; the engine counts this as compute.
    """
    found = {(run.model, run.cache_mib, run.overlap): run for run in runs if run.source == MATRIX}
    bare, without, with_cache = (found[model, cache, False] for model, cache in ((QWEN, 0), (GEMMA, 0), (GEMMA, 2000)))
    hidden_s = 1 / without.tokens_per_s - 1 / found[GEMMA, 0, True].tokens_per_s
    read_bandwidth = bare.mib_per_token * MIB / bare.read_s
    room_bandwidth = with_cache.mib_per_token * MIB / (with_cache.compute_s - without.compute_s)
    return {
        "read_bandwidth": read_bandwidth,
        "room_bandwidth": room_bandwidth,
        "load_bandwidth": 1 / (1 / read_bandwidth + 1 / room_bandwidth),
        "compute_bandwidth": (48 * 8 * QWEN_BYTES + QWEN_DENSE) / bare.compute_s,
        "overlap": hidden_s / without.compute_s,
    }


# Page


def section(record: dict[str, Any]) -> str:
    traces, runs = record["traces"], record["runs"]
    planned = [run for run in runs if "predicted" in run]
    parts = [
        "## 5. What real traces cost\n",
        lessons(traces, planned),
        "This command repeats it:\n",
        "    python results/traces.py FOLDER\n",
        wrapped(
            "It replays six public traces in FOLDER, then writes [the record](../results/traces.json) and this "
            "section. The traces are not in this repository; the record has their sources and checksums. All layers "
            "share one cache in decode order, as in BigMoeOnEdge."
        ),
        markdown(traces_table(traces)),
        wrapped(
            "16 tokens use: distinct experts of a layer in 16 adjacent tokens (working set). First uses: misses that "
            "remain with memory for all experts. Expert sizes are those of Q4_K_M on the phone; of the 137M model in "
            "fp16. The phone's traces are short, and only their decoded tokens count."
        ),
        markdown(misses_table(traces)),
        wrapped(
            "Budget: memory for the experts of so many tokens, all k experts in all layers. Best online: the fewest "
            f"misses of {', '.join(ONLINE)}, each with and without bypass. Loads and MB are those of LRU, per token."
        ),
        "![Misses of LRU and Belady by memory, for six traces](traces.svg)\n",
        plan_text(traces, runs, planned),
    ]
    return "\n".join(parts)


def lessons(traces: Sequence[dict[str, Any]], planned: Sequence[dict[str, Any]]) -> str:
    at_two = {trace["file"]: budget_of(trace, 2)["miss_rates"]["lru"] for trace in traces}
    qwen, small = ([at_two[SOURCES[i].file] for i in pair] for pair in ((0, 1), (2, 3)))
    cells = [budget["miss_rates"] for trace in traces for budget in shown(trace)]
    online = [1 - best(rates)[1] / rates["lru"] for rates in cells]
    bound = [1 - rates["belady"] / rates["lru"] for rates in cells]
    gpt_oss = traces[5]
    errors = [error(run) for run in planned]
    return "\n".join(
        [
            wrapped(
                "- **The model decides whether a cache pays.** With memory for the experts of two tokens, LRU misses "
                f"{percent(qwen[0])} of the accesses of Qwen3-30B on general text and {percent(qwen[1])} on code. "
                f"A locality loss in training lowers the misses of a 137M model from {percent(small[0])} to "
                f"{percent(small[1])}, more than any policy in the table; its authors report 2 to 3 % more perplexity.",
                "  ",
            ).rstrip(),
            wrapped(
                "- **LRU is hard to beat without knowing the future.** The best of eight online policies avoids "
                f"{percent(min(online))} to {percent(max(online))} of its misses, and which one is best differs from "
                f"trace to trace. Belady avoids {percent(min(bound))} to {percent(max(bound))}. These are the rows of "
                "the table below; the figure has all sizes.",
                "  ",
            ).rstrip(),
            wrapped(
                f"- **`plan` is within {percent(max(map(abs, errors)))} of the phone** in {len(errors)} runs of two "
                "models, with a profile that was fitted to other runs. Runs with the same memory share one replay.",
                "  ",
            ).rstrip(),
            wrapped(
                f"- **Short traces overstate the misses.** In the {gpt_oss['tokens']} tokens of gpt-oss-120b, "
                f"{percent(gpt_oss['first_uses'])} of the accesses are first uses, which no cache avoids.",
                "  ",
            ),
        ]
    )


def traces_table(traces: Sequence[dict[str, Any]]) -> Table:
    headings = ("trace", "layers × tokens", "k of N", "MB per expert", "16 tokens use", "first uses", "source")
    rows = tuple(
        (
            trace["name"],
            f"{trace['layers']} × {trace['tokens']:,}",
            f"{trace['top_k']} of {trace['experts']}",
            f"{trace['expert_bytes'] / 1e6:.2f}",
            f"{trace['working_set_16']:.1f}",
            percent(trace["first_uses"], 1),
            trace["source"],
        )
        for trace in traces
    )
    return Table("traces", "", headings, rows)


def misses_table(traces: Sequence[dict[str, Any]]) -> Table:
    headings = ("trace", "budget", "GB", "LRU misses", "best online", "Belady", "loads", "MB")
    rows = []
    for trace in traces:
        for budget in shown(trace):
            rates = budget["miss_rates"]
            policy, rate = best(rates)
            rows.append(
                (
                    trace["name"],
                    f"{budget['tokens']} token{'s' * (budget['tokens'] > 1)}",
                    f"{budget['bytes'] / 1e9:.3g}",
                    percent(rates["lru"], 1),
                    f"{percent(rate, 1)} ({policy})",
                    percent(rates["belady"], 1),
                    f"{budget['lru_loads_per_token']:.3g}",
                    f"{budget['lru_bytes_per_token'] / 1e6:.3g}",
                )
            )
    return Table("misses", "", headings, tuple(rows))


def plan_text(
    traces: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], planned: Sequence[dict[str, Any]]
) -> str:
    fit = fitted(Run(**{field.name: run[field.name] for field in fields(Run)}) for run in runs)
    first = [run for run in planned if run["source"] == MATRIX and not run["overlap"]]
    plain = [error(run, "plain") for run in first]
    serial = [error(run, "serial") for run in planned if run["overlap"]]
    hits = " and ".join(
        f"{percent(trace['replayed_hits'], 1)} of the accesses for {trace['name'].partition(',')[0]} (the phone: "
        f"{percent(trace['counted_hits'], 1)})"
        for trace in traces
        if "counted_hits" in trace
    )
    speeds = " and ".join(
        f"{run['mib_per_token'] * MIB / run['read_s'] / 1e9:.2f} GB/s with {run['cache_mib']:,} MiB" for run in first
    )
    (later,) = (run for run in planned if run["source"] == LATER and run["model"] == QWEN)
    speed = {(r["model"], r["cache_mib"], r["overlap"]): r["tokens_per_s"] for r in runs if r["source"] == MATRIX}
    return "\n".join(
        [
            "### Against a phone\n",
            wrapped(
                "The phone is a OnePlus 15R that runs BigMoeOnEdge with LRU; its profile is `oneplus-15r`. For the "
                f"texts that the phone traced itself, the replay hits {hits}. The measured runs decoded other "
                "texts than the traces. Qwen3 top-8 is predicted from the trace of general text, the others from the "
                "phone's traces."
            ),
            markdown(plan_table(planned)),
            wrapped(
                "Error: predicted tokens/s compared with measured. Serial: the error of `plan` without overlap. Plain "
                "reads: the error without overlap if a load were only its read. From the pages that the record names, "
                "these are the runs of LRU with a fixed cache, at least 4 lanes and a trace with the same k, except "
                "those that their page calls contaminated. The same run reached "
                f"{first[-1]['tokens_per_s']:.2f} tokens/s in one session and "
                f"{later['tokens_per_s']:.2f} in another with a cooler phone, so errors below "
                f"{percent(later['tokens_per_s'] / first[-1]['tokens_per_s'] - 1)} may be chance."
            ),
            wrapped(
                "**What is fitted.** Compute and read speed are those of Qwen3 without a cache: "
                f"{fit['compute_bandwidth'] / 1e9:.1f} GB/s and {fit['read_bandwidth'] / 1e9:.2f} GB/s. With these "
                f"alone, `plan` was {percent(min(plain))} to {percent(max(plain))} too fast for the two serial runs of "
                "that session with a cache. Two figures were then added, both fitted to Gemma-4-26B, which has no "
                "trace here:"
            ),
            wrapped(
                "- **Making room.** According to the engine's documentation, it reads into fixed buffers without a "
                "cache. With a cache, a load also gets new pages, and those of the evicted expert are released; this "
                "counts as compute. "
                f"Gemma computes one second longer per {fit['room_bandwidth'] / 1e9:.1f} GB that it loads. Reading and "
                f"making room together are a `load_bandwidth` of {fit['load_bandwidth'] / 1e9:.2f} GB/s. So if you "
                "measure a device, measure loads into the cache, not plain reads; `stickymoe device MODEL` does.",
                "  ",
            ).rstrip(),
            wrapped(
                "- **Overlap.** Without a cache, overlap hides the reads of Gemma behind "
                f"{percent(fit['overlap'])} of its compute time (`overlap`). Serial predictions of the runs with "
                f"overlap were off by {signed(min(serial))} to {signed(max(serial))}.",
                "  ",
            ),
            wrapped(
                "No run in the table was used for a fit, but it was these runs that showed which costs were missing. "
                "Three rows share one replay. **Not modelled:** the read speed falls to "
                f"{speeds}, probably because few misses per layer do not keep four lanes busy; and "
                f"overlap can also hurt: Qwen3 without a cache fell from {speed[QWEN, 0, False]:.2f} to "
                f"{speed[QWEN, 0, True]:.2f} tokens/s. Experts of all layers count with their mean size."
            ),
        ]
    )


def plan_table(planned: Sequence[dict[str, Any]]) -> Table:
    headings = (
        "run",
        "measured",
        "cache",
        "overlap",
        "hits: replay, phone",
        "MiB per token: replay, phone",
        "tokens/s: plan, phone",
        "error",
        "serial",
        "plain reads",
    )
    rows = []
    for run in planned:
        found = run["predicted"]
        rows.append(
            (
                run["model"],
                run["source"].rpartition(" ")[2],
                f"{run['cache_mib']:,} MiB",
                "yes" if run["overlap"] else "no",
                f"{percent(found['hits'])}, {percent(run['hits'])}",
                f"{found['mib_per_token']:.0f}, {run['mib_per_token']:.0f}",
                f"{found['tokens_per_s']:.2f}, {run['tokens_per_s']:.2f}",
                signed(error(run)),
                signed(error(run, "serial")),
                signed(error(run, "plain")),
            )
        )
    return Table("plan", "", headings, tuple(rows))


def figure(traces: Sequence[dict[str, Any]]) -> Any:
    """The misses of LRU and Belady by memory, one panel per trace."""
    points = [
        {
            "trace": trace["name"],
            "policy": name,
            "tokens": budget["tokens"],
            "misses": rounded(budget["miss_rates"][key]),
        }
        for trace in traces
        for budget in trace["budgets"]
        for name, key in (("LRU", "lru"), ("Belady", "belady"))
    ]
    dashes = alt.Scale(domain=["LRU", "Belady"], range=[[1, 0], [4, 3]])
    return (
        alt.Chart(inline(points))
        .mark_line(point=True, color=PALETTE[0])
        .encode(
            x=alt.X(
                "tokens:Q",
                scale=alt.Scale(type="log", base=2),
                axis=alt.Axis(values=SHOWN),
                title="memory, in experts of so many tokens",
            ),
            y=alt.Y("misses:Q", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]), title="misses"),
            strokeDash=alt.StrokeDash("policy:N", scale=dashes, legend=alt.Legend(title=None, orient="bottom")),
            facet=alt.Facet("trace:N", columns=3, title=None, sort=[trace["name"] for trace in traces]),
        )
        .properties(width=200, height=140)
    )


def shown(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [budget for budget in trace["budgets"] if budget["tokens"] in SHOWN]


def budget_of(trace: dict[str, Any], tokens: float) -> dict[str, Any]:
    return next(budget for budget in trace["budgets"] if budget["tokens"] == tokens)


def best(rates: dict[str, float]) -> tuple[str, float]:
    """The policy with the fewest misses among those that a device can run."""
    return min(((policy, rate) for policy, rate in rates.items() if policy != "belady"), key=lambda pair: pair[1])


def error(run: dict[str, Any], prediction: str = "tokens_per_s") -> float:
    return float(run["predicted"][prediction] / run["tokens_per_s"] - 1)


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def signed(value: float) -> str:
    return f"{round(100 * value):+d} %".replace("-", "−").replace("+0 ", "0 ")


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
