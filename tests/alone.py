"""Run a test in a child process of its own."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """For tests that start numba's threads: a process that has them cannot fork children, as other tests do."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                test(*args, **kwargs)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, "the test failed in its child process; its output is above"

    return run
