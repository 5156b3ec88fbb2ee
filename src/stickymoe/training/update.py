"""One update of a model: L = L_CE + Σ weight · term over the micro-batches of a step, then AdamW."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stickymoe.data.batches import NO_TARGET, Batch
from stickymoe.models.gpt import GPT
from stickymoe.routing.losses import LossContext, expert_load, objective
from stickymoe.routing.trace import RoutingTrace
from stickymoe.runs.config import RunConfig
from stickymoe.training.optimiser import adamw, clip_gradients, learning_rate
from stickymoe.variants import Phase


@dataclass(frozen=True)
class Span:
    """A phase and the steps it covers: first ≤ step < last, counted over all phases."""

    phase: Phase
    first: int
    last: int


def spans(config: RunConfig) -> list[Span]:
    """The phases of a run, one after another."""
    first, out = 0, []
    for phase in config.variant.phases():
        last = first + config.steps_of(phase)
        out.append(Span(phase, first, last))
        first = last
    return out


@runtime_checkable
class Batches(Protocol):
    """Batches by step; `part` of `parts` belongs to one process and micro-batch."""

    def batch(self, step: int, *, part: int = 0, parts: int = 1) -> Batch: ...


class NotFiniteError(Exception):
    """The loss or the gradient is no longer finite."""

    def __init__(self, what: str, value: float) -> None:
        super().__init__(f"The {what} became {value}")


class Updates:
    """The updates of one phase: `updates(step)` trains on the batch of that step and returns its values."""

    def __init__(self, model: GPT, batches: Batches, config: RunConfig, span: Span, accelerator: Accelerator) -> None:
        self.bare_model, self.batches, self.config, self.span = model, batches, config, span
        self.accelerator = accelerator
        gates = {id(p) for p in model.gate_parameters()}
        for p in model.parameters():
            p.requires_grad_(span.phase.trains == "all" or id(p) in gates)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.bare_optimiser = adamw(trained, config.train, row_lr=model.slow_parameters())
        self.model: nn.Module
        self.optimiser: torch.optim.Optimizer
        if isinstance(model, FSDPModule):  # sharded in an earlier phase
            self.model, self.optimiser = model, accelerator.prepare_optimizer(self.bare_optimiser)
        else:
            self.model, self.optimiser = accelerator.prepare(model, self.bare_optimiser)

    def __call__(self, step: int) -> dict[str, float]:
        """One update: the mean of the loss, of each term and of the switch rate, and the norm of the gradient."""
        accelerator, accumulate = self.accelerator, self.config.train.accumulate
        progress = (step - self.span.first) / (self.span.last - self.span.first)
        self.bare_model.set_progress(progress)
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr(step) * group["lr_scale"]
        world = accelerator.num_processes
        batches = [
            self.batches.batch(step, part=micro * world + accelerator.process_index, parts=accumulate * world)
            for micro in range(accumulate)
        ]
        sums: dict[str, Tensor] = {}
        for micro, (batch, share) in enumerate(zip(batches, self._shares(batches), strict=True)):
            # FSDP would keep whole gradients between micro-batches.
            sync = accelerator.is_fsdp2 or micro == accumulate - 1
            with contextlib.nullcontext() if sync else accelerator.no_sync(self.model):
                values = self._loss(batch, progress)
                accelerator.backward(values["loss"] * share)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value.detach() * share
        means = {name: float(value) for name, value in accelerator.reduce(sums, reduction="mean").items()}
        if not math.isfinite(means["loss"]):
            raise NotFiniteError("loss", means["loss"])
        norm = float(clip_gradients(accelerator, self.model.parameters(), self.config.train.clip))
        if not math.isfinite(norm):
            raise NotFiniteError("gradient", norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return means | {"grad_norm": norm}

    def lr(self, step: int) -> float:
        return self.span.phase.lr or learning_rate(step, self.config.train)

    def close(self) -> None:
        self.accelerator.free_memory(self.model, self.optimiser)

    def _loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The loss of a micro-batch, and its parts without their weights."""
        batch = batch.to(self.accelerator.device)
        with self.accelerator.autocast():
            out = self.model(
                batch.tokens,
                batch.targets,
                mask=batch.mask,
                doc=batch.doc,
                boundary=batch.boundary,
                visit=batch.visit,
            )
        if out.trace is None:
            return {"loss": out.loss, "ce": out.loss}
        terms = objective(out.trace, self.span.phase.terms, self._context(out.trace), progress)
        parts = {"ce": out.loss, **terms.values, "switch_rate": _switch_rate(out.trace)}
        return {"loss": out.loss + terms.total, **parts}

    def _context(self, trace: RoutingTrace) -> LossContext:
        """The expert load f of the whole batch, so that L_bal is the same for one and for several processes."""
        load = None
        if self.accelerator.num_processes > 1:
            load = self.accelerator.reduce(expert_load(trace), reduction="mean")
        return LossContext(load=load, share_block=self.config.model.layers_per_pool)

    def _shares(self, batches: list[Batch]) -> list[float]:
        """The weight of each micro-batch, so that every target of the step counts equally.

        Gradients are averaged over processes, so the weights of all micro-batches sum to the number of processes.
        """
        counts = torch.tensor([int((batch.targets != NO_TARGET).sum()) for batch in batches])
        total = int(self.accelerator.reduce(counts.sum().to(self.accelerator.device), reduction="sum"))
        return [int(n) * self.accelerator.num_processes / total for n in counts]


def _switch_rate(trace: RoutingTrace) -> Tensor:
    """eq:sr_metric of one batch, for the display."""
    top1 = trace.S[..., 0]
    switched = (top1[:, :, 1:] != top1[:, :, :-1]) & trace.pairs
    return switched.sum() / (trace.pairs.sum() * top1.shape[0]).clamp(min=1)
