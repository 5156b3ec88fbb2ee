"""`python -m stickymoe.sweeps.tied PARENT ARGUMENTS`: run Python with these arguments; it dies with the process PARENT.

Otherwise the training process of a killed Ray worker would keep the lock of its run and a core of its node.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h; it survives exec


def main(parent: int, arguments: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it in its workers and what they start
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
