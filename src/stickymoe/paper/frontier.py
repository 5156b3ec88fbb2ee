"""The measure of a sticky router: how much of the MoE gain over `dense` it keeps, and how many misses it has.

A router with 3 % higher perplexity than vanilla can lose half of the gain of the mixture over a dense model with the
same active width. So each row is compared with both controls, vanilla and dense, over common seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stickymoe.paper.grids import PAPER_ROWS
from stickymoe.reports.collection import Group, Row, Value, common_seeds
from stickymoe.reports.pareto import pareto_front
from stickymoe.reports.tables import ALL_SLOTS, MISSING, Cell, Table, capacities, number

# The target: ten times fewer misses than vanilla, and 80 % of the MoE gain.
MISSES_FACTOR, TARGET_GAIN = 10.0, 0.8
EXPLAINED = (
    "Gain kept: share of the MoE gain over dense that the row keeps, ± half of the 95 % interval over seeds; all other "
    "± are one standard deviation · misses: share of accesses (k per token and layer) that an LRU cache with C slots "
    "per layer misses · ×: how many times fewer misses than vanilla · ★ Pareto-optimal in perplexity and misses (at "
    "the largest cache, over common seeds) · even: utilisation entropy of at least 95 % of the maximum, no neglected "
    "expert · a row with one seed is compared with vanilla and dense of the same seed."
)
SMALLEST_GAIN = 2.0  # per cent that vanilla must be below dense for the share to be meaningful
EVEN = 0.95  # of log₂ N, for the entropy of the expert use
# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True)
class Point:
    """One row: the gain it keeps, and for each cache size its misses and the factor by which vanilla has more.

    All values are over the seeds that the row has in common with vanilla and dense.
    """

    row: Row
    seeds: tuple[int, ...]
    ppl: Value
    kept: Value
    misses: dict[int, Value]
    fewer: dict[int, Value]

    @property
    def even(self) -> bool:
        """Whether the experts are used evenly and none is neglected."""
        entropy, n = self.metric("utilisation_entropy"), self.row.runs[0].config.model.pool_size
        neglected = self.metric("neglected_experts")
        return entropy is not None and entropy.mean >= EVEN * math.log2(n) and not (neglected and neglected.mean)

    def metric(self, name: str) -> Value | None:
        return self.row.metric(name, self.seeds)

    def ahead(self, other: Point, capacity: int) -> tuple[Value, Value] | None:
        """How much lower its perplexity is and how much higher its hit rate, over common seeds; None without any."""
        ppl = self.row.against(other.row, "ppl", lambda ours, theirs: theirs - ours)
        hits = self.row.against(other.row, f"{ALL_SLOTS}{capacity}", lambda ours, theirs: ours - theirs)
        return None if ppl is None or hits is None else (ppl, hits)

    def beats(self, other: Point, capacity: int) -> bool:
        """Whether it is better in perplexity or misses and not worse in the other, comparing means."""
        ahead = self.ahead(other, capacity)
        means = [] if ahead is None else [value.mean for value in ahead]
        return bool(means) and min(means) >= 0 and max(means) > 0

    def clearly_beats(self, other: Point, capacity: int) -> bool:
        """Whether it is better in both; with several seeds the 95 % intervals of both differences must exclude 0."""
        ahead = self.ahead(other, capacity)
        return ahead is not None and all(value.mean > (interval(value) or 0.0) for value in ahead)

    def reaches_target(self, capacity: int) -> bool:
        return self.kept.mean >= TARGET_GAIN and self.fewer[capacity].mean >= MISSES_FACTOR and self.even

    def clearly_reaches_target(self, capacity: int) -> bool:
        """Whether it has three or more seeds and the 95 % intervals of gain and misses lie inside the target."""
        goals = ((self.kept, TARGET_GAIN), (self.fewer[capacity], MISSES_FACTOR))
        beyond = (v.n >= 3 and v.mean - (interval(v) or 0.0) >= goal for v, goal in goals)
        return self.reaches_target(capacity) and all(beyond)


def kept_gain(row: Row, *, baseline: Row, dense: Row, seeds: Iterable[int] | None = None) -> Value | None:
    """The share of the MoE gain that a row keeps: (PPL_dense − PPL_row) / (PPL_dense − PPL_vanilla).

    Numerator and denominator are means over the common seeds of the three rows, or those among `seeds`. The deviation
    is that of a ratio: for each seed, the gain of the row minus the share times the gain of vanilla.
    """
    ours, base, without = (r.by_seed("ppl") for r in (row, baseline, dense))
    common = common_seeds(row, baseline, dense)
    seeds = common if seeds is None else [seed for seed in common if seed in set(seeds)]
    gain = statistics.fmean(without[seed] - base[seed] for seed in seeds) if seeds else 0.0
    if gain <= 0:
        return None
    kept = statistics.fmean(without[seed] - ours[seed] for seed in seeds) / gain
    off = [((without[seed] - ours[seed]) - kept * (without[seed] - base[seed])) / gain for seed in seeds]
    return Value(kept, statistics.stdev(off) if len(off) > 1 else None, len(off))


def interval(value: Value) -> float | None:
    """Half the width of the 95 % interval of a mean over seeds; None for one seed."""
    if value.sd is None:
        return None
    return _T95[min(value.n - 1, len(_T95)) - 1] * value.sd / math.sqrt(value.n)


def gain_warning(group: Group) -> str | None:
    """One line that says why no share of the gain can be computed: a control is missing, or the gain is too small."""
    baseline, dense = group.baseline, group.find("dense")
    if baseline is None or dense is None:
        missing = [name for name, row in (("vanilla", baseline), ("dense", dense)) if row is None]
        found = f"{len(group.complete)} finished row{'s' * (len(group.complete) != 1)}"
        return f"{group.title}: {found}, but no {' and no '.join(missing)}, so the MoE gain is unknown"
    change = baseline.change(dense)
    if change is None:
        return f"{group.title}: vanilla and dense have no common seed, so the MoE gain is unknown"
    if change.mean <= -SMALLEST_GAIN:
        return None
    return (
        f"{group.title}: the perplexity of vanilla is {change.mean:+.1f} % relative to dense, expected "
        f"{-SMALLEST_GAIN:+.0f} % or less; a share of such a small gain is noise, train longer (--train.steps)"
    )


def points(group: Group) -> list[Point]:
    """The routed rows of a group that has vanilla and dense, the most kept gain first; none where there is no gain."""
    baseline, dense = group.baseline, group.find("dense")
    if baseline is None or dense is None:
        return []
    found = []
    for row in group.routed:
        kept = kept_gain(row, baseline=baseline, dense=dense)
        seeds = common_seeds(row, baseline, dense)
        hit_rates = {C: row.metric(f"{ALL_SLOTS}{C}", seeds) for C in capacities(group.rows)}
        fewer = {C: row.fewer_misses(baseline, f"{ALL_SLOTS}{C}", seeds) for C in hit_rates}
        ppl = row.metric("ppl", seeds)
        if kept is not None and ppl is not None:
            found.append(
                Point(
                    row,
                    tuple(seeds),
                    ppl,
                    kept,
                    {C: Value(1 - hit.mean, hit.sd, hit.n) for C, hit in hit_rates.items() if hit is not None},
                    {C: value for C, value in fewer.items() if value is not None},
                )
            )
    return sorted(found, key=lambda point: -point.kept.mean)


def fitting(group: Group, smaller: Group) -> list[tuple[Row, Value]]:
    """Rows of a group with fewer experts, and the share of the gain of `group` that each keeps, largest first."""
    baseline, dense = group.baseline, group.find("dense")
    if baseline is None or dense is None:
        return []
    kept = [(row, share) for row in smaller.routed if (share := kept_gain(row, baseline=baseline, dense=dense))]
    return sorted(kept, key=lambda pair: -pair[1].mean)


def front(found: Sequence[Point], capacity: int) -> list[Point]:
    """The Pareto-optimal points, fewest misses first."""
    measured = [point for point in found if capacity in point.misses]
    optimal = pareto_front(measured, lambda ours, theirs: ours.beats(theirs, capacity))
    return sorted(optimal, key=lambda point: point.misses[capacity].mean)


def kept_table(group: Group, *, name: str = "kept", caption: str = "") -> Table | None:
    """Gain kept and misses of every row, dense last; ★ marks the Pareto-optimal rows at the largest cache.

    If the gain of vanilla over dense is too small, no shares are shown.
    """
    found = points(group)
    if not found:
        return None
    meaningful = gain_warning(group) is None
    sizes = sorted({C for point in found for C in point.misses})
    stars = {point.row.label for point in front(found, sizes[-1])} if sizes else set()
    lines = []
    for point in found:
        kept, half = 100 * point.kept.mean, interval(point.kept)
        share = Value(kept, None if half is None else 100 * half, point.kept.n)
        cells: list[Cell] = [str(point.kept.n), number(point.ppl, ".2f"), number(share if meaningful else None, ".0f")]
        for C in sizes:
            fewer = None if point.row is group.baseline else point.fewer.get(C)
            cells += [number(point.misses.get(C), ".3f"), number(fewer, ".2f")]
        cells += [number(point.metric("switch_rate"), ".3f"), number(point.metric("cache_hit_rate"), ".3f")]
        cells += ["yes" if point.even else "no"]
        label = f"{point.row.label} ★" if point.row.label in stars else point.row.label
        lines.append((label, *cells))
    if (dense := group.find("dense")) is not None and (ppl := dense.metric("ppl")) is not None:
        dashes: list[Cell] = [MISSING] * (2 * len(sizes) + 3)
        lines.append((dense.label, str(ppl.n), number(ppl, ".2f"), "0", *dashes))
    heads = [head for C in sizes for head in (f"misses C={C} ↓", f"× C={C}")]
    headings = ("variant", "seeds", "PPL ↓", "gain kept % ↑", *heads, "SR ↓", "CHR ↑", "even")
    return Table(name, caption, headings, tuple(lines))


def origin(row: Row) -> str:
    """Where the method comes from: vanilla, the paper's table, the paper's appendix, or beyond the paper."""
    name = row.variant.name
    if name == "vanilla":
        return name
    if name in {settings["variant"]["name"] for settings in PAPER_ROWS}:
        return "paper"
    return "appendix of the paper" if name in ("cross_layer", "hash", "trajectory") else "beyond the paper"


def dominators(found: Sequence[Point], capacity: int) -> dict[str, Point | None]:
    """For each row of the paper (no ablations), a point beyond the paper that clearly beats it, or None.

    Of several, take the one with the most common seeds, then the one that keeps the most gain.
    """
    ours = [point for point in found if origin(point.row) == "beyond the paper"]
    return {
        point.row.label: max(
            (other for other in ours if other.clearly_beats(point, capacity)),
            key=lambda other: (len(common_seeds(other.row, point.row)), other.kept.mean),
            default=None,
        )
        for point in found
        if origin(point.row) == "paper" and not point.row.ablation
    }


def nearest(found: Sequence[Point], capacity: int) -> Point | None:
    """The point with the fewest misses among those that keep the target gain and use their experts evenly."""
    enough = [p for p in found if p.kept.mean >= TARGET_GAIN and p.even and capacity in p.fewer]
    return max(enough, key=lambda p: p.fewer[capacity].mean, default=None)
