"""Handle Ctrl-C and SIGTERM: save, then stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a request to save and stop; a second one stops at once.

    Under torchrun only the first one counts: torchrun repeats the Ctrl-C that the terminal has already sent, and kills
    its processes itself if they take too long.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.is_set() and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
