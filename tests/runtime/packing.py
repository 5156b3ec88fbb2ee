"""A model folder packed as simply as possible, and the experts of a model computed one by one: references for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stickymoe.runtime.checkpoints import Checkpoint
from stickymoe.runtime.hosts import torch_expert
from stickymoe.runtime.store import DENSE

# The families whose experts do not go through the experts functions of transformers.
UNSUPPORTED = {
    "dbrx": "DbrxExperts",
    "jetmoe": "JetMoeParallelExperts",
    "llama4": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "step3p7": "Step3p7Experts",
    "ernie4_5_vl_moe": "for images",
    "doge": "product keys",
    "nllb_moe": "over a capacity",
    "switch_transformers": "over a capacity",
    "llama": "no gate and experts",
}


def pack(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write what a model without experts is built from."""
    checkpoint.copy_config(folder)
    save_file(dict(checkpoint.dense()), folder / DENSE)
    return folder


class FromCheckpoint:
    """Experts read from a checkpoint, in ascending order. `swapped` exchanges experts 0 and 1."""

    def __init__(self, checkpoint: Checkpoint, *, swapped: bool = False) -> None:
        self.checkpoint, self.swapped = checkpoint, swapped
        self.widths: set[int] = set()

    def __call__(self, layer: int, module: nn.Module, h: Tensor, S: Tensor, w: Tensor) -> Tensor:
        self.widths.add(S.shape[1])
        y = torch.zeros_like(h)
        for e in S[self.checkpoint.n_experts > S].unique().tolist():
            read = 1 - e if self.swapped and e < 2 else e
            names = [t.name for t in self.checkpoint.spec.tensors]
            tensors = dict(zip(names, self.checkpoint.expert(layer, read), strict=True))
            slot, token = S.eq(e).T.nonzero(as_tuple=True)
            out = torch_expert(module, tensors, h[token]) * w[token, slot, None]
            y.index_add_(0, token, out.to(y.dtype))
        return y
