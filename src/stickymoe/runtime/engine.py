"""`offload`: generate text with experts on disk and a few slots per layer in memory.

    engine = stickymoe.offload("runs/soft", slots=2, policy="lru")
    out = engine.generate([11, 42], max_new_tokens=64)
    out.tokens, out.stats.misses, out.table

The text does not depend on the slots, and replaying the table gives the counts. Several texts of an engine can take
turns, token by token: `begin` one, and call `step`.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stickymoe.errors import ConfigError, StoreError, require, shown
from stickymoe.locality.devices import parse_bytes
from stickymoe.locality.plan import bytes_text
from stickymoe.locality.policies import find_policy, policy_names
from stickymoe.locality.table import RouteTable
from stickymoe.runtime.experts import ExpertLayers, Kernel
from stickymoe.runtime.memory import Region
from stickymoe.runtime.readers import IO, Readers, Throttle
from stickymoe.runtime.sampling import Sampling
from stickymoe.runtime.slots import COUNTS, SCRATCH_SLOTS, Change, OnMiss, Pool, Waits
from stickymoe.runtime.store import Store
from stickymoe.runtime.stored_rows import ROW_COUNTS, StoredRows

Prefetch = Literal["none", "previous", "next_layer"]
OnToken = Callable[[int], None]
PREFETCHES: tuple[Prefetch, ...] = ("none", "previous", "next_layer")
_MEASURED = (*COUNTS, *ROW_COUNTS, "bytes_read", "stall_s", "late_s", "row_stall_s")


@dataclass(frozen=True)
class Settings:
    """How experts are held in memory and loaded.

    slots: of each layer
    throttle: bytes per second of a simulated slow memory; None: as fast as the disk
    """

    slots: int
    policy: str = "lru"
    prefetch: Prefetch = "none"
    on_miss: OnMiss = "load"
    throttle: float | None = None


@dataclass(frozen=True)
class Stats:
    """What a generation cost.

    Attributes:
        prompt_tokens: tokens of the prompt
        tokens: generated tokens
        hits: requested experts that were in a slot
        misses: requested experts that were not in a slot
        evictions: experts that left a slot for another one
        prefetched: experts that were loaded before they were requested
        wasted: prefetched experts that no token used
        bypassed: misses that passed through a scratch slot and evicted nobody
        prompt_misses: misses of the prompt, among the others
        bytes_read: bytes of experts that were read from the store
        stall_s: seconds that the model waited for loads on demand
        late_s: seconds that it waited for prefetches in flight
        rows: requested rows of tables on disk
        row_hits: requested rows that were in memory
        row_bytes_read: bytes that were read for the other rows: whole blocks
        row_stall_s: seconds that the model waited for rows
        prompt_s: seconds of the prompt
        decode_s: seconds of the tokens after the first
        resident_bytes: bytes of the slots, hot rows and the dense part
    """

    prompt_tokens: int
    tokens: int
    hits: int
    misses: int
    evictions: int
    prefetched: int
    wasted: int
    bypassed: int
    prompt_misses: int
    bytes_read: int
    stall_s: float
    late_s: float
    rows: int
    row_hits: int
    row_bytes_read: int
    row_stall_s: float
    prompt_s: float
    decode_s: float
    resident_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: the first token comes from the prompt."""
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 and self.tokens > 1 else math.nan

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else math.nan


@dataclass(frozen=True)
class Generation:
    """What `Engine.generate` returns.

    Attributes:
        tokens: the new tokens
        stats: what they cost
        table: the routes of the prompt and of every token that was given back; None for a model without experts
        interrupted: whether Ctrl-C ended the text
    """

    tokens: list[int]
    stats: Stats
    table: RouteTable | None
    interrupted: bool = False


