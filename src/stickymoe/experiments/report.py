"""`stickymoe report`: finished runs on one page that opens offline, and beside it every table and figure as a file.

    report.html               the page
    report.md                 the same tables, figures and findings as Markdown
    report/tables/*.md|tex|csv
    report/figures/*.svg|png

Text that came from a corpus or a record is data to the page, never markup.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vl_convert
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from stickymoe import __version__
from stickymoe.errors import RunError, StickyError
from stickymoe.experiments import figures, tables
from stickymoe.experiments.collection import Collection, Group, Row, Run, collect
from stickymoe.experiments.findings import Finding, findings, overfitting
from stickymoe.experiments.paper import SOURCE, beside_the_paper
from stickymoe.experiments.ribbon import PALETTE, Ribbon, read_ribbon, ribbon_svg
from stickymoe.experiments.tables import ALL_SLOTS, Table, capacities
from stickymoe.runs.folder import write_atomic

RIBBON_LENGTH = 180


@dataclass(frozen=True)
class Drawing:
    """A figure with its words: `title` above, `text` below; `spec` is Vega-Lite."""

    name: str
    title: str
    text: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """What the page says of one group of runs."""

    name: str
    group: Group
    results: Table
    paper: Table | None
    drawings: list[Drawing]
    findings: list[Finding]
    ribbons: Ribbons | None


def report(folders: Sequence[Path], out: Path) -> Collection:
    """Write the page `out` about every run in or under `folders`, and its tables and figures beside it."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"{out}: expected a page to write, such as report.html.")
    collection = collect(folders)
    sections = [_section(name, group) for name, group in collection.names().items()]
    patterns = Drawing(
        "access-patterns",
        "Two orders of access",
        "The number is the order in which a layer's experts are asked for. In prefill a layer sees all tokens before "
        "the next begins, so a token's neighbour is the next access; in decoding all other layers come in between.",
        figures.themed(figures.access_patterns()),
    )
    provenance = _provenance(collection)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out.with_suffix("")
        for table in [t for s in sections for t in (s.results, s.paper) if t is not None] + [provenance]:
            _write_table(table, beside / "tables")
        for drawing in [d for s in sections for d in s.drawings] + [patterns]:
            _write_figure(drawing.name, vl_convert.vegalite_to_svg(drawing.spec), beside / "figures")
        for section in sections:
            if section.ribbons is not None:
                _write_figure(f"ribbon-{section.name}", section.ribbons.svg(), beside / "figures")
        write_atomic(out.with_suffix(".md"), _markdown(collection, sections, patterns, beside.name))
        write_atomic(out, _page(collection, sections, patterns))
    except OSError as e:
        raise RunError(f"{out} could not be written ({e.strerror or e}).") from e
    return collection


def _section(name: str, group: Group) -> Section:
    found = findings(group) if group.baseline is not None and len(group.complete) > 2 else []
    overfit = overfitting(group)
    return Section(
        name=name,
        group=group,
        results=tables.results(group.rows, group.baseline, name=f"results-{name}", caption=f"Results, {group.title}."),
        paper=beside_the_paper(group, name=f"paper-{name}"),
        drawings=_drawings(name, group),
        findings=[overfit] if overfit is not None else found,
        ribbons=_ribbons(group),
    )


def _drawings(name: str, group: Group) -> list[Drawing]:
    frontier = "The dashed line is the frontier: no run is better in both. Bars are one standard deviation over seeds."
    wanted: list[tuple[str, str, str, Callable[[], figures.Chart | None]]] = [
        (
            "pareto-chr",
            "Hit rate against perplexity",
            f"The paper's hit rate: top-1 expert, LRU, 2 slots a layer. {frontier}",
            lambda: figures.pareto(group, "cache_hit_rate", "cache hit rate (higher is better)", better="higher"),
        ),
        (
            "pareto-sr",
            "Switch rate against perplexity",
            frontier,
            lambda: figures.pareto(group, "switch_rate", "switch rate (lower is better)", better="lower"),
        ),
        *(_misses(group, C, frontier) for C in capacities(group.rows)),
        (
            "layers",
            "Switch rate by layer",
            "Layer 0 is nearest to the input. Brighter is stickier.",
            lambda: figures.layers(group),
        ),
        (
            "switches-misses",
            "Switches and misses",
            "One point for each layer of each run. The paper calls the two directly equivalent.",
            lambda: figures.switches_and_misses(group),
        ),
        (
            "utilisation",
            "Use of experts by layer",
            "Share of all k slots; white is the even share, purple more, orange less.",
            lambda: figures.utilisation(group),
        ),
        (
            "curves",
            "Training and validation",
            "Loss terms without their weights, the mean over seeds; point at a line to single it out.",
            lambda: figures.curves(group),
        ),
    ]
    charts = [(short, title, text, make()) for short, title, text, make in wanted]
    return [
        Drawing(f"{short}-{name}", title, text, figures.themed(chart))
        for short, title, text, chart in charts
        if chart is not None
    ]


