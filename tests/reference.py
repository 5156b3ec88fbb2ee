"""The paper's equations as plain loops, to be read beside it; the package is compared with them.

L layers, B sequences, T tokens, N experts, k experts per token. `g` is [L,B,T,N], a NumPy array or a torch
tensor, so that autograd runs through the same loops; `S` is [L,B,T,k]; `mask` and `doc` are [B,T]. A document
border is where `doc` changes between adjacent positions. Nothing here uses the package.
"""

from itertools import combinations
from math import exp, inf, log, log2, nan


def document_start(doc, b, t):
    """Position of the first token of the document that holds token t."""
    while t > 0 and (doc is None or doc[b][t] == doc[b][t - 1]):
        t -= 1
    return t


def position(mask, doc, b, t):
    """Real tokens of the document before token t."""
    return sum(1 for s in range(document_start(doc, b, t), t) if mask[b][s])


def is_pair(mask, doc, b, t):
    """Whether tokens t−1 and t are both real and in the same document."""
    return t > 0 and mask[b][t - 1] and mask[b][t] and (doc is None or doc[b][t - 1] == doc[b][t])


def real_tokens(mask):
    return [(b, t) for b in range(len(mask)) for t in range(len(mask[b])) if mask[b][t]]


def squared_distance(p, q):
    return sum((p[i] - q[i]) ** 2 for i in range(len(p)))


# Losses


def balance_loss(g, S, mask, doc=None):
    """eq:bal_loss. N Σ_i f_i p_i over the real tokens, mean over layers; documents make no difference."""
    L, N, k = len(g), len(g[0][0][0]), len(S[0][0][0])
    tokens = real_tokens(mask)
    if not tokens:
        return 0.0
    total = 0.0
    for l in range(L):
        for i in range(N):
            f = sum(1 for b, t in tokens for slot in range(k) if S[l][b][t][slot] == i) / (k * len(tokens))
            p = sum(g[l][b][t][i] for b, t in tokens) / len(tokens)
            total = total + N * f * p
    return total / L


def slot_balance_loss(g, S, mask, slots, within=False):
    """L_bal of the slots i mod C, and the mean over slots of L_bal among the experts of each, or only the latter."""
    N = len(g[0][0][0])
    slots = min(slots, N)
    roots = [len(range(slot, N, slots)) ** 0.5 for slot in range(slots)]  # a slot's use grows as the root of its size
    real = real_tokens(mask)
    total = 0.0
    for layer in range(len(g)):
        used = [e for b, t in real for e in S[layer][b][t]]
        for slot in range(slots):
            members = list(range(slot, N, slots))
            whole = [sum(g[layer][b][t][e] for e in members) for b, t in real]
            uses = [e for e in used if e in members]
            between = sum(roots) / roots[slot] * len(uses) / max(len(used), 1) * sum(whole) / max(len(real), 1)
            among = 0.0
            for e in members:
                p = sum(g[layer][b][t][e] / w for (b, t), w in zip(real, whole, strict=True)) / max(len(real), 1)
                among += len(members) * uses.count(e) / max(len(uses), 1) * p
            total += among / slots + (0.0 if within else between)
    return total / len(g)


def consistency_loss(g, mask, doc=None):
    """eq:cons_loss, eq:cons_loss_full. Mean ‖g_t − g_{t−1}‖² over the batch's pairs, mean over layers."""
    L = len(g)
    pairs = [(b, t) for b, t in real_tokens(mask) if is_pair(mask, doc, b, t)]
    if not pairs:
        return 0.0
    total = 0.0
    for l in range(L):
        for b, t in pairs:
            total = total + squared_distance(g[l][b][t], g[l][b][t - 1])
    return total / (L * len(pairs))


