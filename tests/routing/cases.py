"""Inputs of routers for the tests of rules: hidden states, tokens, documents, and logits with many ties."""

from dataclasses import fields, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st

from stickymoe.models.moe import Router
from stickymoe.routing.rules import ChoiceInput, RouterInput, RouterState, RoutingRule
from stickymoe.routing.trace import token_positions
from strategies import documents, seeds

D = 6


def router_input(rng, B, T, doc=None, dtype=torch.float64):
    """T tokens whose hidden and attended values have nothing in common."""
    h, attended = (torch.tensor(rng.standard_normal((B, T, D)), dtype=dtype) for _ in range(2))
    return RouterInput(
        h=h,
        attended=attended,
        tokens=torch.tensor(rng.integers(0, 50, (B, T))),
        position=token_positions(torch.ones(B, T, dtype=torch.bool), doc),
        doc=doc,
    )


def router(rng, N, k, *, dtype=torch.float64, gate_only=False, **parts):
    """A router with a random gate; `parts` are those of its rule."""
    made = Router(D, N, RoutingRule(k, **parts), gate_only=gate_only).to(dtype)
    made.gate.weight.data = torch.tensor(rng.standard_normal(made.gate.weight.shape), dtype=dtype)
    return made


def choose(choice, logits, k, x, state=None, **given):
    """`(p, S, state)` of a choice on its own."""
    return choice(ChoiceInput(logits, k, **given), x, state or RouterState())


def _fields(x, part):
    of_tokens = ("h", "attended", "tokens", "position", "doc", "boundary")
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    return replace(x, **{name: values[name][part] for name in of_tokens if values[name] is not None})


def steps(x, start, stop):
    """The tokens from `start` to `stop`."""
    return _fields(x, (slice(None), slice(start, stop)))


def row(x, b):
    """One sequence, as a batch."""
    return _fields(x, slice(b, b + 1))


def doc_of(x, b):
    return None if x.doc is None else x.doc[b].tolist()


@st.composite
def inputs(draw, max_T=12):
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, max_T))
    doc = draw(st.none() | documents(B, T))
    return router_input(draw(seeds()), B, T, None if doc is None else torch.tensor(doc))


@st.composite
def windowed_logits(draw):
    """Logits in quarters: many ties, and sums that floating point does not blur."""
    B, T, N = draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    doc = draw(st.none() | documents(B, T))
    rng = draw(seeds())
    x = router_input(rng, B, T, None if doc is None else torch.tensor(doc))
    return torch.tensor(rng.integers(-6, 7, (B, T, N)) / 4), draw(st.integers(1, N)), x


def assert_pieces_are_the_whole(route, x, data):
    """With gradient or without, which is on tensors or on arrays."""
    T = x.h.shape[1]
    cuts = data.draw(st.sets(st.integers(1, T - 1))) if T > 1 else set()
    whole = route(x)
    state, pieces = None, []
    for start, stop in pairwise([0, *sorted(cuts), T]):
        with torch.set_grad_enabled(data.draw(st.booleans())):
            pieces.append(route(steps(x, start, stop), state))
        state = pieces[-1].state
    assert torch.equal(torch.cat([p.S for p in pieces], dim=1), whole.S)
    torch.testing.assert_close(torch.cat([p.g for p in pieces], dim=1), whole.g, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([p.w for p in pieces], dim=1), whole.w, rtol=1e-12, atol=1e-14)
    assert state.values.keys() == whole.state.values.keys()
    for name, value in whole.state.values.items():
        torch.testing.assert_close(state.values[name], value, rtol=1e-12, atol=1e-14)


def assert_documents_stand_alone(route, x):
    """Each document, routed alone, gives its part of the packed row."""
    whole = route(x)
    for b in range(len(x.h)):
        starts = [t for t in range(x.h.shape[1]) if x.position[b, t] == 0]
        for start, stop in pairwise([*starts, x.h.shape[1]]):
            routed = route(replace(row(steps(x, start, stop), b), doc=None))
            assert torch.equal(routed.S[0], whole.S[b, start:stop])
            torch.testing.assert_close(routed.g[0], whole.g[b, start:stop], rtol=1e-12, atol=1e-14)
