"""Tiny random models of the mixture-of-experts families of transformers.

A family is named by its folder in ``transformers/models``. ``tiny(family)`` builds a model of a few thousand parameters
whose gates choose differently from token to token, and ``batch(model)`` gives it something to read. Every family is one
row of a table: the names of its two classes and what its configuration needs beyond the shared defaults.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCABULARY = 64
EXPERTS = 8

# Given to a configuration only where it has a field of that name.
DEFAULTS: dict[str, Any] = {
    # sizes
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "sliding_window": 16,
    "initializer_range": 0.2,  # experts large enough to be noticed in the output
    # tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "router_jitter_noise": 0.0,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # linear attention and state spaces
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 4,
    "mamba_d_conv": 2,
    "hc_mult": 2,
}

# Shrinks the image and audio towers of families whose language model comes only with them.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "intermediate_size": 16,
    "encoder_ffn_dim": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "encoder_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "encoder_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 32,
    "output_dim": 32,
    "patch_size": 4,
    "image_size": 16,
    "window_size": 2,
    "mlp_dim": 16,
    "output_channels": 8,
    "downsample_channels": [16, 32],
    "global_attn_indexes": [0],
    "vocab_size": 8,
    "position_embedding_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "downsample_hidden_size": 8,
    "n_window": 4,
    "n_window_infer": 8,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "projection_intermediate_size": 16,
    "patch_sizes": [4],
    "hidden_sizes": [32],
    "depths": [1],
}

# Settings of the configuration around the language model's. No token of a batch may mean an image.
WHOLE: dict[str, dict[str, Any]] = {
    "qwen3_omni_moe": {"vision_start_token_id": 1000},
    "mistral_large4": {"image_token_index": 1000},
    "muse_spark": {"out_hidden_size": 32, "projector_hidden_size": 32},
}

SPARSE = ["dense", "sparse", "sparse"]
# Two experts are always within the two groups with the best experts: only a single group is a limit.
BEST_GROUP = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = ["linear_attention", "linear_attention", "full_attention"]

# family: (model class, configuration class, settings of the language model)
TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # softmax
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"norm_topk_prob": True}),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {}),
    "mellum": ("MellumForCausalLM", "MellumConfig", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {"layer_types": LINEAR}),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {
            "layer_types": LINEAR,
            "hc_count": 2,
            "hc_lowrank": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
    ),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerConfig", {}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {"block_size": 4}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {"layer_types": LINEAR}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {}),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", BEST_GROUP),
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        "DeepseekOcr2Config",
        {**BEST_GROUP, "mlp_layer_types": SPARSE},
    ),
    "unlimited_ocr": (
        "UnlimitedOcrForConditionalGeneration",
        "UnlimitedOcrConfig",
        {**BEST_GROUP, "mlp_layer_types": SPARSE},
    ),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Config", {"n_group": 2, "topk_group": 1}),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", "MistralLarge4Config", {"n_group": 2, "topk_group": 1}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", {}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {"num_layers": 2, "zero_expert_num": 4, "ffn_hidden_size": 16, "expert_ffn_hidden_size": 16},
    ),
    # top-k of logits, then softmax
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig", {}),
    "aria": ("AriaTextForCausalLM", "AriaTextConfig", {}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig", {}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_chunk_size": 4,
        },
    ),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", {}),
    "cohere2_moe": ("Cohere2MoeForCausalLM", "Cohere2MoeConfig", {}),
    # sigmoid, selection bias and groups
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {}),
    "axk1": ("AXK1ForCausalLM", "AXK1Config", {}),
    "axk2": ("AXK2ForCausalLM", "AXK2Config", {"gated_norm_rank": 4}),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig", {"layer_group_size": 2}),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", {"norm_topk_prob": True}),
    "exaone_moe": ("ExaoneMoeForCausalLM", "ExaoneMoeConfig", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {}),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        {"rope_parameters": {**ROPE, "mrope_section": [1, 1], "partial_rotary_factor": 0.5}},
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {"mlp_layer_types": SPARSE, "layer_types": LINEAR, "index_kpool": 2, "qk_rope_head_dim": 0},
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {}),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", {}),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", {"layer_types": LINEAR}),
    "solar_open": ("SolarOpenForCausalLM", "SolarOpenConfig", {}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "use_mamba_kernels": False,
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 2,
            "chunk_size": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "beam": ("BeamForCausalLM", "BeamConfig", {"mlp_layer_types": SPARSE}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", {"head_dim": 12, "num_key_value_heads": 2}),
    # sigmoid
    "minimax_m3_vl": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {"dense_intermediate_size": 16, "rotary_dim": 8, "mlp_layer_types": SPARSE},
    ),
    "step3p7": (
        "Step3p7ForConditionalGeneration",
        "Step3p7Config",
        {"share_expert_dim": 16, "mlp_layer_types": SPARSE, "moe_router_scaling_factor": 1.5},
    ),
    "muse_spark": (
        "MuseSparkForConditionalGeneration",
        "MuseSparkConfig",
        {"moe_hidden_size": 32, "output_multiplier": 0.5},
    ),
    "laguna": (
        "LagunaForCausalLM",
        "LagunaConfig",
        {"moe_router_logit_softcapping": 2.0, "moe_routed_scaling_factor": 1.5},
    ),
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {"route_scale": 1.5}),
    "hy_v3": ("HYV3ForCausalLM", "HYV3Config", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "kolibri1": ("Kolibri1ForCausalLM", "Kolibri1Config", {}),
    "flint": ("FlintForCausalLM", "FlintConfig", {"mlp_only_layers": [0]}),
    "inkling": (
        "InklingForCausalLM",
        "InklingTextConfig",
        {
            "n_shared_experts": 2,
            "mlp_layer_types": SPARSE,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 8,
            "sliding_window_size": 16,
            "d_rel": 4,
            "rel_extent": 16,
            "conv_kernel_size": 2,
            "logits_mup_width_multiplier": 1.0,
        },
    ),
    # the rest
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "num_key_value_heads": 1,
            "head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "diffusion_gemma": (
        "DiffusionGemmaEncoderTextModel",
        "DiffusionGemmaTextConfig",
        {"top_k_experts": 2, "global_head_dim": 8},
    ),
    "zaya": ("ZayaForCausalLM", "ZayaConfig", {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {"router_jitter_noise": 0.2}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Ernie4_5_VLMoeConfig",
        {"moe_intermediate_size": [16, 8], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        },
    ),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {"intermediate_size_mlp": 16, "attention_chunk_size": 16}),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", {"kv_channels": 8}),
    # special
    "doge": ("DogeForCausalLM", "DogeConfig", {"is_moe": True, "num_experts": 16}),
    "nllb_moe": (
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "expert_capacity": 8,
        },
    ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 16,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "decoder_start_token_id": 0,
            "expert_capacity": 8,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
}

SPECIAL: tuple[str, ...] = ("doge", "nllb_moe", "switch_transformers")
DENSE: tuple[str, ...] = ("llama",)
FAMILIES: tuple[str, ...] = tuple(name for name in TABLE if name not in SPECIAL + DENSE)

# Models whose forward pass has no argument `labels`.
NO_LOSS: tuple[str, ...] = ("diffusion_gemma",)
HAS_LOSS: tuple[str, ...] = tuple(name for name in TABLE if name not in NO_LOSS)

BIASES = ("e_score_correction_bias", "expert_bias")


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Give a tiny model of the family in eval mode; `changes` go into the configuration of its language model."""
    model_class, config_class, settings = TABLE[family]
    config = _config(getattr(transformers, config_class), {**settings, **changes}, WHOLE.get(family, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config).float()
        _spread(model, shift=0.0 if family == "axk2" else -0.7)
    return model.eval()


def batch(model: PreTrainedModel, B: int = 2, T: int = 9) -> dict[str, Tensor]:
    """Give tokens without padding, and labels where the model computes a loss."""
    generator = torch.Generator().manual_seed(B * 1000 + T)
    ids = torch.randint(3, VOCABULARY, (B, T), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if has_loss(model):
        inputs["labels"] = ids % model.config.num_labels if _classifies(model) else ids.clone()
    return inputs


def has_loss(model: PreTrainedModel) -> bool:
    """Whether the model returns a loss when it is given labels."""
    return "labels" in inspect.signature(model.forward).parameters


def gates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Go through (name, gate, block) of all gates of feed-forward experts; a vision gate is among them."""
    for name, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" not in children and "input_linear" not in children:
            continue
        if "attention" in name:  # JetMoE routes its attention heads, too
            continue
        for child in ("gate", "router"):
            if child in children:
                yield f"{name}.{child}", children[child], block


def _config(config_class: Any, settings: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Build a configuration; one made of parts gets a small tower for each part that is not the language model."""
    parts = dict(config_class.sub_configs)
    if "text_config" not in parts:
        return config_class(**{**_known(config_class, DEFAULTS), **settings})
    text = _config(parts.pop("text_config"), settings, {})
    towers = {name: _tower(config_class, name) for name in parts}
    return config_class(text_config=text, **towers, **whole)


def _tower(config_class: Any, name: str) -> Any:
    """Build a small configuration of one part, itself perhaps made of parts."""
    part = config_class.sub_configs[name]
    if part is transformers.AutoConfig:
        part = type(part.for_model(config_class.sub_configs_defaults[name].model_type))
    inner = {child: _tower(part, child) for child in part.sub_configs}
    return part(**_known(part, TOWER), **inner)


def _known(config_class: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the settings that the configuration has a field for."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}


def _classifies(model: PreTrainedModel) -> bool:
    """Whether labels are classes of tokens instead of tokens."""
    return type(model).__name__.endswith("ForTokenClassification")


def _spread(model: nn.Module, shift: float) -> None:
    """Draw gates and selection biases anew, so that choices depend on the token and the biases matter.

    A shift of all biases changes no choice, but makes biased scores negative: an expert outside the best groups must
    not pass for one with score 0. AXK2 lets it pass, and its choice among several such experts would be arbitrary.
    """
    with torch.no_grad():
        for _, gate, block in gates(model):
            for name, tensor in [*gate.named_parameters(), *gate.named_buffers(), *_own(block)]:
                _redraw(name.rsplit(".", 1)[-1], tensor, shift)
        for name, tensor in model.named_parameters():
            if name.endswith("router_gate.weight"):  # Doge has no gate beside its experts
                tensor.normal_(std=0.5)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Go through a module's parameters and buffers without those of its children."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name in BIASES:
            yield name, tensor


def _redraw(name: str, tensor: Tensor, shift: float) -> None:
    """Draw one tensor of a gate anew, by its name and shape."""
    if name in BIASES:
        tensor.normal_(shift, 0.3)
    elif name == "balancing_biases":
        tensor.normal_(-1.1, 0.3)
        tensor[-1] = -1.0  # from_pretrained sets Zaya's skip class to this, whatever was saved
    elif name == "tid2eid":
        tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort(-1)[:, : tensor.shape[1]])
    elif name in ("scale", "per_expert_scale", "router_states_scale", "global_scale"):
        tensor.uniform_(0.5, 1.5)
    elif name == "bias":
        tensor.normal_(std=0.3)
    elif tensor.dim() == 2:
        tensor.normal_(std=0.5)
