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
from collections.abc import Sequence
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
from stickymoe.experiments.findings import Finding, findings, scope, summary
from stickymoe.experiments.frontier import EXPLAINED, kept_table
from stickymoe.experiments.on_device import OnDevice, on_device
from stickymoe.experiments.paper import SOURCE, beside_the_paper, layers_beside_the_paper
from stickymoe.experiments.ribbon import PALETTE, Ribbon, read_ribbon, ribbon_svg
from stickymoe.experiments.tables import ALL_SLOTS, Table, capacities
from stickymoe.locality.devices import Device, load_device
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
    kept: Table | None
    beside_paper: list[Table]
    drawings: list[Drawing]
    findings: list[Finding]
    ribbons: Ribbons | None
    on_device: OnDevice | None

    @property
    def tables(self) -> list[Table]:
        return [self.results, *([self.kept] if self.kept else []), *self.beside_paper]


def report(
    folders: Sequence[Path], out: Path, *, device: str = "raspberry-pi-5", memory: float | None = None
) -> Collection:
    """Write the page `out` about every run in or under `folders`, and its tables and figures beside it.

    `device` is the profile, and `memory` the bytes for experts, of the section on devices.
    """
    profile = load_device(device)
    beside = out.with_suffix("")
    if out.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"{out}: expected a page to write, such as report.html.")
    if beside.resolve() in [folder.resolve() for folder in folders]:
        raise RunError(f"{out} would put tables and figures among the runs in {beside}. Choose another name with -o.")
    collection = collect(folders)
    sections = [_section(name, group, collection, profile, memory) for name, group in collection.names().items()]
    patterns = _patterns()
    provenance = _provenance(collection)
    figures_of = [(d.name, vl_convert.vegalite_to_svg(d.spec)) for s in sections for d in s.drawings]
    figures_of += [(f"ribbon-{s.name}", s.ribbons.svg()) for s in sections if s.ribbons is not None]
    figures_of.append((patterns.name, vl_convert.vegalite_to_svg(patterns.spec)))
    try:
        for folder in (beside / "tables", beside / "figures"):
            folder.mkdir(parents=True, exist_ok=True)
        for table in [*(table for section in sections for table in section.tables), provenance]:
            for suffix, text in (("md", tables.markdown), ("tex", tables.latex), ("csv", tables.csv_text)):
                write_atomic(beside / "tables" / f"{table.name}.{suffix}", text(table))
        for name, svg in figures_of:
            write_atomic(beside / "figures" / f"{name}.svg", svg)
            (beside / "figures" / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))
        write_atomic(out.with_suffix(".md"), _markdown(collection, sections, patterns, beside.name))
        write_atomic(out, _page(collection, sections, patterns))
    except OSError as e:
        raise RunError(f"{out} could not be written ({e.strerror or e}).") from e
    return collection


def _section(name: str, group: Group, collection: Collection, device: Device, memory: float | None) -> Section:
    costs = on_device(group, device, memory)
    others = [other for other in collection.groups if other is not group]
    paper = (beside_the_paper(group, name=f"paper-{name}"), layers_beside_the_paper(group, name=f"paper-layers-{name}"))
    return Section(
        name=name,
        group=group,
        results=tables.results(group.rows, group.baseline, name=f"results-{name}", caption=f"Results, {group.title}."),
        kept=kept_table(group, name=f"kept-{name}", caption=f"{EXPLAINED} {group.title}."),
        beside_paper=[table for table in paper if table is not None],
        drawings=_drawings(name, group) + _device_drawings(name, costs),
        findings=findings(group, others) if len(group.complete) > 1 else [],
        ribbons=_ribbons(group),
        on_device=costs,
    )


def _drawings(name: str, group: Group) -> list[Drawing]:
    frontier = "The dashed line is the frontier: no run is better in both. Bars are one standard deviation over seeds."
    wanted = [
        (
            "pareto-chr",
            "Hit rate against perplexity",
            f"The paper's hit rate: top-1 expert, LRU, 2 slots a layer. {frontier}",
            figures.pareto(group, "cache_hit_rate", "cache hit rate (higher is better)", better="higher"),
        ),
        (
            "pareto-sr",
            "Switch rate against perplexity",
            frontier,
            figures.pareto(group, "switch_rate", "switch rate (lower is better)", better="lower"),
        ),
    ]
    for C in capacities(group.rows):
        axis = f"misses per access, all slots, C={C} (log, lower is better)"
        wanted.append(
            (
                f"pareto-misses-c{C}",
                f"All-slots misses against perplexity, {C} slots a layer",
                f"What a device pays: all k experts of a token, LRU. {frontier}",
                figures.pareto(group, f"{ALL_SLOTS}{C}", axis, better="lower", misses=True),
            )
        )
        wanted.append(
            (
                f"kept-c{C}",
                f"What is kept of the mixture's gain, {C} slots a layer",
                "Points on the dashed line are beaten by none. In the shaded corner four fifths of the gain are kept "
                "at ten times fewer misses than vanilla's.",
                figures.kept_gain(group, C),
            )
        )
    wanted += [
        (
            "layers",
            "Switch rate by layer",
            "Layer 0 is nearest to the input. Brighter is stickier.",
            figures.layers(group),
        ),
        (
            "switches-misses",
            "Switches and misses",
            "One point for each layer of each row. The paper calls the two directly equivalent.",
            figures.switches_and_misses(group),
        ),
        (
            "utilisation",
            "Use of experts by layer",
            "Share of all k slots; white is the even share, orange more, purple less.",
            figures.utilisation(group),
        ),
        (
            "curves",
            "Training and validation",
            "Loss terms without their weights, the mean over seeds; in the page, point at a line to single it out.",
            figures.curves(group),
        ),
    ]
    return [
        Drawing(f"{short}-{name}", title, text, figures.themed(chart))
        for short, title, text, chart in wanted
        if chart is not None
    ]


