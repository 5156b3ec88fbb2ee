"""Models and texts for the commands: load a checkpoint, stream a text through it, and measure perplexity and routes.

B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stickymoe.errors import ConfigError, DataError, require
from stickymoe.huggingface.attached import Attached, attach
from stickymoe.huggingface.gates import expert_bytes, find_gates, other_bytes
from stickymoe.huggingface.inputs import NO_TARGET
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.table import RouteTable
from stickymoe.reading import reason

_PIECE = 1 << 20  # characters that are tokenised at a time
_TEXT_SUFFIXES = (".txt", ".md", ".rst")
DTYPES = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, on the GPU if there is one, and its tokenizer."""

    name: str
    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype  # in which the weights are saved


def load_model(name: str, dtype: str = "auto") -> Loaded:
    """Load a supported model and its tokenizer from a local folder, or by its id on the hub."""
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"{name} has no config.json: expected a folder of a transformers model, or an id on the hub.")
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):  # refuse an unsupported family before its weights are read
            find_gates(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise ConfigError(f"{name} cannot be loaded as a transformers model with tokenizer ({reason(e)}).") from e
    model.train(False)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    path = str(folder.resolve()) if folder.exists() else name
    saved = getattr(config, "dtype", None)
    return Loaded(Path(path).name, path, model, tokenizer, saved if isinstance(saved, torch.dtype) else model.dtype)


def token_chunks(
    tokenizer: PreTrainedTokenizerBase, text: Path, length: int, most: int | None = None
) -> Iterator[Int[Tensor, " _"]]:
    """The tokens of a text file, or of all text files in a folder, in rows of `length`; at most `most` tokens.

    No special tokens are added. The last row of a file may be shorter. A row never spans two files.
    """
    require(length >= 2, "seq_len", length, "a whole number ≥ 2")
    left = math.inf if most is None else most
    for file in _text_files(text):
        waiting: list[int] = []
        for piece in _pieces(file):
            waiting += tokenizer(piece, add_special_tokens=False)["input_ids"]
            while len(waiting) >= length and left >= 2:
                row, waiting = waiting[:length], waiting[length:]
                yield torch.tensor(row[: int(min(left, length))])
                left -= length
        if len(waiting) >= 2 and left >= 2:
            yield torch.tensor(waiting[: int(min(left, length))])
            left -= len(waiting)
        if left < 2:
            return


def _text_files(text: Path) -> list[Path]:
    if text.is_file():
        return [text]
    if not text.is_dir():
        raise DataError(f"{text} is neither a file nor a folder: expected a text file, or a folder with text files.")
    found = sorted(file for file in text.rglob("*") if file.suffix in _TEXT_SUFFIXES)
    if not found:
        raise DataError(f"{text} has no text files ({', '.join(_TEXT_SUFFIXES)}).")
    return found


def _pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces that end at line ends."""
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := "".join(lines.readlines(_PIECE)):
                yield piece
    except UnicodeDecodeError as e:
        raise DataError(f"{file} is not UTF-8 text (byte {e.object[e.start]:#04x}); convert it first.") from e
    except OSError as e:
        raise DataError(f"{file} cannot be read ({reason(e)}).") from e


@dataclass(frozen=True)
class Scored:
    """The result of a text: mean loss per predicted token, and the routes of every token."""

    nats: float
    targets: int
    table: RouteTable

    @property
    def ppl(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf


def score_text(
    attached: Attached,
    rows: list[Int[Tensor, " _"]],
    *,
    batch_size: int = 4,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Scored:
    """Predict every token of every row but its first, and record the routes; with a folder, in bounded memory."""
    if not rows:
        raise DataError("The text is empty: expected at least 2 tokens.")
    model, recorder = attached.model, Recorder(folder)
    nats, targets = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(rows), batch_size):
            ids, mask = padded(rows[first : first + batch_size])
            ids, mask = ids.to(model.device), mask.to(model.device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            labels = torch.nn.functional.pad(torch.where(mask, ids, NO_TARGET)[:, 1:], (0, 1), value=NO_TARGET)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_TARGET, reduction="sum"
            )
            nats += float(loss)
            targets += int(labels.ne(NO_TARGET).sum())
            recorder.add(with_tokens(attached.trace.table(), ids))
            if progress is not None:
                progress(int(mask.sum()))
    return Scored(nats / max(targets, 1), targets, finished(attached, recorder))


def with_tokens(table: RouteTable, ids: Int[Tensor, "B T"]) -> RouteTable:
    """The table with token ids and without weights, which nothing that reads it needs."""
    return replace(table, weights=None, tokens=ids.cpu().numpy().astype(np.int32))


def finished(attached: Attached, recorder: Recorder) -> RouteTable:
    """The recorded table, with the sizes of the model."""
    N = attached.trace.table().n_experts
    gates = [gate for gate in attached.gates if not gate.optional]
    return recorder.finish(expert_bytes=expert_bytes(gates, N), other_bytes=other_bytes(attached.model, gates))


def padded(rows: list[Int[Tensor, " _"]]) -> tuple[Int[Tensor, "B T"], Tensor]:
    """Rows as one batch, padded on the right with token 0, and the mask of real tokens."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def sizes_of(loaded: Loaded, rows: list[Int[Tensor, " _"]]) -> tuple[int, int]:
    """The experts of a token and of a layer, from the routes of a few tokens."""
    with attach(loaded.model) as attached, torch.no_grad():
        loaded.model(input_ids=rows[0][None, :4].to(loaded.model.device))
        table = attached.trace.table()
    return table.top_k, table.n_experts
