"""A small transformers checkpoint with a tokenizer, and a text, for tests of the commands."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedTokenizerFast

TEXT = "The cache holds three experts. A token asks for two of them, and the next token asks for others.\n" * 40


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_checkpoint(folder: Path, **changes: object) -> Path:
    """A tiny Mixtral of 2 layers with 6 experts."""
    settings = {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MixtralConfig(**(settings | changes))).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
