"""Compiled loops of the Llama-shaped decoder: one call runs a layer of one token, up to the choice of experts.

    table [L + 1, fields]    where the matrices, keys and values of a layer lie; the last row is for the model
    vectors [·]              norms, biases and rotary frequencies, fp32
    work [rows, width]       the residual stream and scratch
    words [·]                the token and the chosen experts

Matrices stay where torch has them, in fp32 or bf16. Keys and values of a layer are [2, kv heads, dh, T].
d width, dh width of a head, f width of a feed-forward layer, N experts, k experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from stickymoe.routing import kernels as rules
from stickymoe.runtime import kernels
from stickymoe.runtime import token_kernels as shared
from stickymoe.runtime.formats import ACTIVATIONS

# Fields of `table`: addresses of matrices, and places of vectors, −1 for one that a layer does not have.
(Q, K, V, O, GATE, DENSE_GATE, DENSE_UP, DENSE_DOWN, KV) = range(9)
(ATTENTION_NORM, FFN_NORM, QKV_BIAS, O_BIAS, Q_NORM, K_NORM, DENSE_WIDTH) = range(9, 16)
# Fields of the last row. ROWS: of the matrices Q, K and V.
(EMBEDDING, HEAD, FINAL_NORM, FREQUENCIES, WIDTH, ROWS) = range(6)
(HEAD_WIDTH, NORM_PER_HEAD, EXPERTS, TOP_K, NORMALISE, WINDOW, PRECISION, CAPACITY, VOCABULARY) = range(8, 17)
FIELDS = 17
# The first numbers of `vectors`.
(EPSILON, CLIP, ROTARY_SCALE) = range(3)
# Rows of `work`.
(X, H, PROJECTED, ATTENDED, HIDDEN, Y, LOGITS, G, W, COS, SIN) = range(11)
WORK_ROWS = 11
# Fields of `words`: where the token's keys go, its number in the vocabulary, and its position in the text.
(PLACE, TOKEN, POSITION) = range(3)
CHOSEN = 3

_SILU = ACTIVATIONS.index("silu")


@njit(nogil=True, fastmath=shared.SUMS)
def _norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    squares = np.float32(0.0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + epsilon)
    for i in range(len(x)):
        out[i] = weight[i] * (x[i] * scale)


@njit(nogil=True)
def _norm_at(vectors: Any, begin: int, x: Any, out: Any) -> None:
    _norm(x, vectors[begin : begin + len(x)], vectors[EPSILON], out)


@njit(nogil=True)
def _norm_projection(vectors: Any, begin: int, width: int, x: Any) -> None:
    """The norm of every `width` numbers, in place."""
    for first in range(0, len(x), width):
        part = x[first : first + width]
        _norm_at(vectors, begin, part, part)


@njit(nogil=True)
def _add_at(vectors: Any, begin: int, x: Any) -> None:
    if begin >= 0:
        for i in range(len(x)):
            x[i] += vectors[begin + i]


@njit(nogil=True)
def _clip(x: Any, most: Any) -> None:
    if most < np.inf:
        for i in range(len(x)):
            x[i] = min(max(x[i], -most), most)


@njit(nogil=True)
def _rotate(x: Any, cos: Any, sin: Any, dh: int) -> None:
    """The rotary embedding of every head, in place."""
    half = dh // 2
    for first in range(0, len(x), dh):
        for i in range(half):
            a, b = x[first + i], x[first + half + i]
            x[first + i] = a * cos[i] - b * sin[i]
            x[first + half + i] = b * cos[i] + a * sin[i]


@njit(nogil=True)
def _embed(vectors: Any, model: Any, work: Any, words: Any) -> None:
    """The token's embedding, and the angles of its position."""
    d, half = model[WIDTH], model[HEAD_WIDTH] // 2
    x = work[X, :d]
    if model[PRECISION] == kernels.FP32:
        x[:] = kernels.row_at(model[EMBEDDING] + 4 * d * words[TOKEN], d)
    else:
        bits = kernels.bytes_at(model[EMBEDDING] + 2 * d * words[TOKEN], 2 * d).view(np.uint16)
        for i in range(d):
            x[i] = kernels.from_bf16(bits[i])
    for i in range(half):
        angle = np.float32(words[POSITION]) * vectors[model[FREQUENCIES] + i]
        work[COS, i] = np.cos(angle) * vectors[ROTARY_SCALE]
        work[SIN, i] = np.sin(angle) * vectors[ROTARY_SCALE]