@dataclass(frozen=True)
class Pass:
    """One forward pass of a text, which wrote one token.

    Attributes:
        S: for each layer the experts of the last token of the pass, heaviest first
        w: their weights
        changes: for each pool of experts what was loaded
        hits: requested experts that were in a slot
        misses: requested experts that were not in a slot
        bytes_read: bytes of experts that were read from the store
        stall_s: seconds that the model waited for loads on demand
    """

    S: list[list[int]]
    w: list[list[float]]
    changes: list[list[Change]]
    hits: int
    misses: int
    bytes_read: int
    stall_s: float
    seconds: float
    resident_bytes: int


@runtime_checkable
class HostText(Protocol):
    """A text in a model. `logits` are those after its last token."""

    logits: NDArray[np.float32]

    def append(self, token: int) -> None:
        """Run one more token."""


@runtime_checkable
class Host(Protocol):
    """A model whose experts are in slots."""

    context: int  # the most tokens of a text; 0 if unlimited
    vocab_size: int

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights outside the experts."""

    @property
    def keeps_residents(self) -> bool:
        """Whether its routers keep experts resident themselves."""

    def begin(self, ids: list[int]) -> HostText:
        """Run a prompt. The texts of a model can take turns."""

    def logits(self, ids: list[int]) -> Tensor:
        """The logits after each of the tokens of a text [T, V]."""

    def encode(self, text: str, *, chat: bool) -> list[int]: ...

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages with `role` and `content`, in the chat template of the model."""

    def decode(self, tokens: list[int]) -> str: ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""


class Text:
    """A text that is generated step by step. See `Engine.begin`."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        watch: bool,
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.last: Pass | None = None  # the last pass, if the text is watched
        self._engine = engine
        self._most = max_new_tokens
        self._choose = sampling.chooser()
        self._stop_ids = stop_ids
        self._watch = watch
        self._notes = None if engine.layers is None else engine.layers.new_notes()
        self._host_text: HostText | None = None
        self._start = self._first = self._latest = time.perf_counter()
        self._prompt_misses = 0
        self._closed = False
        self.charged = np.zeros(len(_MEASURED))  # what its passes cost

    @property
    def ended(self) -> bool:
        """Whether the text is complete: it has a stop token, or as many tokens as asked for."""
        return bool(self.tokens) and (self.tokens[-1] in self._stop_ids or len(self.tokens) == self._most)

    @property
    def stopped(self) -> bool:
        """Whether a stop token ended the text."""
        return bool(self.tokens) and self.tokens[-1] in self._stop_ids

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits from which the last token was chosen."""
        assert self._host_text is not None
        return self._host_text.logits

    def step(self) -> int:
        """The next token. The first one runs the prompt."""
        engine = self._engine
        if self._closed or self.ended:
            raise ConfigError("The text has ended: begin another one.")
        engine.require_open()
        start = time.perf_counter()
        if engine.charged is not self or self._watch:
            engine.charge(self)
        before = self.charged.copy() if self._watch else None
        pools: Sequence[Pool] = ()
        if engine.layers is not None:
            assert self._notes is not None
            engine.layers.notes = self._notes
            if self._watch:
                pools = engine.layers.pools
                for pool in pools:
                    pool.changes = []
        try:
            with _threads(engine.threads):
                if self._host_text is None:
                    self._host_text = engine.host.begin(self.prompt)
                else:
                    self._host_text.append(self.tokens[-1])
        finally:
            changes = [pool.changes or [] for pool in pools]
            for pool in pools:
                pool.changes = None
        token = self._choose(self._host_text.logits)
        self.tokens.append(token)
        self._latest = time.perf_counter()
        if len(self.tokens) == 1:
            engine.charge(self)
            self._first, self._prompt_misses = self._latest, int(self.charged[_MEASURED.index("misses")])
        if before is not None:
            self.last = self._pass(before, changes, self._latest - start)
        return token

    def _pass(self, before: NDArray[np.float64], changes: list[list[Change]], seconds: float) -> Pass:
        self._engine.charge(self)
        S: list[Any] = [] if self._notes is None else self._notes.S[-1]
        w: list[Any] = [] if self._notes is None else self._notes.w[-1]
        cost = dict(zip(_MEASURED, (self.charged - before).tolist(), strict=True))
        return Pass(
            S=[of_layer[-1].tolist() for of_layer in S],
            w=[of_layer[-1].tolist() for of_layer in w],
            changes=changes,
            hits=int(cost["hits"]),
            misses=int(cost["misses"]),
            bytes_read=int(cost["bytes_read"]),
            stall_s=cost["stall_s"] + cost["late_s"],
            seconds=seconds,
            resident_bytes=self._engine.resident_bytes,
        )

    @property
    def stats(self) -> Stats:
        """What the text has cost so far. If texts take turns, each pays for its own passes."""
        self._engine.charge(self._engine.charged)
        # A prefetch of an earlier text that this one uses makes its waste negative.
        cost = {name: max(value, 0.0) for name, value in zip(_MEASURED, self.charged.tolist(), strict=True)}
        counts: dict[str, Any] = {name: int(cost[name]) for name in (*COUNTS, *ROW_COUNTS, "bytes_read")}
        return Stats(
            prompt_tokens=len(self.prompt),
            tokens=len(self.tokens),
            prompt_misses=self._prompt_misses,
            stall_s=cost["stall_s"],
            late_s=cost["late_s"],
            row_stall_s=cost["row_stall_s"],
            prompt_s=self._first - self._start,
            decode_s=self._latest - self._first,
            resident_bytes=self._engine.resident_bytes,
            **counts,
        )

    @property
    def table(self) -> RouteTable | None:
        """The routes of the prompt and of every token that was given back to the model."""
        if self._notes is None or self._engine.layers is None:
            return None
        return self._engine.layers.table(
            self._notes, self.prompt + self.tokens, other_bytes=self._engine.host.dense_bytes
        )

    def close(self) -> None:
        """End the text and free its keys and values. Its tokens, stats and table can still be read."""
        self._closed = True
        self._host_text = None
        self._engine.texts.discard(self)


