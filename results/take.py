"""Take over the records of runs that ended, failed ones too: python results/take.py RUNS paper|frontier."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stickymoe.errors import RunError
from stickymoe.runs.record import RunRecord

HERE = Path(__file__).parent


def main(runs: Path, page: str) -> None:
    for path in sorted(runs.rglob("record.json")):
        try:
            if RunRecord.read(path).status not in ("complete", "failed"):
                continue
        except RunError as e:
            print(f"skipped: {e}")
            continue
        folder = HERE / page / path.parent.relative_to(runs)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("record.json", "metrics.jsonl"):
            if path.with_name(name).exists():
                shutil.copyfile(path.with_name(name), folder / name)
        print(folder.relative_to(HERE))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
