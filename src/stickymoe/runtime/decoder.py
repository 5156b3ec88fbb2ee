"""Decode one token of our own GPT at a time in compiled loops, layer by layer; the plain model is the reference.

The experts are not the decoder's: between two layers the caller brings the chosen ones into slots.

    decoder = Decoder(model)
    decoder.start(cache)                        # after a prompt, run by the model itself
    decoder.begin(token)
    for layer in range(decoder.n_layers):
        routed = decoder.route(layer)           # the experts of the token and their weights; None for a dense layer
        ...                                     # y = Σ w·expert(decoder.h(layer))
        decoder.add(layer, y)
    logits = decoder.logits()

`step` does the work of `add` and of the next `route` in one compiled call, with the experts in slots.

Rules and side parts that the compiled loops do not know, such as those of a user, run as in the model: slower, with the
same result. d width, N experts, k experts per token, V vocabulary, M = gates · N logits of a token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from stickymoe.errors import ConfigError, require
from stickymoe.models.gpt import GPT, Block, DecodeCache, LayerCache
from stickymoe.models.moe import FeedForward, Router
from stickymoe.routing.fixed import Hashed, Trajectory
from stickymoe.routing.layer import SidePart
from stickymoe.routing.lookup import Lookup, NgramTable, RowTable
from stickymoe.routing.rules import HardWindow, RouterInput, RouterState, RoutingRule, TopK, Unfiltered, kept_by
from stickymoe.routing.sequential import (
    Hysteresis,
    LearnedSmooth,
    Rent,
    Residency,
    ResidentChoice,
    Segment,
    SlotChoice,
    SlotGates,
    Smooth,
    TwoSpeed,
    require_room,
)
from stickymoe.runtime import decoder_kernels as k
from stickymoe.runtime.stored_rows import StoredRows, StoredTable
from stickymoe.runtime.tokens import ALIGNMENT, Routed, TokenDecoder, aligned

_State = tuple[str, int]  # the name of a value in the router's state, and its width


@dataclass(frozen=True)
class _Part:
    """A filter or a choice as the compiled loops run it: its code, its settings, and its state by kind."""

    code: int
    integers: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    float_state: _State | None = None
    integer_state: _State | None = None
    flag_state: _State | None = None


def _filter_part(part: object, N: int) -> _Part | None:
    """A filter; None if the compiled loops do not know it."""
    if type(part) is Unfiltered:
        return _Part(k.UNFILTERED)
    if type(part) is Smooth and len(part.decay) == 1:
        return _Part(k.SMOOTH, numbers=(float(part.decay[0]),), float_state=(part.name, N))
    if type(part) is LearnedSmooth:
        return _Part(k.SMOOTH, numbers=(part.decay().item(),), float_state=("smooth", N))
    if type(part) is TwoSpeed:
        return _Part(k.TWO_SPEED, numbers=(part.decay,), float_state=("slow", N))
    if type(part) is SlotGates:
        capacity, fast, slow = part.settings
        return _Part(k.SLOT_GATES, (capacity,), (fast, slow), ("averages", 2 * N))
    return None


def _choice_part(part: object, N: int) -> _Part | None:
    """A choice; None if the compiled loops do not know it."""
    if type(part) is TopK:
        return _Part(k.TOP_K_CHOICE)
    if type(part) is HardWindow:
        return _Part(k.HARD_WINDOW, (part.window,), (part.beta,), integer_state=("left", N))
    if type(part) is Hysteresis:
        return _Part(k.HYSTERESIS, numbers=(part.bonus,), flag_state=("chosen", N))
    if type(part) is Residency or type(part) is Rent:
        return _resident_part(part, N)
    if type(part) is SlotChoice:
        margin, rest = part.limits
        settings = part.capacity, rest, -1 if part.hashed is None else part.hashed
        return _Part(k.SLOT_CHOICE, settings, (margin,), None, ("age", N), ("resident", N))
    if type(part) is Segment:
        return _Part(k.SEGMENT, (part.window,), (), ("total", N), None, ("chosen", N))
    if type(part) is Hashed:
        return _Part(k.HASHED, (part.key,))
    if type(part) is Trajectory:
        return _Part(k.TRAJECTORY, (part.window, int(part.sentence)), integer_state=("key", 1))
    return None


def _resident_part(part: Residency | Rent, N: int) -> _Part:
    """A choice among residents, at the strength that it has after training."""
    strength, capacity = part.strength(1.0), min(part.capacity, N)
    if strength == 0.0:
        return _Part(k.TOP_K_CHOICE)
    if isinstance(part, Rent):
        price = strength * part.price
        return _Part(k.RENT, (capacity,), (price,), ("missed", N), ("unused", N), ("resident", N))
    settings = capacity, part.pinned, int(part.average > 0)
    numbers = strength * part.margin, 1 - (1 - part.average) ** strength
    return _Part(k.RESIDENCY, settings, numbers, ("demand", N), None, ("resident", N))


def _parts(rule: RoutingRule, N: int) -> tuple[_Part, _Part] | None:
    """Filter and choice of a rule; None if the model's own code has to run it."""
    filter, choice = _filter_part(rule.filter, N), _choice_part(rule.choice, N)
    known = type(rule) is RoutingRule and rule.scoring.plain and rule.skip is None
    if not known or filter is None or choice is None:
        return None
    if isinstance(rule.choice, ResidentChoice | SlotChoice):
        require_room(rule.choice.capacity, np.empty(rule.top_k))  # compiled loops do not check where they write
    return filter, choice


