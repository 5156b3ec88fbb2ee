"""Measure a model of the examples and write its record, `results.json`, into the folder of the model.

    python -m examples.evaluate --model models/olmoe/remoe-1 --text webdocs --method remoe --seed 1

B rows, T tokens per row.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import stickymoe
from examples.common import tokens_of
from stickymoe.files import write_text
from stickymoe.runs.environment import describe_environment

CAPACITY = 4  # expert slots per layer for the published misses
LENGTH = 256  # tokens of a chunk, as in training


def batches(tokens: np.ndarray, length: int, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, mask and targets [B, T] in which every token but the first is a target once; the last row is padded."""
    stream = torch.from_numpy(tokens.astype(np.int64))
    n = len(stream) - 1
    padding = -n % length
    inputs, targets = (F.pad(part, (0, padding)).view(-1, length) for part in (stream[:-1], stream[1:]))
    mask = (torch.arange(n + padding) < n).view(-1, length)
    yield from zip(inputs.split(rows), mask.split(rows), targets.split(rows), strict=True)


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: np.ndarray, *, length: int = LENGTH, rows: int = 8) -> dict[str, float]:
    """Perplexity and locality of a model on a stream of tokens, in chunks of `length` tokens."""
    model.eval()
    recorder, entropy, nll = stickymoe.Recorder(), 0.0, 0.0
    with stickymoe.attach(model, None) as attached:
        for inputs, mask, targets in batches(tokens, length, rows):
            logits = model(input_ids=inputs, attention_mask=mask.long()).logits[mask].float()
            nll += F.cross_entropy(logits, targets[mask], reduction="sum").item()
            recorder.add(attached.trace.table())
            entropy += attached.trace.gate_entropy_by_layer().mean().item() * int(mask.sum())
    n = len(tokens) - 1
    return {"tokens": n, "ppl": math.exp(nll / n), **locality(recorder.finish()), "gate_entropy": entropy / n}


def locality(table: stickymoe.RouteTable) -> dict[str, float]:
    """The metrics of the tables in the examples. Misses are over all chosen experts, LRU, cold for every chunk."""
    measured = stickymoe.measure(table, capacities=(CAPACITY,))
    return {
        "switch_rate": float(measured["switch_rate"]),
        "set_switch_rate": float(measured["set_switch_rate"]),
        f"misses_c{CAPACITY}": 1 - float(measured[f"cache_hit_rate_all_c{CAPACITY}"]),
        "effective_experts": float(measured["effective_experts"]),
        "neglected_experts": int(measured["neglected_experts"]),
    }


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int = 64) -> str:
    """The greedy answer to a prompt, through the chat template."""
    chat = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    text = model.eval().generate(**given, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(text[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def size_of(model: PreTrainedModel) -> dict[str, int]:
    """Shape and parameters of a Mixtral or OLMoE."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_experts_per_tok")
    return {name: getattr(model.config, name) for name in names} | {
        "num_experts": model.config.num_local_experts,
        "parameters": model.num_parameters(),
    }


def record_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    *,
    method: str,
    seed: int,
    most_tokens: int | None = None,
    prompt: str | None = None,
) -> dict[str, Any]:
    """The record of a model: metrics on valid.txt and test.txt, its answer to a prompt if there is one, versions."""
    splits = {name: tokens_of(tokenizer, text / f"{name}.txt")[:most_tokens] for name in ("valid", "test")}
    record: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "model": size_of(model),
        "metrics": {name: evaluate(model, tokens) for name, tokens in splits.items()},
    }
    if prompt is not None:
        record |= {"prompt": prompt, "answer": answer(model, tokenizer, prompt)}
    environment = describe_environment()
    environment["packages"]["transformers"] = version("transformers")
    return record | {"environment": environment}


def write_record(file: Path, record: dict[str, Any]) -> None:
    write_text(file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    valid = record["metrics"]["valid"]
    print(f"{record['method']}, seed {record['seed']}: perplexity {valid['ppl']:.2f}, misses {valid['misses_c4']:.3f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure a model and write its record.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder with valid.txt and test.txt")
    parser.add_argument("--method", required=True, help="name of the row in the tables, such as remoe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most_tokens", type=int, help="first tokens of each split; all by default")
    parser.add_argument("--prompt", help="a prompt to answer")
    a = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    settings = {"method": a.method, "seed": a.seed, "most_tokens": a.most_tokens, "prompt": a.prompt}
    write_record(a.model / "results.json", record_of(model, tokenizer, a.text, **settings))


if __name__ == "__main__":
    main()
