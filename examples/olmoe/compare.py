"""Compare the trained and the adapted models over seeds, from their records, and put the tables into README.md.

    python -m examples.olmoe.compare --take models/olmoe      copies */results.json to records/ first
    python -m examples.olmoe.compare                          the tables again, from the committed records

Differences are paired: each method minus vanilla of the same seed, mean ± half of the 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stickymoe.files import write_text
from stickymoe.paper.frontier import interval
from stickymoe.reports.collection import Value
from stickymoe.reports.rerouting import rules_table
from stickymoe.reports.tables import markdown

HERE = Path(__file__).parent
BASELINE = "vanilla"
ORDER = (BASELINE, "soft", "remoe", "remoe_full")  # others follow by name
SPLIT = "test"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

# Heading, key and decimals of each metric.
METRICS = (
    ("PPL", "ppl", 2),
    ("switch rate", "switch_rate", 3),
    ("misses, C=4", "misses_c4", 3),
    ("effective experts", "effective_experts", 2),
    ("gate entropy", "gate_entropy", 2),
)
# Heading, key, and a method's number against vanilla's.
DIFFERENCES: tuple[tuple[str, str, Callable[[float, float], float]], ...] = (
    ("PPL, %", "ppl", lambda ours, base: 100 * (ours / base - 1)),
    ("switch rate, %", "switch_rate", lambda ours, base: 100 * (ours / base - 1)),
    ("misses, %", "misses_c4", lambda ours, base: 100 * (ours / base - 1)),
    ("effective experts", "effective_experts", lambda ours, base: ours - base),
)

Results = dict[str, dict[int, dict[str, float]]]  # method → seed → metric → number


def take(models: Path, records: Path) -> None:
    """Copy the record of every model under `models` whose method and seed it names."""
    records.mkdir(exist_ok=True)
    for file in sorted(models.glob("*/results.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        write_text(records / f"{record['method']}-{record['seed']}.json", file.read_text(encoding="utf-8"))


def read(records: Path) -> Results:
    """The metrics of every record, in the order of the tables."""
    found: Results = {}
    for file in sorted(records.glob("*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(record["method"], {})[record["seed"]] = record["metrics"][SPLIT]
    rank = {name: i for i, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(ORDER)), item[0])))


def shown(values: list[float], digits: int, sign: str = "") -> str:
    """Mean ± half of the 95 % interval; without ± for one seed; a dash for none."""
    value = Value.of(values)
    if value is None:
        return "–"
    half = interval(value)
    return f"{value.mean:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def values_table(results: Results) -> str:
    rows = [
        [name, str(len(seeds)), *(shown([m[key] for m in seeds.values()], digits) for _, key, digits in METRICS)]
        for name, seeds in results.items()
    ]
    return table(["method", "seeds", *(heading for heading, _, _ in METRICS)], rows)


def differences_table(results: Results) -> str:
    base = results.get(BASELINE, {})
    rows = []
    for name, seeds in results.items():
        common = sorted(seeds.keys() & base.keys())
        if name != BASELINE:
            pairs = [[change(seeds[s][key], base[s][key]) for s in common] for _, key, change in DIFFERENCES]
            rows.append([name, str(len(common)), *(shown(values, 2, "+") for values in pairs)])
    return table([f"method − {BASELINE}", "seeds", *(heading for heading, _, _ in DIFFERENCES)], rows)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(records: Path) -> str:
    results = read(records)
    if not results:
        return "No records yet."
    about = f"Test split; mean ± half of the 95 % interval over seeds. Baseline: {BASELINE}."
    parts = [about, values_table(results), "Paired differences:", differences_table(results)]
    return "\n\n".join(parts + rules(records))


def rules(records: Path) -> list[str]:
    """What `stickymoe reroute --json` found, for each record in the folder `reroute`."""
    parts = []
    for file in sorted((records / "reroute").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        setting = f"{found['policy']}, {found['slots']} slots per layer, cold for every row, validation split"
        parts.append(f"Rules without training on `{found['model']}` ({setting}):")
        parts.append(markdown(rules_table(found["rows"])).strip())
    return parts


def with_tables(page: str, made: str) -> str:
    """The page with what stands between its two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md: expected the markers {BEGIN} and {END}, in this order.")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def write_page(folder: Path, tables: Callable[[Path], str], argv: list[str] | None = None) -> None:
    """The command of both examples: write the tables of the README in `folder`, from its records."""
    parser = argparse.ArgumentParser(description="Write the tables of README.md from the records.")
    parser.add_argument("--take", type=Path, help="folder of models whose records are copied to records/ first")
    a = parser.parse_args(argv)
    if a.take is not None:
        take(a.take, folder / "records")
    made = tables(folder / "records")
    page = folder / "README.md"
    write_text(page, with_tables(page.read_text(encoding="utf-8"), made))
    print(made)


if __name__ == "__main__":
    write_page(HERE, tables)
