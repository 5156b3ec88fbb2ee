"""Take over the records of complete runs, to be committed: python results/take.py RUNS."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stickymoe.runs.record import RunRecord

HERE = Path(__file__).parent


def main(runs: Path) -> None:
    for path in sorted(runs.rglob("record.json")):
        if RunRecord.read(path).status != "complete":
            continue
        folder = HERE / path.parent.relative_to(runs)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("record.json", "metrics.jsonl"):
            shutil.copyfile(path.with_name(name), folder / name)
        print(folder.relative_to(HERE))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
