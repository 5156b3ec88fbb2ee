"""Decode one token of a Llama-shaped model of transformers at a time in compiled loops, layer by layer.

    decoder = LlamaDecoder.of(model)            # None if the compiled loops do not know the model
    decoder.start(output.past_key_values)       # after a prompt, run by the model itself
    logits = decode_token(decoder, layers, token)

Mixtral, OLMoE and Qwen3-MoE: RMS norms, rotary embedding, grouped-query attention, softmax and top-k gates. Matrices
are read where the model has them, in fp32 or bf16; everything is computed in fp32.
d width, dh width of a head, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from stickymoe.errors import ConfigError
from stickymoe.runtime import kernels
from stickymoe.runtime import llama_kernels as k
from stickymoe.runtime.tokens import ALIGNMENT, TokenDecoder, aligned

_FAMILIES = {"mixtral": "Mixtral", "olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe"}
_ROTARY = ("default", "linear", "llama3", "yarn")  # the frequencies of these do not depend on the length of a text
_PRECISIONS = {torch.float32: kernels.FP32, torch.bfloat16: kernels.BF16}
_BLOCK = 256  # tokens by which the room for keys and values grows
_UNLIMITED = 2**62


def _is_known(model: PreTrainedModel) -> bool:
    """Whether the compiled loops compute what the model does: decided by its config and the classes of its modules."""
    config: Any = model.config
    name = _FAMILIES.get(config.model_type)
    code = sys.modules[type(model).__module__]
    if name is None or code.__name__ != f"transformers.models.{config.model_type}.modeling_{config.model_type}":
        return False
    if type(model) is not getattr(code, f"{name}ForCausalLM") or model.training:
        return False
    rope_type = config.rope_parameters.get("rope_type", "default")
    plain = config.hidden_act == "silu" and rope_type in _ROTARY and getattr(config, "layer_types", None) is None
    if name == "Olmoe":  # its mask has no window
        plain = plain and getattr(config, "sliding_window", None) is None
    return plain and _has_known_modules(model, code, name) and _has_known_matrices(model)


def _has_known_modules(model: Any, code: Any, name: str) -> bool:
    own = {
        getattr(code, name + part)
        for part in ("Model", "DecoderLayer", "Attention", "RMSNorm", "SparseMoeBlock", "TopKRouter", "Experts")
    }
    own |= {type(model), getattr(code, f"{name}RotaryEmbedding")}
    if name == "Qwen3Moe":
        own.add(code.Qwen3MoeMLP)
    common = {nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"])}
    rotary = model.model.rotary_emb
    head_width = model.model.layers[0].self_attn.head_dim
    whole = len(rotary.inv_freq) * 2 == head_width  # otherwise a part of each head is not rotated
    return whole and {type(module) for module in model.modules()} <= own | common and model.lm_head.bias is None


def _has_known_matrices(model: Any) -> bool:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    kinds = {(p.dtype, p.device.type, p.is_contiguous()) for p in matrices}
    return len(kinds) == 1 and next(iter(kinds)) in {(dtype, "cpu", True) for dtype in _PRECISIONS}


class LlamaDecoder(TokenDecoder):
    """The model for one text. Its matrices are not copied, and must not change.

    expert_layers: the layers that have experts
    """

    @classmethod
    def of(cls, model: PreTrainedModel, *, threads: int = 1) -> LlamaDecoder | None:
        """The decoder of a model; None if it is not supported. `threads` do not change the result."""
        return cls(model, threads) if _is_known(model) else None

    def __init__(self, model: Any, threads: int) -> None:
        config = model.config
        self._threads = None if threads == 1 else threads
        self._matrices: list[Tensor] = []  # compiled loops know only where they lie
        self._vectors: list[Tensor] = []
        layers = list(model.model.layers)
        self.n_layers = len(layers)
        self.expert_layers = [i for i, layer in enumerate(layers) if hasattr(layer.mlp, "gate")]
        attention, moe = layers[0].self_attn, layers[self.expert_layers[0]].mlp
        head_width = attention.head_dim
        self._window = getattr(config, "sliding_window", None) or _UNLIMITED
        self._kv_shape = 2, config.num_key_value_heads, head_width

        clip = getattr(config, "clip_qkv", None)
        numbers = config.rms_norm_eps, np.inf if clip is None else clip, model.model.rotary_emb.attention_scaling
        self._vector(torch.tensor(numbers))
        table = np.full((self.n_layers + 1, k.FIELDS), -1, np.int64)
        for row, layer in zip(table, layers, strict=False):
            self._fill(row, layer)
        last = table[-1]
        last[k.EMBEDDING] = self._matrix(model.model.embed_tokens)
        last[k.HEAD] = self._matrix(model.lm_head)
        last[k.FINAL_NORM] = self._vector(model.model.norm.weight)
        last[k.FREQUENCIES] = self._vector(model.model.rotary_emb.inv_freq)
        last[k.ROWS : k.ROWS + 3] = [len(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        last[k.WIDTH], last[k.HEAD_WIDTH] = config.hidden_size, head_width
        last[k.VOCABULARY] = len(model.lm_head.weight)
        last[k.NORM_PER_HEAD] = config.model_type == "qwen3_moe"
        last[k.EXPERTS], last[k.TOP_K] = moe.gate.num_experts, moe.gate.top_k
        last[k.NORMALISE] = getattr(moe.gate, "norm_topk_prob", True)
        last[k.WINDOW] = self._window
        last[k.PRECISION] = _PRECISIONS[model.lm_head.weight.dtype]
        self._table = table
        self._flat = torch.cat(self._vectors).numpy()
        self._hidden_width = 2 * max(moe.experts.down_proj.shape[-1], int(table[:-1, k.DENSE_WIDTH].max()))
        self._allocate()
        self.start()

    def for_new_text(self) -> LlamaDecoder:
        """A decoder with a state of its own. It shares the weights, so several texts of a model can take turns."""
        other = copy.copy(self)
        other._table = self._table.copy()  # it says where keys and values lie
        other._allocate()
        other.start()
        return other

    def _fill(self, row: Shaped[np.ndarray, " fields"], layer: Any) -> None:
        """What the table says about a layer."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        row[k.Q : k.V + 1] = [self._matrix(projection) for projection in projections]
        row[k.O] = self._matrix(attention.o_proj)
        if attention.q_proj.bias is not None:
            row[k.QKV_BIAS] = self._vector(*(projection.bias for projection in projections))
            row[k.O_BIAS] = self._vector(attention.o_proj.bias)
        row[k.ATTENTION_NORM] = self._vector(layer.input_layernorm.weight)
        row[k.FFN_NORM] = self._vector(layer.post_attention_layernorm.weight)
        if hasattr(attention, "q_norm"):
            row[k.Q_NORM] = self._vector(attention.q_norm.weight)
            row[k.K_NORM] = self._vector(attention.k_norm.weight)
        if hasattr(mlp, "gate"):
            row[k.DENSE_WIDTH] = 0
            row[k.GATE] = self._matrix(mlp.gate)
        else:
            row[k.DENSE_WIDTH] = len(mlp.up_proj.weight)
            parts = mlp.gate_proj, mlp.up_proj, mlp.down_proj
            row[k.DENSE_GATE : k.DENSE_DOWN + 1] = [self._matrix(part) for part in parts]

    def _matrix(self, module: nn.Module) -> int:
        """Where the matrix of a module lies."""
        matrix = module.weight
        assert isinstance(matrix, Tensor)
        self._matrices.append(matrix.detach())
        return matrix.data_ptr()

    def _vector(self, *vectors: Float[Tensor, " _"]) -> int:
        """Copy vectors, one behind the other; returns where they begin."""
        begin = sum(map(len, self._vectors))
        self._vectors += [vector.detach().float() for vector in vectors]
        return begin

    def _allocate(self) -> None:
        """State and scratch."""
        last, top_k = self._table[-1], int(self._table[-1, k.TOP_K])
        d = int(last[k.WIDTH])
        width = max(d, int(last[k.ROWS : k.ROWS + 3].sum()), self._hidden_width, int(last[k.EXPERTS]))
        width += -width % ALIGNMENT
        work = aligned(k.WORK_ROWS * width).reshape(-1, width)
        work[:] = 0.0
        words = np.zeros(k.CHOSEN + top_k, np.int64)
        self._words = words
        self._x, self._h = work[k.X, :d], work[k.H, :d]
        self._routed = words[k.CHOSEN :], work[k.W, :top_k]
        self._predicted = np.empty(top_k, np.int64), np.empty(top_k, np.float32)
        self._logits = aligned(int(last[k.VOCABULARY]))
        self._arrays = self._table, self._flat, work, words, self._logits
        self._kv: list[Any] = [None] * self.n_layers  # [2, kv heads, dh, T] each

    def start(self, past: Any = None) -> None:
        """Continue the text of a cache of transformers, which is not changed; without one, begin a new text."""
        self._expect(self.n_layers + 1)
        self._position = self._place = 0
        if past is None:
            self._make_room([np.empty((*self._kv_shape, 0), np.float32)] * self.n_layers)
            return
        rows = len(past.layers[0].keys)
        if rows != 1:
            raise ConfigError(f"past: got {rows} rows, expected one text.")
        self._position = int(past.get_seq_length())
        self._place = past.layers[0].keys.shape[2]  # with a window, the last tokens
        pairs = (torch.cat([layer.keys, layer.values]) for layer in past.layers)
        self._make_room(pair.detach().float().transpose(2, 3).numpy() for pair in pairs)

    def _make_room(self, kv: Iterable[Float[np.ndarray, "2 heads dh _"]]) -> None:
        """Copy keys and values to where there is room for more, layer by layer, without what has left the window."""
        kept = min(self._place, self._window - 1)
        capacity = kept + _BLOCK - kept % _BLOCK
        for layer, old in enumerate(kv):
            new = aligned(math.prod(self._kv_shape) * capacity).reshape(*self._kv_shape, capacity)
            new[..., :kept] = old[..., self._place - kept : self._place]
            self._kv[layer] = new
            self._table[layer, k.KV] = new.ctypes.data
        self._table[-1, k.CAPACITY] = self._capacity = capacity
        self._place = kept

    def begin(self, token: int) -> None:
        """The next token of the text."""
        V = len(self._logits)
        if not 0 <= token < V:
            raise ConfigError(f"token: got {token}, expected 0 … {V - 1}.")
        if self._place == self._capacity:
            self._make_room(self._kv)
        self._words[k.PLACE], self._words[k.TOKEN], self._words[k.POSITION] = self._place, token, self._position
        self._place += 1
        self._position += 1
        self._expect(0)

    def _run_layer(self, layer: int, slots: Any, spec_rows: Any, which: Any) -> bool:
        k.run(self._threads, layer, slots, spec_rows, which, *self._arrays)
        return bool(self._table[layer, k.DENSE_WIDTH] == 0)

    def _run_head(self, slots: Any, spec_rows: Any, which: Any) -> Float[np.ndarray, " V"]:
        k.run(self._threads, self.n_layers, slots, spec_rows, which, *self._arrays)
        return self._logits

    def predict(self, layer: int) -> list[int]:
        """What the gate of a later layer chooses for the hidden state of this one; nothing is changed by it."""
        S, w = self._predicted
        k.route(layer, self._table, self._arrays[2], S, w)
        chosen: list[int] = S[w > 0].tolist()
        return chosen
