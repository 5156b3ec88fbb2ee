"""Reading text, JSON and YAML that may be damaged: the one place that does it.

Each function returns what the file holds or raises `error`, a kind of `StickyError`, with one line. A value that was
read consists of text, finite 64-bit numbers, true, false, null, lists and mappings with text as keys, so that whatever
uses it can compare, print and write it again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from stickymoe.errors import StickyError, shown

MAX_DEPTH = 32
MAX_YAML_BYTES = 1 << 20  # the parser needs seconds for a megabyte
MAX_YAML_NODES = 100_000  # with every alias replaced by what it refers to
_MAX_LINE = 200


def one_line(text: str) -> str:
    """A text on one line, cut to a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + "…"


def reason(error: BaseException) -> str:
    """Why something failed, as a part of one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(getattr(error, "strerror", None) or error)
    return one_line(text).rstrip(".") or type(error).__name__


def read_bytes(path: Path, error: type[StickyError]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise error(f"{path} cannot be read ({reason(e)}).") from e


def read_text(path: Path, error: type[StickyError]) -> str:
    content = read_bytes(path, error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as e:
        at = f"byte 0x{content[e.start]:02x} at offset {e.start}"
        raise error(f"{path} is damaged: it is not UTF-8 text ({at}).") from e


def read_json(path: Path, error: type[StickyError]) -> Any:
    return parse_json(read_text(path, error), path, error)


def parse_json(text: str, source: Path | str, error: type[StickyError]) -> Any:
    try:
        value = json.loads(text)
        _require_plain(value)
    except (ValueError, RecursionError) as e:
        raise error(f"{source} is damaged: {reason(e)}.") from e
    return value


def read_yaml(path: Path, error: type[StickyError]) -> Any:
    return parse_yaml(read_text(path, error), path, error)


class _ShallowLoader(yaml.SafeLoader):
    """Stops at deep nesting, for which the parser takes quadratic time."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_yaml(text: str, source: Path | str, error: type[StickyError]) -> Any:
    if len(text) > MAX_YAML_BYTES:
        raise error(f"{source} is too long: got {len(text):,} characters, expected at most {MAX_YAML_BYTES:,}.")
    loader: Any = None
    try:
        loader = _ShallowLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _require_small(node)
        value = loader.construct_document(node)
    # Besides YAMLError: wrong dates and long numbers are ValueErrors, and wrong tags raise further types.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as e:
        raise error(f"{source} is not YAML: {reason(e)}.") from e
    finally:
        if loader is not None:
            loader.dispose()
    try:
        _require_plain(value, infinite=True)
    except ValueError as e:
        raise error(f"{source} is not usable: {e}.") from e
    return value


def _require_plain(value: Any, *, infinite: bool = False) -> None:
    """Refuse what JSON and YAML can express but no file of ours holds."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(part, dict):
            for key in part:
                if not isinstance(key, str):
                    raise ValueError(f"got the key {shown(key)}, expected text; put it into quotes")
                _require_text(key)
            waiting += [(inner, depth + 1) for inner in part.values()]
        elif isinstance(part, list):
            waiting += [(inner, depth + 1) for inner in part]
        elif isinstance(part, str):
            _require_text(part)
        elif isinstance(part, float):
            if not (infinite or math.isfinite(part)):
                raise ValueError(f"got the number {part}, expected a finite one")
        elif isinstance(part, int):
            if not -(2**63) <= part < 2**63:
                raise ValueError(f"got an integer of {part.bit_length()} bits, expected at most 64")
        elif part is not None:
            raise ValueError(f"got {shown(part)}, expected a number or text; put it into quotes")


def _require_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise ValueError(f"got {shown(text)}, which is half of a character") from e


def _require_small(root: yaml.Node) -> None:
    """Refuse aliases that refer to themselves, or that expand to far more than was written."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_YAML_NODES + 1  # where a node contains itself, this is its size
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            items = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
            sizes[id(node)] = 1 + sum(size(item) for item in items)
        return sizes[id(node)]

    if size(root) > MAX_YAML_NODES:
        raise ValueError(f"its aliases expand to more than {MAX_YAML_NODES:,} values")
