"""Trainers that train with routing objectives: real steps, compared with steps computed by hand."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig

import stickymoe
from stickymoe import RoutingTrace, StickyError, StickySFTTrainer, StickyTrainer
from stickymoe.huggingface.trainer import Statistics

LR = 0.1
# TRL and transformers announce changes of their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("mixtral").train()


def rows(n: int = 8, T: int = 10, seed: int = 0) -> list[list[int]]:
    return torch.randint(3, 64, (n, T), generator=torch.Generator().manual_seed(seed)).tolist()


def dataset(ids: list[list[int]]) -> Dataset:
    return Dataset.from_list([{"input_ids": x, "attention_mask": [1] * len(x), "labels": x} for x in ids])


COMMON = {
    "use_cpu": True,
    "report_to": [],
    "optim": "sgd",
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "seed": 0,
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings = {**COMMON, "per_device_train_batch_size": 8, "max_steps": 1, **changes}
    return TrainingArguments(output_dir=str(folder), **settings)


def soft(lam: float, mu: float = 0.0) -> Any:
    return stickymoe.variant("soft", lam=lam, mu=mu)


def step_by_hand(model: PreTrainedModel, ids: Tensor, lam: float, mu: float, **inputs: Any) -> dict[str, Tensor]:
    """The weights after one step of gradient descent on cross-entropy and the terms."""
    other = copy.deepcopy(model)
    inputs = {"input_ids": ids, "labels": ids, **inputs}
    out = other(**inputs, output_router_logits=True)
    trace = RoutingTrace.from_logits(
        torch.stack(out.router_logits).view(3, *ids.shape, -1), 2, inputs.get("attention_mask")
    )
    loss = out.loss - other.router_aux_loss_coef * out.aux_loss
    loss = loss + lam * stickymoe.consistency_loss(trace) + mu * stickymoe.balance_loss(trace)
    loss.backward()
    return {name: (p - LR * p.grad).detach() for name, p in other.named_parameters()}


def assert_weights(model: PreTrainedModel, expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, atol=atol, rtol=1e-4, msg=lambda text, n=name: n + text)


def gates_of(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for name, value in weights.items() if "gate.weight" in name])


# Trainer


def test_a_step_equals_one_by_hand(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = rows()
    expected = step_by_hand(model, torch.tensor(ids), 3.0, 0.5)
    without = step_by_hand(model, torch.tensor(ids), 0.0, 0.0)
    assert (gates_of(expected) - gates_of(without)).abs().max() > 1e-3
    trainer = StickyTrainer(model, arguments(tmp_path), train_dataset=dataset(ids), variant=soft(3.0, 0.5))
    trainer.train()
    assert_weights(model, expected)
    assert trainer.attached is None
    assert not model._forward_hooks
    assert "generate" not in model.__dict__


def test_the_name_of_a_variant_and_none(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = rows()
    for name, lam, mu in (("soft", 0.1, 0.01), (None, 0.0, 0.0)):
        own = copy.deepcopy(model)
        expected = step_by_hand(own, torch.tensor(ids), lam, mu)
        trainer = StickyTrainer(own, arguments(tmp_path), train_dataset=dataset(ids), variant=name)
        trainer.train()
        assert_weights(own, expected)
        assert "routing_switch_rate" in trainer.state.log_history[0]
        assert ("routing_cons" in trainer.state.log_history[0]) == (name is not None)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulation_equals_one_batch(model: PreTrainedModel, tmp_path: Path, checkpointing: bool) -> None:
    ids = rows()
    expected = step_by_hand(model, torch.tensor(ids), 3.0, 0.0)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    args = arguments(tmp_path, **settings, gradient_checkpointing=checkpointing)
    StickyTrainer(model, args, train_dataset=dataset(ids), variant=soft(3.0)).train()
    assert_weights(model, expected)


def test_a_rule_trains(model: PreTrainedModel, tmp_path: Path) -> None:
    """The same step as that of a model which is attached by hand."""
    ids = torch.tensor(rows())
    other = copy.deepcopy(model)
    with stickymoe.attach(other, "hysteresis+soft", bonus=0.5, lam=2.0, mu=0.5):
        other(input_ids=ids, labels=ids).loss.backward()
    expected = {name: (p - LR * p.grad).detach() for name, p in other.named_parameters()}
    variant = stickymoe.variant("hysteresis+soft", bonus=0.5, lam=2.0, mu=0.5)
    args = arguments(tmp_path, gradient_checkpointing=True)
    StickyTrainer(model, args, train_dataset=dataset(ids.tolist()), variant=variant).train()
    assert_weights(model, expected)


def test_routing_becomes_consistent_and_is_logged(model: PreTrainedModel, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=30, learning_rate=0.02, optim="adamw_torch", logging_steps=5)
    trainer = StickyTrainer(
        model, args, train_dataset=dataset(rows(16)), eval_dataset=dataset(rows(8, seed=1)), variant=soft(20.0)
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 6
    names = {"cons", "bal", "switch_rate", "hit_rate_c3", "hit_rate_c4", "gate_entropy", "effective_experts"}
    names |= {"neglected_experts"}
    assert {key.removeprefix("routing_") for key in logs[0] if key.startswith("routing_")} == names
    assert {key.removeprefix("eval_routing_") for key in after if key.startswith("eval_routing_")} == names
    assert logs[-1]["routing_cons"] < 0.2 * logs[0]["routing_cons"]
    assert logs[-1]["routing_switch_rate"] < 0.8 * logs[0]["routing_switch_rate"]
    assert after["eval_routing_switch_rate"] < 0.8 * before["eval_routing_switch_rate"]
    assert after["eval_routing_hit_rate_c3"] > before["eval_routing_hit_rate_c3"]


def test_logged_numbers_equal_those_by_hand(model: PreTrainedModel, tmp_path: Path) -> None:
    from stickymoe.locality import metrics

    ids = rows()
    with stickymoe.attach(model) as attached, torch.no_grad():
        ce = model(input_ids=torch.tensor(ids), labels=torch.tensor(ids)).loss
        trace = attached.trace
    args = arguments(tmp_path, per_device_eval_batch_size=8)
    trainer = StickyTrainer(
        model, args, train_dataset=dataset(ids), eval_dataset=dataset(ids), variant=soft(3.0, 0.5), cache_slots=[2, 5]
    )
    found = trainer.evaluate()
    table = trace.table()
    expected = {
        "eval_loss": ce.item(),  # free of the terms
        "eval_routing_cons": stickymoe.consistency_loss(trace).item(),
        "eval_routing_bal": stickymoe.balance_loss(trace).item(),
        "eval_routing_switch_rate": stickymoe.switch_rate(table),
        "eval_routing_hit_rate_c2": metrics.cache_hit_rate_all(table, 2),
        "eval_routing_hit_rate_c5": metrics.cache_hit_rate_all(table, 5),
        "eval_routing_gate_entropy": trace.gate_entropy_by_layer().mean().item(),
        "eval_routing_effective_experts": metrics.effective_experts_by_layer(table).mean(),
        "eval_routing_neglected_experts": metrics.neglected_experts(table),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    trainer.train()
    logged = trainer.state.log_history[-2]
    assert logged["loss"] == pytest.approx(
        (ce + 3 * expected["eval_routing_cons"] + 0.5 * expected["eval_routing_bal"]).item(), rel=1e-4
    )
    assert logged["routing_cons"] == pytest.approx(expected["eval_routing_cons"], rel=1e-4)


def test_evaluation_during_training_with_metrics(model: PreTrainedModel, tmp_path: Path) -> None:
    seen = []

    def compute(prediction: Any) -> dict[str, float]:
        seen.append(
            prediction.predictions[0].shape
            if isinstance(prediction.predictions, tuple)
            else prediction.predictions.shape
        )
        return {"count": float(len(prediction.label_ids))}

    args = arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = StickyTrainer(
        model,
        args,
        train_dataset=dataset(rows()),
        eval_dataset=dataset(rows(4)),
        variant=soft(1.0),
        compute_metrics=compute,
    )
    trainer.train()
    assert seen == [(4, 10, 64)] * 2
    evals = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evals) == 2
    assert all(entry["eval_count"] == 4 and "eval_routing_cons" in entry for entry in evals)
    predictions = trainer.predict(dataset(rows(4)))
    assert predictions.label_ids.shape == (4, 10)


def test_the_models_own_balance_loss_is_announced(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.config.output_router_logits = True
    with caplog.at_level(logging.WARNING):
        StickyTrainer(model, arguments(tmp_path), train_dataset=dataset(rows()), variant=soft(1.0))
    assert any("its own load-balancing loss" in record.message for record in caplog.records)


def test_frozen_gates_and_layers_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    trainer = StickyTrainer(model, arguments(tmp_path), train_dataset=dataset(rows()), variant=soft(1.0))
    with pytest.raises(StickyError, match="the terms have no gradient; train the gates"):
        trainer.train()
    assert not model._forward_hooks


def test_dense_models_and_model_init_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StickyError, match="model_init is not supported"):
        StickyTrainer(args=arguments(tmp_path), model_init=lambda: tiny("mixtral"), variant=soft(1.0))
    trainer = StickyTrainer(tiny("llama"), arguments(tmp_path), train_dataset=dataset(rows()), variant=soft(1.0))
    with pytest.raises(StickyError, match="no gate and experts"):
        trainer.train()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_saving_and_resuming(family: str, tmp_path: Path) -> None:
    """Checkpoints hold the experts of Mixtral and DeepSeek one by one, and those of GPT-OSS stacked."""
    model = tiny(family).train()
    ids = rows()
    start = copy.deepcopy(model)
    args = arguments(tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=2)
    StickyTrainer(model, args, train_dataset=dataset(ids), variant=soft(2.0, 0.1)).train()
    resumed = StickyTrainer(
        start, arguments(tmp_path / "b", max_steps=4), train_dataset=dataset(ids), variant=soft(2.0, 0.1)
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_weights(start, {name: p.detach() for name, p in model.named_parameters()})


def test_label_smoothing_keeps_the_terms(model: PreTrainedModel, tmp_path: Path) -> None:
    """The trainer then computes cross-entropy itself, and takes the labels out of the inputs."""
    ids = rows()
    steps = {}
    for lam in (0.0, 3.0):
        own = copy.deepcopy(model)
        args = arguments(tmp_path, label_smoothing_factor=0.1)
        StickyTrainer(own, args, train_dataset=dataset(ids), variant=soft(lam)).train()
        steps[lam] = {name: p.detach() for name, p in own.named_parameters()}
    by_terms = {
        name: (step_by_hand(model, torch.tensor(ids), 3.0, 0.0)[name] - value)
        for name, value in step_by_hand(model, torch.tensor(ids), 0.0, 0.0).items()
    }
    for name, value in by_terms.items():
        torch.testing.assert_close(steps[3.0][name] - steps[0.0][name], value, atol=1e-6, rtol=1e-3)


def test_labels_that_are_not_shifted(tmp_path: Path) -> None:
    """A classifier has one label for a row: none of them is cut off."""
    from transformers import MixtralForSequenceClassification

    source = tiny("mixtral")
    source.config.num_labels = 3
    torch.manual_seed(0)
    model = MixtralForSequenceClassification(source.config).train()
    ids = torch.tensor(rows())
    classes = torch.arange(8) % 3
    other = copy.deepcopy(model)
    with stickymoe.attach(other) as attached:
        other(input_ids=ids)
        (3.0 * stickymoe.consistency_loss(attached.trace)).backward()
    data = Dataset.from_list([{"input_ids": x.tolist(), "labels": int(y)} for x, y in zip(ids, classes, strict=True)])
    for settings in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        weights = []
        for lam in (0.0, 3.0):
            own = copy.deepcopy(model)
            StickyTrainer(own, arguments(tmp_path, **settings), train_dataset=data, variant=soft(lam)).train()
            weights.append({name: p.detach() for name, p in own.named_parameters()})
        for name, parameter in other.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else -LR * parameter.grad
            torch.testing.assert_close(weights[1][name] - weights[0][name], expected, atol=1e-6, rtol=1e-3)


# SFTTrainer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sft(folder: Path, **changes: Any) -> SFTConfig:
    settings = {**COMMON, "per_device_train_batch_size": 8, "max_steps": 1, "bf16": False, "max_length": 32}
    settings |= {"gradient_checkpointing": False, "dataset_num_proc": None, **changes}
    return SFTConfig(output_dir=str(folder), **settings)


def tokens(ids: list[list[int]]) -> Dataset:
    return Dataset.from_list([{"input_ids": x} for x in ids])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_step_equals_one_by_hand(
    model: PreTrainedModel, tokenizer: Any, tmp_path: Path, checkpointing: bool
) -> None:
    ids = rows()
    expected = step_by_hand(model, torch.tensor(ids), 3.0, 0.5)
    trainer = StickySFTTrainer(
        model,
        sft(tmp_path, gradient_checkpointing=checkpointing),
        train_dataset=tokens(ids),
        processing_class=tokenizer,
        variant=soft(3.0, 0.5),
    )
    assert trainer.aux_loss_enabled is False
    trainer.train()
    assert_weights(model, expected)
    assert {"routing_cons", "routing_switch_rate", "routing_hit_rate_c3"} <= set(trainer.state.log_history[0])
    assert "aux_loss" not in trainer.state.log_history[0]


def test_sft_keeps_the_balance_loss_that_is_asked_for(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    ids = rows()
    own = copy.deepcopy(model)
    trainer = StickySFTTrainer(
        own,
        sft(tmp_path, router_aux_loss_coef=0.7),
        train_dataset=tokens(ids),
        processing_class=tokenizer,
        variant=soft(3.0),
    )
    trainer.train()
    assert "aux_loss" in trainer.state.log_history[0]
    without = step_by_hand(model, torch.tensor(ids), 3.0, 0.0)
    found = {name: p.detach() for name, p in own.named_parameters()}
    assert (gates_of(found) - gates_of(without)).abs().max() > 1e-4


def test_sft_accumulation_equals_one_batch(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    ids = rows()
    expected = step_by_hand(model, torch.tensor(ids), 3.0, 0.0)
    args = sft(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    StickySFTTrainer(model, args, train_dataset=tokens(ids), processing_class=tokenizer, variant=soft(3.0)).train()
    assert_weights(model, expected)


def test_sft_padding(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    ids = [row[: 4 + i % 5] for i, row in enumerate(rows())]
    width = max(map(len, ids))
    full = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    labels = torch.where(mask.bool(), full, -100)
    expected = step_by_hand(model, full, 3.0, 0.5, attention_mask=mask, labels=labels)
    StickySFTTrainer(
        model, sft(tmp_path), train_dataset=tokens(ids), processing_class=tokenizer, variant=soft(3.0, 0.5)
    ).train()
    assert_weights(model, expected)


@pytest.mark.parametrize("how", ["packing", "padding_free"])
@pytest.mark.filterwarnings("ignore:.*[Pp]adding-free.*", "ignore:.*[Pp]acking.*", "ignore:.*[Ff]lash.*")
def test_sft_packing_equals_padding(model: PreTrainedModel, tokenizer: Any, tmp_path: Path, how: str) -> None:
    """Documents that share a row are not paired with each other."""
    ids = [row[: 4 + i % 5] for i, row in enumerate(rows())]
    other = copy.deepcopy(model)
    StickySFTTrainer(
        other, sft(tmp_path), train_dataset=tokens(ids), processing_class=tokenizer, variant=soft(3.0, 0.5)
    ).train()
    changes = (
        {"packing": True, "packing_strategy": "bfd", "max_length": 24}
        if how == "packing"
        else {"padding_free": True, "max_length": None}
    )
    trainer = StickySFTTrainer(
        model, sft(tmp_path, **changes), train_dataset=tokens(ids), processing_class=tokenizer, variant=soft(3.0, 0.5)
    )
    traces = []
    add = trainer._statistics["train"].add
    trainer._statistics["train"].add = lambda trace, terms: (traces.append(trace), add(trace, terms))
    trainer.train()
    assert traces[0].mask.shape[0] == 1
    assert int(traces[0].doc.max()) == 7
    assert_weights(model, {name: p.detach() for name, p in other.named_parameters()})


def test_sft_evaluates_with_metrics(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    """It then runs a second forward pass without gradient."""
    ids = rows()
    expected = step_by_hand(model, torch.tensor(ids), 3.0, 0.0)
    args = sft(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = StickySFTTrainer(
        model,
        args,
        train_dataset=tokens(ids),
        eval_dataset=tokens(rows(4, seed=1)),
        processing_class=tokenizer,
        variant=soft(3.0),
        compute_metrics=lambda prediction: {"count": float(len(prediction.label_ids))},
    )
    trainer.train()
    assert_weights(model, expected)
    logged = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert logged["eval_count"] == 4
    assert {"eval_routing_cons", "eval_routing_switch_rate", "eval_routing_neglected_experts"} <= set(logged)
    with stickymoe.attach(model) as attached, torch.no_grad():
        model.eval()
        model(input_ids=torch.tensor(rows(4, seed=1)))
    assert logged["eval_routing_cons"] == pytest.approx(stickymoe.consistency_loss(attached.trace).item(), rel=1e-4)


def test_sft_return_outputs_in_training(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    """The loss of a second pass without gradient does not replace that of the first."""
    ids = torch.tensor(rows())
    trainer = StickySFTTrainer(
        model, sft(tmp_path), train_dataset=tokens(rows()), processing_class=tokenizer, variant=soft(3.0)
    )
    model.train()
    losses = []
    for return_outputs in (False, True):
        inputs = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        result = trainer.compute_loss(model, inputs, return_outputs=return_outputs)
        model.zero_grad()
        (result[0] if return_outputs else result).backward()
        losses.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value)


def test_sft_with_lora_and_a_rule(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    from peft import LoraConfig

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = StickySFTTrainer(
        model,
        sft(tmp_path, max_steps=3, gradient_checkpointing=True),
        train_dataset=tokens(rows(24)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["gate"]),
        variant=stickymoe.variant("hysteresis+soft", bonus=0.1, lam=3.0),
    )
    trainer.train()
    assert "routing_cons" in trainer.state.log_history[0]
    changed = [name for name, p in trainer.model.named_parameters() if "modules_to_save" in name]
    assert len(changed) == 3
    for name, parameter in trainer.model.named_parameters():
        if "modules_to_save" in name:
            layer = name.split("layers.")[1].split(".")[0]
            assert not torch.equal(parameter, before[f"model.layers.{layer}.mlp.gate.weight"])


def test_statistics_of_packed_and_plain_batches_go_together() -> None:
    g = torch.full((1, 1, 4, 3), 1 / 3)
    S = torch.tensor([[[[0], [0], [1], [1]]]])
    statistics = Statistics()
    for doc in (None, torch.tensor([[0, 0, 1, 1]])):
        statistics.add(RoutingTrace.from_choice(g, S, torch.ones(1, 1, 4, 1), doc=doc), {})
    assert statistics.summary([2])["switch_rate"] == pytest.approx(1 / 5)  # of three pairs and two, one switches


def test_the_best_model_is_loaded_with_its_experts(tmp_path: Path) -> None:
    model = tiny("mixtral")
    data = [{"input_ids": row, "labels": row} for row in rows()]
    args = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=5.0,  # the first evaluation is the best
        optim="sgd",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = StickyTrainer(model, args, train_dataset=data, eval_dataset=data, variant="soft")
    trainer.train()
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint)
    assert_weights(model, dict(best.named_parameters()))
