"""Copy the records of complete and failed runs: python results/take.py RUNS paper|frontier.

A failed run never replaces a complete one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stickymoe.errors import RunError
from stickymoe.runs.record import RunRecord

HERE = Path(__file__).parent


def main(runs: Path, page: str) -> None:
    for path in sorted(runs.rglob("record.json")):
        folder = HERE / page / path.parent.relative_to(runs)
        try:
            status = RunRecord.read(path).status
            known = RunRecord.read(folder / path.name).status if (folder / path.name).exists() else None
        except RunError as e:
            print(f"skipped: {e}")
            continue
        if status != "complete" and (status != "failed" or known == "complete"):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("record.json", "metrics.jsonl"):
            if path.with_name(name).exists():
                shutil.copyfile(path.with_name(name), folder / name)
        print(folder.relative_to(HERE))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in ("paper", "frontier") or not Path(sys.argv[1]).is_dir():
        sys.exit(f"Got {' '.join(sys.argv[1:]) or 'no arguments'}; expected a folder of runs, then paper or frontier.")
    main(Path(sys.argv[1]), sys.argv[2])
