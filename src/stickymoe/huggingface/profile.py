"""`profile`: record how a checkpoint routes a text, and the answers it generates."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stickymoe.errors import DataError
from stickymoe.huggingface.attached import Attached, attach
from stickymoe.huggingface.inputs import Inputs
from stickymoe.huggingface.text import Loaded, Progress, finished, padded, score_text
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.table import RouteTable
from stickymoe.routing.trace import RoutingTrace

PREFILL, DECODE = 0, 1


@dataclass(frozen=True)
class Profile:
    """The routes of a text, and its perplexity if nothing was generated."""

    table: RouteTable
    ppl: float | None


def profile(
    loaded: Loaded,
    rows: list[Int[Tensor, " _"]],
    out: Path,
    *,
    generate: int = 0,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Profile:
    """Write the routes of a text to the folder `out`; with `generate`, each row is a prompt for that many tokens.

    An unfinished profile leaves no table that could be mistaken for a whole one.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not empty: expected a new folder; choose another one.")
    try:
        with attach(loaded.model) as attached:
            if not generate:
                scored = score_text(attached, rows, batch_size=batch_size, folder=out, progress=progress)
                return Profile(scored.table, scored.ppl)
            return Profile(_generated(attached, rows, out, generate, batch_size, progress), None)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was new
        raise


def _generated(
    attached: Attached,
    rows: list[Int[Tensor, " _"]],
    out: Path,
    n_tokens: int,
    batch_size: int,
    progress: Progress | None,
) -> RouteTable:
    """The routes of prompts (one forward pass each) and of the greedy answers to them (one pass per token)."""
    if not rows:
        raise DataError("The text is empty: expected at least 2 tokens.")
    recorder = Recorder(out)
    for same in _equally_long(rows, batch_size):
        ids, mask = (x.to(attached.model.device) for x in padded(same))
        passes: list[RouteTable] = []

        def keep(trace: RoutingTrace, inputs: Inputs, passes: list[RouteTable] = passes) -> None:
            tokens = inputs.tokens.cpu().numpy().astype(np.int32)  # type: ignore[union-attr]
            passes.append(replace(trace.table(), weights=None, tokens=tokens))

        attached.on_trace = keep
        with torch.no_grad():
            attached.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                max_new_tokens=n_tokens,
                min_new_tokens=n_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                pad_token_id=0,
            )
        attached.on_trace = None
        recorder.add(_joined(passes))
        if progress is not None:
            progress(len(same) * (ids.shape[1] + n_tokens))
    return finished(attached, recorder)


def _equally_long(rows: list[Int[Tensor, " _"]], batch_size: int) -> list[list[Int[Tensor, " _"]]]:
    """Batches of rows of the same length, so that no prompt is padded."""
    by_length: dict[int, list[Int[Tensor, " _"]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    return [same[i : i + batch_size] for same in by_length.values() for i in range(0, len(same), batch_size)]


def _joined(passes: list[RouteTable]) -> RouteTable:
    """The forward passes of one generation, one after another: the first is the prompt."""
    prompt = passes[0].mask.shape[1]
    S = np.concatenate([p.S for p in passes], axis=2)
    phase = np.full(S.shape[1:3], DECODE, np.uint8)
    phase[:, :prompt] = PREFILL
    return RouteTable(
        S=S,
        n_experts=passes[0].n_experts,
        mask=np.concatenate([p.mask for p in passes], axis=1),
        phase=phase,
        tokens=np.concatenate([p.tokens for p in passes if p.tokens is not None], axis=1),
        skips=any(p.skips for p in passes),
    )
