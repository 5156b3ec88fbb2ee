"""What sticky routing and a plan are worth on a real device: python benchmarks/sticky.py, on a quiet machine.

Two models of the preset `demo` are trained, with plain routing and with the recommended router. Both generate the same
number of tokens with three of four experts in memory, from slow memory of a given speed, and take turns. Then the
engine is calibrated, and `plan` predicts the speed of each model for every number of slots, which is measured too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import median_interval, write_record

HERE = Path(__file__).parent
SLOTS, TOKENS, THROTTLE = 3, 96, "25MB"
MODELS = {"vanilla": ["--variant", "vanilla"], "sticky": ["--recommended"]}


def trained(folder: Path, name: str) -> Path:
    """The run of a model, trained if it is not there."""
    if not (folder / name / "record.json").is_file():
        command = [sys.executable, "-m", "stickymoe.cli", "train", "--preset", "demo", *MODELS[name]]
        subprocess.run([*command, "--out", str(folder / name), "--quiet"], check=True)
    return folder / name


def prompts(engine: Any, n: int) -> list[list[int]]:
    """Texts to continue, each of a few tokens of the corpus."""
    from stickymoe.data.corpora import load_corpus
    from stickymoe.runs.config import DataConfig

    rows = [row for document in load_corpus(DataConfig()).test for row in document.rows if len(row) > 40]
    return [engine.host.encode(row[:40], chat=False)[:12] for row in rows[:: len(rows) // n][:n]]


def generate(engine: Any, ids: list[int]) -> tuple[float, float]:
    """Tokens/s and misses per decoded token, of a text that follows another one."""
    stats = engine.generate(ids, max_new_tokens=TOKENS, do_sample=True, warm=True).stats
    return stats.tokens_per_s, (stats.misses - stats.prompt_misses) / (stats.tokens - 1)


def compare(runs: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Speed of the sticky model relative to the vanilla one, and the ratio of their misses."""
    import stickymoe

    engines = {n: stickymoe.offload(run, slots=SLOTS, throttle=THROTTLE, policy="lru") for n, run in runs.items()}
    texts = prompts(next(iter(engines.values())), rounds + 1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for ids in texts:
        for name, engine in engines.items():
            found[name].append(generate(engine, ids))
    for engine in engines.values():
        engine.close()
    pairs = list(zip(found["sticky"][1:], found["vanilla"][1:], strict=True))  # the first text fills the slots
    speeds = [sticky[0] / vanilla[0] for sticky, vanilla in pairs]
    misses = [vanilla[1] / max(sticky[1], 1 / TOKENS) for sticky, vanilla in pairs]
    return {
        "speed": interval(speeds),
        "misses": interval(misses),
        "share": interval([speed / ratio for speed, ratio in zip(speeds, misses, strict=True)]),
        "tokens_per_s": {name: [round(s, 2) for s, _ in rows[1:]] for name, rows in found.items()},
        "misses_per_token": {name: [round(m, 4) for _, m in rows[1:]] for name, rows in found.items()},
    }


def interval(values: list[float]) -> dict[str, float]:
    """The median with its 95 % interval."""
    return dict(zip(("low", "median", "high"), (round(x, 3) for x in median_interval(values)), strict=True))


def predict(name: str, run: Path, rounds: int) -> list[dict[str, Any]]:
    """What `plan` predicts from a calibration, and what the engine does, for every number of slots."""
    import stickymoe
    from stickymoe.runtime.calibrate import calibrate

    device = calibrate(run, throttle=THROTTLE, policy="lru", rounds=rounds)
    rows = []
    for slots in range(1, 5):
        with stickymoe.offload(run, slots=slots, throttle=THROTTLE, policy="lru") as engine:
            ratios, speeds = [], []
            for ids in prompts(engine, rounds):
                out = engine.generate(ids, max_new_tokens=TOKENS, do_sample=True)
                (point,) = stickymoe.plan(out.table, device, policies=["lru"]).points["lru"][slots - 1 : slots]
                ratios.append(point.tokens_per_s / out.stats.tokens_per_s)
                speeds.append(out.stats.tokens_per_s)
        rows.append(
            {
                "model": name,
                "slots": slots,
                "tokens_per_s": round(sorted(speeds)[len(speeds) // 2], 2),
                "plan": interval(ratios),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=Path, help="folder with the runs vanilla and sticky, trained if missing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = {name: trained(args.runs or Path(temporary), name) for name in MODELS}
        compared = compare(runs, args.rounds)
        for what, key, target in (
            (f"tokens/s at {SLOTS} of 4 slots, {THROTTLE}/s", "speed", ""),
            ("misses, vanilla : sticky", "misses", ""),
            ("ratio of tokens/s : ratio of misses", "share", "  (target ≥ 0.85)"),
        ):
            found = compared[key]
            print(f"{what:45} {found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f}){target}")
        planned = [row for name, run in runs.items() for row in predict(name, run, args.rounds)]
        for row in planned:
            p = row["plan"]
            print(
                f"plan : measured, {row['model']:7}  {row['slots']} slots  {row['tokens_per_s']:8.1f} tokens/s   "
                f"{p['median']:.2f} ({p['low']:.2f} to {p['high']:.2f})  (target 0.85 to 1.15)"
            )
    settings = {"slots": SLOTS, "tokens": TOKENS, "throttle": THROTTLE, "rounds": args.rounds}
    write_record(HERE / "sticky.json", {"settings": settings, "compare": compared, "plan": planned})


if __name__ == "__main__":
    main()
