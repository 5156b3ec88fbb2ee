"""How much of the mixture's gain over `dense` is kept, at how many all-slots misses: the yardstick of a sticky router.

A perplexity that is 3 % above vanilla's sounds cheap, and can be half of what the mixture is worth over a dense model
of the same active width. So a row's place is its share of that gain, over the seeds it has in common with both
controls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stickymoe.experiments.collection import Group, Row, Value, common_seeds, kept_gain
from stickymoe.experiments.grids import PAPER_ROWS
from stickymoe.experiments.tables import ALL_SLOTS, NOTHING, Cell, Table, capacities, number

# What a row must reach to be called solved: ten times fewer misses, four fifths of the gain.
FEWER, KEPT = 10.0, 0.8
EXPLAINED = (
    "Gain kept: share of the mixture's gain over dense, ± half of its 95 % interval over seeds, elsewhere one standard "
    "deviation · misses: share of accesses, k for each token and layer, that an LRU cache of C experts a layer does "
    "not hold, × times fewer than vanilla · ★ none is better in both perplexity and misses, at the largest cache and "
    "over common seeds · even: expert use of at least 95 % of full entropy, none neglected · a row with one seed is "
    "compared with vanilla and dense of that seed, not with their means in this table."
)
WORTH = 2.0  # per cent that vanilla must be below dense, for a share of it to mean something
EVEN = 0.95  # of log₂ N, for the entropy of the experts' use
# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True)
class Point:
    """One row: the gain it keeps, and per capacity its misses per access and how many times fewer than vanilla's.

    All are over the seeds that it has in common with vanilla and dense.
    """

    row: Row
    seeds: tuple[int, ...]
    ppl: Value
    kept: Value
    misses: dict[int, Value]
    fewer: dict[int, Value]

    @property
    def even(self) -> bool:
        """Whether its experts are used evenly, and none is neglected."""
        entropy, n = self.metric("utilisation_entropy"), self.row.runs[0].config.model.pool_size
        neglected = self.metric("neglected_experts")
        return entropy is not None and entropy.mean >= EVEN * math.log2(n) and not (neglected and neglected.mean)

    def metric(self, name: str) -> Value | None:
        return self.row.metric(name, self.seeds)

    def ahead(self, other: Point, capacity: int) -> tuple[Value, Value] | None:
        """By how much its perplexity is lower and its hit rate higher, over common seeds; None without any."""
        ppl = self.row.against(other.row, "ppl", lambda ours, theirs: theirs - ours)
        hits = self.row.against(other.row, f"{ALL_SLOTS}{capacity}", lambda ours, theirs: ours - theirs)
        return None if ppl is None or hits is None else (ppl, hits)

    def beats(self, other: Point, capacity: int) -> bool:
        """Better in perplexity or misses, and no worse in the other, by the means."""
        ahead = self.ahead(other, capacity)
        means = [] if ahead is None else [value.mean for value in ahead]
        return bool(means) and min(means) >= 0 and max(means) > 0

    def surely_beats(self, other: Point, capacity: int) -> bool:
        """Better in both, and where there are several seeds by more than the half of each 95 % interval."""
        ahead = self.ahead(other, capacity)
        return ahead is not None and all(value.mean > (interval(value) or 0.0) for value in ahead)

    def solves(self, capacity: int) -> bool:
        return self.kept.mean >= KEPT and self.fewer[capacity].mean >= FEWER and self.even

    def surely_solves(self, capacity: int) -> bool:
        """Over three seeds or more, with the whole 95 % intervals of what it keeps and of its misses in the target."""
        goals = ((self.kept, KEPT), (self.fewer[capacity], FEWER))
        beyond = (v.n >= 3 and v.mean - (interval(v) or 0.0) >= goal for v, goal in goals)
        return self.solves(capacity) and all(beyond)


def interval(value: Value) -> float | None:
    """Half the width of the 95 % interval of a mean over seeds; None for a single one."""
    if value.sd is None:
        return None
    return _T95[min(value.n - 1, len(_T95)) - 1] * value.sd / math.sqrt(value.n)


def no_share(group: Group) -> str | None:
    """A line that says why no gain of it can be shared out: a control is missing, or vanilla is hardly better."""
    baseline, dense = group.baseline, group.find("dense")
    if missing := [name for name, row in (("vanilla", baseline), ("dense", dense)) if row is None]:
        there = f"{len(group.complete)} finished row{'s' * (len(group.complete) != 1)}"
        return f"{group.title}: {there}, but no {' and no '.join(missing)} to measure the gain by"
    assert baseline is not None
    assert dense is not None
    change = baseline.change(dense)
    if change is None:
        return f"{group.title}: vanilla and dense have no seed in common, so there is no gain to share out"
    if change.mean <= -WORTH:
        return None
    return (
        f"{group.title}: vanilla's perplexity is {change.mean:+.1f} % from dense's, expected {-WORTH:+.0f} % or less; "
        "shares of so little are noise, train longer (--train.steps)"
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
    """Rows of a mixture of fewer experts, and the share of the larger one's gain that each keeps, the most first."""
    baseline, dense = group.baseline, group.find("dense")
    if baseline is None or dense is None:
        return []
    kept = [(row, share) for row in smaller.routed if (share := kept_gain(row, baseline=baseline, dense=dense))]
    return sorted(kept, key=lambda pair: -pair[1].mean)


