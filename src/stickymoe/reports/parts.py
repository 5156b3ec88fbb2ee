"""The parts of a report: tables, figures, lists and the ribbon. Page and Markdown show every part the same way."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import vl_convert
import yaml

from stickymoe.reports import tables
from stickymoe.reports.charts import Chart, themed
from stickymoe.reports.collection import Run
from stickymoe.reports.ribbon import Ribbon, ribbon_svg
from stickymoe.reports.tables import Table

clean = tables.markdown_escaped


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """Something to show under a title. Return one of its subclasses from a section.

    name: unique in the report; the name of its files and its anchor in the page
    note: a sentence or two below the title
    summary: a line for the top of the report
    """

    kind: ClassVar[str]  # the template of the page: templates/KIND.html

    name: str
    title: str
    note: str = ""
    summary: str = ""

    @abstractmethod
    def markdown(self, folder: str) -> str:
        """The part in Markdown; `folder` holds the files of the report."""

    def tables(self) -> list[Table]:
        """Tables to write as files."""
        return []

    def figures(self) -> dict[str, str]:
        """SVG pictures to write as files, by name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TablePart(Part):
    kind: ClassVar[str] = "table"
    table: Table

    def markdown(self, folder: str) -> str:
        caption = f"{clean(self.table.caption)}\n\n" if self.table.caption else ""
        note = f"\n{clean(self.note)}\n" if self.note else ""
        return f"### {clean(self.title)}\n\n{caption}{tables.markdown(self.table)}{note}"

    def tables(self) -> list[Table]:
        return [self.table]

    @property
    def html(self) -> str:
        """Every cell is escaped."""
        return tables.html(self.table)


@dataclass(frozen=True, kw_only=True)
class FigurePart(Part):
    """A chart of Altair; `note` is the caption below it. A `wide` figure takes the whole width of the page."""

    kind: ClassVar[str] = "figure"
    chart: Chart
    wide: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        return themed(self.chart)

    def markdown(self, folder: str) -> str:
        return _picture(self, self.name, folder)

    def figures(self) -> dict[str, str]:
        return {self.name: vl_convert.vegalite_to_svg(self.spec)}


@dataclass(frozen=True)
class Item:
    """A line of a list; `badge` is a short verdict in front of the text."""

    label: str
    text: str
    badge: str = ""


@dataclass(frozen=True, kw_only=True)
class ListPart(Part):
    kind: ClassVar[str] = "list"
    items: Sequence[Item]

    def markdown(self, folder: str) -> str:
        note = f"{clean(self.note)}\n\n" if self.note else ""
        return f"### {clean(self.title)}\n\n{note}" + "".join(f"- {self._line(item)}\n" for item in self.items)

    @staticmethod
    def _line(item: Item) -> str:
        badge = f" ({item.badge})" if item.badge else ""
        return f"**{clean(item.label)}**{badge}: {clean(item.text)}"


@dataclass(frozen=True, kw_only=True)
class RibbonPart(Part):
    """One text as routed by several runs; the page compares two of them, at first number 0 and number `sticky`."""

    kind: ClassVar[str] = "ribbon"
    ribbons: Sequence[Ribbon]
    sticky: int

    @property
    def layer(self) -> int:
        """The layer shown at first: a middle one."""
        return len(self.ribbons[0].experts) // 2

    @property
    def data(self) -> dict[str, Any]:
        """What the script of the page needs."""
        first = self.ribbons[0]
        return {
            "tokens": first.tokens,
            "experts": first.n_experts,
            "capacity": first.capacity,
            "layers": len(first.experts),
            "layer": self.layer,
            "sticky": self.sticky,
            "runs": [
                {"label": r.label, "experts": r.experts.tolist(), "loads": r.loads.tolist()} for r in self.ribbons
            ],
        }

    def markdown(self, folder: str) -> str:
        return _picture(self, self.name, folder)

    def figures(self) -> dict[str, str]:
        return {self.name: ribbon_svg([self.ribbons[i] for i in sorted({0, self.sticky})], layer=self.layer)}


@dataclass(frozen=True, kw_only=True)
class RunsPart(Part):
    """Config, data and environment of every run: in full on the page, as a table in a file."""

    kind: ClassVar[str] = "runs"
    runs: Sequence[Run]
    table: Table

    def markdown(self, folder: str) -> str:
        return f"### {clean(self.title)}\n\n{clean(self.note)} [Table]({folder}/tables/{self.table.name}.md).\n"

    def tables(self) -> list[Table]:
        return [self.table]

    @staticmethod
    def text(run: Run) -> str:
        facts = {"config": run.record.config, "data": run.record.data, "environment": run.record.environment}
        return yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False, allow_unicode=True)


def _picture(part: Part, name: str, folder: str) -> str:
    title, note = clean(part.title), f"\n{clean(part.note)}\n" if part.note else ""
    return f"### {title}\n\n![{title}]({folder}/figures/{name}.svg)\n{note}"
