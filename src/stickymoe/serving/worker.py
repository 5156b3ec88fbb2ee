"""A model that answers several requests: one thread owns the engine, and the texts take turns, one token each.

    worker = Worker("soft", lambda: offload("runs/soft", slots=2), Limits())
    worker.start()
    worker.submit(Request(ids, emit=print))     # emit is called in the worker's thread
    worker.stop()

A text is the same as alone, whatever runs beside it. Nothing here knows HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from stickymoe.errors import ConfigError, StickyError
from stickymoe.locality.table import RouteTable
from stickymoe.runtime.engine import Engine, Pass, Settings, Stats, Text
from stickymoe.runtime.streaming import StopStrings, TextStream

FinishReason = Literal["stop", "length"]
_REPORT_S = 0.5  # how often totals are brought up to date while answers run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    max_tokens: of an answer
    running, waiting: answers of a model that take turns, and requests that wait
    seconds: of an answer, waiting included
    body_bytes: of a request
    """

    max_tokens: int = 1024
    running: int = 8
    waiting: int = 64
    seconds: float = 300.0
    body_bytes: int = 1_000_000


class BusyError(StickyError):
    """Too many requests wait, or one waited too long; try again after `seconds`."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class UnavailableError(StickyError):
    """The model cannot answer now: the server stops, or the model cannot be read."""


@dataclass(frozen=True)
class TokenLogprob:
    """log p of a token, and of the most likely ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """One more token of an answer.

    text: what it adds to the answer; it may wait for the rest of a character or of a stop string
    token_text: the token alone
    slots: the experts in the slots of each pool, with the first token of a watched text
    """

    token: int
    text: str
    token_text: str
    logprob: TokenLogprob | None = None
    passed: Pass | None = None
    slots: list[list[int | None]] | None = None


@dataclass(frozen=True)
class Finish:
    """The end of an answer. `text` is what was held back. `cut` says which limit of the server ended it."""

    reason: FinishReason
    text: str
    stats: Stats
    table: RouteTable | None
    cut: str | None = None


@dataclass(frozen=True)
class Failure:
    """The answer ended by an error."""

    error: StickyError


Event = Piece | Finish | Failure


