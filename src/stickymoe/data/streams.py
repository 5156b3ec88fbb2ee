"""Corpora that are streamed with `datasets`, from the hub or from a folder, and need not fit in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stickymoe.errors import DataError
from stickymoe.reading import reason

# Without a validation split, one document of so many is held out for validation and one for the test, up to a limit.
HELD_OUT, MOST_HELD_OUT = 200, 500
_COLUMN = "text"
_VALID = ("validation", "valid", "val", "dev")
_LIBRARIES = ("datasets", "huggingface_hub")


@dataclass(frozen=True)
class Stream:
    """The texts of a split of a dataset, or every text whose number `keeps`; it can be read again from the start."""

    name: str
    open: Callable[[], Any]
    keeps: Callable[[int], bool]
    limit: int = 0

    def __iter__(self) -> Iterator[str]:
        with explained(self.name):
            for number, example in enumerate(self.open()):
                if self.limit and number >= self.limit:
                    return
                text = example.get(_COLUMN)
                if not isinstance(text, str):
                    columns = ", ".join(example)
                    raise DataError(f"Corpus '{self.name}' has the columns {columns}, expected '{_COLUMN}' with text.")
                if self.keeps(number):
                    yield text


@contextmanager
def without_logs() -> Iterator[None]:
    """No log of the hub's libraries: they repeat what they raise, and every attempt to connect."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """One line for the dozen unrelated errors that the hub's libraries raise."""
    try:
        with without_logs():
            yield
    except (DataError, GeneratorExit):
        raise
    except Exception as e:
        raise DataError(
            f"Corpus '{name}' could not be read with datasets ({type(e).__name__}: {reason(e)}). Check its name and "
            "the network, or pass --data.path DIR, a folder with train, valid and test text files."
        ) from e


def open_streams(name: str, limit: int) -> tuple[str, dict[str, Stream]]:
    """What identifies the text of `NAME` or `NAME:SUBSET` in its present state, and its splits."""
    try:
        from datasets import load_dataset_builder
    except ImportError as e:
        raise DataError(
            f"Corpus '{name}' needs the package 'datasets', which is not installed. Run: pip install 'stickymoe[hub]'."
        ) from e
    path, _, subset = name.partition(":")
    if path.startswith((".", "/")) and not Path(path).exists():
        raise DataError(f"Corpus '{name}': the folder '{path}' does not exist.")
    with explained(name):
        builder = load_dataset_builder(path, subset or None)
        splits = builder.as_streaming_dataset()
    if "train" not in splits:
        raise DataError(f"Corpus '{name}' has the splits {', '.join(splits)}, expected train.")
    valid = next((split for split in _VALID if split in splits), None)

    def stream(split: str, keeps: Callable[[int], bool] = lambda number: True, limit: int = 0) -> Stream:
        return Stream(name, lambda: splits[split], keeps, limit)

    if valid is None:
        found = {
            "train": stream("train", lambda number: _held_out(number) is None, limit),
            "valid": stream("train", lambda number: _held_out(number) == "valid", limit),
            "test": stream("train", lambda number: _held_out(number) == "test", limit),
        }
    else:
        found = {"train": stream("train", limit=limit), "valid": stream(valid)}
        if "test" in splits:
            found["test"] = stream("test")
    return f"{path}:{builder.config_id}:{builder.hash}:{limit}", found


def _held_out(number: int) -> str | None:
    """The split that a document of a dataset without validation texts is held out for."""
    group, place = divmod(number, HELD_OUT)
    return {0: "valid", 1: "test"}.get(place) if group < MOST_HELD_OUT else None
