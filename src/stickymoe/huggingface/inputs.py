"""What a forward pass of a transformers model was given, as routing needs it: real tokens, documents, labels.

B sequences, T tokens, P tokens before them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from stickymoe.errors import ConfigError

NO_TARGET = -100


@dataclass(frozen=True)
class Inputs:
    """The inputs of one forward pass. `past` is the KV cache, `past_length` the tokens that it holds."""

    mask: Bool[Tensor, "B T"]
    doc: Int[Tensor, "B T"] | None
    tokens: Int[Tensor, "B T"] | None
    past: Any
    past_length: int
    labels: Tensor | None
    fraction: Tensor | float  # what this pass contributes to the labels of the whole batch

    @classmethod
    def of(
        cls, model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], prompt_mask: Tensor | None
    ) -> Inputs:
        """`prompt_mask` is the mask that the user gave to `generate`."""
        given = _by_name(model, args, kwargs)
        tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
        like = tokens if tokens is not None else embeds
        if like is None:
            raise ConfigError("attach: the forward pass got neither input_ids nor inputs_embeds; pass one of them.")
        shape = (like.shape[0], like.shape[1])
        past: Any = given.get("past_key_values")
        length = int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0
        if given.get("position_ids") is None and given.get("cu_seq_lens_q") is not None:
            raise ConfigError(
                "attach: got cu_seq_lens_q without position_ids, which say where documents begin; pass both."
            )
        mask = _mask(given.get("attention_mask"), prompt_mask, shape, length, like.device)
        labels = given.get("labels")
        return cls(
            mask=mask,
            doc=None if length else _documents(given.get("position_ids"), mask),
            tokens=tokens,
            past=past,
            past_length=length,
            labels=labels,
            fraction=label_fraction(model, labels, given.get("shift_labels"), given.get("num_items_in_batch")),
        )


def _by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if not args:
        return kwargs
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _mask(given: Any, prompt_mask: Tensor | None, shape: tuple[int, int], past: int, device: torch.device) -> Tensor:
    """Real tokens among the T of this pass."""
    B, T = shape
    if not isinstance(given, Tensor) or given.ndim != 2:  # none, or already expanded to four dimensions
        if given is not None and prompt_mask is None:
            raise ConfigError(
                "attach: got an attention mask that is not [rows, tokens], in which padding cannot be found; pass a "
                "mask of two dimensions, and position_ids for packed documents."
            )
        given = prompt_mask
    if given is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    mask: Tensor = given.to(device).bool()
    if len(mask) != B and B % len(mask) == 0:  # beams, or several answers to one prompt
        mask = mask.repeat_interleave(B // len(mask), dim=0)
    if mask.shape[1] < past + T:  # tokens after the prompt are real
        mask = torch.nn.functional.pad(mask, (0, past + T - mask.shape[1]), value=True)
    return mask[:, past : past + T]


def _documents(position_ids: Any, mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"] | None:
    """Document numbers of a packed row, whose positions start again at every document; None for one document a row."""
    if not isinstance(position_ids, Tensor):
        return None
    if position_ids.ndim == 3 and len(position_ids) == 4:  # text positions come first, then those of images
        position_ids = position_ids[0]
    if position_ids.ndim != 2 or position_ids.shape[1] != mask.shape[1]:
        return None
    follows = position_ids[:, 1:] == position_ids[:, :-1] + 1
    begins = ~follows & mask[:, 1:] & mask[:, :-1]
    if not bool(begins.any()):
        return None
    doc = torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
    return doc.expand(mask.shape)


def label_fraction(
    model: PreTrainedModel, labels: Tensor | None, shifted: Tensor | None, total: Tensor | int | None
) -> Tensor | float:
    """Labels of this pass / labels of all passes before the next step of the optimiser, as transformers counts them."""
    if total is None or (labels is None and shifted is None):
        return 1.0
    own = shifted
    if own is None:
        assert labels is not None
        own = labels[..., 1:] if LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss else labels
    fraction: Tensor = own.ne(NO_TARGET).sum() / total
    return fraction
