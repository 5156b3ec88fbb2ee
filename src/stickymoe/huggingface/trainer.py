"""Routing objectives and expert statistics in transformers' Trainer, and in every trainer that is built on it.

class StickyDPOTrainer(StickyTrainerMixin, DPOTrainer): ...
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stickymoe.errors import ConfigError
from stickymoe.huggingface.attached import Attached, attach
from stickymoe.huggingface.gates import find_model
from stickymoe.huggingface.inputs import label_fraction
from stickymoe.locality import metrics
from stickymoe.locality.recorder import Recorder
from stickymoe.locality.table import RouteTable
from stickymoe.routing.losses import LossContext, objective
from stickymoe.routing.trace import RoutingTrace
from stickymoe.variants import Variant
from stickymoe.variants import variant as make_variant

_MOST_TOKENS = 1 << 15  # tokens whose routes are kept for the statistics of one log entry

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class StickyTrainerMixin(_Base):
    """Adds a variant's terms to the loss of any trainer, and logs them with statistics of the experts.

    Args:
        variant: a variant or its name; None logs the statistics alone
        cache_slots: slots of the LRU caches whose hit rates are logged (default: k+1 and 2k)

    Terms count while the model trains; `eval_loss` stays free of them, so it can be compared between variants. Terms
    scale with the labels of a micro-batch, so accumulation over micro-batches equals one large batch. Log entries:
    routing_TERM for every term, routing_switch_rate, routing_hit_rate_cC, routing_gate_entropy,
    routing_effective_experts and routing_neglected_experts; in evaluations with the prefix of the evaluation. With
    several processes, the statistics are those of the first.
    """

    attached: Attached | None = None
    model: Any

    def __init__(
        self, *args: Any, variant: Variant | str | None = None, cache_slots: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        self.variant = make_variant(variant) if isinstance(variant, str) else variant
        self.cache_slots = cache_slots
        self._statistics = {"train": Statistics(), "eval": Statistics()}
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise ConfigError(
                "StickyTrainer: model_init is not supported, because it replaces the model; pass model=…."
            )
        if self.variant is not None:
            self._switch_off_balance_loss()
        config = getattr(self.model, "config", None)
        if self.variant is not None and getattr(config, "output_router_logits", False):
            logging.getLogger(__name__).warning(
                "the model adds its own load-balancing loss (output_router_logits); set it to False to train with the "
                "variant's alone"
            )

    def _switch_off_balance_loss(self) -> None:
        """Switch off the family's balance loss that TRL's trainers add, unless its weight was set."""
        if hasattr(self, "aux_loss_enabled") and getattr(self.args, "router_aux_loss_coef", 0.0) is None:
            self.router_aux_loss_coef, self.aux_loss_enabled = 0.0, False
            config = find_model(self.model).config.get_text_config()
            if hasattr(config, "output_router_logits"):
                config.output_router_logits = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._attached_model():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._statistics["eval"] = Statistics()
        with self._attached_model():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._statistics["eval"] = Statistics()
        with self._attached_model():
            return super().predict(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Trainer reads the file as it is, in which experts have other names, and leaves out what does not match
        # (huggingface/transformers#43701): experts would start again. `from_pretrained` renames them.
        if not self._is_plain or model is not None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
        self.model.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        if self._is_plain and self.state.best_model_checkpoint is not None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    @property
    def _is_plain(self) -> bool:
        """Whether the model is a transformers model in one piece, without adapters."""
        return isinstance(self.model, PreTrainedModel) and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @contextlib.contextmanager
    def _attached_model(self) -> Iterator[Attached]:
        """The model with hooks, for the outermost call only."""
        if self.attached is not None:
            yield self.attached
            return
        with attach(self.model, self.variant) as attached:
            attached.adds_terms = False
            self.attached = attached
            try:
                yield attached
            finally:
                self.attached = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        labels = inputs.get("labels"), inputs.get("shift_labels")
        with self._attached_model() as attached:
            attached.progress = self.state.global_step / max(self.state.max_steps, 1) if model.training else 1.0
            context = self.loss_context(model, inputs)
            traces: list[RoutingTrace] = []
            attached.on_trace = lambda trace, _: traces.append(trace)
            try:
                result: Any = super().compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
                )
            finally:
                attached.on_trace = None
            terms, progress = attached.terms_of_loss, attached.progress
        traces = self._traces_of(traces, model.training and bool(terms))
        found = [objective(trace, terms, context, progress) for trace in traces] if terms else []
        self._statistics["train" if model.training else "eval"].add(traces[-1], found[-1].values if found else {})
        if not found or not model.training:
            return result
        loss = result[0] if return_outputs else result
        total = torch.stack([part.total for part in found]).mean()
        loss = loss + (total * self._fraction(labels, num_items_in_batch)).to(loss)
        return (loss, result[1]) if return_outputs else loss

    def loss_context(self, model: nn.Module, inputs: dict[str, Any]) -> LossContext:
        """What the terms need in addition to the trace."""
        return LossContext()

    def _traces_of(self, traces: list[RoutingTrace], trains: bool) -> list[RoutingTrace]:
        """The traces of a step that count: those with gradient, since trainers may run a further pass without."""
        if not traces:
            raise ConfigError("StickyTrainer: the loss was computed without a forward pass of the attached model.")
        with_gradient = [trace for trace in traces if trace.g.requires_grad]
        if with_gradient:
            return with_gradient
        if trains and torch.is_grad_enabled():
            raise ConfigError(
                "StickyTrainer: no parameter that is trained changes the gates, so the terms have no gradient; train "
                "the gates or the layers before them."
            )
        return traces[-1:]

    def _fraction(self, labels: tuple[Tensor | None, Tensor | None], num_items: Tensor | int | None) -> Tensor | float:
        """Labels of this micro-batch / labels of the batch, as the trainer scales its own loss."""
        fraction = label_fraction(find_model(self.model), *labels, num_items)
        average = num_items is not None and self.args.average_tokens_across_devices
        return fraction * (self.accelerator.num_processes // self.get_tp_size()) if average else fraction

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        timed = [key.removesuffix("_runtime") for key in logs if key.endswith("_runtime") and key != "train_runtime"]
        if timed or "loss" in logs:
            found = self._statistics["eval" if timed else "train"].summary(self.cache_slots)
            prefix = f"{timed[0]}_" if timed else ""
            logs.update({f"{prefix}routing_{name}": value for name, value in found.items()})  # evaluate returns them
        super().log(logs, *args, **kwargs)


class Statistics:
    """Terms and routes since the last log entry."""

    def __init__(self) -> None:
        self._tables: deque[RouteTable] = deque()
        self._terms: dict[str, list[float]] = {}

    def add(self, trace: RoutingTrace, terms: dict[str, Tensor]) -> None:
        with torch.no_grad():
            values = {name: float(value) for name, value in terms.items()}
            values["gate_entropy"] = float(trace.gate_entropy_by_layer().mean())
        for name, value in values.items():
            self._terms.setdefault(name, []).append(value)
        table = trace.table()
        if table.doc is None:  # packed batches may have one document a row
            table = replace(table, doc=np.zeros(table.mask.shape, np.int32))
        self._tables.append(table)
        while len(self._tables) > 1 and sum(table.mask.size for table in self._tables) > _MOST_TOKENS:
            self._tables.popleft()

    def summary(self, slots: Sequence[int] | None) -> dict[str, float]:
        """The means of the terms, and statistics of the routes; then everything is forgotten."""
        if not self._tables:
            return {}
        recorder = Recorder()
        for table in self._tables:
            recorder.add(table)
        found = {name: float(np.mean(values)) for name, values in self._terms.items()}
        found |= expert_statistics(recorder.finish(), slots)
        self.__init__()  # type: ignore[misc]
        return found


def expert_statistics(table: RouteTable, slots: Sequence[int] | None = None) -> dict[str, float]:
    """Switch rate, hit rates of LRU caches, and how evenly the experts are used."""
    k, N = table.top_k, table.n_experts
    sizes = sorted({min(k + 1, N), min(2 * k, N)}) if slots is None else slots
    return {
        "switch_rate": metrics.switch_rate(table),
        **{f"hit_rate_c{C}": metrics.cache_hit_rate_all(table, C) for C in sizes},
        "effective_experts": float(metrics.effective_experts_by_layer(table).mean()),
        "neglected_experts": float(metrics.neglected_experts(table)),
    }


class StickyTrainer(StickyTrainerMixin, Trainer):
    """transformers' Trainer with routing objectives and expert statistics."""


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer, which writes `trainer_state.json` last."""
    complete = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


class SaveAndStop(TrainerCallback):
    """Saves and stops after the step in which `stop` was set, for example by Ctrl-C."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.stop.is_set():
            control.should_save = control.should_training_stop = True
        return control
