"""Put perplexity, misses and answers of the models into README.md, from their records.

python -m examples.smollm2.compare --take models/smollm2    copies */results.json to records/ first
python -m examples.smollm2.compare                          the table again, from the committed records
"""

from __future__ import annotations

import json
from pathlib import Path

from examples.olmoe.compare import METRICS, rules, table, write_page

HERE = Path(__file__).parent
PROMPT = "What is HTML? Answer in one sentence."
MOST_TOKENS = 8192  # of each split
ORDER = ("upcycled", "vanilla", "soft")  # others follow by name


def tables(records: Path) -> str:
    """One row per model, then its answers to the prompt."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(records.glob("*.json"))]
    if not found:
        return "No records yet."
    rank = {name: i for i, name in enumerate(ORDER)}
    found.sort(key=lambda record: (rank.get(record["method"], len(ORDER)), record["method"], record["seed"]))
    rows, answers = [], []
    for record in found:
        m, steps = record["metrics"]["test"], record.get("training", {}).get("steps")
        name = f"{record['method']}, seed {record['seed']}"
        steps = "–" if steps is None else str(steps)
        numbers = [f"{m[key]:.{digits}f}" for _, key, digits in METRICS]
        rows.append([name, steps, *numbers])
        answers.append(f"- **{name}**: {' '.join(record['answer'].split())}")
    about = f"First {MOST_TOKENS:,} tokens of the test split."
    headings = ["model", "steps", *(heading for heading, _, _ in METRICS)]
    parts = [about, table(headings, rows), f"Greedy answers to “{PROMPT}”:", "\n".join(answers)]
    return "\n\n".join(parts + rules(records) + from_disk(records / "disk"))


def from_disk(records: Path) -> list[str]:
    """The upcycled model with its experts on disk: one row per store and number of slots, and what it answered."""
    rows: list[list[str]] = []
    answers: dict[str, None] = {}  # each once
    for file in sorted(records.glob("*.json")):
        made = json.loads(file.read_text(encoding="utf-8"))
        precision = file.stem.partition("-")[0]
        read = made["bytes_read"] / (made["prompt_tokens"] + made["n_tokens"]) / 1e6
        rows.append(
            [
                *(precision, str(made["slots"]), f"{made['tokens_per_s']:.1f}"),
                f"{made['misses'] / (made['hits'] + made['misses']):.1%}",
                *(f"{read:.0f}", f"{made['resident_bytes'] / 1e6:,.0f}"),
            ]
        )
        answers[f"- **{precision}**: {' '.join(made['text'].split())}"] = None
    if not rows:
        return []
    headings = ["experts", "slots of 8", "tokens/s", "misses", "MB read per token", "MB resident"]
    about = (
        "The upcycled model with experts on disk (`stickymoe generate`, greedy, one thread, direct reads). Its gates "
        "are random, so it has no locality yet. The answer is the same for every number of slots:"
    )
    return [about, table(headings, rows), "\n".join(answers)]


if __name__ == "__main__":
    write_page(HERE, tables)