def anchor_loss(g, mask, doc, window, anchors=None):
    """eq:hard_loss. Σ (t − s(t))/W · ‖g_t − g_s(t)‖² divided by L × real tokens, with s(t) = W⌊t/W⌋.

    t counts the real tokens of the document. g_s(t) is read from `anchors`: a detached copy of `g` fixes it.
    """
    L = len(g)
    anchors = g if anchors is None else anchors
    tokens = real_tokens(mask)
    if not tokens:
        return 0.0
    total = 0.0
    for l in range(L):
        for b, t in tokens:
            offset = position(mask, doc, b, t) % window
            s = [u for u in range(t + 1) if mask[b][u]][-1 - offset]
            total = total + offset / window * squared_distance(g[l][b][t], anchors[l][b][s])
    return total / (L * len(tokens))


def cross_layer_loss(g, mask, block=None):
    """eq:cross_loss. Σ_ℓ ‖g^(ℓ) − g^(ℓ+1)‖² summed over layer pairs, mean over the real tokens.

    With `block`, only over pairs of layers in the same block of that many.
    """
    tokens = real_tokens(mask)
    if not tokens:
        return 0.0
    total = 0.0
    for b, t in tokens:
        for l in range(len(g) - 1):
            if block is None or l // block == (l + 1) // block:
                total = total + squared_distance(g[l][b][t], g[l + 1][b][t])
    return total / len(tokens)


def pair_mean(g, mask, doc, cost, weight=lambda b, t: 1.0):
    """Σ ω·cost(l, b, t) / Σ ω over the pairs (t−1, t), mean over layers."""
    pairs = [(b, t) for b, t in real_tokens(mask) if is_pair(mask, doc, b, t)]
    whole = sum(weight(b, t) for b, t in pairs)
    if not whole:
        return 0.0
    total = 0.0
    for l in range(len(g)):
        for b, t in pairs:
            total = total + weight(b, t) * cost(l, b, t)
    return total / (len(g) * whole)


def boundary_loss(g, mask, doc, boundary, across):
    """Consistency with weight `across` on the pairs whose later token begins a sentence."""
    return pair_mean(
        g,
        mask,
        doc,
        lambda l, b, t: squared_distance(g[l][b][t], g[l][b][t - 1]),
        lambda b, t: across if boundary[b][t] else 1.0,
    )


