"""Two processes give the losses and gradients of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from tiny import tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, TrainingArguments
from two_processes import in_two_processes

import stickymoe
from stickymoe import RoutingTrace, StickyTrainer

VARIANTS = {
    "soft": stickymoe.variant("soft", lam=3.0, mu=0.0),
    "rule": stickymoe.variant("hysteresis+soft", bonus=0.2, lam=3.0, mu=0.0),
}
LR = 0.1


def tokens() -> Tensor:
    return torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    def whole(p: Tensor) -> Tensor:
        return p.full_tensor() if isinstance(p, DTensor) else p

    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}


def on_one_process(variant: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    model, ids = tiny("mixtral").train(), tokens()
    with stickymoe.attach(model, variant) as attached:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach(), gradients(model), attached.trace.S


def wrapped(model: PreTrainedModel, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first", ["attached first", "wrapped first"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_losses_and_gradients_equal_those_of_one_process(tmp_path: Path, how: str, first: str, variant: str) -> None:
    def work(rank: int) -> Any:
        model = tiny("mixtral").train()
        ids = tokens()[2 * rank : 2 * rank + 2]
        attached = stickymoe.attach(model, VARIANTS[variant]) if first == "attached first" else None
        model = wrapped(model, how)
        attached = attached or stickymoe.attach(model, VARIANTS[variant])
        for _ in range(2):  # twice, since the first step sets things up
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found = gradients(model)
        attached.detach()
        with torch.no_grad():
            bare = model(input_ids=ids, labels=ids).loss
        return {"loss": loss.detach(), "gradients": found, "S": attached.trace.S, "bare": bare, "terms": attached.terms}

    loss, expected, S = on_one_process(VARIANTS[variant])
    found = in_two_processes(work, tmp_path)
    torch.testing.assert_close((found[0]["loss"] + found[1]["loss"]) / 2, loss)
    assert torch.equal(torch.cat([rank["S"] for rank in found], 1), S)
    for rank in found:
        assert sorted(rank["gradients"]) == sorted(expected)
        for name, value in expected.items():
            torch.testing.assert_close(rank["gradients"][name], value, atol=1e-6, rtol=1e-4)
    if variant == "soft":
        for rank in found:
            torch.testing.assert_close(rank["loss"] - rank["bare"], 3.0 * rank["terms"]["cons"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("across", [True, False])
def test_a_trainer_on_two_processes_weighs_terms_by_labels(tmp_path: Path, across: bool) -> None:
    """Two processes of two rows each; some rows have fewer labels than others.

    Rows count by their labels among those of all processes, or among those of their own.
    """
    ids = tokens()
    labels = ids.clone()
    labels[0, :5], labels[2, :7], labels[3, 4:] = -100, -100, -100
    data = Dataset.from_list(
        [{"input_ids": x.tolist(), "labels": y.tolist()} for x, y in zip(ids, labels, strict=True)]
    )

    def work(rank: int) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        model = tiny("mixtral").train()
        seen: list[Any] = []
        handle = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((kwargs["input_ids"], kwargs["labels"])), with_kwargs=True
        )
        args = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            report_to=[],
            optim="sgd",
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=across,
            max_steps=1,
        )
        assert args.world_size == 2
        trainer = StickyTrainer(model, args, train_dataset=data, variant=VARIANTS["soft"])
        trainer.train()
        handle.remove()
        return {"weights": {n: p.detach() for n, p in model.named_parameters()}, "seen": seen}

    found = in_two_processes(work, tmp_path, joined=False)
    model = tiny("mixtral").train()
    counts = [[int((y[:, 1:] != -100).sum()) for _, y in rank["seen"]] for rank in found]
    assert sorted(x.flatten().tolist() for rank in found for x, _ in rank["seen"]) == sorted(ids.tolist())
    loss: Any = 0.0
    for rank, own in zip(found, counts, strict=True):
        for (x, y), n in zip(rank["seen"], own, strict=True):
            out = model(input_ids=x, labels=y, output_router_logits=True)
            trace = RoutingTrace.from_logits(torch.stack(out.router_logits).view(3, *x.shape, -1), 2)
            ce = out.loss - model.router_aux_loss_coef * out.aux_loss
            share = n / sum(map(sum, counts)) if across else n / sum(own) / 2
            loss = loss + share * (ce + 3.0 * stickymoe.consistency_loss(trace))
    loss.backward()
    for rank in found:
        for name, p in model.named_parameters():
            torch.testing.assert_close(rank["weights"][name], (p - LR * p.grad).detach(), atol=1e-6, rtol=1e-4)
