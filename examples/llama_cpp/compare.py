"""Compare what llama.cpp and stickymoe generated from one model: python -m examples.llama_cpp.compare --help."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from stickymoe import load_table

HERE = Path(__file__).parent


def compared(ours: Path, theirs: Path, answer: dict[str, Any]) -> dict[str, int]:
    """How many tokens and choices of experts are equal, of tokens that both routed. Masked ones were not routed."""
    a, b = load_table(ours), load_table(theirs)
    if a.S.shape[::3] != b.S.shape[::3] or a.tokens is None:
        raise SystemExit(f"{ours} and {theirs} are traces of different models, or the first has no token ids.")
    text = [*answer["prompt"], *answer["tokens"]]
    written = np.asarray(a.tokens)[0]
    n = min(written.size, b.S.shape[2])
    both = np.asarray(a.mask)[0, :n] & np.asarray(b.mask)[0, :n]
    choices = [np.sort(np.asarray(table.S)[:, 0, :n], axis=-1)[:, both] for table in (a, b)]
    prompt = len(answer["prompt"])
    return {
        "layers": a.n_layers,
        "tokens": n - prompt,
        "equal_tokens": int((written[prompt:n] == text[prompt:n]).sum()),
        "choices": choices[0].size,
        "equal_choices": int((choices[0] == choices[1]).sum()),
    }


def sentence(found: dict[str, int]) -> str:
    return (
        f"Of the generated tokens, {found['equal_tokens']} of {found['tokens']} are equal; of the choices of experts "
        f"in {found['layers']} layers, {found['equal_choices']:,} of {found['choices']:,}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a generation of llama.cpp with one of stickymoe.")
    parser.add_argument("--ours", type=Path, required=True, help="the trace of stickymoe generate")
    parser.add_argument("--theirs", type=Path, required=True, help="the converted trace of llama.cpp")
    parser.add_argument("--answer", type=Path, required=True, help="the JSON file of examples.llama_cpp.generate")
    parser.add_argument("--record", type=Path, default=HERE / "record.json", help="file to write")
    args = parser.parse_args()
    found = compared(args.ours, args.theirs, json.loads(args.answer.read_text()))
    args.record.write_text(json.dumps(found, indent=1) + "\n")
    print(sentence(found))


if __name__ == "__main__":
    main()