class _Weights:
    """Tensors collected into one array, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self._pieces: list[Shaped[np.ndarray, " numbers"]] = []
        self._owners: list[tuple[Tensor, int]] = []
        self.size = 0

    def add(self, *tensors: Shaped[Tensor, ...] | None) -> int:
        """Append tensors, one behind the other; returns where they begin."""
        begin = self.size
        given = [t for t in tensors if t is not None]
        pieces = [_array(t).reshape(-1) for t in given]
        length = sum(map(len, pieces))
        ends = np.cumsum([begin, *map(len, pieces)])
        self._owners += zip(given, ends[:-1].tolist(), strict=True)
        padding = np.zeros(-length % ALIGNMENT, np.float32)
        self._pieces += [*pieces, padding]
        self.size += length + len(padding)
        return begin

    def array(self) -> Float[np.ndarray, " numbers"]:
        """All of them. Tensors in fp32 on the CPU become views of it, so that there is one copy of the model."""
        out = aligned(self.size)
        np.concatenate(self._pieces, out=out)
        for tensor, begin in self._owners:
            if tensor.dtype == torch.float32 and tensor.is_cpu:
                tensor.data = torch.from_numpy(out[begin : begin + tensor.numel()]).view(tensor.shape)
        return out


def _array(tensor: Shaped[Tensor, ...]) -> Float[np.ndarray, ...]:
    """The tensor in fp32; shares memory if possible."""
    return np.ascontiguousarray(tensor.detach().float().numpy(force=True))


class Decoder(TokenDecoder):
    """The model for one text. Its dense weights are moved into one array, which the model and the decoder use."""

    def __init__(self, model: GPT, *, threads: int = 1) -> None:
        """`threads` compute the head, which has most of the dense weights; they do not change the result."""
        require(threads >= 1, "threads", threads, "a whole number ≥ 1")
        c = model.config
        self.config = c
        self.n_layers = c.n_layers
        self._threads = threads
        self._vocab_size = model.token_embedding.num_embeddings
        self._parts: dict[int, tuple[_Part, _Part]] = {}
        self._rules: dict[int, RoutingRule] = {}  # of the layers that the model's own code routes
        self._sides: dict[int, SidePart] = {}  # the same for side parts
        self._before: dict[int, int] = {}  # how many earlier tokens a lookup reads
        self._stored: StoredRows | None = None  # what reads rows that are not in memory
        self._tables: list[Float[np.ndarray, "rows width"]] = []  # compiled loops know only where they lie

        weights = _Weights()
        rows = [
            self._layer_fields(i, block, weights) for i, block in enumerate(model.blocks) if isinstance(block, Block)
        ]
        embedding = weights.add(model.token_embedding.weight)
        positions = weights.add(model.position_embedding.weight)
        rows.append([embedding, positions, weights.add(model.final_norm.weight, model.final_norm.bias), c.d_model])
        self._table = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for row, fields in zip(self._table, rows, strict=True):
            row[: len(fields)] = fields
        self._weights = weights.array()
        self._embedding = self._weights[embedding : embedding + self._vocab_size * c.d_model].reshape(-1, c.d_model)
        self._allocate()
        self._positions = np.arange(c.seq_len)
        self._sentences = any(choice.code == k.TRAJECTORY and choice.integers[1] for _, choice in self._parts.values())
        self.start()

    def _layer_fields(self, layer: int, block: Block, weights: _Weights) -> list[int]:
        """The layer's row of the table; its weights are added to `weights`."""
        fields = [0] * k.FIELDS
        fields[k.ATTENTION_NORM] = weights.add(block.attention_norm.weight, block.attention_norm.bias)
        fields[k.QKV] = weights.add(block.attention.qkv.weight, block.attention.qkv.bias)
        fields[k.OUT] = weights.add(block.attention.out.weight, block.attention.out.bias)
        fields[k.FFN_NORM] = weights.add(block.ffn_norm.weight, block.ffn_norm.bias)
        if isinstance(block.ffn, FeedForward):
            fields[k.UP] = weights.add(block.ffn.up.weight, block.ffn.up.bias)
            fields[k.DOWN] = weights.add(block.ffn.down.weight, block.ffn.down.bias)
            fields[k.DENSE_WIDTH] = block.ffn.up.out_features
        else:
            self._route_fields(layer, block.ffn.router, fields, weights)
        fields[k.SIDE] = k.NO_SIDE if block.side is None else k.PYTHON
        if type(block.side) is Lookup:
            fields[k.SIDE] = k.LOOKUP
            self._before[layer] = block.side.longest - 1
            self._lookup_fields(block.side, fields, weights)
        elif block.side is not None:
            self._sides[layer] = block.side
        return fields

    def _route_fields(self, layer: int, router: Router, fields: list[int], weights: _Weights) -> None:
        rule = router.rule
        N = router.gate.out_features // rule.filter.gates
        fields[k.GATE] = weights.add(router.gate.weight)
        fields[k.EXPERTS], fields[k.TOP_K], fields[k.GATES] = N, rule.top_k, rule.filter.gates
        fields[k.SOURCE] = k.FROM_ATTENDED if rule.source == "attended" else k.FROM_H
        parts = _parts(rule, N)
        if parts is None:
            self._rules[layer] = rule
            return
        self._parts[layer] = parts
        filter, choice = parts
        fields[k.FILTER], fields[k.CHOICE] = filter.code, choice.code
        for first, part in ((k.FILTER_SETTING, filter), (k.CHOICE_SETTINGS, choice)):
            fields[first : first + len(part.integers)] = part.integers

    def _lookup_fields(self, side: Lookup, fields: list[int], weights: _Weights) -> None:
        fields[k.ROW_UP] = -1 if side.up is None else weights.add(side.up.weight)
        fields[k.ROW_GATE] = -1 if side.gate is None else weights.add(side.gate.weight)
        if side.tokens is not None:
            (fields[k.TOKEN_ROWS],) = self._addresses(side.tokens, fields) or [self._address(side.tokens)]
            fields[k.ROW_WIDTH] = side.tokens.embedding_dim
        for table in side.ngrams:
            assert isinstance(table, NgramTable)
            salts = table.salts.tolist()
            fields[k.N_NGRAMS] += 1
            fields[k.ROW_WIDTH] = len(salts) * table.table.embedding_dim
            places = self._addresses(table.table, fields)
            address = 0 if places else self._address(table.table)
            fields += [table.n, table.rows, address, len(salts), *(places or salts)]

    def _addresses(self, table: nn.Module, fields: list[int]) -> list[int]:
        """Where the rows of the token lie that are read from the store; none if the table is in memory."""
        if not isinstance(table, StoredTable):
            return []
        self._stored = table.rows
        fields[k.STORED] = 1
        return table.rows.addresses(table.name)

    def _address(self, table: RowTable) -> int:
        """Where a table of rows lies. It is not copied if it is fp32, since it may be larger than the model."""
        self._tables.append(_array(table.weight))
        return self._tables[-1].ctypes.data

    def _allocate(self) -> None:
        """State and scratch."""
        c, L, N = self.config, self.n_layers, self.config.pool_size
        logits = int((self._table[:L, k.EXPERTS] * self._table[:L, k.GATES]).max())
        hidden = max(2 * c.d_ff, int(self._table[:L, k.DENSE_WIDTH].max()))
        rows = int(self._table[:L, k.ROW_WIDTH].max())
        width = max(3 * c.d_model, c.seq_len, logits, 2 * N, hidden, rows)
        width += -width % ALIGNMENT
        length = c.seq_len + -c.seq_len % ALIGNMENT
        dh = c.d_model // c.n_heads
        self._work = aligned((k.FLOAT_STATE + 2 * L) * width).reshape(-1, width)
        self._work[:] = 0.0
        self._kv = aligned(2 * L * c.d_model * length).reshape(2, L, c.n_heads, dh, length)
        self._kv[:] = 0.0
        self._words = np.zeros((k.INTEGER_STATE + L, max(c.seq_len, N, 2)), np.int64)
        self._flags = np.zeros((L + 1, N), np.bool_)
        self._numbers = np.zeros((L, 4), np.float64)
        for layer, (filter, choice) in self._parts.items():
            for first, part in ((k.FILTER_NUMBERS, filter), (k.CHOICE_NUMBERS, choice)):
                self._numbers[layer, first : first + len(part.numbers)] = part.numbers
        self._logits = aligned(self._vocab_size)
        self._x, self._h = self._work[k.X, : c.d_model], self._work[k.H, : c.d_model]
        self._routed = self._words[k.S, : c.top_k], self._work[k.W, : c.top_k]
        self._router_state: dict[int, RouterState | None] = {}
        self._side_state: dict[int, RouterState | None] = {}
        settings = self._weights, self._table, self._numbers
        self._arrays = *settings, self._work, self._words, self._flags, self._kv

    def for_new_text(self) -> Decoder:
        """A decoder with a state of its own. It shares the weights, so several texts of a model can take turns."""
        other = copy.copy(self)
        other._allocate()
        other.start()
        return other

    def start(self, cache: DecodeCache | None = None) -> None:
        """Continue the text of a cache of one row, which is not changed; without one, begin a new text."""
        self._position = -1
        self._expect(self.n_layers + 1)
        if cache is None or cache.position is None:
            for layer in range(self.n_layers):
                self._remember(layer, None, 0)
            return
        if len(cache.position) != 1:
            raise ConfigError(f"cache: got {len(cache.position)} rows, expected one text.")
        last = int(cache.position[0, -1])
        for layer, past in enumerate(cache.layers):
            self._remember(layer, past, last + 1)
        self._position = last

    def _remember(self, layer: int, past: LayerCache | None, length: int) -> None:
        """Take over the state of a layer after `length` tokens of the document."""
        router, side = (None, None) if past is None else (past.router, past.side)
        self._router_state[layer], self._side_state[layer] = router, side
        if past is not None:
            for kind, values in enumerate((past.keys, past.values)):
                self._kv[kind, layer, :, :, :length] = _array(values[0, :, -length:].transpose(1, 2))
        position = np.array([[length]])
        if layer in self._parts:
            filter, choice = self._parts[layer]
            places = (
                (filter.float_state, self._work[k.FLOAT_STATE + 2 * layer]),
                (choice.float_state, self._work[k.FLOAT_STATE + 2 * layer + 1]),
                (choice.integer_state, self._words[k.INTEGER_STATE + layer]),
                (choice.flag_state, self._flags[layer]),
            )
            for state, place in places:
                if state is not None:
                    name, width = state
                    place[:width] = (router or RouterState()).remembered(name, position, width, place.dtype)[0]
        before = self._before.get(layer, 0)
        if before:
            recent = (side or RouterState()).remembered("recent", position, before, np.int64)[0]
            known = min(before, length)
            self._words[k.HISTORY, length - known : length] = recent[before - known :]

    def begin(self, token: int, *, boundary: bool | None = None) -> None:
        """The next token of the text. `boundary`: whether it is the first of a sentence, if a rule reads that."""
        position = self._position + 1
        if position >= self.config.seq_len:
            raise ConfigError(f"tokens: got {position + 1} in a row, expected at most seq_len={self.config.seq_len}.")
        if not 0 <= token < self._vocab_size:
            raise ConfigError(f"token: got {token}, expected 0 … {self._vocab_size - 1}.")
        if boundary is None and self._sentences:
            raise ConfigError("RouterInput: boundary is missing, but this rule reads it; pass boundary.")
        self._position = position
        self._boundary = boundary
        self._words[k.TOKEN, 0] = position
        self._words[k.TOKEN, 1] = token
        self._words[k.HISTORY, position] = token
        if boundary is not None:
            self._flags[-1, 0] = boundary
        if self._stored is not None:
            self._stored.begin(self._words[k.HISTORY, : position + 1], self._positions, position)
        self._expect(0)

    def warm_up(self) -> None:
        """Compile the loops, or load them from the disk, before a text is timed. No rows are read."""
        stored, self._stored = self._stored, None
        super().warm_up()
        self._stored = stored

    def route(self, layer: int) -> Routed | None:
        """Run a layer up to its experts, after `add`. Returns what `step` returns."""
        return self.step(layer)

    def _run_layer(self, layer: int, slots: Any, spec_rows: Any, which: Any) -> bool:
        self._wait_for_rows(layer)
        k.run(layer, slots, spec_rows, which, *self._arrays)
        if layer in self._rules:
            self._route_in_python(layer)
        if layer in self._sides:
            self._side_in_python(layer)
        return bool(self._table[layer, k.DENSE_WIDTH] == 0)

    def _wait_for_rows(self, layer: int) -> None:
        """The layer before is completed with its rows."""
        if self._stored is not None and layer > 0:
            self._stored.wait(layer - 1)

    def _run_head(self, slots: Any, spec_rows: Any, which: Any) -> Float[np.ndarray, " V"]:
        self._wait_for_rows(self.n_layers)
        k.run(self.n_layers, slots, spec_rows, which, *self._arrays)
        head = k.head if self._threads == 1 else k.head_in_threads
        head(self._embedding, self._h, self._threads, self._logits)
        return self._logits

    def residents(self, layer: int) -> list[int]:
        """The experts that the router of a layer keeps resident, after it was routed; empty if it keeps none."""
        if layer in self._parts:
            state = self._parts[layer][1].flag_state
            if state is None or state[0] != "resident":
                return []
            kept: list[int] = self._flags[layer].nonzero()[0].tolist()
            return kept
        routed = self._router_state[layer]
        return [] if routed is None else kept_by(routed)

    def predict(self, layer: int) -> list[int] | None:
        """What the router of a later layer would choose for the hidden state of this one; nothing is changed by it.

        None where the model's own code routes, or the gate reads what is not known yet.
        """
        if layer not in self._parts or self._table[layer, k.SOURCE] != k.FROM_H:
            return None
        kept = (
            self._work[[k.W, k.FLOAT_STATE + 2 * layer, k.FLOAT_STATE + 2 * layer + 1]],
            self._words[[k.S, k.KEY, k.INTEGER_STATE + layer]],
            self._flags[layer].copy(),
        )
        k.route(layer, *self._arrays[:-1])
        chosen: list[int] = self._words[k.S, : self._table[layer, k.TOP_K]].tolist()
        self._work[[k.W, k.FLOAT_STATE + 2 * layer, k.FLOAT_STATE + 2 * layer + 1]] = kept[0]
        self._words[[k.S, k.KEY, k.INTEGER_STATE + layer]] = kept[1]
        self._flags[layer] = kept[2]
        return chosen

    @torch.no_grad()
    def _route_in_python(self, layer: int) -> None:
        """Route by the model's own code."""
        M = int(self._table[layer, k.EXPERTS] * self._table[layer, k.GATES])
        logits = torch.tensor(self._work[k.LOGITS, :M])[None, None]
        routing = self._rules[layer](logits, self._router_input(), self._router_state[layer])
        self._router_state[layer] = routing.state
        n = self._rules[layer].top_k
        self._words[k.S, :n] = routing.S[0, 0].numpy()
        self._work[k.W, :n] = routing.w[0, 0].numpy()

    @torch.no_grad()
    def _side_in_python(self, layer: int) -> None:
        """Run a side part by its own code. It reads the input of the experts only, so it need not wait for them."""
        y, self._side_state[layer] = self._sides[layer](self._router_input(), self._side_state[layer])
        self._x += y[0, 0].float().numpy()

    def _router_input(self) -> RouterInput:
        """What a rule may read; copies, because a rule may keep them in its state."""
        d = self.config.d_model
        position, token = torch.tensor(self._words[k.TOKEN, :2]).view(2, 1, 1)
        boundary = None if self._boundary is None else torch.tensor([[self._boundary]])
        h, attended = torch.tensor(self._work[[k.H, k.ATTENDED], :d]).view(2, 1, 1, d)
        return RouterInput(h, attended, token, position, None, boundary)
