"""Our GPT around expert slots: the prompt in one pass of the plain model, then one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from stickymoe.errors import ConfigError, RunError
from stickymoe.models.gpt import GPT, Block, DecodeCache
from stickymoe.models.moe import DeltaExperts, Experts, MoE, Router
from stickymoe.reading import reason
from stickymoe.routing.rules import RouterInput, Routing, kept_by
from stickymoe.runs.settings import read_config
from stickymoe.runtime.decoder import Decoder
from stickymoe.runtime.experts import ExpertLayers, Layers
from stickymoe.runtime.stored_rows import StoredRows, StoredTable
from stickymoe.runtime.tokens import decode_token
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import find_checkpoint, load_model


class SlotExperts(nn.Module):
    """Takes the place of a layer's experts."""

    def __init__(self, layer: int, layers: Layers) -> None:
        super().__init__()
        self.layer = layer
        self.layers = layers
        self._residents: list[int] = []

    def keep_bases(self, experts: Experts) -> None:
        """Own the bases of the experts that this takes the place of, if these are differences from bases."""
        if isinstance(experts, DeltaExperts):
            self.up, self.down = experts.up, experts.down

    def forward(self, h: Float[Tensor, "n d"], S: Int[Tensor, "n k"], w: Float[Tensor, "n k"]) -> Float[Tensor, "n d"]:
        return self.layers.compute(self.layer, h, S, w, _plain_expert, "weight", self._residents)

    def routed(self, router: nn.Module, args: Any, routing: Routing) -> None:
        """The router of this layer has run, directly before its experts are computed."""
        self._residents = kept_by(routing.state)


def _plain_expert(tensors: dict[str, Tensor], x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """eq:moe_output for one expert."""
    z = F.gelu(torch.addmm(tensors["up_bias"], x, tensors["up"].t()))
    return torch.addmm(tensors["down_bias"], z, tensors["down"].t())


@torch.no_grad()
def _keeps_residents(router: Router) -> bool:
    """Whether the rule keeps experts resident itself, as its state after one token shows."""
    h = torch.zeros(1, 1, router.gate.in_features)
    first = torch.zeros(1, 1, dtype=torch.long)
    logits = torch.zeros(1, 1, router.gate.out_features)
    state = router.rule(logits, RouterInput(h, h, first, first, None, first.bool())).state
    return state.resident is not None


def _use_stored(model: GPT, rows: StoredRows) -> None:
    """Let the model take rows from the store instead of tables in memory."""
    for name in rows.layout.shapes:
        path, _, child = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(path), child, StoredTable(rows, name))


class RunText:
    """A text of a run: the prompt in one pass, then one token after another."""

    def __init__(self, host: RunHost, ids: list[int]) -> None:
        self._host = host
        self._tokens = list(ids)
        self._cache = DecodeCache.empty(host.model.config.n_layers)
        self.logits: Float[np.ndarray, " V"] = host.forward(self._tokens, len(ids), self._cache)[-1].numpy()
        self._decoder = None if host.decoder is None else host.decoder.for_new_text()
        if self._decoder is not None:
            self._decoder.start(self._cache)
            del self._cache  # the decoder has copied it

    def append(self, token: int) -> None:
        if self._decoder is None:
            self._tokens.append(token)
            self.logits = self._host.forward(self._tokens, 1, self._cache)[-1].numpy()
        else:
            self.logits = self._host.decode_token(self._decoder, token)


