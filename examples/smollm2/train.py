"""Train an upcycled model briefly, so that its experts diverge, with or without a locality loss.

    python -m examples.smollm2.train --model models/smollm2/upcycled --text webdocs --out models/smollm2/soft

Only experts and gates are trained: embeddings, attention and norms stay those of SmolLM2. Adafactor stores row and
column means instead of a second moment for every weight. The gates have a higher learning rate than the experts,
because they start random. Ctrl-C saves and stops; the same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Adafactor, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments, set_seed

from examples.common import Rows, tokens_of, train, variant_of
from examples.evaluate import record_of, write_record
from examples.smollm2.compare import MOST_TOKENS, PROMPT
from stickymoe.training.memory import keep_freed_memory


def train_experts_only(model: PreTrainedModel, lr: float, gate_lr: float) -> torch.optim.Optimizer:
    """Freeze all but experts and gates, and return their optimiser."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    gates = [p for name, p in model.named_parameters() if ".mlp.gate." in name]
    experts = [p for name, p in model.named_parameters() if ".mlp.experts." in name]
    groups = [{"params": experts, "lr": lr}, {"params": gates, "lr": gate_lr}]
    return Adafactor(groups, lr=lr, relative_step=False, scale_parameter=False)


def training_arguments(a: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(a.out / "checkpoints"),
        max_steps=a.steps,
        per_device_train_batch_size=a.batch,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, a.steps // 20),
        max_grad_norm=0.0,  # Adafactor clips its own update
        save_steps=a.save_steps,
        save_total_limit=1,
        logging_steps=5,
        seed=a.seed,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train an upcycled model briefly.")
    parser.add_argument("--model", type=Path, required=True, help="folder that upcycle.py wrote")
    parser.add_argument("--text", type=Path, required=True, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--variant", default="soft", help="soft, vanilla (balance term only), none or another")
    parser.add_argument("--lam", type=float, help="weight of the locality loss; the variant's own by default")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=2, help="rows per step")
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the experts")
    parser.add_argument("--gate_lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_steps", type=int, default=50)
    a = parser.parse_args(argv)

    keep_freed_memory()
    set_seed(a.seed)
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    rows = Rows(tokens_of(tokenizer, a.text / "train.txt", a.out.parent / "tokens" / "train.npy"), a.seq_len)
    optimiser = train_experts_only(model, a.lr, a.gate_lr)
    if train(model, rows, variant_of(a.variant, a.lam), training_arguments(a), optimiser) is None:
        return
    model.save_pretrained(a.out)
    tokenizer.save_pretrained(a.out)
    training = {name: getattr(a, name) for name in ("lam", "steps", "batch", "seq_len", "lr", "gate_lr")}
    settings = {"method": a.variant, "seed": a.seed, "most_tokens": MOST_TOKENS, "prompt": PROMPT}
    record = record_of(model, tokenizer, a.text, **settings)
    write_record(a.out / "results.json", record | {"training": training})


if __name__ == "__main__":
    main()
