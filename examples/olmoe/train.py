"""Train a small OLMoE from scratch, with or without a locality loss, and measure it.

    python -m examples.olmoe.train --text webdocs --out models/olmoe/soft-1 --variant soft --seed 1

4 layers, 16 experts, top-2, 10.2M parameters; BPE of 4,096 tokens, trained on train.txt. Ctrl-C saves and stops; the
same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast, TrainingArguments, set_seed

from examples.common import Rows, read_rows, tokens_of, train, variant_of
from examples.evaluate import record_of, write_record
from stickymoe.data.tokenizers import train_bpe
from stickymoe.training.memory import keep_freed_memory

VOCAB = 4096
END = "<|endoftext|>"


def tokenise(text: Path, cache: Path) -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """The tokenizer and the training tokens, from `cache`, which the first run fills."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        if not (cache / "tokenizer.json").exists():
            bpe = train_bpe(read_rows(text / "train.txt"), VOCAB - 1)
            PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END).save_pretrained(cache)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(cache)
        return tokenizer, tokens_of(tokenizer, text / "train.txt", cache / "train.npy")


def olmoe(tokenizer: PreTrainedTokenizerFast, seq_len: int) -> OlmoeForCausalLM:
    config = OlmoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.0,  # the balance term is the variant's
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return OlmoeForCausalLM(config)


def optimiser_of(model: OlmoeForCausalLM, lr: float) -> torch.optim.Optimizer:
    """The paper's AdamW: weight decay on matrices and embeddings only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def training_arguments(a: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(a.out / "checkpoints"),
        max_steps=a.steps,
        per_device_train_batch_size=a.batch,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, a.steps // 20),
        max_grad_norm=1.0,
        save_steps=a.save_steps,
        save_total_limit=1,
        logging_steps=50,
        seed=a.seed,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small OLMoE from scratch.")
    parser.add_argument("--text", type=Path, required=True, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--variant", default="vanilla", help="vanilla (balance term only), soft, none or another")
    parser.add_argument("--lam", type=float, help="weight of the locality loss; the variant's own by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save_steps", type=int, default=500)
    a = parser.parse_args(argv)

    keep_freed_memory()
    set_seed(a.seed)
    tokenizer, tokens = tokenise(a.text, a.out.parent / "tokens")  # shared with the runs beside this one
    model = olmoe(tokenizer, a.seq_len)
    rows = Rows(tokens, a.seq_len)
    if train(model, rows, variant_of(a.variant, a.lam), training_arguments(a), optimiser_of(model, a.lr)) is None:
        return
    model.save_pretrained(a.out)
    tokenizer.save_pretrained(a.out)
    training = {name: getattr(a, name) for name in ("lam", "steps", "batch", "seq_len", "lr")}
    record = record_of(model, tokenizer, a.text, method=a.variant, seed=a.seed)
    write_record(a.out / "results.json", record | {"training": training})


if __name__ == "__main__":
    main()
