"""Write the model of a run as a folder that transformers loads."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from stickymoe import files
from stickymoe.errors import RunError
from stickymoe.huggingface.model import StickyMoEConfig, StickyMoEForCausalLM
from stickymoe.reading import reason
from stickymoe.runs.config import RunConfig
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.training.checkpoint import find_checkpoint, load_model

# Tokens for padding and for the end of a text: GPT-2's own, or the byte 0 as byte-level vocabularies write it. The text
# that a model is trained on has no special tokens, so neither is ever predicted.
_END_TOKENS = ("<|endoftext|>", "Ā")


def export_run(run: Path, out: Path, *, checkpoint: str | None = None) -> None:
    """Write the newest or named checkpoint of a run, its config and its tokenizer into the new folder `out`."""
    if out.exists() or out.is_symlink():
        raise RunError(f"{out} exists already, expected a new folder. Choose another one, or delete it first.")
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise RunError(f"{run} is not a run: it has no config.yaml. Pass a folder that stickymoe train wrote.")
    config = read_config(file=folder.config)
    chosen = find_checkpoint(folder.checkpoints, checkpoint)
    if chosen is None:
        raise RunError(f"{run} has no checkpoint to export: resume or repeat the run first.")
    tokenizer = _tokenizer(folder, config)
    model = StickyMoEForCausalLM(StickyMoEConfig.of_run(config, len(tokenizer)))
    load_model(chosen, model.gpt)
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)  # type: ignore[no-untyped-call]
    _write(model, tokenizer, out)


def _tokenizer(folder: RunFolder, config: RunConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of a run. Text that looks like a special token is encoded as text, as in training."""
    try:
        tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    except Exception as e:  # the tokenizers library raises plain Exception
        raise RunError(f"{folder.tokenizer} is missing or damaged ({reason(e)}). Train the run again.") from e
    end = next(token for token in _END_TOKENS if tokenizer.token_to_id(token) is not None)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=end,
        eos_token=end,
        split_special_tokens=True,
        padding_side="right",
        model_max_length=config.model.seq_len,
    )


def _write(model: StickyMoEForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a folder that is complete or absent."""
    temporary = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        files.publish_folder(temporary, out)
    except (OSError, SafetensorError) as e:
        raise RunError(f"{out} cannot be written ({reason(e)}). Choose another folder.") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
