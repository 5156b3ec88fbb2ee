"""`stickymoe report`: finished runs on one page that opens offline, with every table and figure as a file.

    report.html                       the page
    report.md                         the same in Markdown
    report/tables/*.md|tex|csv
    report/figures/*.svg|png

Text from a corpus or a record is always escaped. The content comes from sections, see `reports.sections`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from stickymoe import __version__, files
from stickymoe.errors import RunError
from stickymoe.locality.devices import load_device
from stickymoe.reports import tables
from stickymoe.reports.collection import Collection, Group, collect
from stickymoe.reports.parts import Part, clean
from stickymoe.reports.ribbon import PALETTE
from stickymoe.reports.sections import DEFAULT_APPENDICES, DEFAULT_SECTIONS, Appendix, Context, Section


@dataclass(frozen=True)
class Chapter:
    """One group of runs with its parts, or the appendix, which has no group."""

    name: str
    title: str
    parts: tuple[Part, ...]
    group: Group | None = None

    @property
    def blocks(self) -> list[list[Part]]:
        """Consecutive figures together, every other part alone."""
        runs = itertools.groupby(self.parts, key=lambda part: part.kind == "figure")
        return [
            block for figures, parts in runs for block in ([list(parts)] if figures else [[part] for part in parts])
        ]


def report(
    folders: Sequence[Path],
    out: Path,
    *,
    sections: Sequence[Section] = DEFAULT_SECTIONS,
    appendices: Sequence[Appendix] = DEFAULT_APPENDICES,
    order: Sequence[str] = (),
    device: str = "raspberry-pi-5",
    memory: float | None = None,
) -> Collection:
    """Write the page `out` about every run in or under `folders`, and its tables and figures next to it.

    Every group of comparable runs gets all `sections`; `appendices` come once, at the end. `order` names variants that
    come first. `device` is a profile, `memory` the bytes for weights on it.
    """
    profile = load_device(device)
    folder = out.with_suffix("")
    if out.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"{out}: expected the name of an HTML file, such as report.html.")
    if folder.resolve() in [runs.resolve() for runs in folders]:
        raise RunError(f"{out} would write tables and figures into the runs in {folder}. Choose another name with -o.")
    collection = collect(folders, order=order)
    chapters = []
    for name, group in collection.names().items():
        context = Context(name, collection, profile, memory)
        parts = tuple(part for section in sections for part in section(group, context))
        chapters.append(Chapter(name, group.title, parts, group))
    end = tuple(part for appendix in appendices for part in appendix(collection))
    if end:
        chapters.append(Chapter("appendix", "Appendix", end))
    _require_unique_names(chapters)
    try:
        _write_files(chapters, folder)
        files.write_text(out.with_suffix(".md"), _markdown(collection, chapters, folder.name))
        files.write_text(out, _page(collection, chapters))
    except OSError as e:
        raise RunError(f"{out} could not be written ({e.strerror or e}).") from e
    return collection


def _require_unique_names(chapters: Sequence[Chapter]) -> None:
    names = [part.name for chapter in chapters for part in chapter.parts]
    for name in names:
        if names.count(name) > 1:
            raise RunError(f"Two parts of the report have the name '{name}': use context.name to make names unique.")


def _write_files(chapters: Sequence[Chapter], folder: Path) -> None:
    parts = [part for chapter in chapters for part in chapter.parts]
    for kind in ("tables", "figures"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for table in (table for part in parts for table in part.tables()):
        for suffix, text in (("md", tables.markdown), ("tex", tables.latex), ("csv", tables.csv_text)):
            files.write_text(folder / "tables" / f"{table.name}.{suffix}", text(table))
    for name, svg in ((name, svg) for part in parts for name, svg in part.figures().items()):
        files.write_text(folder / "figures" / f"{name}.svg", svg)
        files.write_bytes(folder / "figures" / f"{name}.png", vl_convert.svg_to_png(svg, scale=2))


def _page(collection: Collection, chapters: Sequence[Chapter]) -> str:
    environment = Environment(
        loader=PackageLoader("stickymoe.reports"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        collection=collection,
        chapters=chapters,
        summaries=_summaries(chapters),
        version=__version__,
        palette=PALETTE,
        vega=Markup(vl_convert.javascript_bundle(None)),  # type: ignore[arg-type]  # its stub lacks the default
        unfinished=[run for run in collection.runs if not run.complete],
    )


def _summaries(chapters: Sequence[Chapter]) -> list[tuple[str, str]]:
    """The title of a chapter and a summary, for every part that has one."""
    return [(chapter.title, part.summary) for chapter in chapters for part in chapter.parts if part.summary]


def _markdown(collection: Collection, chapters: Sequence[Chapter], folder: str) -> str:
    lines = ["# Results\n", "Written by `stickymoe report`.\n"]
    problems = [f"- **damaged** {clean(str(bad.path))}: {clean(bad.reason)}" for bad in collection.damaged]
    problems += [
        f"- **{run.record.status}** {clean(run.config.variant.label)}, seed {run.config.seed}"
        f"{': ' + clean(run.record.failure) if run.record.failure else ''}"
        for run in collection.runs
        if not run.complete
    ]
    lines += [*problems, ""] if problems else []
    summaries = [f"- **{clean(title)}**: {clean(summary)}" for title, summary in _summaries(chapters)]
    lines += [*summaries, ""] if summaries else []
    for chapter in chapters:
        lines.append(f"## {clean(chapter.title)}\n")
        lines += [part.markdown(folder) for part in chapter.parts]
    return "\n".join(lines)