def grouped_loss(g, mask, doc, groups, inside):
    """(1−δ)·‖G_t − G_t−1‖² + δ·‖g_t − g_t−1‖²; expert i is in group ⌊i·groups/N⌋."""
    N = len(g[0][0][0])

    def of_groups(row):
        return [sum(row[i] for i in range(N) if i * groups // N == j) for j in range(groups)]

    def cost(l, b, t):
        now, last = g[l][b][t], g[l][b][t - 1]
        between = squared_distance(of_groups(now), of_groups(last))
        return (1 - inside) * between + inside * squared_distance(now, last)

    return pair_mean(g, mask, doc, cost)


def dot_loss(g, mask, doc):
    """1 − ⟨g_t, g_t−1⟩."""
    return pair_mean(
        g, mask, doc, lambda l, b, t: 1 - sum(p * q for p, q in zip(g[l][b][t], g[l][b][t - 1], strict=True))
    )


def replacement_loss(g, S, mask, doc):
    """BlES: the share of experts that were not chosen before, times the L1 distance of the gates."""
    k = len(S[0][0][0])

    def cost(l, b, t):
        new = sum(1 for e in S[l][b][t] if e not in list(S[l][b][t - 1]))
        return new / k * sum(abs(p - q) for p, q in zip(g[l][b][t], g[l][b][t - 1], strict=True))

    return pair_mean(g, mask, doc, cost)


def logarithm(x):
    return x.log() if hasattr(x, "log") else log(x)


def adjacent_entropy_loss(g, mask, doc, targets):
    """BlockFFN: binary cross-entropy of g_t against `targets` at t−1, mean over experts."""

    def cost(l, b, t):
        pairs = list(zip(g[l][b][t], targets[l][b][t - 1], strict=True))
        return -sum(q * logarithm(p) + (1 - q) * logarithm(1 - p) for p, q in pairs) / len(pairs)

    return pair_mean(g, mask, doc, cost)


def chunk_loss(g, k, mask, doc, window):
    """BlockFFN: 1 − Π_t (1 − g_t)^k over chunks of W real tokens of a document, mean over experts and chunks."""
    L, N = len(g), len(g[0][0][0])
    chunks = {}
    for b, t in real_tokens(mask):
        start = document_start(doc, b, t)
        chunks.setdefault((b, start, position(mask, doc, b, t) // window), []).append(t)
    if not chunks:
        return 0.0
    total = 0.0
    for l in range(L):
        for (b, _, _), tokens in chunks.items():
            for i in range(N):
                none = 1.0
                for t in tokens:
                    none = none * (1 - g[l][b][t][i]) ** k
                total = total + (1 - none) / N
    return total / (L * len(chunks))


def reuse_loss(g, S, mask, doc):
    """ReMoE: −log of the mean over pairs of the mean gate of the previous token's experts; mean over layers."""
    L, k = len(g), len(S[0][0][0])
    pairs = [(b, t) for b, t in real_tokens(mask) if is_pair(mask, doc, b, t)]
    total = 0.0
    for l in range(L if pairs else 0):
        kept = sum(sum(g[l][b][t][e] for e in S[l][b][t - 1]) / k for b, t in pairs) / len(pairs)
        total = total - logarithm(kept)
    return total / L


def lagged_divergence(g, mask, doc, lags):
    """ReMoE: symmetric KL between gates that are `lag` real tokens apart, mean over tokens, lags and layers."""
    L, total = len(g), 0.0
    for l in range(L):
        for lag in lags:
            pairs = [
                (b, t)
                for b, t in real_tokens(mask)
                if t >= lag
                and mask[b][t - lag]
                and document_start(doc, b, t) == document_start(doc, b, t - lag)
                and position(mask, doc, b, t) - position(mask, doc, b, t - lag) == lag
            ]
            for b, t in pairs:
                p, q = g[l][b][t], g[l][b][t - lag]
                cost = sum((x - y) * (logarithm(x) - logarithm(y)) for x, y in zip(p, q, strict=True))
                total = total + cost / len(pairs)
    return total / (L * len(lags))


def windowed_entropy(g, mask, doc, window):
    """ReMoE: entropy in nats of the mean gate over W real tokens of a document, mean over windows and layers."""
    L, N = len(g), len(g[0][0][0])
    windows = {}
    for b, t in real_tokens(mask):
        start = document_start(doc, b, t)
        windows.setdefault((b, start, position(mask, doc, b, t) // window), []).append(t)
    total = 0.0
    for l in range(L):
        for (b, _, _), tokens in windows.items():
            means = [sum(g[l][b][t][i] for t in tokens) / len(tokens) for i in range(N)]
            total = total - sum(m * logarithm(m) for m in means)
    return total / max(L * len(windows), 1)


def reference_divergence(g, fixed, mask):
    """KL(fixed ‖ g), mean over real tokens and layers."""
    tokens, total = list(real_tokens(mask)), 0.0
    for l in range(len(g)):
        for b, t in tokens:
            pairs = zip(g[l][b][t], fixed[l][b][t], strict=True)
            total = total + sum(q * (logarithm(q) - logarithm(p)) for p, q in pairs)
    return total / max(len(g) * len(tokens), 1)


def cache_aware(logits, g, k, capacity, kept, method, strength, doc=None):
    """Prefer the residents of an LRU cache; the `kept` best are always chosen. One sequence, in plain loops."""
    T, N = len(logits), len(logits[0])
    chosen, cache, ranges = [], [], []
    for t in range(T):
        if starts(T, doc)[t]:
            cache, ranges = [], []
        z = logits[t]
        ranges.append(max(z) - min(z))
        bonus = strength * sum(ranges) / len(ranges)
        order = sorted(range(N), key=lambda e: (-z[e], e))
        S = []
        for slot in range(k):
            left = [e for e in order if e not in S]
            e = left[0]
            if slot >= kept:
                if method == "prior":
                    e = min(left, key=lambda i: (-(z[i] + (bonus if i in cache else 0.0)), i))
                elif e not in cache:
                    others = [i for i in left if i in cache]
                    if method == "rank":
                        others = [i for i in others if order.index(i) < strength]
                    else:
                        others = [i for i in others if g[t][i] >= (1 - strength) * g[t][e]]
                    e = others[0] if others else e
            S.append(e)
        S.sort(key=lambda i: -g[t][i])
        lru_request(cache, S, capacity)
        chosen.append(S)
    return chosen


def expected_misses(g, k, mask, doc, capacity):
    """A soft cache: a = u(1−m), m ← m + a − e, e ∝ m(1−u) for what exceeds the capacity; Σ a per real token."""
    L, B, T, N = len(g), len(mask), len(mask[0]), len(g[0][0][0])
    tokens = real_tokens(mask)
    if not tokens:
        return 0.0
    total = 0.0
    for l in range(L):
        for b in range(B):
            m = [0.0] * N
            for t in range(T):
                if document_start(doc, b, t) == t:
                    m = [0.0] * N
                if not mask[b][t]:
                    continue
                u = [k * p if k * p <= 1 else 1.0 for p in g[l][b][t]]
                a = [u[i] * (1 - m[i]) for i in range(N)]
                total = total + sum(a)
                free = sum(m[i] * (1 - u[i]) for i in range(N))
                excess = sum(m) + sum(a) - capacity
                e = [excess * m[i] * (1 - u[i]) / free if excess > 0 and free > 0 else 0.0 for i in range(N)]
                m = [m[i] + a[i] - e[i] for i in range(N)]
    return total / (L * len(tokens))


# Routing


def softmax(row):
    """eq:gate."""
    largest = max(row)
    weights = [exp(x - largest) for x in row]
    return [w / sum(weights) for w in weights]


def top_k(g_row, k):
    """eq:topk. The k most probable experts, best first; ties go to the lowest index."""
    chosen = []
    for _ in range(k):
        best = None
        for i in range(len(g_row)):
            if i not in chosen and (best is None or g_row[i] > g_row[best]):
                best = i
        chosen.append(best)
    return chosen


def scored(logits, k, *, score, bias, groups, groups_kept, group_score, renormalise, scale):
    """`(g, S, w)` of one token: scores, the k best by score and bias in the best groups, weights from the scores."""
    N = len(logits)
    p = softmax(logits) if score == "softmax" else [1 / (1 + exp(-x)) for x in logits]
    rank = [p[i] + (bias[i] if bias else 0.0) for i in range(N)]
    size = N // groups
    best_of = {"max": 1, "top2": 2}[group_score]
    values = [sum(sorted(rank[j * size : (j + 1) * size], reverse=True)[:best_of]) for j in range(groups)]
    kept = top_k(values, groups_kept)
    S = top_k([rank[i] if i // size in kept else -inf for i in range(N)], k)
    S = sorted(S, key=lambda i: -p[i])
    total = sum(p[i] for i in S) if renormalise else 1.0
    return [x / sum(p) for x in p], S, [scale * p[i] / total for i in S]


def hard_window(logits, k, window, beta, doc=None):
    """Hard-Window (sec:variants). `(g, S)` of one sequence [T,N], with β on the experts of H(t, W).

    H(t, W) holds the unbiased top-k of the preceding W tokens of the same document; g comes after the bias.
    """
    T, N = len(logits), len(logits[0])
    unbiased = [top_k(logits[t], k) for t in range(T)]
    g, S = [], []
    for t in range(T):
        start = document_start(None if doc is None else [doc], 0, t)
        H = {e for s in range(max(start, t - window), t) for e in unbiased[s]}
        g.append(softmax([logits[t][e] + (beta if e in H else 0.0) for e in range(N)]))
        S.append(top_k(g[t], k))
    return g, S


def by_weight(logits_row, experts):
    """The experts of a set, heaviest first; ties go to the lowest index."""
    return sorted(experts, key=lambda e: (-softmax(logits_row)[e], e))


def with_difference(base, out, inner):
    """base + out·inner, entry by entry: [rows, columns], [rows, r] and [r, columns]."""
    r = len(inner)
    return [
        [base[a][b] + sum(out[a][i] * inner[i][b] for i in range(r)) for b in range(len(base[0]))]
        for a in range(len(base))
    ]


def starts(T, doc):
    """Which tokens of one sequence are the first of a document."""
    return [document_start(None if doc is None else [doc], 0, t) == t for t in range(T)]


def smooth(x, decay, doc=None):
    """s_t = d·s_t−1 + (1−d)·x_t of one sequence [T,d]; s = x at the start of a document."""
    s = []
    for t, start in enumerate(starts(len(x), doc)):
        s.append(list(x[t]) if start else [decay * p + (1 - decay) * q for p, q in zip(s[-1], x[t], strict=True)])
    return s


def hysteresis(logits, k, bonus, doc=None):
    """S of one sequence: the top-k of the logits with a bonus on the experts of the token before."""
    S = []
    for t, start in enumerate(starts(len(logits), doc)):
        last = [] if start else S[-1]
        S.append(by_weight(logits[t], top_k([x + bonus * (e in last) for e, x in enumerate(logits[t])], k)))
    return S


def residency(logits, k, capacity, margin, average, doc=None, pinned=0):
    """`(S, R)` of one sequence: chosen and resident experts of every token; the first `pinned` are never evicted."""
    N = len(logits[0])
    S, residents, demand = [], [], []
    for t, start in enumerate(starts(len(logits), doc)):
        signal = softmax(logits[t]) if average else logits[t]
        if start:
            demand = list(signal)
            R = set(top_k([inf] * pinned + demand[pinned:], min(capacity, N)))
        else:
            demand = [average * q + (1 - average) * s for q, s in zip(demand, signal, strict=True)]
            R = set(residents[-1])
            outside = [e for e in range(N) if e not in R]
            if outside:
                best = min(outside, key=lambda e: (-demand[e], e))
                worst = max(R - set(range(pinned)), key=lambda e: (-demand[e], e))
                if demand[best] > demand[worst] + margin:
                    R = R - {worst} | {best}
        residents.append(R)
        S.append(by_weight(logits[t], R)[:k])
    return S, residents


def slot_choice(logits, k, slots, margin, rest=1, doc=None, drawn=None):
    """`(S, R)` of one sequence: chosen and resident experts of every token, one resident for each slot i mod C.

    With `drawn` the slots of each token are given.
    """
    N = len(logits[0])
    members = [range(slot, N, slots) for slot in range(min(slots, N))]
    S, residents = [], []
    for t, start in enumerate(starts(len(logits), doc)):
        g = softmax(logits[t])
        share = [g[e] / sum(g[f] for f in range(e % slots, N, slots)) for e in range(N)]
        if start:
            R = {min(slot, key=lambda e: (-share[e], e)) for slot in members}
            loaded = t - rest + 1  # the next token may load
        else:
            R = set(residents[-1])
            changes = []
            for slot in members:
                (here,) = R & set(slot)
                others = [e for e in slot if e != here]
                if others:
                    best = min(others, key=lambda e: (-share[e], e))
                    changes.append((share[best] - share[here], here, best))
            wins = [change for change in changes if change[0] > margin]
            if wins and t - loaded >= rest:
                _, here, best = min(wins, key=lambda change: (-change[0], change[1] % slots))
                R = R - {here} | {best}
                loaded = t
        residents.append(R)
        available = R if drawn is None else {e for e in R if e % slots in drawn[t]}
        S.append(by_weight(logits[t], available)[:k])
    return S, residents


def slot_gates(h, fast_gate, slow_gate, slots, fast, slow, doc=None, token_gate=None):
    """Logits of one sequence: the slot's mean row on the fast average, each expert's own row on the slow one.

    With `token_gate`, also the slot's mean row of it on the token.
    """

    def dot(row, x):
        return sum(p * q for p, q in zip(row, x, strict=True))

    N = len(slow_gate)
    out = []
    for x, quick, steady in zip(h, smooth(h, fast, doc), smooth(h, slow, doc), strict=True):
        logits = []
        for e in range(N):
            members = range(e % slots, N, slots)
            logit = sum(dot(fast_gate[f], quick) for f in members) / len(members) + dot(slow_gate[e], steady)
            if token_gate is not None:
                logit += sum(dot(token_gate[f], x) for f in members) / len(members)
            logits.append(logit)
        out.append(logits)
    return out


def rent(logits, k, capacity, price, doc=None):
    """`(S, R)` of one sequence: chosen and resident experts of every token."""
    N = len(logits[0])
    S, residents, missed, last_use = [], [], [], []
    for t, start in enumerate(starts(len(logits), doc)):
        g = softmax(logits[t])
        if start:
            R = set(top_k(g, min(capacity, N)))
            missed, last_use = [0.0] * N, [(t - 1, 0)] * N
        else:
            R = set(residents[-1])
            least = g[by_weight(logits[t], R)[k - 1]]
            for e in range(N):
                if e not in R:
                    missed[e] += max(0.0, g[e] - least)
            wanted = [e for e in range(N) if e not in R and g[e] > least]
            if wanted:
                best = min(wanted, key=lambda e: (-missed[e], e))
                oldest = min(R, key=lambda e: (last_use[e], g[e], -e))
                if missed[best] > price:
                    R = R - {oldest} | {best}
                    missed[best] = missed[oldest] = 0.0
        residents.append(R)
        S.append(by_weight(logits[t], R)[:k])
        for heavier, e in enumerate(S[-1]):
            last_use[e] = (t, -heavier)
    return S, residents


def segment(logits, k, window, doc=None):
    """S of one sequence: one set per W tokens of a document, from the sum of the logits of the W tokens before."""
    S, chosen = [], None
    for t in range(len(logits)):
        position = t - document_start(None if doc is None else [doc], 0, t)
        if position == 0:
            chosen = top_k(logits[t], k)
        elif position % window == 0:
            chosen = top_k([sum(column) for column in zip(*logits[t - window : t], strict=True)], k)
        S.append(by_weight(logits[t], chosen))
    return S


def hashed_experts(key, n_experts, k, salt=0):
    """The k experts whose mixed numbers are the smallest."""
    return hashed_order(key, n_experts, salt)[:k]


def hashed_slots(key, capacity, n_experts, k, salt=0):
    """The slots of the first experts in hashed order; slots themselves are hashed if all have as many experts."""
    slots = min(capacity, n_experts)
    drawn = []
    for i in hashed_order(key, slots if n_experts % slots == 0 else n_experts, salt):
        if i % slots not in drawn:
            drawn.append(i % slots)
    return drawn[:k]


def hashed_order(key, n, salt):
    """0 to n−1 by their mixed numbers, which are signed 64-bit integers."""

    def signed(x):
        x %= 2**64
        return x - 2**64 if x >= 2**63 else x

    def mixed(i):
        x = key * n + i + salt * 2**40
        x = x * -4658895280553007687 % 2**64
        x = (x ^ x >> 32) * -7723592293110705685 % 2**64
        return signed(x ^ x >> 29)

    return sorted(range(n), key=mixed)


def span_starts(T, window, sentence, boundary, doc=None):
    """For each token of one sequence, the first token of its span."""
    first = []
    for t, start in enumerate(starts(T, doc)):
        position = t - document_start(None if doc is None else [doc], 0, t)
        new = start or (window and position % window == 0) or (sentence and boundary[t])
        first.append(t if new else first[-1])
    return first


# Metrics: `table` has S, n_experts, mask and doc


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def ratio(part, whole):
    return part / whole if whole else nan


def switch_rate(table):
    """eq:sr_metric. Share of adjacent pairs whose top-1 expert changes, mean over layers."""
    return _changes(table, lambda chosen: chosen[0])


def set_switch_rate(table):
    """eq:switch_rate. Share of adjacent pairs whose selected set changes, mean over layers."""
    return _changes(table, lambda chosen: {int(e) for e in chosen})


def _changes(table, what):
    rates = []
    for layer in table.S:
        pairs = [(b, t) for b, t in real_tokens(table.mask) if is_pair(table.mask, table.doc, b, t)]
        changed = sum(1 for b, t in pairs if what(layer[b][t]) != what(layer[b][t - 1]))
        rates.append(ratio(changed, len(pairs)))
    return mean(rates)


def lru_request(cache, request, capacity):
    """CHR. `(hits, loads, evictions)` of one request to `cache`, a list with the least recent expert first.

    The experts of a request come heaviest first. If they cannot all be resident at once, each is a request.
    """
    if len(request) > capacity:
        outcomes = [lru_request(cache, [e], capacity) for e in request]
        return tuple([e for outcome in outcomes for e in outcome[part]] for part in range(3))

    hits = [e for e in request if e in cache]
    loads = [e for e in request if e not in cache]
    evictions = []
    for e in loads:
        if len(cache) == capacity:
            victim = next(x for x in cache if x not in request)
            cache.remove(victim)
            evictions.append(victim)
        cache.append(e)
    for e in reversed(request):
        cache.remove(e)
        cache.append(e)
    return hits, loads, evictions


def lru(requests, capacity):
    """CHR. `(hits, misses)` of a cold LRU cache over a list of requests."""
    cache, n_hits, n_misses = [], 0, 0
    for request in requests:
        hits, loads, _ = lru_request(cache, request, capacity)
        n_hits += len(hits)
        n_misses += len(loads)
    return n_hits, n_misses


def streams(S, mask, doc):
    """CHR. The requests of one layer [B,T,k] as lists, one per document of a sequence, each for a cold cache."""
    found = []
    for b in range(len(S)):
        for t in range(len(S[b])):
            if document_start(doc, b, t) == t:
                found.append([])
            if mask is None or mask[b][t]:
                found[-1].append([int(e) for e in S[b][t]])
    return found


def cache_hit_rate(table, capacity=2):
    """CHR. Hits over top-1 accesses of an LRU cache per sequence, cold; mean over layers."""
    return _hit_rate(table, capacity, slots=1)


def cache_hit_rate_all(table, capacity):
    """CHR over all k slots: a token's k experts are one request."""
    return _hit_rate(table, capacity, slots=len(table.S[0][0][0]))


def _hit_rate(table, capacity, slots):
    rates = []
    for layer in table.S:
        hits = accesses = 0
        for stream in streams(layer, table.mask, table.doc):
            h, m = lru([request[:slots] for request in stream], capacity)
            hits += h
            accesses += h + m
        rates.append(ratio(hits, accesses))
    return mean(rates)


def assignments(layer, mask, n_experts):
    """UE. How many slots of one layer each expert received."""
    counts = [0] * n_experts
    for b, t in real_tokens(mask):
        for e in layer[b][t]:
            counts[e] += 1
    return counts


def utilisation_entropy(table):
    """UE. Entropy in bits of the assignments over all slots, mean over layers."""
    return mean(_entropies(table))


def effective_experts(table):
    """2^UE per layer, mean over layers."""
    return mean(2**bits for bits in _entropies(table))


def _entropies(table):
    for layer in table.S:
        counts = assignments(layer, table.mask, table.n_experts)
        if sum(counts) == 0:
            yield nan
        else:
            yield -sum(c / sum(counts) * log2(c / sum(counts)) for c in counts if c > 0)


def neglected_experts(table):
    """Experts whose share of the assignments is below a tenth of 1/N, counted over all layers."""
    neglected = 0
    for layer in table.S:
        counts = assignments(layer, table.mask, table.n_experts)
        neglected += sum(1 for c in counts if 10 * table.n_experts * c < sum(counts))
    return neglected


def gate_entropy(g, mask):
    """Gate entropy. Mean entropy of g over the real tokens in bits, mean over layers."""
    tokens = real_tokens(mask)
    total = sum(-p * log2(p) for layer in g for b, t in tokens for p in layer[b][t] if p > 0)
    return ratio(total, len(g) * len(tokens))


# Caches: other policies than the paper's, with what they remember written out


def one_by_one(requests, capacity):
    """A request that cannot be resident at once is one request per expert, heaviest first."""
    return [part for r in requests for part in ([r] if len(r) <= capacity else [[e] for e in r])]


def misses(requests, capacity, policy):
    """Misses of a cold cache that loads on demand. `policy` is fifo, sieve, lfu or static."""
    return counts([("ask", request) for request in requests], capacity, policy)["misses"]


def counts(requests, capacity, policy, on_miss="load", fade=8):
    """What a cold cache counts. A request is (kind, experts): ask (of one token), union (of several) or prefetch."""
    total = {}
    for kind, experts in requests:
        for e in experts if kind != "prefetch" else ():
            total[e] = total.get(e, 0) + 1
    cache = {}  # expert -> when it was loaded, when last used, uses, value with age, whether used again
    found = dict.fromkeys(("hits", "misses", "prefetched", "wasted", "evictions", "bypassed"), 0)
    asked, counted = {}, 0  # recent requests of each expert
    clock = age = 0
    hand = None
    for kind, experts in requests:
        if kind != "prefetch":
            if counted >= fade * capacity:
                asked, counted = {e: n // 2 for e, n in asked.items()}, 0
            for e in experts:
                asked[e] = asked.get(e, 0) + 1
            counted += len(experts)
        for group in groups(cache, kind, experts, capacity):
            for e in group:
                if e in cache and kind != "prefetch":
                    found["hits"] += 1
                    cache[e]["unused"] = False
            for e in [e for e in group if e not in cache]:
                found["prefetched" if kind == "prefetch" else "misses"] += 1
                if len(cache) == capacity:
                    free = [x for x in cache if x not in group]
                    if policy == "fifo":
                        victim = min(free, key=lambda x: cache[x]["loaded"])
                    elif policy == "lru":
                        victim = min(free, key=lambda x: cache[x]["used"])
                    elif policy == "static":
                        victim = min(free, key=lambda x: (total.get(x, 0), -x))
                    elif policy == "lfu":
                        victim = min(free, key=lambda x: (cache[x]["value"], cache[x]["used"]))
                        age = cache[victim]["value"]
                    else:
                        victim, after = sieve_victim(cache, group, hand)
                        hand = victim
                    if on_miss == "bypass" and kind != "prefetch" and asked[e] < asked.get(victim, 0):
                        found["bypassed"] += 1
                        continue
                    if policy == "sieve":
                        hand = after
                    found["evictions"] += 1
                    found["wasted"] += cache.pop(victim)["unused"]
                cache[e] = {"loaded": None, "uses": 0, "again": False, "unused": kind == "prefetch"}
            for e in [e for e in reversed(group) if e in cache]:
                clock += 1
                entry = cache[e]
                if entry["loaded"] is None:
                    entry["loaded"] = clock
                else:
                    entry["again"] = True
                entry["used"] = clock
                entry["uses"] += 1
                entry["value"] = entry["uses"] + age
    found["wasted"] += sum(entry["unused"] for entry in cache.values())
    return found


def groups(cache, kind, experts, capacity):
    """The parts of a request that are served together; computed as the request begins."""
    if kind == "prefetch":
        return [experts[:capacity]]
    if len(experts) <= capacity:
        return [experts]
    if kind == "ask":
        return [[e] for e in experts]
    rest = [e for e in experts if e not in cache]
    return [[e for e in experts if e in cache], *(rest[i : i + capacity] for i in range(0, len(rest), capacity))]


def sieve_victim(cache, pinned, hand):
    """SIEVE. `(victim, hand)`: the hand goes from older to newer loads and takes marks off what it passes."""
    order = sorted((x for x in cache if cache[x]["loaded"] is not None), key=lambda x: cache[x]["loaded"])
    at = order.index(hand) if hand in order else 0
    while order[at] in pinned or cache[order[at]]["again"]:
        if order[at] not in pinned:
            cache[order[at]]["again"] = False
        at = (at + 1) % len(order)
    return order[at], order[at + 1] if at + 1 < len(order) else None


def fewest_misses(requests, capacity):
    """The fewest misses of any cold cache that loads on demand, by trying every choice of victims."""
    best = {frozenset(): 0}
    for request in one_by_one(requests, capacity):
        after = {}
        for cache, count in best.items():
            loads = set(request) - cache
            free = cache - set(request)
            surplus = max(len(cache) + len(loads) - capacity, 0)
            for gone in combinations(sorted(free), surplus):
                state = (cache | loads) - set(gone)
                after[state] = min(after.get(state, inf), count + len(loads))
        best = after
    return min(best.values())
