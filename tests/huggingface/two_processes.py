"""Work in two forked processes that are joined by gloo."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def in_two_processes(work: Callable[[int], Any], folder: Path, *, joined: bool = True) -> list[Any]:
    """What `work` answers for rank 0 and 1. Unless `joined`, it only finds the variables from which to join itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_forked(work, rank, folder, port, joined) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.txt").read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _forked(work: Callable[[int], Any], rank: int, folder: Path, port: int, joined: bool) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with (folder / f"{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        torch.set_num_threads(1)
        if joined:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        torch.save(work(rank), folder / f"{rank}.pt")
        if distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
