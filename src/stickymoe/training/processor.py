"""Work around processors that report instructions that they do not support."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def disable_missing_amx() -> None:
    """Disable AMX in oneDNN if the processor reports it but cannot run it, unless the user has set the option.

    On some virtual machines, the first bf16 product kills the process. So a child process tries one first.
    """
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        tried = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
        if tried.returncode == -signal.SIGILL:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
