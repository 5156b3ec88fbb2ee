"""Compiled loops of the decoder: one call runs a layer of one token, from attention to the choice of experts.

A call into compiled code costs a fraction of a microsecond for each array, so there are few arrays:

    weights [·]                  the dense weights, one after another, fp32
    table [L + 1, fields]        where the weights of a layer begin, and how it routes; the last row is for the model
    numbers [L, 4]               settings of filters and choices
    work [rows, width]           the residual stream, scratch, and the routers' fp32 state
    words [rows, width]          the token, the chosen experts, and the routers' integer state
    flags [L + 1, N]             the routers' Boolean state; the last row holds whether a sentence begins
    kv [2, L, heads, dh, T]      keys and values, the tokens last: loops over tokens are long, loops over dh are short

d width, f width of a feed-forward layer, N experts, k experts per token, M = gates · N logits of a token.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from stickymoe.locality import row_kernels as addresses
from stickymoe.locality.row_kernels import mix
from stickymoe.routing import kernels as rules
from stickymoe.runtime import kernels
from stickymoe.runtime import token_kernels as shared

# Fields of `table`. A bias follows its matrix.
(ATTENTION_NORM, QKV, OUT, FFN_NORM, GATE, UP, DOWN, DENSE_WIDTH) = range(8)
(EXPERTS, TOP_K, GATES, SOURCE, FILTER, CHOICE) = range(8, 14)
FILTER_SETTING = 14
CHOICE_SETTINGS = 15  # four of them
(SIDE, ROW_WIDTH, TOKEN_ROWS, ROW_UP, ROW_GATE, N_NGRAMS, STORED) = range(19, 26)
# For each table: n, rows, address, number of heads, and their salts. If the tables are STORED on disk, the rows of the
# token lie at TOKEN_ROWS, and at addresses in place of the salts.
NGRAMS = 26
FIELDS = NGRAMS
# Fields of the last row of `table`.
(TOKENS, POSITIONS, FINAL_NORM, WIDTH) = range(4)

# Columns of `numbers`.
(FILTER_NUMBERS, CHOICE_NUMBERS) = (0, 2)

# Rows of `work`; behind them, for each layer, the state of its filter and that of its choice.
(X, H, PROJECTED, ATTENDED, SCORES, HIDDEN, Y, LOGITS, FILTERED, G, BONUS, W, ROW) = range(13)
FLOAT_STATE = 13
# Rows of `words`; behind them, for each layer, the state of its choice.
(TOKEN, S, HISTORY, KEY) = range(4)
INTEGER_STATE = 4

# Codes of filters, choices, sources and side parts. PYTHON: the caller runs the model's own code.
PYTHON = 0
(UNFILTERED, SMOOTH, TWO_SPEED, SLOT_GATES) = range(1, 5)
(TOP_K_CHOICE, HARD_WINDOW, HYSTERESIS, RESIDENCY, RENT, SLOT_CHOICE, SEGMENT, HASHED, TRAJECTORY) = range(1, 10)
(FROM_H, FROM_ATTENDED) = range(2)
(NO_SIDE, LOOKUP) = range(1, 3)

_EPSILON = np.float32(1e-5)  # torch's for layer norms


@njit(nogil=True, fastmath=shared.SUMS)
def _dot(a: Any, x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += a[i] * x[i]
    return total


@njit(nogil=True)
def _linear(weights: Any, begin: int, x: Any, biased: bool, out: Any) -> None:
    """A·x, plus the bias behind A if there is one."""
    n, m = len(out), len(x)
    A = weights[begin : begin + n * m].reshape(n, m)
    for r in range(n):
        out[r] = _dot(A[r], x)
    if biased:
        b = weights[begin + n * m : begin + n * m + n]
        for r in range(n):
            out[r] += b[r]


@njit(nogil=True, fastmath=shared.SUMS)
def _norm(weights: Any, begin: int, x: Any, out: Any) -> None:
    d = len(x)
    total = np.float32(0.0)
    for i in range(d):
        total += x[i]
    mean = total / np.float32(d)
    squares = np.float32(0.0)
    for i in range(d):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(d) + _EPSILON)
    for i in range(d):
        out[i] = (x[i] - mean) * scale * weights[begin + i] + weights[begin + d + i]


@njit(nogil=True)
def _attend(layer: int, weights: Any, table: Any, work: Any, kv: Any, position: int) -> None:
    """Attention of the token, added to the residual stream; H is the normalised input of the feed-forward layer."""
    heads, dh = kv.shape[2], kv.shape[3]
    d = heads * dh
    x, h, attended, y = work[X, :d], work[H, :d], work[ATTENDED, :d], work[Y, :d]
    _norm(weights, table[layer, ATTENTION_NORM], x, h)
    projected = work[PROJECTED, : 3 * d]
    _linear(weights, table[layer, QKV], h, True, projected)
    for head in range(heads):
        own = slice(head * dh, (head + 1) * dh)
        q, k, v = projected[:d][own], projected[d : 2 * d][own], projected[2 * d :][own]
        keys, values = kv[0, layer, head], kv[1, layer, head]
        for i in range(dh):
            keys[i, position] = k[i]
            values[i, position] = v[i]
        shared.attention(q, keys, values, 0, position + 1, work[SCORES], attended[own])
    _linear(weights, table[layer, OUT], attended, True, y)
    for i in range(d):
        x[i] += y[i]
    _norm(weights, table[layer, FFN_NORM], x, h)


@njit(nogil=True)
def _dense(weights: Any, up: int, down: int, x: Any, h: Any, hidden: Any, y: Any) -> None:
    """The feed-forward layer of the dense control, with GELU, added to the residual stream."""
    _linear(weights, up, h, True, hidden)
    for i in range(len(hidden)):
        a = hidden[i]
        hidden[i] = np.float32(0.5) * a * (np.float32(1.0) + math.erf(a * np.float32(math.sqrt(0.5))))
    _linear(weights, down, hidden, True, y)
    for i in range(len(x)):
        x[i] += y[i]


@njit(nogil=True)
def _filter(layer: int, table: Any, numbers: Any, work: Any, position: Any) -> None:
    """LOGITS → FILTERED, by the loops that scan whole sequences."""
    n, m = table[layer, EXPERTS], table[layer, EXPERTS] * table[layer, GATES]
    logits, out = work[LOGITS, :m].reshape(1, 1, m), work[FILTERED, :n].reshape(1, 1, n)
    state = work[FLOAT_STATE + 2 * layer]
    code = table[layer, FILTER]
    settings = numbers[layer, FILTER_NUMBERS : FILTER_NUMBERS + 2]
    if code == SMOOTH:
        rules.average(logits, position, state[:n].reshape(1, n), settings[:1], out)
    elif code == TWO_SPEED:
        rules.two_speed(logits, position, state[:n].reshape(1, n), settings[0], out)
    elif code == SLOT_GATES:
        averages, capacity = state[: 2 * n].reshape(1, 2 * n), table[layer, FILTER_SETTING]
        rules.slot_logits(logits, position, averages, capacity, settings[0], settings[1], out)
    else:
        for i in range(n):
            work[FILTERED, i] = work[LOGITS, i]


@njit(nogil=True)
def _choose(layer: int, table: Any, numbers: Any, work: Any, words: Any, flags: Any, position: Any) -> None:
    """FILTERED → S and W, by the loops that scan whole sequences."""
    n, k = table[layer, EXPERTS], table[layer, TOP_K]
    logits, g = work[FILTERED, :n].reshape(1, 1, n), work[G, :n].reshape(1, 1, n)
    floats = work[FLOAT_STATE + 2 * layer + 1, :n].reshape(1, n)
    integers, marks = words[INTEGER_STATE + layer, :n].reshape(1, n), flags[layer, :n].reshape(1, n)
    token, chosen = words[TOKEN, 1:2].reshape(1, 1), words[S, :k].reshape(1, 1, k)
    code = table[layer, CHOICE]
    a, b, c = table[layer, CHOICE_SETTINGS], table[layer, CHOICE_SETTINGS + 1], table[layer, CHOICE_SETTINGS + 2]
    p, q = numbers[layer, CHOICE_NUMBERS], numbers[layer, CHOICE_NUMBERS + 1]
    rules.softmax(logits, g)
    if code == HYSTERESIS:
        rules.hysteresis(logits, g, position, marks, p, chosen)
    elif code == RESIDENCY:
        rules.residency(g if c else logits, g, position, floats, marks, a, b, p, q, chosen)
    elif code == RENT:
        rules.rent(g, position, floats, integers, marks, a, p, chosen)
    elif code == SLOT_CHOICE:
        keys = token if c >= 0 else words[TOKEN, :0].reshape(0, 0)
        rules.slot_choice(g, keys, max(c, 0), position, marks, integers, a, p, b, chosen)
    elif code == SEGMENT:
        rules.segment(logits, g, position, floats, marks, a, chosen)
    elif code == HASHED:
        rules.hashed(token, g, a, chosen)
    elif code == TRAJECTORY:
        starts = flags[-1, : 1 if b else 0]
        boundaries = starts.reshape(len(starts), len(starts))
        key = words[KEY, :1].reshape(1, 1)
        rules.span_keys(token, position, boundaries, a, integers, key)
        rules.hashed(key, g, 0, chosen)
    else:
        if code == HARD_WINDOW:
            bonus = work[BONUS, :n].reshape(1, 1, n)
            rules.window_bonus(g, position, integers, k, a, p, bonus)
            for i in range(n):
                logits[0, 0, i] += bonus[0, 0, i]
            rules.softmax(logits, g)
        rules.top_k(g, chosen)
    rules.combine(g, chosen, work[W, :k].reshape(1, 1, k))


@njit(nogil=True)
def _route(layer: int, weights: Any, table: Any, numbers: Any, work: Any, words: Any, flags: Any) -> None:
    """The gate of a layer on H, and its choice; for a rule that the caller runs, the logits alone."""
    d = table[-1, WIDTH]
    m = table[layer, EXPERTS] * table[layer, GATES]
    source = work[ATTENDED, :d] if table[layer, SOURCE] == FROM_ATTENDED else work[H, :d]
    _linear(weights, table[layer, GATE], source, False, work[LOGITS, :m])
    if table[layer, CHOICE] != PYTHON:
        now = words[TOKEN, :1].reshape(1, 1)
        _filter(layer, table, numbers, work, now)
        _choose(layer, table, numbers, work, words, flags, now)


@njit(nogil=True)
def _look_up(layer: int, weights: Any, table: Any, work: Any, words: Any, d: int) -> None:
    """The rows of the token and its n-grams, added to the residual stream. They are not copied before."""
    fields = table[layer]
    position, token, history = words[TOKEN, 0], words[TOKEN, 1], words[HISTORY]
    x, h, y = work[X, :d], work[H, :d], work[Y, :d]
    width = fields[ROW_WIDTH]
    row = work[ROW, :width]
    row[:] = 0.0
    if fields[TOKEN_ROWS]:
        found = kernels.row_at(fields[TOKEN_ROWS] + (0 if fields[STORED] else 4 * width * token), width)
        for i in range(width):
            row[i] += found[i]
    place = NGRAMS
    for _ in range(fields[N_NGRAMS]):
        n, rows, address, heads = fields[place], fields[place + 1], fields[place + 2], fields[place + 3]
        part = width // heads
        for head in range(heads):
            own = fields[place + 4 + head]  # the salt, or where the row lies
            index = heads * rows  # the row of texts that are shorter than n
            if position >= n - 1 and not fields[STORED]:
                key = own
                for back in range(n):
                    key = mix(key ^ history[position - back])
                index = key % rows + head * rows
            found = kernels.row_at(own if fields[STORED] else address + 4 * part * index, part)
            for i in range(part):
                row[head * part + i] += found[i]
        place += 4 + heads
    if fields[ROW_UP] >= 0:
        _linear(weights, fields[ROW_UP], row, False, y)
        row = work[ROW, :d]
        for i in range(d):
            row[i] = y[i]
    if fields[ROW_GATE] >= 0:
        _linear(weights, fields[ROW_GATE], h, False, y)
        for i in range(d):
            row[i] *= np.float32(1.0) + y[i]
    for i in range(d):
        x[i] += row[i]


def _entries(sources: int) -> Any:
    """The entry points. On disk, numba keys them by this file and by `sources`, the checksum of the files they call."""

    @njit(cache=True, nogil=True)
    def run(
        layer: int,
        slots: Any,
        spec_rows: Any,
        which: Any,
        weights: Any,
        table: Any,
        numbers: Any,
        work: Any,
        words: Any,
        flags: Any,
        kv: Any,
    ) -> None:
        """Complete the layer before: add its experts, if `which` names some, and its rows. Then run a layer up to its
        choice of experts.

        Layer 0 begins with the embedding; layer L is the norm before the head. Rows come last, so that there is time
        to read them.
        """
        _ = sources  # a function is keyed by what it encloses
        d = kv.shape[2] * kv.shape[3]
        x, h = work[X, :d], work[H, :d]
        position = words[TOKEN, 0]
        if len(which) > 0:
            w, hidden, y = work[W, : len(which)], work[HIDDEN], work[Y, :d]
            shared.add_experts(None, slots, spec_rows, which, h, w, hidden, y, x)
        if layer > 0 and table[layer - 1, SIDE] == LOOKUP:
            _look_up(layer - 1, weights, table, work, words, d)
        if layer == kv.shape[1]:
            _norm(weights, table[layer, FINAL_NORM], x, h)
            return
        if layer == 0:
            embedding = table[-1, TOKENS] + d * words[TOKEN, 1]
            place = table[-1, POSITIONS] + d * position
            for i in range(d):
                x[i] = weights[embedding + i] + weights[place + i]
        _attend(layer, weights, table, work, kv, position)
        f = table[layer, DENSE_WIDTH]
        if f > 0:
            _dense(weights, table[layer, UP], table[layer, DOWN], x, h, work[HIDDEN, :f], work[Y, :d])
        else:
            _route(layer, weights, table, numbers, work, words, flags)

    @njit(cache=True, nogil=True)
    def route(layer: int, weights: Any, table: Any, numbers: Any, work: Any, words: Any, flags: Any) -> None:
        """The choice of a layer alone, for the hidden state H."""
        _ = sources
        _route(layer, weights, table, numbers, work, words, flags)

    return run, route


run, route = _entries(shared.checksum(addresses, rules, kernels, shared))


@njit(nogil=True)
def _head_rows(embedding: Any, h: Any, first: int, stop: int, out: Any) -> None:
    for r in range(first, stop):
        out[r] = _dot(embedding[r], h)


@njit(cache=True, nogil=True)
def head(embedding: Any, h: Any, threads: int, out: Any) -> None:
    """The logits of all tokens of the vocabulary."""
    _head_rows(embedding, h, 0, len(out), out)


@njit(cache=True, nogil=True, parallel=True)
def head_in_threads(embedding: Any, h: Any, threads: int, out: Any) -> None:
    """The same, each thread a part of the vocabulary."""
    V = len(out)
    for part in prange(threads):
        _head_rows(embedding, h, part * V // threads, (part + 1) * V // threads, out)