def best(found: Sequence[Point], capacity: int) -> list[Point]:
    """The points that no other beats, the fewest misses first."""
    left = [point for point in found if capacity in point.misses]
    return sorted(
        (point for point in left if not any(other.beats(point, capacity) for other in left)),
        key=lambda point: point.misses[capacity].mean,
    )


def kept_table(group: Group, *, name: str = "kept", caption: str = "") -> Table | None:
    """Gain kept and all-slots misses of every row, dense last; ★ marks those that none beats at the largest cache.

    Of a gain too small to be shared out no shares are shown.
    """
    found = points(group)
    if not found:
        return None
    worth = no_share(group) is None
    sizes = sorted({C for point in found for C in point.misses})
    stars = {point.row.label for point in best(found, sizes[-1])} if sizes else set()
    lines = []
    for point in found:
        kept, half = 100 * point.kept.mean, interval(point.kept)
        share = Value(kept, None if half is None else 100 * half, point.kept.n)
        cells: list[Cell] = [str(point.kept.n), number(point.ppl, ".2f"), number(share if worth else None, ".0f")]
        for C in sizes:
            fewer = None if point.row is group.baseline else point.fewer.get(C)
            cells += [number(point.misses.get(C), ".3f"), number(fewer, ".2f")]
        cells += [number(point.metric("switch_rate"), ".3f"), number(point.metric("cache_hit_rate"), ".3f")]
        cells += ["yes" if point.even else "no"]
        label = f"{point.row.label} ★" if point.row.label in stars else point.row.label
        lines.append((label, *cells))
    if (dense := group.find("dense")) is not None and (ppl := dense.metric("ppl")) is not None:
        nothing: list[Cell] = [NOTHING] * (2 * len(sizes) + 3)
        lines.append((dense.label, str(ppl.n), number(ppl, ".2f"), "0", *nothing))
    heads = [head for C in sizes for head in (f"misses C={C} ↓", f"× C={C}")]
    headings = ("variant", "seeds", "PPL ↓", "gain kept % ↑", *heads, "SR ↓", "CHR ↑", "even")
    return Table(name, caption, headings, tuple(lines))


def origin(row: Row) -> str:
    """Whose method it is: vanilla's, the paper's by its table, named in its appendix, or past it."""
    name = row.variant.name
    if name == "vanilla":
        return name
    if name in {settings["variant"]["name"] for settings in PAPER_ROWS}:
        return "the paper"
    return "its appendix" if name in ("cross_layer", "hash", "trajectory") else "past the paper"


def dominators(found: Sequence[Point], capacity: int) -> dict[str, Point | None]:
    """For each of the paper's rows, no ablations, a point past it that surely beats it, or None.

    Of several the one with most seeds in common, then the one that keeps most.
    """
    ours = [point for point in found if origin(point.row) == "past the paper"]
    return {
        point.row.label: max(
            (other for other in ours if other.surely_beats(point, capacity)),
            key=lambda other: (len(common_seeds(other.row, point.row)), other.kept.mean),
            default=None,
        )
        for point in found
        if origin(point.row) == "the paper" and not point.row.ablation
    }


def nearest(found: Sequence[Point], capacity: int) -> Point | None:
    """The point with the most times fewer misses among those that keep enough and use their experts evenly."""
    enough = [p for p in found if p.kept.mean >= KEPT and p.even and capacity in p.fewer]
    return max(enough, key=lambda p: p.fewer[capacity].mean, default=None)
