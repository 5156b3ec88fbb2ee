"""A transformers model around expert slots: its own forward pass, with the experts computed by ours.

Where compiled loops know the model, its own forward pass runs the prompt only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from stickymoe.errors import ConfigError
from stickymoe.reading import reason
from stickymoe.runtime.experts import ExpertLayers, Layers
from stickymoe.runtime.hosts import build_without_experts, expert_gates, install, torch_expert
from stickymoe.runtime.llama import LlamaDecoder
from stickymoe.runtime.tokens import decode_token


class TransformersText:
    """A text of a transformers model: the prompt in one pass, then one token after another."""

    def __init__(self, host: TransformersHost, ids: list[int]) -> None:
        self._host = host
        out = host.forward(ids, None)
        self.logits: Float[np.ndarray, " V"] = out.logits[0, -1].float().numpy()
        self._past = out.past_key_values
        self._decoder = None if host.decoder is None else host.decoder.for_new_text()
        if self._decoder is not None:
            self._decoder.start(self._past)
            del self._past  # the decoder has copied it

    def append(self, token: int) -> None:
        if self._decoder is None:
            self.logits = self._host.forward([token], self._past).logits[0, -1].float().numpy()
        else:
            self.logits = self._host.decode_token(self._decoder, token)


class TransformersHost:
    """A model of transformers, from a store."""

    keeps_residents = False

    def __init__(self, folder: Path, layers: Layers, threads: int) -> None:
        self.layers = layers
        self.model: PreTrainedModel = build_without_experts(folder, dense=layers.dense())
        if not self.model.can_generate():
            raise ConfigError(f"{folder} is a {type(self.model).__name__}, which does not generate text.")
        self._gates = expert_gates(self.model)
        self._installed = install(self.model, self._compute)
        self._calls: dict[nn.Module, tuple[Any, ...]] = {}  # what each gate was called with last
        self._known = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        for gate in self._gates:
            gate.module.register_forward_pre_hook(self._note_call)
        self._tokenizer_folder = folder
        self._tokenizer: Any = None
        text_config = self.model.config.get_text_config()
        self.context = int(getattr(text_config, "max_position_embeddings", 0) or 0)
        self.vocab_size = int(text_config.vocab_size)
        self.decoder = LlamaDecoder.of(self.model, threads=threads) if layers.kernel == "compiled" else None
        if self.decoder is not None:
            self.decoder.warm_up()
        self._now: LlamaDecoder | None = None  # what computes the token; None: the model itself
        layers.predict = self._predict

    @property
    def tokenizer(self) -> Any:
        """Loaded when text is encoded or decoded: token ids need none."""
        if self._tokenizer is None:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_folder)
            except (OSError, ValueError, KeyError, ImportError) as e:
                raise ConfigError(f"{self._tokenizer_folder} has no tokenizer that loads ({reason(e)}).") from e
        return self._tokenizer

    @property
    def dense_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters() if not p.is_meta)

    @property
    def end_ids(self) -> tuple[int, ...]:
        config = getattr(self.model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        return () if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),)

    def encode(self, text: str, *, chat: bool) -> list[int]:
        if not chat:
            return list(self.tokenizer(text)["input_ids"])
        if not self.has_chat:
            raise ConfigError(f"--chat: {self._tokenizer_folder} has no chat template; omit --chat.")
        return self.encode_chat([{"role": "user", "content": text}])

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if not self.has_chat:
            raise ConfigError("The tokenizer of this model has no chat template: pass a prompt in place of messages.")
        try:
            encoded = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, tokenize=True
            )
        except TemplateError as e:  # a template can refuse messages, such as two of one role in a row
            raise ConfigError(f"messages: the chat template of this model refuses them ({reason(e)}).") from e
        return list(encoded["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def begin(self, ids: list[int]) -> TransformersText:
        return TransformersText(self, ids)

    def decode_token(self, decoder: LlamaDecoder, token: int) -> Float[np.ndarray, " V"]:
        """The logits after one more token, in compiled loops."""
        self._now = decoder
        assert isinstance(self.layers, ExpertLayers)
        return decode_token(decoder, self.layers, token)

    def logits(self, ids: list[int]) -> Float[Tensor, "T V"]:
        logits: Tensor = self.forward(ids, None).logits[0]
        return logits

    @torch.no_grad()
    def forward(self, tokens: list[int], past: Any) -> Any:
        """What the model itself gives for tokens that continue the text of `past`."""
        self._now = None
        self.layers.begin()
        return self.model(input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True)

    def _compute(
        self,
        layer: int,
        module: nn.Module,
        x: Float[Tensor, "n d"],
        S: Int[Tensor, "n k"],
        w: Float[Tensor, "n k"],
    ) -> Float[Tensor, "n d"]:
        return self.layers.compute(layer, x, S, w, lambda tensors, rows: torch_expert(module, tensors, rows), "expert")

    def _note_call(self, gate: nn.Module, args: tuple[Any, ...]) -> None:
        if self.layers.prefetch == "next_layer":
            self._calls[gate] = args

    def _predict(self, layer: int, x: Float[Tensor, "1 d"]) -> list[int] | None:
        """What the gate of a layer chooses for the hidden state of the layer before."""
        if self._now is not None:
            return self._now.predict(self._now.expert_layers[layer])
        gate = self._gates[layer]
        hidden, *others = self._calls[gate.module]
        if not all(other is None or id(other) in self._known for other in others):  # it reads more than hidden states
            return None
        reading = gate.read(gate.module(x.view(*[1] * (hidden.dim() - 1), -1), *others))
        w, order = reading.weights.reshape(-1).sort(descending=True, stable=True)
        N = self.layers.contents.n_experts
        chosen = reading.indices.reshape(-1)[order]
        return [e for e, weight in zip(chosen.tolist(), w.tolist(), strict=True) if e < N and weight != 0]
