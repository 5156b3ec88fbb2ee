"""Our GPT as a model of transformers: the same weights and logits, with `generate`, pipelines and evaluation tools.

Routers remember more than keys and values, so the cache is our own `DecodeCache`. B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from stickymoe.errors import ConfigError, require
from stickymoe.models.gpt import GPT, DecodeCache
from stickymoe.runs.config import RunConfig
from stickymoe.variants import Site


class StickyMoEConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The sections `model` and `variant` of a run's config, and the size of the vocabulary."""

    model_type = "stickymoe"

    def __init__(
        self,
        vocab_size: int = 4096,
        model: dict[str, Any] | None = None,
        variant: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.model = {} if model is None else model
        self.variant = {"name": "vanilla"} if variant is None else variant
        complete = self.run_config().as_dict()
        self.model, self.variant = complete["model"], complete["variant"]
        super().__init__(**kwargs)

    @classmethod
    def of_run(cls, config: RunConfig, vocab_size: int) -> StickyMoEConfig:
        """The config of the model of a run."""
        settings = config.as_dict()
        return cls(vocab_size=vocab_size, model=settings["model"], variant=settings["variant"])

    def run_config(self) -> RunConfig:
        """The settings as a `RunConfig`, which checks them. Data, training and evaluation have default values."""
        size = self.vocab_size
        require(type(size) is int and size >= 1, "vocab_size", size, "a whole number ≥ 1")
        other: dict[str, Any] = {"data": {}, "train": {}, "eval": {}, "seed": 0}
        config = RunConfig.from_dict({"model": self.model, "variant": self.variant, **other})
        by_sentence = config.variant.settings().get("sentence", False)
        require(not by_sentence, "variant.sentence", by_sentence, "False: transformers does not mark sentences")
        return config

    # The names that transformers and evaluation tools read

    @property
    def hidden_size(self) -> int:
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.model["n_layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["n_heads"])

    @property
    def max_position_embeddings(self) -> int:
        return int(self.model["seq_len"])


class GenerationCache(DecodeCache):
    """A `DecodeCache` with what `generate` reads and calls."""

    is_croppable = False  # a router cannot return to an earlier state
    is_compileable = False  # it grows

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in that order."""
        chosen = self.select(beam_idx)
        self.layers, self.position, self.doc = chosen.layers, chosen.position, chosen.doc


class StickyMoEForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A GPT with the routers of a variant. The head is the token embedding, so there is one tensor for both."""

    config_class = StickyMoEConfig
    config: StickyMoEConfig
    accepts_loss_kwargs = True  # `forward` takes num_items_in_batch
    _is_stateful = True  # assisted generation, which crops the cache, is refused

    def __init__(self, config: StickyMoEConfig) -> None:
        super().__init__(config)
        settings = config.run_config()
        c, V, variant = settings.model, config.vocab_size, settings.variant
        self.gpt = GPT(c, V, lambda layer: variant.parts(Site(layer, c.d_model, c.pool_size, c.top_k, V)))
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The GPT initialises itself."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.token_embedding

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if there are labels: label t is predicted from the tokens before t, −100 is ignored.

        `attention_mask` marks real tokens, which come first in a row. The loss is the mean over the labels, or their
        sum divided by `num_items_in_batch`. It is the cross-entropy alone, without the terms of the variant.
        """
        cache = _cache(past_key_values)
        if cache is None and use_cache:
            cache = GenerationCache([None] * self.config.num_hidden_layers)
        logits = self._logits(input_ids, attention_mask, cache)
        loss = None
        if labels is not None:
            V = self.config.vocab_size
            loss = self.loss_function(logits, labels, V, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]

    def _logits(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None, cache: DecodeCache | None
    ) -> Float[Tensor, "B T V"]:
        """The logits of the GPT, after a check of the mask."""
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        if mask is not None:
            _require_padding_on_the_right(mask, input_ids, cache)
        logits = self.gpt(input_ids, mask=mask, cache=cache).logits
        assert isinstance(logits, Tensor)
        return logits

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Whether keys and values are all that is remembered."""
        return False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ConfigError(
                "generate: got prompts padded to one length, expected prompts of equal length without padding; "
                "call generate once for each length, or use batch_size=1 in a pipeline or in lm-eval."
            )
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc,arg-type]
        return inputs

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Refuse a text that is too long before its first token is generated."""
        longest, seq_len = generation_config.max_length, self.config.max_position_embeddings
        if longest > seq_len:
            raise ConfigError(
                f"generate: got {input_ids_length} tokens and {longest - input_ids_length} to generate, expected at "
                f"most seq_len={seq_len} together; set max_new_tokens."
            )
        super()._validate_generated_length(  # type: ignore[misc]
            generation_config, input_ids_length, has_default_max_length
        )


def _cache(given: object) -> GenerationCache | None:
    """The cache of the tokens so far; refused if it holds keys and values alone."""
    if given is None or isinstance(given, GenerationCache):
        return given
    expected = "the cache of an earlier call of this model"
    raise ConfigError(f"past_key_values: got {type(given).__name__}, expected {expected}; pass use_cache=True first.")


def _require_padding_on_the_right(mask: Tensor, input_ids: Tensor, cache: DecodeCache | None) -> None:
    if cache is not None:
        raise ConfigError(
            "attention_mask: got padding with a cache, expected rows of equal length; use use_cache=False, or rows "
            "without padding."
        )
    if mask.shape != input_ids.shape:
        expected = list(input_ids.shape)
        raise ConfigError(f"attention_mask: got the shape {list(mask.shape)}, expected that of input_ids, {expected}.")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ConfigError(
            "attention_mask: got padding on the left, expected it on the right; set tokenizer.padding_side='right'."
        )
