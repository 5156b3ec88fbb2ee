"""Training: the paper's protocol, phase by phase, with exact resume.

The numbers of a run are a function of its config, its data and the thread count. Batches depend on the step alone, so
a resumed run gives the same metrics as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from stickymoe.data.batches import TrainBatches
from stickymoe.data.tokens import TokenData, load_tokens
from stickymoe.errors import ConfigError, DataError, DivergedError, InterruptedRunError, RunError
from stickymoe.locality.formats import save_table
from stickymoe.locality.table import RouteTable
from stickymoe.models.gpt import GPT
from stickymoe.runs.config import RunConfig
from stickymoe.runs.environment import describe_environment, resumed_environment
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
    save_shards,
)
from stickymoe.training.evaluate import Evaluation, evaluate
from stickymoe.training.memory import keep_freed_memory
from stickymoe.training.processes import Processes
from stickymoe.training.progress import Clock, Display
from stickymoe.training.stopping import stop_request
from stickymoe.training.update import NotFiniteError, Span, Updates, spans
from stickymoe.variants import Phase


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

    The record of a finished run is returned unchanged. With `resume` an unfinished run continues from its newest
    checkpoint, or the named one. `first_phase` is a finished run that equals this one's first phase; it is reused.
    """
    keep_freed_memory()
    accelerator = make_accelerator(config)
    processes = Processes(accelerator)
    try:
        return _train(config, RunFolder(out), accelerator, processes, resume, checkpoint, first_phase, quiet)
    except RuntimeError as e:
        lost = processes.lost(e)
        if lost is None:
            raise
        raise lost from e


def _train(
    config: RunConfig,
    folder: RunFolder,
    accelerator: Accelerator,
    processes: Processes,
    resume: bool,
    checkpoint: str | None,
    first_phase: Path | None,
    quiet: bool,
) -> RunRecord:
    data = processes.main_first(lambda: load_tokens(config.data))
    processes.everywhere(lambda: _require_same(data, processes.from_main(data.fingerprint)))
    record = RunRecord(
        run_id=run_id(config, data.fingerprint),
        status="running",
        config=config.as_dict(),
        data=data.describe(),
        environment=describe_environment()
        | {
            "device": accelerator.device.type,
            "threads": torch.get_num_threads(),
            "processes": processes.count,
        },
    )
    with contextlib.ExitStack() as held:

        def enter() -> RunRecord | None:
            held.enter_context(folder.lock())
            return earlier_run(folder, record, resume=resume)

        earlier = processes.in_main(enter)
        if earlier is not None and earlier.status == "complete":
            return earlier
        if earlier is not None:
            record = replace(record, environment=resumed_environment(earlier.environment, record.environment))
        run = processes.everywhere(lambda: _Run(config, data, folder, record, accelerator, processes, quiet))
        return run.execute(checkpoint, first_phase)


def _require_same(data: TokenData, fingerprint: str) -> None:
    if data.fingerprint != fingerprint:
        raise DataError(
            f"The data of this process has the fingerprint {data.fingerprint[:12]}, that of the main process "
            f"{fingerprint[:12]}. Give all machines the same corpus."
        )


def _require_dense_gradients(model: GPT, config: RunConfig) -> None:
    if model.slow_parameters():
        raise ConfigError(
            f"variant: got {config.variant.name}, whose tables have sparse gradients, which FSDP cannot shard; train "
            "it without FSDP."
        )


