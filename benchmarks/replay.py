"""Cache replay compared with libCacheSim: one core, 128 experts, one expert per request.

    python benchmarks/replay.py        everything; writes replay.json (minutes, 3 GB of disk)
    python benchmarks/replay.py --accesses 1e6 --growth 1e5,1e6     a quick look, same record
    python benchmarks/replay.py --growth 1e6,1e7,1e8           without the trace of a billion accesses

Candidates (each in its own process, taking turns; all read the same synthetic trace)
    lru, belady          our replay of the memory-mapped trace at one capacity
    curve                our LRU miss-ratio curve, all capacities in one pass
    per request          libCacheSim's LRU called from Python once per request, on the first --slow accesses
    whole, whole belady  libCacheSim with its own C reader on an oracleGeneral file, LRU and Belady

Candidates with the same policy and accesses must count the same misses. Times are per access. Memory is what a process
needs in addition to its imports, including the open trace.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from harness import Timing, Work, race, serve, write_record

HERE = Path(__file__)
STICKINESS, SKEW = 0.5, 0.8


def make(folder: Path, accesses: int, experts: int) -> Path:
    """A trace of one layer and one sequence, with one expert per token."""
    from stickymoe.locality.synthetic import Synthetic, make_trace

    kind = Synthetic(
        n_experts=experts, top_k=1, n_layers=1, sequences=1, length=accesses, stickiness=STICKINESS, skew=SKEW
    )
    make_trace(folder, kind)
    return folder


def make_oracle(folder: Path) -> None:
    """The same accesses as oracleGeneral records of libCacheSim, with the next use that its Belady needs."""
    from stickymoe.locality.formats import load_table
    from stickymoe.locality.kernels import NEVER, next_uses

    S = np.array(load_table(folder).S.reshape(-1, 1))
    future = next_uses(S, np.ones(len(S), np.uint8), 1, int(S.max()) + 1)[:, 0]
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    with (folder / "trace.oracleGeneral.bin").open("wb") as file:
        for start in range(0, len(S), 1 << 22):
            part = slice(start, min(start + (1 << 22), len(S)))
            rows = np.zeros(part.stop - part.start, record)
            rows["time"] = np.arange(part.start, part.stop)
            rows["id"] = S[part, 0]
            rows["size"] = 1
            rows["next"] = np.where(future[part] == NEVER, -1, future[part])
            rows.tofile(file)


def ours(a: argparse.Namespace, policy: str) -> Work:
    from stickymoe.locality.formats import load_table
    from stickymoe.locality.replay import simulate

    table = load_table(a.trace)
    return lambda: simulate(table, policy=policy, capacity=a.capacity).misses


def curve(a: argparse.Namespace) -> Work:
    from stickymoe.locality.formats import load_table
    from stickymoe.locality.replay import miss_curve

    table = load_table(a.trace)
    return lambda: miss_curve(table).at(a.capacity).misses


def per_request(a: argparse.Namespace) -> Work:
    import libcachesim

    from stickymoe.locality.formats import load_table

    entries = load_table(a.trace).S.reshape(-1)[: a.slow].tolist()

    def work() -> int:
        cache = libcachesim.LRU(cache_size=a.capacity, hashpower=12)
        hits = 0
        for entry in entries:
            hits += cache.get(libcachesim.Request(obj_id=entry, obj_size=1))
        return len(entries) - hits

    return work


def whole(a: argparse.Namespace, policy: str) -> Work:
    import libcachesim

    reader = libcachesim.TraceReader(
        str(a.trace / "trace.oracleGeneral.bin"),
        trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        reader_init_params=libcachesim.ReaderInitParam(ignore_obj_size=True),
    )

    accesses = reader.get_num_of_req()

    def work() -> int:
        reader.reset()
        miss_ratio, _ = getattr(libcachesim, policy)(cache_size=a.capacity, hashpower=12).process_trace(reader)
        misses: int = round(miss_ratio * accesses)
        return misses

    return work


CANDIDATES: dict[str, Callable[[argparse.Namespace], Work]] = {
    "lru": functools.partial(ours, policy="lru"),
    "belady": functools.partial(ours, policy="belady"),
    "curve": curve,
    "per request": per_request,
    "whole": functools.partial(whole, policy="LRU"),
    "whole belady": functools.partial(whole, policy="Belady"),
}


def run(names: list[str], trace: Path, *, accesses: int, slow: int, experts: int, rounds: int) -> dict[str, Any]:
    capacity = max(experts // 4, 1)
    arguments = ("--trace", str(trace), "--capacity", str(capacity), "--slow", str(slow))
    timings = race(HERE, names, threads=1, rounds=rounds, arguments=arguments)
    print(f"\n{accesses:,} accesses, {experts} experts, {capacity} slots", flush=True)
    found = {}
    for timing in timings:
        n = min(slow, accesses) if timing.name == "per request" else accesses
        found[timing.name] = _result(timing, n)
    _require_agreement(found)
    return {"accesses": accesses, "experts": experts, "capacity": capacity, "timings": found}


def _require_agreement(found: dict[str, Any]) -> None:
    """Candidates with the same policy and accesses must count the same misses."""
    for names in (("lru", "curve", "per request", "whole"), ("belady", "whole belady")):
        misses = {(found[name]["accesses"], found[name]["misses"]) for name in names if name in found}
        if len(misses) > len({accesses for accesses, _ in misses}):
            raise RuntimeError(f"{', '.join(names)} disagree: (accesses, misses) {sorted(misses)}")


def _result(timing: Timing, n: int) -> dict[str, Any]:
    ns = 1e9 * timing.median / n
    print(f"  {timing.name:14} {ns:9.1f} ns/access ± {timing.spread:.0%}  {timing.peak_mb:8.0f} MB", flush=True)
    return {**timing.as_dict(), "accesses": n, "misses": timing.result, "ns_per_access": round(ns, 3)}


def targets(main: dict[str, Any], largest: dict[str, Any]) -> list[dict[str, Any]]:
    ns = {name: timing["ns_per_access"] for name, timing in main["timings"].items()}
    rows = [
        ("libCacheSim per request : ours", ns["per request"] / ns["lru"], "≥", 20),
        ("libCacheSim whole trace : ours", ns["whole"] / ns["lru"], "≥", 1),
        ("whole LRU curve : one replay", ns["curve"] / ns["lru"], "≤", 3),
        ("Belady : LRU", ns["belady"] / ns["lru"], "≤", 5),
        (f"MB for LRU on {largest['accesses']:,} accesses", largest["timings"]["lru"]["peak_mb"], "≤", 500),
    ]
    found = []
    for what, value, sign, goal in rows:
        met = value >= goal if sign == "≥" else value <= goal
        print(f"{what:40} {value:9.2f}  {sign} {goal:<4} {'met' if met else 'missed'}", flush=True)
        found.append({"what": what, "value": round(value, 3), "target": f"{sign} {goal}", "met": met})
    return found


def everything(a: argparse.Namespace) -> None:
    results: dict[str, Any] = {"trace": {"stickiness": STICKINESS, "skew": SKEW}}
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:

        def measured(names: list[str], accesses: int, experts: int, rounds: int) -> dict[str, Any]:
            trace = make(Path(folder) / "trace", accesses, experts)
            if any(name.startswith("whole") for name in names):
                make_oracle(trace)
            found = run(names, trace, accesses=accesses, slow=a.slow, experts=experts, rounds=rounds)
            shutil.rmtree(trace)
            return found

        results["main"] = measured(list(CANDIDATES), a.accesses, 128, a.rounds)
        results["by accesses"] = [measured(["lru"], n, 128, 3) for n in a.growth]
        some = min(a.accesses, 10_000_000)
        results["by experts"] = [
            measured(["lru", "curve", "belady"], some, n, 3) for n in (4, 8, 16, 32, 64, 128, 256, 512)
        ]
    results["targets"] = targets(results["main"], results["by accesses"][-1])
    write_record(a.out, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=CANDIDATES)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--capacity", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--accesses", type=lambda n: int(float(n)), default=50_000_000)
    parser.add_argument(
        "--slow", type=lambda n: int(float(n)), default=2_000_000, help="accesses for the candidate `per request`"
    )
    parser.add_argument(
        "--growth",
        type=lambda text: [int(float(n)) for n in text.split(",")],
        default=[10**6, 10**7, 10**8, 10**9],
        help="numbers of accesses (default 1e6,1e7,1e8,1e9)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="folder for the traces (default: that of the system)")
    parser.add_argument("-o", "--out", type=Path, default=HERE.with_suffix(".json"))
    a = parser.parse_args()
    if a.serve:
        import stickymoe.locality.replay  # noqa: F401

        serve(lambda: CANDIDATES[a.serve](a), warm_up=1)
    else:
        everything(a)


if __name__ == "__main__":
    main()
