"""`adapt`: train a checkpoint for locality, and write a folder that plain transformers loads.

The work goes on in a hidden folder beside the result, with checkpoints of the Trainer. The result appears in one step,
when everything is done.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments

from stickymoe import files
from stickymoe.errors import ConfigError, InterruptedRunError, RunError
from stickymoe.huggingface.attached import attach
from stickymoe.huggingface.gates import find_gates
from stickymoe.huggingface.inputs import NO_TARGET
from stickymoe.huggingface.reroute import row_of
from stickymoe.huggingface.rules import SELECTION_BIASES
from stickymoe.huggingface.text import Loaded, Progress, Scored, padded, score_text
from stickymoe.huggingface.trainer import SaveAndStop, StickyTrainer, last_checkpoint
from stickymoe.locality import metrics
from stickymoe.reading import read_json
from stickymoe.routing import losses
from stickymoe.routing.losses import LossContext
from stickymoe.routing.terms import Term
from stickymoe.runs.adaptation import AdaptConfig
from stickymoe.training.stopping import stop_request
from stickymoe.variants import variant as make_variant


def terms_of(config: AdaptConfig) -> tuple[Term, ...]:
    """The loss terms beside cross-entropy."""
    if config.method == "soft":
        return make_variant("soft", lam=config.lam).terms()
    if config.method == "soft_hard":
        return make_variant("soft_hard", lam=config.lam, alpha=config.alpha, window=config.window).terms()
    if config.method == "remoe":
        return make_variant("remoe", lam=config.lam).phases()[-1].terms
    return (
        Term("ref_kl", config.kl, lambda trace, context: _reference_divergence(trace, context)),
        Term("reuse", config.reuse, lambda trace, context: losses.reuse_by_layer(trace)),
        Term("lag_kl", config.lags, lambda trace, context: losses.lagged_divergence_by_layer(trace)),
        Term(
            "window_entropy",
            config.entropy,
            lambda trace, context: losses.windowed_entropy_by_layer(trace, window=16),
        ),
    )


def _reference_divergence(trace: Any, context: LossContext) -> Tensor:
    if context.reference is None:
        raise ConfigError("ref_kl: the trace of the frozen gates is missing; pass LossContext(reference=…).")
    return losses.reference_divergence_by_layer(trace, context.reference)


@dataclass(frozen=True)
class Measured:
    """A checkpoint on held-out text, with an LRU cache of `slots` per layer."""

    ppl: float
    switch_rate: float
    miss_rate: float
    loads_per_token: float
    bytes_per_token: float
    effective_experts: float

    @classmethod
    def of(cls, scored: Scored, slots: int) -> Measured:
        row = row_of("", None, scored, slots)
        return cls(
            ppl=scored.ppl,
            switch_rate=metrics.switch_rate(scored.table),
            miss_rate=row.miss_rate,
            loads_per_token=row.loads_per_token,
            bytes_per_token=row.bytes_per_token,
            effective_experts=float(metrics.effective_experts_by_layer(scored.table).mean()),
        )


def measure_model(
    loaded: Loaded, rows: list[Int[Tensor, " _"]], slots: int, *, batch_size: int = 4, progress: Progress | None = None
) -> Measured:
    with attach(loaded.model) as attached:
        return Measured.of(score_text(attached, rows, batch_size=batch_size, progress=progress), slots)


def adapt(
    loaded: Loaded,
    out: Path,
    config: AdaptConfig,
    train_rows: list[Int[Tensor, " _"]],
    held_out: list[Int[Tensor, " _"]],
    *,
    slots: int,
    quiet: bool = False,
) -> dict[str, Measured]:
    """Adapt a model and write it to the new folder `out`; returns its measurements before and after.

    Interrupted, it is resumed by the same call. The folder has the model, its tokenizer and `adapt.json`.
    """
    if out.exists():
        raise RunError(f"{out} exists: choose another folder, or delete it first.")
    if loaded.model.dtype != torch.float32:
        raise ConfigError(f"adapt: got a model in {loaded.model.dtype}, in which updates round away; load it in fp32.")
    work = out.with_name(f".{out.name}.adapting")
    settings = {"model": loaded.path, "slots": slots, "train_rows": _digest(train_rows), "held_out": _digest(held_out)}
    settings |= asdict(config)
    _open_work(work, settings)
    before = _measured_once(work / "before.json", loaded, held_out, slots)
    trained = _train(loaded, work, config, train_rows, quiet=quiet)
    trained.train(False)
    adapted = replace(loaded, model=trained)
    after = measure_model(adapted, held_out, slots)
    _publish(adapted, work, out, {"before": before, "after": after}, settings)
    return {"before": before, "after": after}


def _digest(rows: list[Int[Tensor, " _"]]) -> str:
    """Identifies a text by its tokens."""
    content = b"".join(row.numpy().tobytes() for row in rows)
    return f"{len(rows)} rows, {hashlib.sha256(content).hexdigest()[:16]}"


def _open_work(work: Path, settings: dict[str, Any]) -> None:
    """Create the folder of unfinished work; one of other settings is refused."""
    file = work / "settings.json"
    if file.is_file():
        if read_json(file, RunError) != settings:
            raise RunError(f"{work} is unfinished work with other settings: delete it, or resume with its settings.")
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
        files.write_text(file, json.dumps(settings, indent=1) + "\n")
    except OSError as e:
        raise RunError(f"{work} cannot be written ({e.strerror or e}).") from e


def _measured_once(file: Path, loaded: Loaded, rows: list[Int[Tensor, " _"]], slots: int) -> Measured:
    """The measurement of the original model, which a resumed adaptation reads again."""
    if file.is_file():
        return Measured(**read_json(file, RunError))
    found = measure_model(loaded, rows, slots)
    files.write_text(file, json.dumps(asdict(found)) + "\n")
    return found


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: list[Int[Tensor, " _"]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i]}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch with labels; padding is masked and not predicted."""
    ids, mask = padded([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, NO_TARGET)}


