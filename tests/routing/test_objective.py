"""`objective`: the one sum of a variant's terms, by hand."""

import pytest
import torch

from stickymoe.routing.losses import (
    LossContext,
    anchor_by_layer,
    balance_by_layer,
    consistency_by_layer,
    cross_layer_loss,
    expert_load,
    objective,
)
from stickymoe.routing.terms import Term
from stickymoe.routing.trace import RoutingTrace
from stickymoe.variants import variant

BALANCE = Term("bal", 0.5, lambda trace, context: balance_by_layer(trace, load=context.load))
CONSISTENCY = Term("cons", 0.25, lambda trace, context: consistency_by_layer(trace), layers=(1.0, 3.0), warmup=0.5)
CROSS = Term("cross", 0.125, lambda trace, context: cross_layer_loss(trace), layers=(1.0, 3.0))


def trace_of(seed):
    logits = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return logits, RoutingTrace.from_logits(logits, 2)


@pytest.mark.parametrize(("progress", "ramp"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_terms_are_summed_with_their_weights_layers_and_warm_up(progress, ramp):
    logits, trace = trace_of(0)
    result = objective(trace, (BALANCE, CONSISTENCY, CROSS), progress=progress)
    bal, cons = balance_by_layer(trace), consistency_by_layer(trace)
    cross = cross_layer_loss(trace)
    by_hand = 0.5 * (bal[0] + bal[1]) / 2 + ramp * 0.25 * (cons[0] + 3 * cons[1]) / 2 + 0.125 * cross
    torch.testing.assert_close(result.total, by_hand)
    assert list(result.values) == ["bal", "cons", "cross"]
    for symbol, value in {"bal": bal.mean(), "cons": cons.mean(), "cross": cross}.items():
        torch.testing.assert_close(result.values[symbol], value)
    (gradient,) = torch.autograd.grad(result.total, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(by_hand, logits)[0])


def test_without_progress_terms_have_their_full_weight():
    _, trace = trace_of(0)
    assert torch.equal(objective(trace, [CONSISTENCY]).total, objective(trace, [CONSISTENCY], progress=1.0).total)


def test_no_terms_sum_to_zero():
    _, trace = trace_of(0)
    result = objective(trace, ())
    assert result.total.item() == 0.0
    assert result.values == {}


def test_the_load_of_the_whole_batch_reaches_the_balance_term():
    (_, trace), (_, other) = trace_of(0), trace_of(1)
    load = expert_load(other)
    result = objective(trace, [BALANCE], LossContext(load=load))
    torch.testing.assert_close(result.total, 0.5 * balance_by_layer(trace, load=load).mean())
    assert result.total != objective(trace, [BALANCE]).total


def test_the_trace_of_a_frozen_model_reaches_a_term():
    (_, trace), (_, frozen) = trace_of(0), trace_of(1)

    def divergence(trace, context):
        log_ratio = context.reference.g.detach().log() - trace.g.log()
        return (context.reference.g.detach() * log_ratio).sum(-1).mean((1, 2))

    result = objective(trace, [Term("kl", 2.0, divergence)], LossContext(reference=frozen))
    expected = torch.nn.functional.kl_div(trace.g.log(), frozen.g.detach(), reduction="sum") / (2 * 3 * 7)
    torch.testing.assert_close(result.total, 2.0 * expected)
    assert objective(frozen, [Term("kl", 2.0, divergence)], LossContext(reference=frozen)).total.item() == 0.0


def test_a_variant_is_the_sum_of_its_equation():
    _, trace = trace_of(0)
    terms = variant("graded+soft_hard", lam=0.2, alpha=0.5, mu=0.02, window=3, layers=(2.0, 1.0), warmup=0.5).terms()
    cons, hard = consistency_by_layer(trace), anchor_by_layer(trace, window=3)
    of_layers = trace.g.new_tensor([2.0, 1.0])
    by_hand = 0.02 * balance_by_layer(trace).mean() + 0.5 * (of_layers * (0.2 * cons + 0.5 * hard)).mean()
    torch.testing.assert_close(objective(trace, terms, progress=0.25).total, by_hand)
