"""Measure n-gram models on the tokens of published runs: python results/ngrams.py CORPUS [CORPUS ...].

Writes results/ngrams.json. A corpus is a folder with train.txt, valid.txt and test.txt.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from stickymoe.data.tokens import load_tokens
from stickymoe.paper.ngrams import kneser_ney
from stickymoe.runs.config import DataConfig

HERE = Path(__file__).parent
ORDERS = (2, 3, 4)
VOCAB_SIZE = 4096


def measured(folder: Path) -> dict[str, Any]:
    """Perplexity and bits per byte of each order on the validation split."""
    data = load_tokens(DataConfig(corpus="wikitext-2", path=str(folder), vocab_size=VOCAB_SIZE))
    targets = data.valid.tokens[1:]
    models = []
    for order in ORDERS:
        nats = -kneser_ney(data.train.tokens, data.valid.tokens, order=order, vocab_size=data.vocab_size).sum()
        bits_per_byte = float(nats / math.log(2) / data.token_bytes[targets].sum())
        models.append({"order": order, "ppl": math.exp(nats / len(targets)), "bits_per_byte": bits_per_byte})
        print(f"{folder.name}  {order}-gram  PPL {models[-1]['ppl']:.2f}  {bits_per_byte:.4f} bits per byte")
    return {"corpus": folder.name, "data": data.describe(), "models": models}


if __name__ == "__main__":
    folders = [Path(arg) for arg in sys.argv[1:]]
    if not folders or not all(folder.is_dir() for folder in folders):
        sys.exit(f"Got {' '.join(sys.argv[1:]) or 'no arguments'}; expected folders of corpora.")
    (HERE / "ngrams.json").write_text(json.dumps([measured(folder) for folder in folders], indent=1) + "\n")