@dataclass(eq=False)
class Request:
    """A prompt, and what to do with the events of its answer. `cancel` may be called by any thread.

    settings: how experts are held and loaded while it is answered; None: as the server was started
    cold: start with empty slots
    watch: events have routes and loads
    logprobs: how many of the most likely tokens to report; None: no log probabilities
    """

    ids: list[int]
    emit: Callable[[Event], None]
    max_tokens: int = 16
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    settings: Settings | None = None
    cold: bool = False
    watch: bool = False
    logprobs: int | None = None
    cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Totals:
    """What a worker has done since it started. `ended` counts answers by how they ended."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "failed"), 0))
    prompt_tokens: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0


class _Answer:
    """A request that is answered."""

    def __init__(self, request: Request, text: Text, engine: Engine, deadline: float) -> None:
        self.request, self.text, self.deadline = request, text, deadline
        self.stream = TextStream(engine.host.decode)
        self.stop = StopStrings(request.stop)
        self.counted: Stats | None = None


class Worker:
    """The thread of one model."""

    def __init__(self, name: str, open_engine: Callable[[], Engine], limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.totals = Totals()
        self._open = open_engine
        self.engine = self._opened()
        self.defaults = self.engine.settings
        self.tokens_per_s = 0.0
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Request, float]] = deque()
        self._running: list[_Answer] = []
        self._stopping = False
        self._reported = time.monotonic()
        self._seconds = 1.0  # of an answer, a running mean
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)

    def _opened(self) -> Engine:
        engine = self._open()
        try:
            engine.host.decode([])  # loads the tokenizer: without one, no request could be answered
        except BaseException:
            engine.close()
            raise
        return engine

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue whose clients still wait."""
        return sum(not request.cancelled for request, _ in tuple(self._waiting))

    @property
    def running(self) -> int:
        """Answers that take turns."""
        return len(self._running)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def checked(self, given: dict[str, Any]) -> Settings | None:
        """The settings of a request: those of the server with changes; refused if they exceed its budget."""
        base = self.defaults
        if not given:
            return base
        if base is None:
            raise ConfigError(f"{next(iter(given))}: the model {self.name!r} has no experts; omit it.")
        slots = given.get("slots", base.slots)
        if slots > base.slots:
            raise ConfigError(f"slots: got {slots}, expected at most {base.slots}, which the server was started with.")
        throttle = given.get("throttle", base.throttle)
        if throttle is not None and throttle < self.engine.expert_bytes:
            raise ConfigError(
                f"throttle: got {throttle:.0f} bytes per second, expected at least {self.engine.expert_bytes}: one "
                "expert per second."
            )
        return self.engine.checked(Settings(**{**asdict(base), **given}))

    def submit(self, request: Request) -> None:
        """Queue a request; refused if the queue is full."""
        with self._changed:
            if self._stopping:
                raise UnavailableError("The server is shutting down.")
            waiting = self.waiting
            if waiting >= self.limits.waiting:
                after = max(1, math.ceil(self._seconds * waiting / self.limits.running))
                raise BusyError(
                    f"{waiting} requests for {self.name!r} wait already, as many as may: try again in {after} s.",
                    after,
                )
            self._waiting.append((request, time.monotonic() + self.limits.seconds))
            self._changed.notify()

    def stop(self, *, grace_s: float = 0.0) -> None:
        """Answer nothing new. Answers that run may end within `grace_s`; the others fail."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(grace_s)
        self.engine.close()  # also ends a wait for the disk
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                self._admit()
                for answer in list(self._running):
                    if answer in self._running:  # it did not fail with the one before
                        self._step(answer)
                if time.monotonic() - self._reported > _REPORT_S:
                    self._report()
            except Exception as e:  # the thread must not end: requests would wait for ever
                self._fail_all(self._unexpected(e))
        for answer in list(self._running):
            self._fail(answer, UnavailableError("The server is shutting down."))
        self._report()

    def _wait(self) -> bool:
        """Wait for work; False once the worker stops and nothing is left to do."""
        with self._changed:
            while not (self._waiting or self._running or self._stopping):
                self.tokens_per_s = 0.0
                self._changed.wait()
            if self._stopping:
                while self._waiting:
                    request, _ = self._waiting.popleft()
                    self.totals.ended["failed"] += 1
                    request.emit(Failure(UnavailableError("The server is shutting down.")))
                return bool(self._running) and not self.engine.closed
            return True

    def _admit(self) -> None:
        """Begin requests that wait, in their order, as long as they can run beside the others."""
        self._drop_cancelled()
        while self._waiting and len(self._running) < self.limits.running:
            request, deadline = self._waiting[0]
            settings = self.defaults if request.settings is None else request.settings
            if self._running and (request.cold or settings != self.engine.settings):
                return
            self._waiting.popleft()
            if time.monotonic() > deadline:
                self.totals.ended["failed"] += 1
                late = f"The request waited for {self.limits.seconds:g} s, the time limit of an answer: try again."
                request.emit(Failure(BusyError(late, 1)))
            else:
                self._begin(request, settings, deadline)

    def _drop_cancelled(self) -> None:
        """Requests whose clients went away leave the queue, wherever they stand in it."""
        with self._changed:
            kept = deque((request, deadline) for request, deadline in self._waiting if not request.cancelled)
            self.totals.ended["cancelled"] += len(self._waiting) - len(kept)
            self._waiting = kept

    def _begin(self, request: Request, settings: Settings | None, deadline: float) -> None:
        try:
            if self.engine.closed:
                self.engine = self._opened()
            engine = self.engine
            if settings is not None and settings != engine.settings:
                engine.configure(settings)
            text = engine.begin(
                request.ids,
                max_new_tokens=request.max_tokens,
                warm=not request.cold,
                watch=request.watch,
                **request.sampling,
            )
        except Exception as e:
            self.totals.ended["failed"] += 1
            found = e if isinstance(e, StickyError) else self._unexpected(e)
            refused = isinstance(found, ConfigError) and not self.engine.closed
            request.emit(Failure(found if refused else self._unavailable(found)))
        else:
            self._running.append(_Answer(request, text, engine, deadline))

    def _step(self, answer: _Answer) -> None:
        request, text = answer.request, answer.text
        if request.cancelled:
            self._end(answer, "cancelled")
            return
        try:
            token = text.step()
        except StickyError as e:
            self._fail_all(e)
        else:
            self._emit(answer, token)

    def _emit(self, answer: _Answer, token: int) -> None:
        request, text, host = answer.request, answer.text, self.engine.host
        written = "" if text.stopped else answer.stop.push(answer.stream.push(token))
        slots = None
        if request.watch and len(text.tokens) == 1:
            layers = self.engine.layers
            slots = [] if layers is None else [pool.contents for pool in layers.pools]
        logprob = None if request.logprobs is None else token_logprob(text.logits, token, request.logprobs)
        piece = Piece(token, written, host.decode([token]), logprob, text.last, slots)
        late = not text.ended and time.monotonic() > answer.deadline
        if not (text.ended or answer.stop.found or late):
            request.emit(piece)
            return
        rest = "" if answer.stop.found else answer.stop.push(answer.stream.end()) + answer.stop.end()
        reason: FinishReason = "stop" if text.stopped or answer.stop.found else "length"
        cut = f"time limit of {self.limits.seconds:g} s" if late and not answer.stop.found else None
        table = text.table if request.watch else None
        stats = text.stats
        self._end(answer, reason)
        request.emit(piece)
        request.emit(Finish(reason, rest, stats, table, cut))

    def _end(self, answer: _Answer, how: str) -> None:
        self._count(answer)
        self.totals.ended[how] += 1
        self._running.remove(answer)
        answer.text.close()
        stats = answer.text.stats
        self._seconds += 0.2 * (stats.prompt_s + stats.decode_s - self._seconds)

    def _fail(self, answer: _Answer, error: StickyError) -> None:
        self._end(answer, "failed")
        answer.request.emit(Failure(error))

    def _fail_all(self, error: StickyError) -> None:
        """What the slots hold is not known: the texts end, and the engine is opened again for the next request."""
        with contextlib.suppress(OSError):
            self.engine.close()
        found = UnavailableError("The server is shutting down.") if self._stopping else self._unavailable(error)
        for answer in list(self._running):
            self._fail(answer, found)

    def _unexpected(self, error: Exception) -> StickyError:
        log.error("%s: an answer failed", self.name, exc_info=error)
        return StickyError(f"{type(error).__name__} while the text was generated; the server's log has more.")

    def _unavailable(self, error: StickyError) -> UnavailableError:
        return UnavailableError(f"The model {self.name!r} cannot answer: {error}")

    def _report(self) -> None:
        before, then = self.totals.tokens, self._reported
        for answer in self._running:
            self._count(answer)
        self._reported = time.monotonic()
        self.tokens_per_s = (self.totals.tokens - before) / max(self._reported - then, 1e-9)

    def _count(self, answer: _Answer) -> None:
        """Add what an answer has cost since it was counted last."""
        now, before, t = answer.text.stats, answer.counted, self.totals
        t.prompt_tokens += now.prompt_tokens if before is None else 0
        for name in ("tokens", "hits", "misses", "bytes_read"):
            setattr(t, name, getattr(t, name) + getattr(now, name) - (0 if before is None else getattr(before, name)))
        t.stall_s += now.stall_s + now.late_s - (0.0 if before is None else before.stall_s + before.late_s)
        answer.counted = now


def token_logprob(logits: Float[np.ndarray, " V"], token: int, n: int) -> TokenLogprob:
    """log softmax of the logits at a token, and at the n most likely ones."""
    x = logits.astype(np.float64)
    log_p = x - x.max()
    log_p -= np.log(np.exp(log_p).sum())
    best = np.argsort(-log_p, kind="stable")[:n].tolist() if n else []
    return TokenLogprob(token, float(log_p[token]), [(t, float(log_p[t])) for t in best])
