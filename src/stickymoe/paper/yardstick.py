"""Models compared at equal fast memory: bits per byte against the bytes that a token loads from slow memory.

A model with C slots per layer keeps C experts of each layer and everything outside the experts in fast memory. The
floor is the best model that fits and loads nothing; the ceiling is the best one with all experts in memory.

Compute is equal if the k experts of a token have the same width together, so many narrow experts stand beside few wide
ones. How much a layer knows is counted in hidden units: N experts of width f have N·f.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import altair as alt

from stickymoe.locality.plan import bytes_text
from stickymoe.paper.frontier import interval
from stickymoe.reports.charts import Chart, Points, horizontal_lines, inline, labels, legible, pixels, rounded
from stickymoe.reports.collection import Group, Row, Run, Value
from stickymoe.reports.ribbon import PALETTE
from stickymoe.reports.tables import ALL_SLOTS, MISSING, Cell, Table, number
from stickymoe.runs.config import RunConfig

WARM = "warm_loads_c"
_VALID = "valid "  # begins the name of a measurement on the validation split in another precision
_ALL = "all in memory"
TOLERANCE = 0.03  # of the fast memory: small parts such as gates may exceed it
SMALLEST_GAP = 0.01  # bits per byte between floor and ceiling, for a share of it to mean something
EXPLAINED = (
    "Fast memory: everything resident, in fp32 unless stated; a row may exceed the budget by 3 % · loaded: bytes per "
    "token from slow memory, on a warm stream; ≤: an upper bound, from sequences that start with empty slots · gap "
    "closed: (floor − bits) / (floor − ceiling); floor: the best model that fits and loads nothing; ceiling: the best "
    "with all experts in memory · ± half of the 95 % interval over seeds."
)


@dataclass(frozen=True)
class Choice:
    """One model on a device: a row, its slots per layer, and what these cost.

    fast_bytes: resident in fast memory
    loaded: bytes per token from slow memory, `row_bytes` among them; `bound` if it is an upper bound
    test: bits per byte on the test split, if every seed was evaluated on it
    precision: of the experts; other than fp32, the trained experts were rounded to it
    fine: its experts are narrower than those of other models in the comparison
    """

    row: Row
    slots: int
    fast_bytes: int
    loaded: float
    bound: bool
    row_bytes: int
    bits: Value
    ppl: Value
    test: Value | None = None
    precision: str = "fp32"
    fine: bool = False

    @property
    def experts(self) -> int:
        return self.row.runs[0].config.model.pool_size

    @property
    def width(self) -> int:
        """Hidden units of one expert."""
        return self.row.runs[0].config.model.d_ff

    @property
    def resident(self) -> bool:
        """Whether all experts are in memory."""
        return self.slots >= self.experts

    @property
    def loads_nothing(self) -> bool:
        return self.loaded == 0

    @property
    def control(self) -> bool:
        return self.row.variant.name in ("dense", "vanilla")

    @property
    def label(self) -> str:
        if self.row.variant.name == "dense":
            return "dense"
        slots = _ALL if self.resident else f"{self.slots} slots"
        width = f" of width {self.width}" if self.fine else ""
        rounded = "" if self.precision == "fp32" else f" in {self.precision}"
        return f"{self.row.label}, N={self.experts}{width}{rounded}, {slots}"


@dataclass(frozen=True)
class Yardstick:
    """The models of one corpus, compute and number of training tokens. `title` names these."""

    title: str
    choices: tuple[Choice, ...]

    @property
    def _config(self) -> RunConfig:
        return self.choices[0].row.runs[0].config

    @property
    def steps(self) -> int:
        return self._config.train.steps

    @property
    def corpus(self) -> str:
        return Group((self.choices[0].row,)).corpus[0]

    @property
    def experts(self) -> int:
        """The most experts per layer, counted in experts of the largest width."""
        return self._most // max(c.width for c in self.choices)

    @property
    def _most(self) -> int:
        """The most hidden units per layer."""
        return max(c.experts * c.width for c in self.choices)

    def _has_most(self, choice: Choice) -> bool:
        return choice.experts * choice.width == self._most

    @property
    def memory(self) -> float | None:
        """The fast memory to compare at by default: the most slots that were measured for the most experts."""
        partly = [c for c in self.choices if self._has_most(c) and not c.resident]
        most = max((c.slots * c.width for c in partly), default=0)
        return min((float(c.fast_bytes) for c in partly if c.slots * c.width == most), default=None)

    def fitting(self, memory: float) -> tuple[Choice, ...]:
        """The models that fit into fast memory, each with as many slots as fit, best first."""
        most: dict[tuple[int, str], Choice] = {}
        for c in self.choices:
            known = most.get((id(c.row), c.precision))
            if c.fast_bytes <= memory * (1 + TOLERANCE) and (known is None or c.slots > known.slots):
                most[id(c.row), c.precision] = c
        return tuple(sorted(most.values(), key=lambda c: c.bits.mean))

    def floor(self, memory: float) -> Choice | None:
        """The best model that fits as it was trained and loads nothing."""
        return _best(c for c in self.fitting(memory) if c.loads_nothing and c.precision == "fp32")

    def rounded(self, memory: float) -> Choice | None:
        """The best model that fits with rounded experts, and would not fit without."""
        fits = self.fitting(memory)
        whole = {id(c.row) for c in fits if c.precision == "fp32" and c.resident}
        return _best(c for c in fits if c.precision != "fp32" and id(c.row) not in whole)

    @property
    def ceiling(self) -> Choice | None:
        """The best model without rows that has the most experts, all in memory."""
        resident = (c for c in self.choices if self._has_most(c) and c.resident and c.loads_nothing)
        return _best(c for c in resident if c.precision == "fp32")

    def closed(self, choice: Choice, memory: float) -> float | None:
        """The share of the gap between floor and ceiling that a model closes; None if there is no gap."""
        floor, ceiling = self.floor(memory), self.ceiling
        if floor is None or ceiling is None or floor.bits.mean - ceiling.bits.mean < SMALLEST_GAP:
            return None
        return (floor.bits.mean - choice.bits.mean) / (floor.bits.mean - ceiling.bits.mean)

    def warning(self, memory: float) -> str | None:
        """One line that says which run is missing, or that there is no gap to close."""
        floor, ceiling = self.floor(memory), self.ceiling
        if floor is None:
            return (
                f"{self.title}: no model fits into {bytes_text(memory)} and loads nothing, so there is no floor: train "
                "one with fewer experts (--model.n_experts)"
            )
        if ceiling is None or ceiling.fast_bytes <= memory * (1 + TOLERANCE):
            return (
                f"{self.title}: no model with all experts in memory exceeds {bytes_text(memory)}, so there is no "
                "ceiling: train one with more experts (--model.n_experts)"
            )
        if floor.bits.mean - ceiling.bits.mean < SMALLEST_GAP:
            return (
                f"{self.title}: the ceiling ({ceiling.label}, {ceiling.bits.mean:.3f} bits per byte) is not better "
                f"than the floor ({floor.label}, {floor.bits.mean:.3f}), so no share of the gap is shown"
            )
        return None


def _best(choices: Iterable[Choice]) -> Choice | None:
    return min(choices, key=lambda c: c.bits.mean, default=None)


def yardsticks(groups: Iterable[Group]) -> tuple[Yardstick, ...]:
    """One for each corpus, compute and training; most models first. Rows may differ in experts and variant."""
    together: dict[tuple[str, str], list[Row]] = {}
    for group in groups:
        for row in group.complete:
            run = row.complete[0]
            members = together.setdefault((_title(run), run.record.data["fingerprint"]), [])
            if all(row.runs != other.runs for other in members):  # a dense row is in several groups
                members.append(row)
    found = (Yardstick(title, _with_widths(rows)) for (title, _), rows in together.items())
    return tuple(sorted((y for y in found if y.choices), key=lambda y: -len(y.choices)))


def _with_widths(rows: list[Row]) -> tuple[Choice, ...]:
    """All choices of some rows. Those of narrower experts say so."""
    found = [c for row in rows for c in _choices(row)]
    widest = max((c.width for c in found), default=0)
    return tuple(replace(c, fine=c.width < widest) for c in found)


def _title(run: Run) -> str:
    """What must be equal: the data, the compute of a token and the training."""
    alone = Group((Row.of([run]),))
    data, model, train = run.config.data, run.config.model, run.config.train
    corpus, vocab_size = alone.corpus
    part = f", {data.fraction:.0%} of it" if data.fraction < 1 else ""
    documents = ", documents apart" if data.documents else ""
    tokens = train.steps * train.batch_size * model.seq_len / 1e6
    return (
        f"{corpus}{part}{documents}, vocabulary {vocab_size:,} · d={model.d_model}, L={model.n_layers}, "
        f"active width {model.top_k * model.d_ff:,} · {train.steps:,} steps, {tokens:.3g}M tokens"
    )


def _choices(row: Row) -> list[Choice]:
    """A row with every number of slots for which its loads were measured, and with all experts in memory."""
    sizes = [run.record.sizes for run in row.complete]
    if any("other_bytes" not in (size or {}) for size in sizes):
        return []  # a record of an earlier version
    size, model = sizes[0] or {}, row.runs[0].config.model
    bits, ppl = row.metric("bits_per_byte"), row.metric("ppl")
    if bits is None or ppl is None:
        return []
    # Layers that share their experts have one cache for all of them.
    expert_bytes: Sequence[int] = size["expert_bytes"][:: model.layers_per_pool]
    rows, other, n = size.get("row_bytes", 0), size["other_bytes"], model.pool_size
    test = _evaluated(row, "test", "bits_per_byte")
    found = [Choice(row, n, other + n * sum(expert_bytes), float(rows), False, rows, bits, ppl, test)]
    for C in range(model.top_k, n):
        loads, bound = _loads(row, C)
        if loads is not None and expert_bytes:
            loaded = loads * sum(expert_bytes) / len(expert_bytes) + rows
            found.append(Choice(row, C, other + C * sum(expert_bytes), loaded, bound, rows, bits, ppl, test))
    for precision in sorted({name.removeprefix(_VALID) for name in _evaluations(row) if name.startswith(_VALID)}):
        found += _rounded(row, precision, other, rows)
    return found


def _rounded(row: Row, precision: str, other: int, rows: int) -> list[Choice]:
    """A row with all its experts in memory, rounded to a precision after training."""
    name, model = f"{_VALID}{precision}", row.runs[0].config.model
    bits, ppl = (_evaluated(row, name, key) for key in ("bits_per_byte", "ppl"))
    if bits is None or ppl is None:
        return []
    expert_bytes = row.complete[0].record.evaluations[name]["expert_bytes"][:: model.layers_per_pool]
    fast, test = other + model.pool_size * sum(expert_bytes), _evaluated(row, f"test {precision}", "bits_per_byte")
    return [Choice(row, model.pool_size, fast, float(rows), False, rows, bits, ppl, test, precision)]


def _evaluations(row: Row) -> set[str]:
    """The measurements that every seed of a row has in addition to its validation metrics."""
    return set.intersection(*(set(run.record.evaluations) for run in row.complete))


def _evaluated(row: Row, name: str, key: str) -> Value | None:
    if name not in _evaluations(row):
        return None
    return Value.of([run.record.evaluations[name][key] for run in row.complete])


def _loads(row: Row, slots: int) -> tuple[float | None, bool]:
    """Experts that a token loads over all layers, and whether this is only a bound: older records have no warm stream.

    A cache that starts empty at each sequence has no more hits than one that was kept.
    """
    warm = row.mean(f"{WARM}{slots}")
    if warm is not None:
        return warm, False
    hits, model = row.mean(f"{ALL_SLOTS}{slots}"), row.runs[0].config.model
    return None if hits is None else (1 - hits) * model.top_k * model.n_layers, True


def table(yardstick: Yardstick, memory: float, *, most: int | None = None, name: str = "yardstick") -> Table:
    """The models that fit, best first, then the ceiling; of many, the best `most` and the controls."""
    fits = yardstick.fitting(memory)
    floor, ceiling, rounded = yardstick.floor(memory), yardstick.ceiling, yardstick.rounded(memory)
    chosen = [c for i, c in enumerate(fits) if most is None or i < most or c in (floor, rounded) or c.control]
    if ceiling is not None and ceiling not in chosen:
        chosen.append(ceiling)
    tested = any(c.test is not None for c in chosen)
    lines = []
    for c in chosen:
        closed = yardstick.closed(c, memory)
        what = " (floor)" if c is floor else " (ceiling)" if c is ceiling else ""
        loaded = "0" if c.loads_nothing else f"{'≤ ' if c.bound else ''}{bytes_text(c.loaded)}"
        cells: tuple[Cell, ...] = (
            str(c.bits.n),
            bytes_text(c.fast_bytes),
            loaded,
            number(_with_interval(c.bits), ".3f"),
            number(_with_interval(c.ppl), ".2f"),
            *([MISSING if c.test is None else number(_with_interval(c.test), ".3f")] if tested else []),
            MISSING if closed is None else f"{100 * closed:.0f}",
        )
        lines.append((c.label + what, *cells))
    headings = ("model", "seeds", "fast memory", "loaded per token ↓", "bits per byte ↓", "PPL ↓")
    last = ("test bits ↓", "gap closed % ↑") if tested else ("gap closed % ↑",)
    return Table(name, yardstick.title, (*headings, *last), tuple(lines))


def _with_interval(value: Value) -> Value:
    return Value(value.mean, interval(value), value.n)


def figure(yardstick: Yardstick, memory: float, lines: Sequence[tuple[str, float]] = ()) -> Chart | None:
    """Bits per byte against bytes loaded per token, at one size of fast memory. `lines` are other models by name."""
    shown: Points = [
        {
            "label": c.label.removesuffix(f", {_ALL}"),
            "loaded": rounded(max(c.loaded, _NOTHING)),
            "bits": rounded(c.bits.mean),
            "kind": _kind(c),
        }
        for c in yardstick.fitting(memory)
    ]
    ceiling = yardstick.ceiling
    others = [{"name": name, "bits": rounded(bits)} for name, bits in lines]
    top = [] if ceiling is None else [{"name": f"ceiling: {ceiling.label}", "bits": rounded(ceiling.bits.mean)}]
    if len(shown) < 2:
        return None
    kinds = [kind for kind in _COLOURS if any(p["kind"] == kind for p in shown)]
    most = max(p["loaded"] for p in shown) * 1.5
    at_x = alt.X(
        "loaded:Q",
        title="bytes loaded per token (log; none at the left edge)",
        scale=alt.Scale(type="log", domain=[_NOTHING, most], nice=False),
        axis=alt.Axis(format="~s", values=[10**n for n in range(2, 9)]),
    )
    bits = [p["bits"] for p in (*shown, *others, *top)]
    low, high = min(bits) * 0.98, max(bits) * 1.02
    at_y = alt.Y("bits:Q", title="bits per byte (lower is better)", scale=alt.Scale(domain=[low, high], nice=False))
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[_COLOURS[kind] for kind in kinds]),
        legend=alt.Legend(title=None, orient="bottom", labelLimit=260),
    )
    points = alt.Chart(inline(shown)).mark_point(size=80, filled=True, opacity=0.9)
    width, height = 700, 360
    x, y = pixels(_NOTHING, most, width, log=True), pixels(low, high, height)
    named = legible(shown, lambda p: (x(p["loaded"]), y(p["bits"])), before=lambda p: p["loaded"] > _RIGHT)
    right = [p for p in named if p["loaded"] > _RIGHT]
    value = [alt.Tooltip("bits:Q", title="bits per byte")]
    return alt.layer(
        points.encode(x=at_x, y=at_y, color=colour, tooltip=["label:N", "loaded:Q", "bits:Q"]),
        labels([p for p in named if p not in right], at_x, at_y),
        labels(right, at_x, at_y, before=True),
        *horizontal_lines(others, "bits", value, at_end=True),
        *horizontal_lines(top, "bits", value, at_end=True, below=True),
    ).properties(width=width, height=height)


_NOTHING = 100.0  # bytes: where a log axis shows models that load nothing
_RIGHT = 50_000.0  # bytes from which on a label stands before its point
_COLOURS = {
    "loads nothing": PALETTE[2],
    "loads rows": PALETTE[1],
    "loads experts": PALETTE[0],
}


def _kind(choice: Choice) -> str:
    if choice.loads_nothing:
        return "loads nothing"
    return "loads rows" if choice.resident else "loads experts"
