"""`offload`: generate text with experts on disk and a few slots per layer in memory.

    engine = stickymoe.offload("runs/soft", slots=2, policy="lru")
    out = engine.generate([11, 42], max_new_tokens=64)
    out.tokens, out.stats.misses, out.table

The text does not depend on the slots, and replaying the table gives the counts.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numba
import torch
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
from stickymoe.runtime.slots import COUNTS, SCRATCH_SLOTS, OnMiss, Pool, Waits
from stickymoe.runtime.store import Store

Prefetch = Literal["none", "previous", "next_layer"]
OnToken = Callable[[int], None]


@dataclass(frozen=True)
class Stats:
    """What a generation cost.

    hits, misses: requested experts that were in a slot, or were not
    evictions: experts that left a slot for another one
    prefetched, wasted: experts that were loaded before they were requested, and those of them that no token used
    bypassed: misses that passed through a scratch slot and evicted nobody
    prompt_misses: misses of the prompt, among the others
    bytes_read: bytes of experts that were read from the store
    stall_s: seconds that the model waited for loads on demand
    late_s: seconds that it waited for prefetches in flight
    prompt_s, decode_s: seconds of the prompt, and of the tokens after the first
    resident_bytes: slots and dense part
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
    """The generated tokens, what they cost, and the routes of the prompt and of every token that was given back.

    `table` is None for a model without experts. `interrupted`: the text was ended by Ctrl-C.
    """

    tokens: list[int]
    stats: Stats
    table: RouteTable | None
    interrupted: bool = False


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

    def generate(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling, stop_ids: Sequence[int]
    ) -> Iterator[int]:
        """The tokens of a text, one after another. Each is computed when it is asked for."""

    def logits(self, ids: list[int]) -> Tensor:
        """The logits after each of the tokens of a text [T, V]."""

    def encode(self, text: str, *, chat: bool) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""


