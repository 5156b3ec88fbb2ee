"""The progress of a run on the terminal: loss terms, tokens per second, time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A live bar on a terminal; elsewhere a line every few seconds."""

    LINE_EVERY = 15.0  # seconds, without a terminal

    def __init__(self, title: str, steps: int, done: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._steps = steps
        self._start_step = done
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, values="")
        self._title = title

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, values: Mapping[str, float], speed: float, unit: str = "tok/s") -> None:
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        text += f"  {speed:,.0f} {unit}"
        self._bar.update(self._task, completed=step, values=text)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line > self.LINE_EVERY or step == self._steps):
            self._last_line = now
            left = (now - self._started) / max(step - self._start_step, 1) * (self._steps - step)
            line = f"{self._title}  {step}/{self._steps}  {text}  {left:.0f} s left"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class Clock:
    """Training speed over all steps, without pauses."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._last = time.monotonic()
        self._seconds = 0.0
        self._steps = 0

    def tick(self) -> None:
        now = time.monotonic()
        self._seconds += now - self._last
        self._last = now
        self._steps += 1

    @property
    def tokens_per_s(self) -> float:
        return self._tokens * self._steps / self._seconds if self._seconds else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield
        self._last = time.monotonic()
