"""What the examples share: the tokens of a text, and training that can be interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

import stickymoe
from stickymoe.files import replacing
from stickymoe.huggingface.trainer import SaveAndStop, StickyTrainer, last_checkpoint
from stickymoe.training.stopping import stop_request


def read_rows(file: Path) -> list[str]:
    """The rows of a text that are not empty."""
    return [row for line in file.read_text(encoding="utf-8").splitlines() if (row := line.strip())]


def tokens_of(tokenizer: PreTrainedTokenizerBase, file: Path, cache: Path | None = None) -> np.ndarray:
    """The tokens of a text, one newline after each row, without special tokens; from `cache` if that file exists."""
    if cache is not None and cache.exists():
        return np.load(cache, mmap_mode="r")
    ids = tokenizer([row + "\n" for row in read_rows(file)], add_special_tokens=False)["input_ids"]
    dtype = np.int16 if len(tokenizer) <= np.iinfo(np.int16).max else np.int32
    tokens = np.concatenate([np.asarray(row, dtype) for row in ids])
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache) as f:
            np.save(f, tokens)
    return tokens


class Rows(Dataset):
    """A stream of tokens cut into rows of `length`; the rest is dropped."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def variant_of(name: str, lam: float | None) -> Any:
    """The variant of that name; None for `none`, which adds no loss term at all."""
    if name == "none":
        return None
    return stickymoe.variant(name) if lam is None else stickymoe.variant(name, lam=lam)


def train(
    model: PreTrainedModel,
    rows: Rows,
    variant: Any,
    arguments: TrainingArguments,
    optimiser: torch.optim.Optimizer,
) -> Trainer | None:
    """Train to the last step, from the last checkpoint if there is one; None after Ctrl-C, which saves and stops."""
    trainer = StickyTrainer(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimiser, None), variant=variant
    )
    with stop_request() as stop:
        trainer.add_callback(SaveAndStop(stop))
        trainer.train(resume_from_checkpoint=last_checkpoint(Path(arguments.output_dir)))
        finished = trainer.state.global_step >= arguments.max_steps
    if not finished:
        print(f"Stopped at step {trainer.state.global_step}; the same command continues from there.")
    return trainer if finished else None