@njit(nogil=True)
def _attend(threads: Any, fields: Any, model: Any, vectors: Any, work: Any, words: Any) -> None:
    """Attention of the token, added to the residual stream; H is the normalised input of the feed-forward layer."""
    d, dh = model[WIDTH], model[HEAD_WIDTH]
    n_q, n_kv = model[ROWS], model[ROWS + 1]
    x, h, attended, y = work[X, :d], work[H, :d], work[ATTENDED, :n_q], work[Y, :d]
    _norm_at(vectors, fields[ATTENTION_NORM], x, h)
    projected = work[PROJECTED, : n_q + 2 * n_kv]
    shared.linear(threads, fields[Q : V + 1], model[ROWS : ROWS + 3], model[PRECISION], h, projected)
    _add_at(vectors, fields[QKV_BIAS], projected)
    q, k, v = projected[:n_q], projected[n_q : n_q + n_kv], projected[n_q + n_kv :]
    if fields[Q_NORM] >= 0:
        _norm_projection(vectors, fields[Q_NORM], dh if model[NORM_PER_HEAD] else n_q, q)
        _norm_projection(vectors, fields[K_NORM], dh if model[NORM_PER_HEAD] else n_kv, k)
    _clip(projected, vectors[CLIP])
    _rotate(projected[: n_q + n_kv], work[COS], work[SIN], dh)

    place, heads = words[PLACE], n_kv // dh
    kv = kernels.row_at(fields[KV], 2 * n_kv * model[CAPACITY]).reshape(2, heads, dh, model[CAPACITY])
    first = max(0, place + 1 - model[WINDOW])
    scores = np.empty(place + 1 - first, np.float32)
    group = n_q // n_kv
    for head in range(heads):
        for i in range(dh):
            kv[0, head, i, place] = k[head * dh + i]
            kv[1, head, i, place] = v[head * dh + i]
        for reader in range(head * group, (head + 1) * group):
            own = slice(reader * dh, (reader + 1) * dh)
            shared.attention(q[own], kv[0, head], kv[1, head], first, place + 1, scores, attended[own])
    shared.linear(threads, fields[O : O + 1], model[WIDTH : WIDTH + 1], model[PRECISION], attended, y)
    _add_at(vectors, fields[O_BIAS], y)
    for i in range(d):
        x[i] += y[i]
    _norm_at(vectors, fields[FFN_NORM], x, h)


@njit(nogil=True)
def _dense(threads: Any, fields: Any, model: Any, work: Any) -> None:
    """A feed-forward layer with SiLU, added to the residual stream."""
    d, f = model[WIDTH], fields[DENSE_WIDTH]
    x, hidden, y = work[X, :d], work[HIDDEN, : 2 * f], work[Y, :d]
    rows = np.array([f, f])
    shared.linear(threads, fields[DENSE_GATE : DENSE_UP + 1], rows, model[PRECISION], work[H, :d], hidden)
    kernels.activate(_SILU, hidden[:f])
    for i in range(f):
        hidden[i] *= hidden[f + i]
    down, rows = fields[DENSE_DOWN : DENSE_DOWN + 1], model[WIDTH : WIDTH + 1]
    shared.linear(threads, down, rows, model[PRECISION], hidden[:f], y)
    for i in range(d):
        x[i] += y[i]


@njit(nogil=True)
def _route(fields: Any, model: Any, work: Any, S: Any, w: Any) -> None:
    """The gate of a layer on H, softmax and top-k: the chosen experts, heaviest first, and their weights."""
    n = model[EXPERTS]
    logits, g = work[LOGITS, :n].reshape(1, 1, n), work[G, :n].reshape(1, 1, n)
    gate, rows, h = fields[GATE : GATE + 1], model[EXPERTS : EXPERTS + 1], work[H, : model[WIDTH]]
    shared.linear(None, gate, rows, model[PRECISION], h, work[LOGITS, :n])
    rules.softmax(logits, g)
    rules.top_k(g, S.reshape(1, 1, len(S)))
    total = np.float32(0.0)
    for i in range(len(S)):
        w[i] = work[G, S[i]]
        total += w[i]
    if model[NORMALISE]:
        for i in range(len(S)):
            w[i] /= total


def _entries(sources: int) -> Any:
    """The entry points. On disk, numba keys them by this file and by `sources`, the checksum of the files they call."""

    @njit(cache=True, nogil=True)
    def run(
        threads: Any,
        layer: int,
        slots: Any,
        spec_rows: Any,
        which: Any,
        table: Any,
        vectors: Any,
        work: Any,
        words: Any,
        logits: Any,
    ) -> None:
        """Add the experts of the layer before, if `which` names some; then run a layer up to its choice of experts.

        Layer 0 begins with the embedding; layer L is the head.
        """
        _ = sources  # a function is keyed by what it encloses
        model, fields = table[-1], table[layer]
        d = model[WIDTH]
        x, h = work[X, :d], work[H, :d]
        if len(which) > 0:
            w, hidden, y = work[W, : len(which)], work[HIDDEN], work[Y, :d]
            shared.add_experts(threads, slots, spec_rows, which, h, w, hidden, y, x)
        if layer == len(table) - 1:
            _norm_at(vectors, model[FINAL_NORM], x, h)
            head, rows = model[HEAD : HEAD + 1], model[VOCABULARY : VOCABULARY + 1]
            shared.linear(threads, head, rows, model[PRECISION], h, logits)
            return
        if layer == 0:
            _embed(vectors, model, work, words)
        _attend(threads, fields, model, vectors, work, words)
        if fields[DENSE_WIDTH] > 0:
            _dense(threads, fields, model, work)
        else:
            k = model[TOP_K]
            _route(fields, model, work, words[CHOSEN : CHOSEN + k], work[W, :k])

    @njit(cache=True, nogil=True)
    def route(layer: int, table: Any, work: Any, S: Any, w: Any) -> None:
        """The choice of a layer alone, for the hidden state H."""
        _ = sources
        _route(table[layer], table[-1], work, S, w)

    return run, route


run, route = _entries(shared.checksum(rules, kernels, shared))
