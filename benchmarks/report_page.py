"""Time and page size of a report on 100 runs: python benchmarks/report_page.py.

The runs are synthetic (three variants with 20 seeds each, 40 strengths of soft), with metrics, routes and text.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stickymoe.runs.environment import describe_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from reports.records import a_run, write  # noqa: E402

WORDS = tuple(f"word{i} " for i in range(64))


def main() -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        variants = [(name, seed) for name in ("vanilla", "oracle", "dense") for seed in range(20)]
        variants += [({"name": "soft", "lam": 0.01 * (i + 1)}, 42) for i in range(40)]
        for variant, seed in variants:
            rates = {name: rng.random() for name in ("switch_rate", "cache_hit_rate", "cache_hit_rate_all_c2")}
            write(a_run(variant, seed=seed, ppl=100 + 5 * rng.random(), **rates), runs, words=WORDS)
        page = Path(place) / "report.html"
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "stickymoe.cli", "report", str(runs), "-o", str(page)], check=True)
        seconds = time.perf_counter() - started
        record = {
            "environment": describe_environment(),
            "runs": len(variants),
            "seconds": round(seconds, 2),
            "page_bytes": page.stat().st_size,
        }
    print(f"{record['runs']} runs: {seconds:.1f} s (target 20), page {record['page_bytes'] / 1e6:.2f} MB (target 5)")
    (HERE / "report_page.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
