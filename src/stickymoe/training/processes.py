"""What the processes of a run do together: one reads first, one writes, and an error in one ends all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import distributed

from stickymoe.errors import (
    ConfigError,
    DataError,
    DivergedError,
    InterruptedRunError,
    RunError,
    StickyError,
)
from stickymoe.reading import reason

T = TypeVar("T")

_KINDS = {kind.__name__: kind for kind in (ConfigError, DataError, DivergedError, InterruptedRunError, RunError)}
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)


class _Failure(NamedTuple):
    """An error as it is sent to other processes."""

    process: int
    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception, process: int) -> _Failure:
        if isinstance(error, StickyError):
            return cls(process, type(error).__name__, str(error))
        return cls(process, "", f"{type(error).__name__}: {reason(error)}")

    def error(self) -> StickyError:
        if self.kind:
            return _KINDS.get(self.kind, StickyError)(self.message)
        return RunError(f"Process {self.process} failed ({self.message}); its own output has the details.")


class Processes:
    """The processes of a run. Methods that exchange something must be called by all of them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self._device = accelerator.device

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def agree(self, error: Exception | None = None) -> None:
        """Raise the error of this process, or otherwise the first error of another one."""
        if self.count > 1:
            failures: list[Any] = [None] * self.count
            distributed.all_gather_object(failures, None if error is None else _Failure.of(error, self.index))
            first = next((failure for failure in failures if failure is not None), None)
            if error is None and first is not None:
                raise first.error()
        if error is not None:
            raise error

    def everywhere(self, work: Callable[[], T]) -> T:
        """The result of `work`, which must succeed in every process."""
        result: Any
        result, error = _tried(work)
        self.agree(error)
        return result  # type: ignore[no-any-return]

    def in_main(self, work: Callable[[], T]) -> T:
        """The result of `work` in the main process, in all processes."""
        if self.count == 1:
            return work()
        result: Any = None
        error: Exception | None = None
        if self.is_main:
            result, error = _tried(work)
        failure, result = self.from_main((None if error is None else _Failure.of(error, self.index), result))
        if failure is not None:
            raise error or failure.error()
        return result  # type: ignore[no-any-return]

    def from_main(self, value: T) -> T:
        """The value of the main process, in all processes."""
        values: list[Any] = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]

    def main_first(self, work: Callable[[], T]) -> T:
        """The result of `work` in every process; the others start when the main process has finished."""
        result: Any = None
        error: Exception | None = None
        for turn in (True, False):
            if self.is_main == turn:
                result, error = _tried(work)
            self.agree(error)
        return result  # type: ignore[no-any-return]

    def gathered(self, value: T) -> list[T]:
        """The values of all processes, in their order, in the main process; elsewhere an empty list."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count if self.is_main else []
        distributed.gather_object(value, values or None, dst=0)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.count == 1:
            return flag
        total = torch.tensor(float(flag), device=self._device)
        distributed.all_reduce(total)
        return bool(total > 0)

    def lost(self, error: RuntimeError) -> RunError | None:
        """The error to report if `error` means that another process is gone."""
        if self.count == 1 or isinstance(error, StickyError) or not _LOST.search(str(error)):
            return None
        return RunError("The connection to another process was lost: it failed or was killed. Resume with --resume.")


def _tried(work: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