class Engine:
    """A model that generates inside a byte budget. Use it as a context manager, or call `close`.

    One thread may use it at a time; `close` may be called from another one.
    """

    def __init__(
        self, host: Host, layers: ExpertLayers | None, readers: Readers | None, waits: Waits, threads: int
    ) -> None:
        self.host = host
        self.threads = threads
        self.layers = layers
        self.settings: Settings | None = None
        self.texts: set[Text] = set()  # those that are not closed
        self.charged: Text | None = None  # what the pools count is charged to it
        self._mark = np.zeros(len(_MEASURED))
        self._readers = readers
        self._scratch: Region | None = None
        self._waits = waits
        self._closed = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in the store, and of a slot: what a miss reads. With mixed precision, of the largest."""
        return 0 if self._readers is None else self._readers.store.slot_bytes

    @property
    def slots(self) -> int:
        """Slots of each pool of experts."""
        return 0 if self.settings is None else self.settings.slots

    @property
    def policy(self) -> str:
        """Which expert leaves a full pool."""
        return "none" if self.settings is None else self.settings.policy

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots, of hot rows and of the dense part."""
        regions = [] if self.layers is None else [pool.region for pool in self.layers.pools]
        if self._scratch is not None:
            regions.append(self._scratch)
        rows = 0 if self.rows is None else self.rows.nbytes
        return self.host.dense_bytes + rows + sum(region.nbytes for region in regions)

    @property
    def rows(self) -> StoredRows | None:
        """What reads tables of rows; None if they are in memory, or if the model has none."""
        return None if self.layers is None else self.layers.rows

    @property
    def io(self) -> str:
        """How experts are read: direct or buffered."""
        return "none" if self._readers is None else self._readers.io

    @property
    def closed(self) -> bool:
        """Whether nothing can be generated any more."""
        return self._closed

    def checked(self, settings: Settings) -> Settings:
        """Settings that this model can use, with at most one slot for each expert; refused otherwise."""
        assert self._readers is not None
        slots, N = settings.slots, self._readers.store.contents.n_experts
        require(isinstance(slots, int) and slots >= 1, "slots", slots, "a whole number ≥ 1")
        require(settings.prefetch in PREFETCHES, "prefetch", settings.prefetch, f"one of {', '.join(PREFETCHES)}")
        require(settings.on_miss in ("load", "bypass"), "on_miss", settings.on_miss, "one of load, bypass")
        known = policy_names(online=True, routed=self.host.keeps_residents)
        policy = find_policy(settings.policy)
        if policy.routed and not self.host.keeps_residents:
            raise ConfigError(
                f"policy: got {settings.policy}, but the routers of this model keep no experts resident: use "
                f"{', '.join(known)}."
            )
        require(policy.online, "policy", settings.policy, f"one of {', '.join(known)}")
        return replace(settings, slots=min(slots, N))

    def configure(self, settings: Settings) -> None:
        """Change how experts are held and loaded, between texts. The slots are empty afterwards."""
        self.require_open()
        if self.layers is None or self._readers is None:
            raise ConfigError("This model has no experts: there is nothing to configure.")
        settings = self.checked(settings)
        if self.texts:
            raise ConfigError("The engine generates a text: configure it before or after.")
        self._empty_slots()
        bypass = settings.on_miss == "bypass"
        self.layers.pools, self._scratch = (), None  # freed before the new ones are allocated
        self.layers.prefetch = settings.prefetch
        self._readers.throttle = None if settings.throttle is None else Throttle(settings.throttle)
        self._scratch = Region(SCRATCH_SLOTS, self._readers.store.slot_bytes) if bypass else None
        self.layers.pools = [
            Pool(
                i,
                self._readers,
                self._waits,
                capacity=settings.slots,
                policy=settings.policy,
                on_miss=settings.on_miss,
                scratch=self._scratch,
            )
            for i in range(self._readers.store.contents.n_pools)
        ]
        if self.rows is not None:
            self.rows.configure(settings.policy)
        self.settings = settings
        self._mark = self._measure()

    def begin(
        self,
        ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 64,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] | None = None,
        warm: bool = False,
        watch: bool = False,
    ) -> Text:
        """A text after the tokens `ids`: each `step` gives its next token, until it has `ended`; then `close` it.

        Texts can take turns in any order: each is the text that it is alone. `warm` keeps what the slots hold; where
        other texts run, it must be true. `watch`: `last` has the routes and loads of each pass.
        """
        self.require_open()
        prompt = _as_list(ids)
        sampling = Sampling(do_sample, temperature, top_k, top_p, seed)
        self._require_room(prompt, max_new_tokens)
        if not warm:
            if self.texts:
                raise ConfigError("Other texts run: their slots cannot be emptied; begin the text with warm=True.")
            self._empty_slots()
        ends = self.host.end_ids if stop_ids is None else tuple(stop_ids)
        text = Text(self, prompt, max_new_tokens, sampling, ends, watch)
        self.texts.add(text)
        self.charge(text)
        return text

    def generate(self, ids: Sequence[int] | Tensor, *, on_token: OnToken | None = None, **settings: Any) -> Generation:
        """Generate after the tokens `ids`; `tokens` of the result are the new ones.

        The settings are those of `begin`. The slots start empty unless `warm`, so that replaying `table` gives the
        counts of `stats`. `on_token` is called with each token. `stop_ids` end the text and are kept; by default those
        of the model. Ctrl-C ends the text.
        """
        text = self.begin(ids, **settings)
        interrupted = False
        try:
            while not text.ended:
                token = text.step()
                if on_token is not None:
                    on_token(token)
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            self.close()  # what the slots hold is not known
            raise
        out = Generation(text.tokens, text.stats, text.table, interrupted)
        text.close()
        if interrupted:
            self.close()
        return out

    def close(self) -> None:
        """End the readers. Nothing can be generated any more."""
        self._closed = True
        if self._readers is not None:
            self._readers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def require_open(self) -> None:
        if self._closed:
            raise StoreError("The engine is closed; open it again with offload.")

    def charge(self, text: Text | None) -> None:
        """Charge what was counted so far to the text that ran, and what follows to `text`."""
        now = self._measure()
        if self.charged is not None:
            self.charged.charged += now - self._mark
        self._mark, self.charged = now, text

    def _measure(self) -> NDArray[np.float64]:
        pools = () if self.layers is None else self.layers.pools
        counts = [pool.counts for pool in pools]
        read = 0 if self._readers is None else self._readers.bytes_read
        totals = [sum(column) for column in zip(*counts, strict=True)] or [0] * len(COUNTS)
        rows = [0] * len(ROW_COUNTS) if self.rows is None else self.rows.counts
        waits = self._waits
        return np.array([*totals, *rows, read, waits.stall_s, waits.late_s, waits.row_stall_s], np.float64)

    def _empty_slots(self) -> None:
        self.charge(None)
        for pool in () if self.layers is None else self.layers.pools:
            pool.empty()
        if self.rows is not None:
            self.rows.empty()
        self._mark = self._measure()

    def _require_room(self, prompt: list[int], max_new_tokens: int) -> None:
        require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "a whole number ≥ 1")
        if not prompt:
            raise ConfigError("The prompt is empty: expected at least one token.")
        most = self.host.vocab_size - 1
        require(max(prompt) <= most, "ids", f"token {max(prompt)}", f"tokens from 0 to {most}")
        context = self.host.context
        if context and len(prompt) + max_new_tokens - 1 > context:
            raise ConfigError(
                f"The prompt has {len(prompt)} tokens and {max_new_tokens} are to be generated, but the model reads at "
                f"most {context}: shorten the prompt, or generate at most {max(context - len(prompt) + 1, 0)} tokens."
            )


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Compute with n threads in torch and in compiled loops, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    if n > 1:
        numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _as_list(ids: Any) -> list[int]:
    """Token ids from a list, an array or a tensor of one sequence."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, list | tuple) and values and isinstance(values[0], list | tuple):
        require(len(values) == 1, "ids", f"{len(values)} sequences", "one sequence")
        values = values[0]
    expected = "a list of token numbers ≥ 0"
    try:
        tokens = [operator.index(i) for i in values]
    except TypeError as e:
        raise ConfigError(f"ids: got {shown(ids)}, expected {expected}.") from e
    require(min(tokens, default=0) >= 0, "ids", tokens, expected)
    return tokens


def offload(
    model: str | Path,
    *,
    slots: int | None = None,
    memory: str | float | None = None,
    policy: str | None = None,
    prefetch: Prefetch = "none",
    on_miss: OnMiss = "load",
    kernel: Kernel | None = None,
    io: IO = "direct",
    throttle: str | float | None = None,
    rows: str | float | None = None,
    threads: int = 1,
    experts: str | None = None,
    store: str | Path | None = None,
    progress: Callable[[str, int], Any] | None = None,
) -> Engine:
    """Open a model for generation with `slots` slots per layer, or as many as fit in `memory` bytes; by default all.

    `model` is a packed store, a run folder or a folder of a transformers model. A folder is packed first, into `store`
    or the user's cache folder; `experts` is the precision of that store. `throttle` simulates slow memory of so many
    bytes per second. `kernel` is compiled where the experts allow it, otherwise torch. `policy` is `router` where the
    routers of a run keep experts resident themselves, otherwise `lru`; with bypass always `lru`.

    `rows` is about the tables of a model with rows in slow memory: "all" keeps them in memory; otherwise they stay on
    disk, and the rows that were used lately take so many bytes. By default they are in memory, unless `memory` is given
    and has no room for them beside all experts.
    """
    from stickymoe.runtime.opening import open_host, open_store

    for key, given, known in (
        ("prefetch", prefetch, PREFETCHES),
        ("on_miss", on_miss, ("load", "bypass")),
        ("kernel", kernel, (None, "torch", "compiled")),
        ("io", io, ("direct", "buffered")),
    ):
        require(given in known, key, given, "one of " + ", ".join(str(name) for name in known if name))
    if policy is not None:
        known_policies = policy_names(online=True, routed=True)
        require(find_policy(policy).online, "policy", policy, f"one of {', '.join(known_policies)}")
    require(threads >= 1, "threads", threads, "a whole number ≥ 1")
    if threads > 1:  # idle threads of compiled loops must not keep torch's from their cores
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rate = None if throttle is None else parsed_bytes("throttle", throttle)
    budget = None if memory is None else parsed_bytes("memory", memory)
    opened = open_store(Path(model), experts=experts, store=None if store is None else Path(store), progress=progress)
    waits = Waits()
    if opened is None:  # a model without experts
        require(rows in (None, "all"), "rows", rows, "all: a model without experts keeps its tables in memory")
        return Engine(open_host(Path(model), None, threads), None, None, waits, threads)
    capacity = _capacity(opened, slots, budget, on_miss)
    row_memory = _row_memory(opened, rows, budget)
    readers = Readers(opened, io=io)
    try:
        stored = None if row_memory is None else StoredRows(opened, readers, waits, memory=row_memory)
        chosen = kernel or ("torch" if opened.contents.spec.activation is None else "compiled")
        layers = ExpertLayers(opened, (), kernel=chosen, threads=threads, prefetch=prefetch, rows=stored)
        host = open_host(opened.folder, layers, threads)
        engine = Engine(host, layers, readers, waits, threads)
        name = policy or ("router" if host.keeps_residents and on_miss == "load" else "lru")
        engine.configure(Settings(capacity, name, prefetch, on_miss, rate))
        return engine
    except BaseException:
        readers.close()
        raise


def parsed_bytes(key: str, given: str | float) -> float:
    value = parse_bytes(given, key) if isinstance(given, str) else float(given)
    require(0 < value < math.inf, key, given, "bytes > 0 such as 64MB")
    return value


def _row_memory(store: Store, rows: str | float | None, memory: float | None) -> float | None:
    """Bytes of hot rows; None if the tables are in memory."""
    if not store.contents.rows:
        if rows not in (None, "all"):
            raise ConfigError(
                f"rows: got {shown(rows)}, but {store.folder} has no rows on disk: omit it, or pack the model again if "
                "its variant is lookup."
            )
        return None
    layout = store.contents.row_layout
    if rows is None:
        fits = memory is None or store.nbytes + layout.table_bytes <= memory
        return None if fits else 0.0
    if rows == "all":
        return None
    most = 0.0 if rows in (0, "0") else parsed_bytes("rows", rows)
    if 0 < most < layout.row_bytes:
        least = f"at least {bytes_text(layout.row_bytes)}: the rows of one token"
        raise ConfigError(f"rows: got {bytes_text(most)}, expected all, 0, or {least}.")
    return most


def _capacity(store: Store, slots: int | None, memory: float | None, on_miss: OnMiss) -> int:
    """Slots of each pool: as given, as many as fit in `memory`, or all experts."""
    N, pools = store.contents.n_experts, store.contents.n_pools
    if slots is not None and memory is not None:
        raise ConfigError("slots and memory: got both, expected one of them.")
    if memory is not None:
        scratch = SCRATCH_SLOTS if on_miss == "bypass" else 0
        slots = int(memory / store.slot_bytes - scratch) // pools
        if slots < 1:
            least = (pools + scratch) * store.slot_bytes
            raise ConfigError(
                f"memory: got {bytes_text(memory)}, expected at least {bytes_text(least)}: one expert of "
                f"{bytes_text(store.slot_bytes)} for each of {pools} layers"
                + (f" and {scratch} to pass through." if scratch else ".")
            )
    if slots is None:
        return N
    require(isinstance(slots, int) and slots >= 1, "slots", slots, "a whole number ≥ 1")
    return min(slots, N)
