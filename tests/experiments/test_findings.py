"""Findings follow from the numbers, and say so when the numbers are not there."""

from __future__ import annotations

import pytest

from experiments.records import a_run
from stickymoe.experiments.collection import grouped
from stickymoe.experiments.findings import findings, overfitting


def soft(lam, **metrics):
    return a_run({"name": "soft", "lam": lam}, **metrics)


def hard(window, **metrics):
    return a_run({"name": "hard_window", "window": window}, **metrics)


PAPER_LIKE = [
    a_run("vanilla", ppl=100.0, switch_rate=0.7),
    soft(0.01, ppl=99.5, switch_rate=0.67),
    soft(0.05, ppl=100.1, switch_rate=0.55),
    soft(0.1, ppl=101.0, switch_rate=0.47),
    soft(0.5, ppl=104.0, switch_rate=0.29, cache_hit_rate=0.86, cache_hit_rate_all_c3=0.8, gate_entropy=1.99),
    hard(2, ppl=105.6, switch_rate=0.5),
    hard(4, ppl=103.7, switch_rate=0.6),
    hard(8, ppl=101.1, switch_rate=0.66),
    a_run({"name": "soft_hard", "alpha": 1.0}, ppl=103.0, switch_rate=0.27, cache_hit_rate=0.89),
    a_run("remoe", ppl=99.9, switch_rate=0.697),
    a_run("oracle", ppl=105.0, switch_rate=0.39, cache_hit_rate=0.84),
    a_run("dense", ppl=110.0),
]


def found(runs):
    (group,) = grouped(runs)
    return {f.claim.split(".")[0] if f.claim[0].isdigit() else f.claim: f for f in findings(group)}


def replaced(*runs):
    keys = {run.config.variant.key for run in runs}
    return [run for run in PAPER_LIKE if run.config.variant.key not in keys] + list(runs)


def test_all_six_hold_on_numbers_like_the_papers():
    verdicts = found(PAPER_LIKE)
    assert [verdicts[str(i)].verdict for i in range(1, 7)] == ["holds"] * 6
    assert "59 %" in verdicts["2"].text
    assert "monotone" in verdicts["2"].text


@pytest.mark.parametrize(
    ("claim", "changed", "verdict"),
    [
        ("1", [soft(0.01, ppl=103.0), soft(0.05, ppl=104.0)], "does not hold"),
        ("1", [soft(0.05, ppl=104.0, switch_rate=0.55)], "holds in part"),
        ("2", [soft(0.5, switch_rate=0.65)], "does not hold"),
        ("2", [soft(0.1, switch_rate=0.6)], "holds in part"),
        ("3", [a_run("remoe", switch_rate=0.4)], "does not hold"),
        ("4", [hard(2, ppl=99.0, switch_rate=0.5)], "holds in part"),
        ("5", [a_run("oracle", switch_rate=0.1, cache_hit_rate=0.95)], "does not hold"),
        ("6", [soft(0.1, switch_rate=0.47, utilisation_entropy=1.0)], "does not hold"),
    ],
)
def test_a_claim_falls_with_its_numbers(claim, changed, verdict):
    assert found(replaced(*changed))[claim].verdict == verdict


def test_what_lacks_its_rows_is_not_tested():
    verdicts = found([a_run("vanilla"), a_run("oracle")])
    assert verdicts["1"].verdict == "not tested"
    assert "soft-lam0.01" in verdicts["1"].text
    assert verdicts["What is the mixture worth over a dense model?"].verdict == "not tested"


def test_the_worth_of_the_mixture_and_what_is_kept():
    text = found(PAPER_LIKE)["What is the mixture worth over a dense model?"].text
    assert "9.1% lower" in text
    assert "soft λ=0.5 60%" in text
    nothing = found(replaced(a_run("dense", ppl=90.0)))["What is the mixture worth over a dense model?"].text
    assert "worth nothing" in nothing


def test_uniform_gates_are_named():
    assert (
        "1 of 11 rows have gates within 1 % of uniform (soft λ=0.5)"
        in found(PAPER_LIKE)["Does utilisation entropy hide uniform gates?"].text
    )


def test_ablations_do_not_pass_for_the_papers_rows():
    ablation = a_run({"name": "soft", "lam": 0.5, "mu": 0.0}, switch_rate=0.01, utilisation_entropy=0.1)
    verdicts = found([*PAPER_LIKE, ablation])
    assert verdicts["5"].verdict == verdicts["6"].verdict == "holds"
    assert "utilisation entropy 0.100" in verdicts["Does the balance loss prevent collapse?"].text


def test_overfitting_is_asked_only_where_the_corpus_was_cut():
    quarter = {"data": {"fraction": 0.25}}
    (whole,) = grouped(PAPER_LIKE)
    assert overfitting(whole) is None
    (group,) = grouped([a_run("vanilla", settings=quarter, best_ppl=90.0), a_run("soft", settings=quarter, ppl=98.0)])
    finding = overfitting(group)
    assert finding.verdict == "measured"
    assert "its best was 90.00" in finding.text
    assert "-2.0 %" in finding.text
    (alone,) = grouped([a_run("vanilla", settings=quarter)])
    assert overfitting(alone).verdict == "not tested"
