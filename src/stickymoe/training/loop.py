"""Training: the paper's protocol, phase by phase, with exact resume.

The numbers of a run are a function of its config, its data and the thread count. Batches depend on the step alone,
so going on from a checkpoint gives the same metrics as never having stopped.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from stickymoe.data.batches import NO_TARGET, Batch, TrainBatches
from stickymoe.data.tokens import TokenData, load_tokens
from stickymoe.errors import ConfigError, DataError, DivergedError, InterruptedRunError, RunError, StickyError
from stickymoe.locality.formats import save_table
from stickymoe.routing.losses import LossContext, expert_load
from stickymoe.routing.trace import RoutingTrace
from stickymoe.runs.config import RunConfig
from stickymoe.runs.environment import continued, describe_environment
from stickymoe.runs.folder import RunFolder, checkpoint_name, run_id
from stickymoe.runs.record import RunRecord, earlier_run
from stickymoe.training.build import build_model, make_accelerator
from stickymoe.training.checkpoint import (
    Progress,
    checkpoint_damage,
    checkpoints_in,
    drop_later_checkpoints,
    find_checkpoint,
    load_model,
    load_optimiser,
    read_progress,
    save_checkpoint,
)
from stickymoe.training.evaluate import Evaluation, evaluate
from stickymoe.training.memory import keep_freed_memory
from stickymoe.training.optimiser import adamw, learning_rate
from stickymoe.training.progress import Clock, Display
from stickymoe.training.stopping import stop_request
from stickymoe.variants import Phase


@dataclass(frozen=True)
class Span:
    """A phase and the steps it covers: first ≤ step < last, counted over all phases."""

    phase: Phase
    first: int
    last: int


def spans(config: RunConfig) -> list[Span]:
    first, out = 0, []
    for phase in config.variant.phases():
        last = first + config.steps_of(phase)
        out.append(Span(phase, first, last))
        first = last
    return out


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    first_phase: Path | None = None,
    quiet: bool = False,
) -> RunRecord:
    """Train `config` into the folder `out` and return its record.

    A finished run is returned as it is. An unfinished one goes on from its newest checkpoint, or the one named, if
    `resume` is given. `first_phase` is a finished run that is this one's first phase, taken over instead of repeated.
    """
    keep_freed_memory()
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        data = load_tokens(config.data)
    folder = RunFolder(out)
    record = RunRecord(
        run_id=run_id(config, data.fingerprint),
        status="running",
        config=config.as_dict(),
        data=data.describe(),
        environment=describe_environment()
        | {
            "device": accelerator.device.type,
            "threads": torch.get_num_threads(),
            "processes": accelerator.num_processes,
        },
    )
    with contextlib.ExitStack() as held:
        earlier: RunRecord | None = None
        refusal: StickyError | None = None
        if accelerator.is_main_process:
            try:
                held.enter_context(folder.lock())
                earlier = earlier_run(folder, record, resume=resume)
            except StickyError as e:
                refusal = e
        earlier, refusal = broadcast_object_list([earlier, refusal])  # all processes go the main one's way
        if refusal is not None:
            raise refusal
        if earlier is not None and earlier.status == "complete":
            return earlier
        if earlier is not None:
            record = replace(record, environment=continued(earlier.environment, record.environment))
        run = _Run(config, data, folder, record, accelerator, quiet)
        return run.carry_out(checkpoint, first_phase)


class _Run:
    """One run being carried out."""

    def __init__(
        self,
        config: RunConfig,
        data: TokenData,
        folder: RunFolder,
        record: RunRecord,
        accelerator: Accelerator,
        quiet: bool,
    ) -> None:
        self.config, self.data, self.folder, self.record = config, data, folder, record
        self.accelerator, self.quiet = accelerator, quiet
        parts = config.train.accumulate * accelerator.num_processes
        if config.train.batch_size % parts:
            raise ConfigError(
                f"train.batch_size: got {config.train.batch_size}, expected a multiple of "
                f"{parts} (micro-batches × processes)."
            )
        self.batches = TrainBatches(
            data.train,
            seq_len=config.model.seq_len,
            batch_size=config.train.batch_size,
            seed=config.seed,
            documents=config.data.documents,
        )
        if len(data.valid.tokens) < 2:
            raise DataError(f"The validation text has {len(data.valid.tokens)} tokens, expected at least 2.")
        self.model = build_model(config, data.vocab_size).to(accelerator.device)
        self.progress = Progress(step=0)

    def carry_out(self, checkpoint: str | None, first_phase: Path | None) -> RunRecord:
        start = find_checkpoint(self.folder.checkpoints, checkpoint)
        if start is not None:
            load_model(start, self.model)
            self.progress = read_progress(start)
        if self.accelerator.is_main_process:
            if checkpoint is not None:
                drop_later_checkpoints(self.folder.checkpoints, self.progress.step)
            self.record.write(self.folder.record)
            self.folder.write_config(self.config)
            self.data.tokenizer.save(str(self.folder.tokenizer))
            self.folder.rewind(self.progress.step)
        try:
            if start is None and first_phase is not None:
                self._take_over(RunFolder(first_phase))
            with stop_request() as stop:
                ahead = [span for span in spans(self.config) if self.progress.step < span.last]
                for span in ahead:
                    last = self._run_phase(span, start, stop)
            if not ahead:  # killed after the last checkpoint
                last = self._evaluate(spans(self.config)[-1].phase, log=False)
            return self._finish(last)
        except InterruptedRunError:
            self._write(replace(self.record, status="interrupted"))
            raise
        except Exception as e:
            with contextlib.suppress(OSError):  # a full disk may be what failed
                self._write(replace(self.record, status="failed", failure=str(e) or type(e).__name__))
            if isinstance(e, OSError):
                raise RunError(f"{self.folder.path} could not be written ({e.strerror or e}).") from e
            raise

    def _take_over(self, first: RunFolder) -> None:
        """Begin where `first` ended, with its weights and its metrics, as if its steps had been done here."""
        same, ended = self.config.variant.first_phase_is, spans(self.config)[0].last
        record = RunRecord.read(first.record)
        expected = None if same is None else run_id(replace(self.config, variant=same), self.data.fingerprint)
        if record.run_id != expected or record.status != "complete":
            raise RunError(f"{first.path} is not the finished first phase of this run ({self.config.variant.label}).")
        weights = first.checkpoints / checkpoint_name(ended)
        damage = checkpoint_damage(weights)
        if damage is not None:
            raise RunError(
                f"{first.path} has no whole checkpoint of its last step to begin from ({damage}): "
                "leave out --first_phase to train that phase here."
            )
        load_model(weights, self.model)
        every = self.config.train.eval_every
        lines = [line for line in first.read_metrics() if "train" in line or line["step"] % every == 0]
        if self.accelerator.is_main_process:
            self.folder.write_metrics(lines)
        self.progress = Progress(step=ended)
        for line in lines:
            if "valid" in line:
                self._note_best(line["valid"]["ppl"], line["step"])

    def _note_best(self, ppl: float | None, step: int) -> None:
        if ppl is not None and (self.progress.best_ppl is None or ppl < self.progress.best_ppl):
            self.progress = replace(self.progress, best_ppl=ppl, best_step=step)

    def _run_phase(self, span: Span, start: Path | None, stop: threading.Event) -> Evaluation | None:
        """Train until the phase ends; the evaluation of its last step, if that is the last of the run."""
        config, accelerator = self.config.train, self.accelerator
        for name, p in self.model.named_parameters():
            p.requires_grad_(span.phase.trains == "all" or ".gate." in name)
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        optimiser = adamw(trained, config)
        if start is not None and self.progress.step > span.first:
            load_optimiser(start, self.model, optimiser)
        model, prepared = accelerator.prepare(self.model, optimiser)
        total = self.config.total_steps
        evaluation: Evaluation | None = None
        clock = Clock(config.batch_size * self.config.model.seq_len)
        title = f"{self.config.variant.label} · {span.phase.name}"
        with self._display(title, total) as display:
            while self.progress.step < span.last:
                index = self.progress.step
                for group in prepared.param_groups:
                    group["lr"] = span.phase.lr or learning_rate(index, config)
                values = self._step(model, prepared, span, index)
                step = index + 1
                self.progress = replace(self.progress, step=step)
                clock.tick()
                if display is not None:
                    display.step(step, {k: v for k, v in values.items() if k != "grad_norm"}, clock.tokens_per_s)
                if step % config.log_every == 0 or step == span.last:
                    lr = prepared.param_groups[0]["lr"]
                    self._log({"step": step, "phase": span.phase.name, "lr": lr, "train": values})
                    self._log_timing({"step": step, "time": time.time(), "tokens_per_s": clock.tokens_per_s})
                if step % config.eval_every == 0 or step == total:
                    with clock.paused():
                        evaluation = self._evaluate(span.phase)
                stopping = self._agree(stop.is_set())
                if step % config.checkpoint_every == 0 or step == span.last or stopping:
                    with clock.paused():
                        self._save(optimiser)
                if stopping and step < total:
                    raise InterruptedRunError(
                        f"Stopped at step {step} of {total}, saved. "
                        f"Go on with: stickymoe train --resume --out {shlex.quote(str(self.folder.path))}"
                    )
        accelerator.free_memory(model, prepared)
        return evaluation if self.progress.step == total else None

    def _step(self, model: nn.Module, optimiser: torch.optim.Optimizer, span: Span, step: int) -> dict[str, float]:
        """eq:total_loss, eq:total_loss_softhard, eq:full_loss, eq:base. One update from L = L_CE + Σ weight · term."""
        accelerator, accumulate = self.accelerator, self.config.train.accumulate
        world = accelerator.num_processes
        batches = [
            self.batches.batch(step, part=micro * world + accelerator.process_index, parts=accumulate * world)
            for micro in range(accumulate)
        ]
        shares = self._shares(batches)
        done = (step - span.first) / (span.last - span.first)
        sums: dict[str, Tensor] = {}
        for micro, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            tokens, targets = batch.tokens.to(accelerator.device), batch.targets.to(accelerator.device)
            doc, boundary = (None if x is None else x.to(accelerator.device) for x in (batch.doc, batch.boundary))
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                mask = batch.mask.to(accelerator.device)
                out = model(tokens, targets, mask=mask, doc=doc, boundary=boundary, done=done)
                loss = out.loss
                parts = {"ce": out.loss}
                if out.trace is not None:
                    context = self._context(out.trace)
                    for term in span.phase.terms:
                        value = term.fn(out.trace, context)
                        loss = loss + term.weighed(value, done)
                        parts[term.symbol] = value.mean()
                    parts["switch_rate"] = _switch_rate(out.trace)
                accelerator.backward(loss * share)
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, 0.0) + value.detach() * share
        means = accelerator.reduce(sums, reduction="mean")
        values = {name: float(value) for name, value in means.items()}
        if not math.isfinite(values["loss"]):
            raise self._diverged("loss", values["loss"], step + 1)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), self.config.train.clip))
        if not math.isfinite(norm):
            raise self._diverged("gradient", norm, step + 1)
        optimiser.step()
        optimiser.zero_grad()
        return values | {"grad_norm": norm}

    def _diverged(self, what: str, value: float, step: int) -> DivergedError:
        kept = checkpoints_in(self.folder.checkpoints)
        which = f"the checkpoint {kept[-1].name} is kept" if kept else "there was no checkpoint yet"
        return DivergedError(f"The {what} became {value} at step {step}; {which}. Lower train.lr or the loss weights.")

    def _shares(self, batches: list[Batch]) -> list[float]:
        """The weight of each micro-batch, so that every target of the step counts alike.

        They sum to 1 over all processes' micro-batches, times the number of processes, by which gradients are averaged.
        """
        counts = torch.tensor([int((batch.targets != NO_TARGET).sum()) for batch in batches])
        total = int(self.accelerator.reduce(counts.sum().to(self.accelerator.device), reduction="sum"))
        return [int(n) * self.accelerator.num_processes / total for n in counts]

    def _agree(self, stop: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return stop
        asked = torch.tensor(float(stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, reduction="sum") > 0)

    def _context(self, trace: RoutingTrace) -> LossContext:
        """f of the whole batch, so that L_bal over several processes is the one over all their tokens."""
        load = None
        if self.accelerator.num_processes > 1:
            load = self.accelerator.reduce(expert_load(trace), reduction="mean")
        return LossContext(load=load, share_block=self.config.model.layers_per_pool)

    def _evaluate(self, phase: Phase, *, log: bool = True) -> Evaluation | None:
        """Measure the model on the validation split, in the main process."""
        evaluation = None
        if self.accelerator.is_main_process:
            with self.accelerator.autocast():
                evaluation = evaluate(
                    self.model, self.data.valid, self.config, self.data.token_bytes, terms=phase.terms
                )
            if not math.isfinite(evaluation.nats):
                raise self._diverged("validation loss", evaluation.nats, self.progress.step)
            if log:
                self._log({"step": self.progress.step, "valid": evaluation.metrics})
            self._note_best(evaluation.metrics["ppl"], self.progress.step)
        self.accelerator.wait_for_everyone()
        return evaluation

    def _finish(self, evaluation: Evaluation | None) -> RunRecord:
        if evaluation is None:
            return self.record
        if evaluation.table is not None:
            save_table(evaluation.table, self.folder.routes)
        best = {"best_ppl": self.progress.best_ppl, "best_step": self.progress.best_step}
        done = replace(
            self.record,
            status="complete",
            metrics=evaluation.metrics | best,
            per_layer=evaluation.per_layer,
        )
        self._write(done)
        return done

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder.checkpoints, self.progress, self.model, optimiser)
        self.accelerator.wait_for_everyone()

    def _log(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.append(self.folder.metrics, line)

    def _log_timing(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.append(self.folder.timings, line)

    def _write(self, record: RunRecord) -> None:
        if self.accelerator.is_main_process:
            record.write(self.folder.record)

    @contextlib.contextmanager
    def _display(self, title: str, total: int) -> Iterator[Display | None]:
        if self.quiet or not self.accelerator.is_main_process:
            yield None
        else:
            with Display(title, total, self.progress.step) as display:
                yield display


def _switch_rate(trace: RoutingTrace) -> Tensor:
    """eq:sr_metric of one batch, for the display."""
    top1 = trace.S[..., 0]
    switched = (top1[:, :, 1:] != top1[:, :, :-1]) & trace.pairs
    return switched.sum() / (trace.pairs.sum() * top1.shape[0]).clamp(min=1)