class Engine:
    """A model that generates inside a byte budget. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        host: Host,
        layers: ExpertLayers | None,
        readers: Readers | None,
        scratch: Region | None,
        waits: Waits,
        threads: int,
    ) -> None:
        self.host = host
        self.threads = threads
        self.layers = layers
        self._readers = readers
        self._scratch = scratch
        self._waits = waits
        self._closed = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in the store, and of a slot: what a miss reads. With mixed precision, of the largest."""
        return 0 if self._readers is None else self._readers.store.slot_bytes

    @property
    def slots(self) -> int:
        """Slots of each pool of experts."""
        return 0 if self.layers is None else self.layers.pools[0].cache.capacity

    @property
    def policy(self) -> str:
        """Which expert leaves a full pool."""
        return "none" if self.layers is None else self.layers.pools[0].cache.policy.name

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots and of the dense part."""
        regions = [] if self.layers is None else [pool.region for pool in self.layers.pools]
        if self._scratch is not None:
            regions.append(self._scratch)
        return self.host.dense_bytes + sum(region.nbytes for region in regions)

    @property
    def io(self) -> str:
        """How experts are read: direct or buffered."""
        return "none" if self._readers is None else self._readers.io

    def generate(
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
        on_token: OnToken | None = None,
    ) -> Generation:
        """Generate after the tokens `ids`; `tokens` of the result are the new ones.

        The slots start empty unless `warm`, so that replaying `table` gives the counts of `stats`. `on_token` is called
        with each token. `stop_ids` end the text and are kept; by default those of the model. Ctrl-C ends the text.
        """
        if self._closed:
            raise StoreError("The engine is closed; open it again with offload.")
        prompt = _as_list(ids)
        sampling = Sampling(do_sample, temperature, top_k, top_p, seed)
        self._require_room(prompt, max_new_tokens)
        self._begin(warm)
        read_before = self._bytes_read()
        tokens: list[int] = []
        interrupted, prompt_misses = False, 0
        start = time.perf_counter()
        first = last = start
        try:
            ends = self.host.end_ids if stop_ids is None else tuple(stop_ids)
            with _threads(self.threads):
                for token in self.host.generate(prompt, max_new_tokens, sampling, ends):
                    tokens.append(token)
                    last = time.perf_counter()
                    if len(tokens) == 1:
                        first, prompt_misses = last, self._misses()
                    if on_token is not None:
                        on_token(token)
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            self.close()  # what the slots hold is not known
            raise
        stats = self._stats(
            prompt_tokens=len(prompt),
            tokens=len(tokens),
            prompt_misses=prompt_misses,
            bytes_read=self._bytes_read() - read_before,
            prompt_s=first - start,
            decode_s=last - first,
        )
        table = self._table(prompt + tokens)
        if interrupted:
            self.close()
        return Generation(tokens, stats, table, interrupted)

    def close(self) -> None:
        """End the readers. Nothing can be generated any more."""
        self._closed = True
        if self._readers is not None:
            self._readers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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

    def _begin(self, warm: bool) -> None:
        self._waits.stall_s = self._waits.late_s = 0.0
        if self.layers is not None:
            self.layers.reset()
            for pool in self.layers.pools:
                pool.begin(warm=warm)

    def _bytes_read(self) -> int:
        return 0 if self._readers is None else self._readers.bytes_read

    def _misses(self) -> int:
        return 0 if self.layers is None else sum(pool.counts["misses"] for pool in self.layers.pools)

    def _stats(self, **measured: Any) -> Stats:
        counts = [] if self.layers is None else [pool.counts for pool in self.layers.pools]
        return Stats(
            **measured,
            **{name: sum(c[name] for c in counts) for name in COUNTS},
            stall_s=self._waits.stall_s,
            late_s=self._waits.late_s,
            resident_bytes=self.resident_bytes,
        )

    def _table(self, tokens: list[int]) -> RouteTable | None:
        if self.layers is None:
            return None
        contents = self.layers.store.contents
        return self.layers.table(tokens, other_bytes=self.host.dense_bytes, share_block=contents.layers_per_pool)


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
    """
    from stickymoe.runtime.opening import open_host, open_store

    for key, given, known in (
        ("prefetch", prefetch, ("none", "previous", "next_layer")),
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
        return Engine(open_host(Path(model), None, threads), None, None, None, waits, threads)
    capacity = _capacity(opened, slots, budget, on_miss)
    readers = Readers(opened, io=io, throttle=None if rate is None else Throttle(rate))
    try:
        scratch = Region(SCRATCH_SLOTS, opened.slot_bytes) if on_miss == "bypass" else None
        chosen = kernel or ("torch" if opened.contents.spec.activation is None else "compiled")
        layers = ExpertLayers(opened, (), kernel=chosen, threads=threads, prefetch=prefetch)
        host = open_host(opened.folder, layers, threads)
        name = _policy(policy, host, on_miss)
        layers.pools = [
            Pool(i, readers, waits, capacity=capacity, policy=name, on_miss=on_miss, scratch=scratch)
            for i in range(opened.contents.n_pools)
        ]
        return Engine(host, layers, readers, scratch, waits, threads)
    except BaseException:
        readers.close()
        raise


def _policy(given: str | None, host: Host, on_miss: OnMiss) -> str:
    """The policy as given, or that of the model's routers if they have one."""
    if given is None:
        return "router" if host.keeps_residents and on_miss == "load" else "lru"
    if find_policy(given).routed and not host.keeps_residents:
        others = ", ".join(policy_names(online=True))
        raise ConfigError(f"policy: got {given}, but the routers of this model keep no experts resident: use {others}.")
    return given


def parsed_bytes(key: str, given: str | float) -> float:
    value = parse_bytes(given, key) if isinstance(given, str) else float(given)
    require(0 < value < math.inf, key, given, "bytes > 0 such as 64MB")
    return value


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