def _train(
    loaded: Loaded, work: Path, config: AdaptConfig, rows: list[Int[Tensor, " _"]], *, quiet: bool
) -> PreTrainedModel:
    model = _trainable(loaded.model, config)
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        seed=config.seed,
        save_steps=config.save_every,
        save_total_limit=1,
        logging_steps=10,
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=quiet,
    )
    trainer = _AdaptTrainer(
        model=model, args=arguments, train_dataset=_Rows(rows), data_collator=collate, settings=config
    )
    with stop_request() as stop:
        trainer.add_callback(SaveAndStop(stop))
        trainer.train(resume_from_checkpoint=last_checkpoint(work))
    if trainer.state.global_step < config.steps:
        raise InterruptedRunError(
            f"Stopped at step {trainer.state.global_step} of {config.steps}, saved. Repeat the same command to resume."
        )
    if config.train == "lora":
        return trainer.model.merge_and_unload()  # type: ignore[no-any-return]
    return loaded.model


def _trainable(model: PreTrainedModel, config: AdaptConfig) -> nn.Module:
    """The model with gradients for what is trained."""
    gates = find_gates(model)
    for p in model.parameters():
        p.requires_grad_(config.train == "all" and p.is_floating_point())
    if config.train == "lora":
        return _with_lora(model, [gate.name for gate in gates])
    for gate in gates:
        for name, p in gate.module.named_parameters():
            p.requires_grad_(name.rpartition(".")[2] not in SELECTION_BIASES)  # no gradient reaches them
    return model


def _with_lora(model: PreTrainedModel, gates: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = sorted(leaves & {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_b_proj"})
    if not targets:
        raise ConfigError(
            "train: got lora, but the attention of this model has no known projections; use routers or all."
        )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=sorted(set(gates)))
    return get_peft_model(model, lora)


class _AdaptTrainer(StickyTrainer):
    """A trainer with the terms of a method; the frozen gates are a reference where it needs one."""

    def __init__(self, *args: Any, settings: AdaptConfig, **kwargs: Any) -> None:
        super().__init__(*args, variant=None, **kwargs)
        self.settings = settings
        self._frozen: dict[str, Tensor] | None = None
        if settings.needs_reference:
            self._frozen = {name: p.detach().clone() for name, p in self._trained_parameters()}

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @contextmanager
    def _attached_model(self) -> Iterator[Any]:
        with super()._attached_model() as attached:
            attached.terms_of_loss = terms_of(self.settings)
            yield attached

    def loss_context(self, model: nn.Module, inputs: dict[str, Any]) -> LossContext:
        if self._frozen is None or not model.training:
            return LossContext()
        assert self.attached is not None
        trained = {name: p.detach().clone() for name, p in self._trained_parameters()}
        terms, self.attached.terms_of_loss = self.attached.terms_of_loss, ()
        try:
            self._set(self._frozen)
            with torch.no_grad():
                model(**{name: value for name, value in inputs.items() if name != "labels"})
            return LossContext(reference=self.attached.trace)
        finally:
            self._set(trained)
            self.attached.terms_of_loss = terms

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, p in self._trained_parameters():
            p.copy_(values[name])


def _publish(loaded: Loaded, work: Path, out: Path, found: dict[str, Measured], settings: dict[str, Any]) -> None:
    """Write the result, in the precision of the original, and rename it to `out`; then delete the work."""
    temporary = work / "result"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        nn.Module.to(loaded.model, loaded.dtype)
        loaded.model.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)
        record = {"settings": settings} | {name: asdict(value) for name, value in found.items()}
        files.write_text(temporary / "adapt.json", json.dumps(record, indent=1) + "\n")
        files.publish_folder(temporary, out)
        shutil.rmtree(work)
    except OSError as e:
        raise RunError(f"{out} cannot be written ({e.strerror or e}); the work is kept in {work}.") from e