class _Run:
    """One run in progress."""

    def __init__(
        self,
        config: RunConfig,
        data: TokenData,
        folder: RunFolder,
        record: RunRecord,
        accelerator: Accelerator,
        processes: Processes,
        quiet: bool,
    ) -> None:
        self.config, self.data, self.folder, self.record = config, data, folder, record
        self.accelerator, self.processes, self.quiet = accelerator, processes, quiet
        parts = config.train.accumulate * processes.count
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
            raise DataError(
                f"The validation text has {len(data.valid.tokens)} tokens, expected at least 2. Give more text."
            )
        self.model = build_model(config, data.vocab_size)
        if accelerator.is_fsdp2:
            _require_dense_gradients(self.model, config)
        else:
            self.model.to(accelerator.device)
        self.progress = Progress(step=0)

    def execute(self, checkpoint: str | None, first_phase: Path | None) -> RunRecord:
        start = self.processes.in_main(lambda: find_checkpoint(self.folder.checkpoints, checkpoint))
        if start is not None:
            self.progress = self.processes.everywhere(lambda: self._load(start))
        self.processes.in_main(lambda: self._begin(drop_later=checkpoint is not None))
        try:
            if start is None and first_phase is not None:
                self.processes.everywhere(lambda: self._reuse(RunFolder(first_phase)))
            last: Evaluation | None = None
            with stop_request() as stop:
                for span in spans(self.config):
                    if self.progress.step < span.last:
                        last = self._run_phase(span, start, stop)
            if last is None:  # killed after the last checkpoint
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

    def _load(self, start: Path) -> Progress:
        load_model(start, self.model)
        return read_progress(start)

    def _begin(self, *, drop_later: bool) -> None:
        """Write what a run folder starts with."""
        if drop_later:
            drop_later_checkpoints(self.folder.checkpoints, self.progress.step)
        self.record.write(self.folder.record)
        self.folder.write_config(self.config)
        self.data.tokenizer.save(str(self.folder.tokenizer))
        self.folder.rewind(self.progress.step)

    def _reuse(self, first: RunFolder) -> None:
        """Start where `first` ended, with its weights and metrics."""
        same, ended = self.config.variant.first_phase_is, spans(self.config)[0].last
        record = RunRecord.read(first.record)
        expected = None if same is None else run_id(replace(self.config, variant=same), self.data.fingerprint)
        if record.run_id != expected or record.status != "complete":
            raise RunError(
                f"{first.path} is not the finished first phase of this run ({self.config.variant.label}): "
                "omit --first_phase to train that phase here."
            )
        weights = first.checkpoints / checkpoint_name(ended)
        damage = checkpoint_damage(weights)
        if damage is not None:
            raise RunError(
                f"{first.path} has no intact checkpoint of its last step ({damage}): "
                "omit --first_phase to train that phase here."
            )
        load_model(weights, self.model)
        every = self.config.train.eval_every
        lines = [line for line in first.read_metrics() if "train" in line or line["step"] % every == 0]
        if self.processes.is_main:
            self.folder.write_metrics(lines)
        self.progress = Progress(step=ended)
        for line in lines:
            if "valid" in line:
                self._note_best(line["valid"]["ppl"], line["step"])

    def _note_best(self, ppl: float | None, step: int) -> None:
        if ppl is not None and (self.progress.best_ppl is None or ppl < self.progress.best_ppl):
            self.progress = replace(self.progress, best_ppl=ppl, best_step=step)

    def _run_phase(self, span: Span, start: Path | None, stop: threading.Event) -> Evaluation | None:
        """Train until the phase ends; returns the evaluation of its last step, if that is the last of the run."""
        config, total = self.config.train, self.config.total_steps
        updates = Updates(self.model, self.batches, self.config, span, self.accelerator)
        if start is not None and self.progress.step > span.first:
            load_optimiser(start, self.model, updates.bare_optimiser)
        evaluation: Evaluation | None = None
        clock = Clock(config.batch_size * self.config.model.seq_len)
        with self._display(f"{self.config.variant.label} · {span.phase.name}", total) as display:
            while self.progress.step < span.last:
                values = self._update(updates, display, clock)
                step = self.progress.step
                if step % config.log_every == 0 or step == span.last:
                    self._log({"step": step, "phase": span.phase.name, "lr": updates.lr(step - 1), "train": values})
                    self._log_timing({"step": step, "time": time.time(), "tokens_per_s": clock.tokens_per_s})
                if step % config.eval_every == 0 or step == total:
                    with clock.paused():
                        evaluation = self._evaluate(span.phase)
                stopping = self.processes.any(stop.is_set())
                if step % config.checkpoint_every == 0 or step == span.last or stopping:
                    with clock.paused():
                        self._save(updates.bare_optimiser)
                if stopping and step < total:
                    raise InterruptedRunError(
                        f"Stopped at step {step} of {total}, saved. "
                        f"Resume with: stickymoe train --resume --out {shlex.quote(str(self.folder.path))}"
                    )
        updates.close()
        return evaluation if self.progress.step == total else None

    def _update(self, updates: Updates, display: Display | None, clock: Clock) -> dict[str, float]:
        """One update, shown and timed."""
        step = self.progress.step + 1
        try:
            values = updates(step - 1)
        except NotFiniteError as e:
            raise self._diverged(str(e), step) from None
        self.progress = replace(self.progress, step=step)
        clock.tick()
        if display is not None:
            display.step(step, {k: v for k, v in values.items() if k != "grad_norm"}, clock.tokens_per_s)
        return values

    def _diverged(self, what: str, step: int) -> DivergedError:
        kept = checkpoints_in(self.folder.checkpoints)
        which = f"the checkpoint {kept[-1].name} is kept" if kept else "there is no checkpoint yet"
        return DivergedError(f"{what} at step {step}; {which}. Lower train.lr or the loss weights.")

    def _evaluate(self, phase: Phase, *, log: bool = True) -> Evaluation:
        """Measure the model on the validation split."""
        with self.accelerator.autocast():
            evaluation = evaluate(
                self.model,
                self.data.valid,
                self.config,
                self.data.token_bytes,
                terms=phase.terms,
                processes=self.processes,
            )
        if not math.isfinite(evaluation.nats):
            raise self._diverged(f"The validation loss became {evaluation.nats}", self.progress.step)
        if log:
            self._log({"step": self.progress.step, "valid": evaluation.metrics})
        self._note_best(evaluation.metrics["ppl"], self.progress.step)
        return evaluation

    def _finish(self, evaluation: Evaluation) -> RunRecord:
        best = {"best_ppl": self.progress.best_ppl, "best_step": self.progress.best_step}
        done = replace(
            self.record,
            status="complete",
            metrics=evaluation.metrics | best,
            per_layer=evaluation.per_layer,
            sizes=self.model.sizes(),
        )
        self.processes.in_main(lambda: self._write_results(done, evaluation.table))
        return done

    def _write_results(self, done: RunRecord, table: RouteTable | None) -> None:
        if table is not None:
            save_table(table, self.folder.routes)
        done.write(self.folder.record)

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        checkpoints, progress, model = self.folder.checkpoints, self.progress, self.model
        if self.accelerator.is_fsdp2:
            save_shards(checkpoints, progress, model, optimiser, self.processes)
        else:
            self.processes.in_main(lambda: save_checkpoint(checkpoints, progress, model, optimiser))

    def _log(self, line: dict[str, Any]) -> None:
        if self.processes.is_main:
            self.folder.append(self.folder.metrics, line)

    def _log_timing(self, line: dict[str, Any]) -> None:
        if self.processes.is_main:
            self.folder.append(self.folder.timings, line)

    def _write(self, record: RunRecord) -> None:
        if self.processes.is_main:
            record.write(self.folder.record)

    @contextlib.contextmanager
    def _display(self, title: str, total: int) -> Iterator[Display | None]:
        if self.quiet or not self.processes.is_main:
            yield None
        else:
            with Display(title, total, self.progress.step) as display:
                yield display
