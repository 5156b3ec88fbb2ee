"""Instructions that a processor announces and does not have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def do_without_missing_amx() -> None:
    """Some virtual machines announce AMX without having it, and the first product in bf16 would end the process.

    A child tries one; if that ends it, oneDNN is told to do without, unless the user told it something already.
    """
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        tried = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False)
        if tried.returncode == -signal.SIGILL:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
