"""Residents replaced by other experts of their slots: what moves, what stays, and for which runs it works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lively import enliven, random_tokens
from stickymoe.cli import main
from stickymoe.errors import RunError
from stickymoe.runs.config import ModelConfig, RunConfig
from stickymoe.runs.record import RunRecord
from stickymoe.training.build import build_model
from stickymoe.training.shuffle import _others, shuffle_residents
from stickymoe.variants import variant

SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=16)


def model_of(name: str = "siblings", capacity: int = 2, **sizes):
    settings = {} if name == "vanilla" else {"capacity": capacity}
    config = RunConfig(model=ModelConfig(**{**vars(SIZES), **sizes}), variant=variant(name, **settings))
    return enliven(build_model(config, 23)).requires_grad_(False).eval()


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9))
def test_every_expert_is_replaced_by_another_of_its_slot(n, capacity, seed):
    capacity = min(n, capacity)
    order = _others(n, capacity, torch.Generator().manual_seed(seed))
    assert sorted(order) == list(range(n))
    for e, other in enumerate(order):
        assert other % capacity == e % capacity
        alone = len(range(e % capacity, n, capacity)) == 1
        assert (other == e) == alone


def test_every_other_expert_of_a_slot_is_drawn():
    drawn = {_others(8, 2, torch.Generator().manual_seed(seed))[0] for seed in range(40)}
    assert drawn == {2, 4, 6}


@pytest.mark.parametrize("name", ["siblings", "siblings+delta"])
def test_whole_experts_move_and_routers_stay(name):
    model, shuffled = model_of(name), model_of(name)
    shuffle_residents(shuffled, seed=3)
    first = model(random_tokens(0, 1, 16)).trace.S[0]
    assert torch.equal(shuffled(random_tokens(0, 1, 16)).trace.S[0], first), "layer 0 is routed as before"
    for block, other in zip(model.blocks, shuffled.blocks, strict=True):
        own, found = block.ffn.experts.weights(), other.ffn.experts.weights()
        for e in range(5):
            (source,) = (i for i in range(5) if all(torch.equal(b[e], a[i]) for a, b in zip(own, found, strict=True)))
            assert source % 2 == e % 2
            assert source != e
    again = model_of(name)
    shuffle_residents(again, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), shuffled.parameters(), strict=True))


def test_experts_that_layers_share_are_shuffled_once():
    model = model_of(share_block=2, n_experts=4)
    before = model.blocks[0].ffn.experts.up.clone()
    shuffle_residents(model)
    after = model.blocks[1].ffn.experts.up
    assert torch.equal(after, before[[2, 3, 0, 1]])  # twice would restore it


def test_equal_experts_of_a_slot_change_nothing():
    model = model_of()
    for block in model.blocks:
        block.ffn.experts.tie()
    expected = model(random_tokens(0, 2, 16)).logits
    shuffle_residents(model)
    assert torch.equal(model(random_tokens(0, 2, 16)).logits, expected)


@pytest.mark.parametrize(("name", "capacity"), [("vanilla", 3), ("residency", 3), ("siblings", 5)])
def test_models_without_shared_slots_are_refused(name, capacity):
    with pytest.raises(RunError, match=r"^--shuffle_residents: got a run in which no experts share a slot, expected "):
        shuffle_residents(model_of(name, capacity))


def test_the_command_shows_both_and_keeps_one(small, finished, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished(small("--variant.capacity", "2", variant="siblings")), run)
    record = RunRecord.read(run / "record.json")
    assert main(["eval", str(run), "--shuffle_residents", "--save"]) == 0
    found = RunRecord.read(run / "record.json").evaluations
    assert set(found) == {"shuffled valid"}
    ppl, true = found["shuffled valid"]["ppl"], record.metrics["ppl"]
    shown = capsys.readouterr().out
    assert f"with another expert of every slot resident: perplexity {ppl:.2f} ({ppl / true - 1:+.1%})" in shown
    assert f"{true:.2f}" in shown
    assert main(["eval", str(run), "--shuffle_residents", "--save"]) == 2
    assert "already has 'shuffled valid'" in capsys.readouterr().err
    assert main(["eval", str(finished(small())), "--shuffle_residents"]) == 2
    assert "no experts share a slot" in capsys.readouterr().err