class RunHost:
    """A model of ours, from a store or (without experts) from its run folder."""

    def __init__(self, folder: Path, layers: Layers | None, threads: int) -> None:
        self.layers = layers
        self.threads = threads
        # What computes the token: a decoder, or the model itself with the state before the token.
        self._now: Decoder | tuple[DecodeCache, int] | None = None
        config = read_config(file=folder / "config.yaml")
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # the tokenizers library raises plain Exception
            raise RunError(f"{folder / 'tokenizer.json'} is missing or damaged ({reason(e)}).") from e
        if config.variant.settings().get("sentence", False):
            raise ConfigError("This variant needs the borders of sentences, which are not known while text is written.")
        vocab = self.tokenizer.get_vocab_size()
        if layers is None:
            chosen = find_checkpoint(folder / "checkpoints")
            if chosen is None:
                raise RunError(f"{folder} has no checkpoint: resume or repeat the run first.")
            self.model = build_model(config, vocab)
            load_model(chosen, self.model)
        else:
            with torch.device("meta"):  # nothing is allocated; the weights come from the store
                self.model = build_model(config, vocab)
            self._use_slots(layers)
            if layers.rows is not None:
                _use_stored(self.model, layers.rows)
            self.model.load_state_dict(load_file(layers.dense()) | layers.tables(), strict=True, assign=True)
            owners = [m for m in self.model.modules() if isinstance(m, SlotExperts) and len(list(m.parameters()))]
            if owners:
                layers.set_bases([(m.up.detach(), m.down.detach()) for m in owners])
        self.model.train(False)
        compiled = layers is None or layers.kernel == "compiled"
        self.decoder = Decoder(self.model, threads=threads) if compiled else None
        if self.decoder is not None:
            self.decoder.warm_up()
        self.keeps_residents = any(
            isinstance(block.ffn, MoE) and _keeps_residents(block.ffn.router) for block in self.model.blocks
        )
        self.context = config.model.seq_len
        self.vocab_size = vocab

    def _use_slots(self, layers: Layers) -> None:
        for layer, block in enumerate(self.model.blocks):
            if isinstance(block.ffn, MoE):
                shared = block.ffn.__dict__.pop("experts", None)  # experts of an earlier layer are not registered
                experts = SlotExperts(layer, layers)
                if shared is None:
                    experts.keep_bases(block.ffn.experts)
                block.ffn.experts = experts  # type: ignore[assignment]
                block.ffn.router.register_forward_hook(experts.routed)
        layers.predict = self._predict

    @property
    def dense_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def end_ids(self) -> tuple[int, ...]:
        return ()  # the text that a run is trained on has no special tokens

    def encode(self, text: str, *, chat: bool) -> list[int]:
        if chat:
            raise ConfigError("--chat: a run of stickymoe has no chat template; omit --chat.")
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    @property
    def has_chat(self) -> bool:
        return False

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise ConfigError("A run of stickymoe has no chat template: pass a prompt in place of messages.")

    def begin(self, ids: list[int]) -> RunText:
        return RunText(self, ids)

    def decode_token(self, decoder: Decoder, token: int) -> Float[np.ndarray, " V"]:
        """The logits after one more token, in compiled loops."""
        self._now = decoder
        assert self.layers is None or isinstance(self.layers, ExpertLayers)
        return decode_token(decoder, self.layers, token)

    def logits(self, ids: list[int]) -> Float[Tensor, "T V"]:
        return self.forward(ids, len(ids), None)

    @torch.no_grad()
    def forward(self, text: list[int], n: int, cache: DecodeCache | None) -> Float[Tensor, "T V"]:
        """The logits after each of the last n tokens of a text, by the model itself; `cache` has those before."""
        if self.layers is not None:
            self.layers.begin()
            if self.layers.rows is not None:
                self.layers.rows.begin(np.array(text), np.arange(len(text)), len(text) - n)
        self._now = None if cache is None else (cache, text[-1])
        out = self.model(torch.tensor([text[-n:]]), cache=cache)
        logits: Tensor | None = out.logits
        assert logits is not None
        return logits[0]

    def _predict(self, layer: int, x: Float[Tensor, "1 d"]) -> list[int] | None:
        """What the router of a layer would choose for the hidden state of the layer before; its state stays."""
        if isinstance(self._now, Decoder):
            return self._now.predict(layer)
        assert self._now is not None
        cache, token = self._now
        block, past = self.model.blocks[layer], cache.layers[layer]
        assert isinstance(block, Block)
        assert isinstance(block.ffn, MoE)
        if block.ffn.router.rule.source != "h":  # what it reads is not known before the layer
            return None
        position = torch.tensor([[cache.length]])
        seen = RouterInput(x[None], tokens=torch.tensor([[token]]), position=position)
        routing = block.ffn.router(seen, None if past is None else past.router)
        return [e for e, w in zip(routing.S[0, 0].tolist(), routing.w[0, 0].tolist(), strict=True) if w != 0]