def _misses(group: Group, C: int, frontier: str) -> tuple[str, str, str, Callable[[], figures.Chart | None]]:
    axis = f"misses per access, all slots, C={C} (lower is better)"
    return (
        f"pareto-misses-c{C}",
        f"All-slots misses against perplexity, {C} slots a layer",
        f"What a device pays: all k experts of a token, LRU. {frontier}",
        lambda: figures.pareto(group, f"{ALL_SLOTS}{C}", axis, better="lower", misses=True),
    )


@dataclass(frozen=True)
class Ribbons:
    """One text routed by every row that kept its routes; `sticky` is the one to hold against the first."""

    shown: list[Ribbon]
    sticky: int

    @property
    def layer(self) -> int:
        """The layer shown at first: a middle one."""
        return len(self.shown[0].experts) // 2

    def svg(self) -> str:
        pair = [self.shown[0], self.shown[self.sticky]] if self.sticky else [self.shown[0]]
        return ribbon_svg(pair, layer=self.layer)

    def as_dict(self) -> dict[str, Any]:
        first = self.shown[0]
        return {
            "words": first.words,
            "experts": first.n_experts,
            "capacity": first.capacity,
            "layers": len(first.experts),
            "layer": self.layer,
            "sticky": self.sticky,
            "runs": [{"label": r.label, "experts": r.experts.tolist(), "loads": r.loads.tolist()} for r in self.shown],
        }


def _ribbons(group: Group) -> Ribbons | None:
    found = [(row, ribbon) for row in group.routed if (ribbon := _first_ribbon(row)) is not None]
    if not found:
        return None
    sticky = min(range(len(found)), key=lambda i: (found[i][0] is group.baseline, found[i][0].mean("switch_rate") or 0))
    return Ribbons([ribbon for _, ribbon in found], sticky)


def _first_ribbon(row: Row) -> Ribbon | None:
    for run in row.complete:
        if run.folder is not None and run.folder.routes.exists():
            with contextlib.suppress(StickyError):  # routes cut off or without tokens: the next seed may do
                return read_ribbon(run.folder.path, length=RIBBON_LENGTH)
    return None


def _provenance(collection: Collection) -> Table:
    rows = []
    for run in collection.runs:
        record, env = run.record, run.record.environment
        packages = env.get("packages", {})
        rows.append(
            (
                record.run_id,
                run.config.variant.label,
                str(run.config.seed),
                record.status,
                record.data["fingerprint"][:12],
                str(env.get("commit") or "unknown")[:12],
                f"torch {packages.get('torch', '?')}, stickymoe {packages.get('stickymoe', '?')}",
                str(env.get("processor") or env.get("system") or "unknown"),
            )
        )
    heads = ("run", "variant", "seed", "status", "data", "commit", "versions", "machine")
    return Table("provenance", "Where every figure comes from.", heads, tuple(rows))


def _write_table(table: Table, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("md", tables.markdown), ("tex", tables.latex), ("csv", tables.csv_text)):
        write_atomic(folder / f"{table.name}.{suffix}", text(table))


def _write_figure(name: str, svg: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.svg", svg)
    (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))


def _page(collection: Collection, sections: list[Section], patterns: Drawing) -> str:
    environment = Environment(
        loader=PackageLoader("stickymoe.experiments"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        collection=collection,
        sections=sections,
        patterns=patterns,
        version=__version__,
        source=SOURCE,
        legend=tables.LEGEND,
        palette=PALETTE,
        table_html=lambda table: Markup(tables.html(table)),  # escapes every cell itself
        script=Markup(vl_convert.javascript_bundle(None)),  # type: ignore[arg-type]  # its stub lacks the default
        config_text=_config_text,
        unfinished=[run for run in collection.runs if not run.complete],
    )


def _config_text(run: Run) -> str:
    facts = {"config": run.record.config, "data": run.record.data, "environment": run.record.environment}
    return yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False, allow_unicode=True)


def _markdown(collection: Collection, sections: list[Section], patterns: Drawing, beside: str) -> str:
    parts = ["# Results\n", f"{tables.LEGEND}.\n"]
    for bad in collection.damaged:
        parts.append(f"- **damaged** `{bad.path}`: {bad.reason}")
    for section in sections:
        parts += [f"## {section.group.title}\n", tables.markdown(section.results)]
        if section.paper is not None:
            parts += [f"{section.paper.caption} Source: {SOURCE}.\n", tables.markdown(section.paper)]
        if section.findings:
            parts.append("### Findings\n")
            parts += [f"- **{f.claim}: {f.verdict}.** {f.text}" for f in section.findings]
            parts.append("")
        for drawing in section.drawings:
            parts.append(_markdown_figure(drawing, beside))
    parts.append(_markdown_figure(patterns, beside))
    return "\n".join(parts)


def _markdown_figure(drawing: Drawing, beside: str) -> str:
    return f"### {drawing.title}\n\n![{drawing.title}]({beside}/figures/{drawing.name}.svg)\n\n{drawing.text}\n"