def _device_drawings(name: str, costs: OnDevice | None) -> list[Drawing]:
    wanted = costs.drawings if costs is not None else []
    return [Drawing(f"{short}-{name}", title, text, figures.themed(chart)) for short, title, text, chart in wanted]


def _patterns() -> Drawing:
    return Drawing(
        "access-patterns",
        "Two orders of access",
        "The number is the order in which a layer's experts are asked for. In prefill a layer sees all tokens before "
        "the next begins, so a token's neighbour is the next access; in decoding all other layers come in between.",
        figures.themed(figures.access_patterns()),
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
        return ribbon_svg([self.shown[i] for i in sorted({0, self.sticky})], layer=self.layer)

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
    capacity = min(capacities(group.rows), default=2)
    found = [(row, ribbon) for row in group.routed if (ribbon := _first_ribbon(row, capacity)) is not None]
    if not found:
        return None
    rates = [row.mean("switch_rate") or 0.0 for row, _ in found]
    sticky = min(range(1, len(found)), key=rates.__getitem__, default=0)
    return Ribbons([ribbon for _, ribbon in found], sticky)


def _first_ribbon(row: Row, capacity: int) -> Ribbon | None:
    for run in row.complete:
        if run.folder is not None and run.folder.routes.exists():
            with contextlib.suppress(StickyError):  # routes cut off or without tokens: the next seed may do
                return read_ribbon(run.folder.path, length=RIBBON_LENGTH, capacity=capacity)
    return None


def _provenance(collection: Collection) -> Table:
    rows = []
    for name, group in collection.names().items():
        for run in group.runs:
            record, env = run.record, run.record.environment
            versions = [
                f"{package} {env.get('packages', {}).get(package) or '?'}" for package in ("stickymoe", "torch")
            ]
            rows.append(
                (
                    record.run_id,
                    name,
                    run.config.variant.label,
                    str(run.config.seed),
                    record.status,
                    record.data["fingerprint"][:12],
                    (env.get("commit") or "unknown")[:12],
                    ", ".join(versions),
                    str(env.get("processor") or env.get("system") or "unknown"),
                )
            )
    heads = ("run", "comparison", "variant", "seed", "status", "data", "commit", "versions", "machine")
    return Table("provenance", "Where every figure comes from.", heads, tuple(rows))


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
        scope=scope,
        summary=summary,
        unfinished=[run for run in collection.runs if not run.complete],
    )


def _config_text(run: Run) -> str:
    facts = {"config": run.record.config, "data": run.record.data, "environment": run.record.environment}
    return yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False, allow_unicode=True)


def _markdown(collection: Collection, sections: list[Section], patterns: Drawing, beside: str) -> str:
    clean = tables.markdown_escaped
    parts = [
        "# Results\n",
        "Made by `stickymoe report`. ± is one standard deviation over seeds; changes and factors are over the seeds "
        f"that both have. {tables.LEGEND}. [Where every figure comes from]({beside}/tables/provenance.md).\n",
    ]
    problems = [f"- **damaged** {clean(str(bad.path))}: {clean(bad.reason)}" for bad in collection.damaged]
    problems += [
        f"- **{run.record.status}** {clean(run.config.variant.label)}, seed {run.config.seed}"
        f"{': ' + clean(run.record.failure) if run.record.failure else ''}"
        for run in collection.runs
        if not run.complete
    ]
    parts += [*problems, ""] if problems else []
    told = [(clean(section.group.title), summary(section.findings)) for section in sections]
    parts += [*(f"- **{title}**: {words}" for title, words in told if words), ""] if any(w for _, w in told) else []
    for section in sections:
        parts += [f"## {clean(section.group.title)}\n", tables.markdown(section.results)]
        if section.kept is not None:
            parts += [f"{clean(section.kept.caption)}\n", tables.markdown(section.kept)]
        for table in section.beside_paper:
            parts += [f"{clean(table.caption)} Source: {SOURCE}.\n", tables.markdown(table)]
        if section.findings:
            parts.append(f"### Findings\n\n{scope(section.group)}\n")
            parts += [f"- **{f.claim}: {f.verdict}.** {clean(f.text)}" for f in section.findings]
            parts.append("")
        if section.on_device is not None:
            parts.append(f"### On a device: {clean(section.on_device.device.name)}\n")
            parts += [f"- **{clean(label)}** {clean(words)}" for label, words in section.on_device.words]
            parts.append("")
        if section.ribbons is not None:
            parts.append(_markdown_figure(f"ribbon-{section.name}", "The same text, routed by two runs", "", beside))
        parts += [_markdown_figure(d.name, d.title, d.text, beside) for d in section.drawings]
    parts.append(_markdown_figure(patterns.name, patterns.title, patterns.text, beside))
    return "\n".join(parts)


def _markdown_figure(name: str, title: str, text: str, beside: str) -> str:
    return f"### {title}\n\n![{title}]({beside}/figures/{name}.svg)\n\n{text}\n"
