"""Decoding with experts on disk, against transformers and accelerate, on a machine that does nothing else.

    python benchmarks/offload.py              everything, about 8 minutes; writes offload.json
    python benchmarks/offload.py --quick      a few short rounds, to see that it works; without a record

The model is a Mixtral of 8 layers with 8 experts, width 512, fp32, with random weights, so experts are chosen without
any locality: with C slots of 8, about 1 − C/8 of the requests miss. All candidates continue the same prompts, and their
texts are compared. Each has its own process; they take turns. Times are of tokens after the first. Ratios are of the
same round: median over rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Timing, Work, median_interval, race, serve, write_record

HERE = Path(__file__)
LAYERS, N, WIDTH, HIDDEN, VOCAB = 8, 8, 512, 1792, 4096
PROMPT, COMPARED = 8, 4  # tokens of a prompt, and tokens of a text that are compared
RATE = 200e6  # bytes per second of slow memory
LARGE = {"layers": 6, "experts": 20}  # 1.3 GB of experts; two slots of a layer are a tenth of them


# The models


def mixtral(layers: int = LAYERS, experts: int = N, width: int = WIDTH, hidden: int = HIDDEN) -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = MixtralForCausalLM(config)
    # With transformers' own small embeddings, every token has nearly the same hidden state and the same experts.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


def make_models(folder: Path) -> None:
    """Everything that the candidates open."""
    from stickymoe.runtime.checkpoints import open_checkpoint
    from stickymoe.runtime.pack import pack, uniform

    sizes = {"mixtral": {}, "large": LARGE, "tiny": {"layers": 2, "experts": 4, "width": 64, "hidden": 64}}
    for name, size in sizes.items():
        # Fused, which transformers and accelerate map without a copy.
        mixtral(**size).save_pretrained(folder / name, save_original_format=False)
    make_run(folder / "gpt")
    for name, precision in (("mixtral", "fp32"), ("mixtral", "int8"), *((n, "fp32") for n in ("large", "tiny", "gpt"))):
        source = open_checkpoint(folder / name)
        pack(source, folder / f"{name}-{precision}", uniform(source, precision))
    shutil.rmtree(folder / "large")
    os.sync()  # pages that are not written yet cannot be evicted


def make_run(path: Path) -> None:
    """A run of the size of cpu-small, without training."""
    from tokenizers import Tokenizer, models

    from stickymoe.runs.folder import RunFolder
    from stickymoe.runs.settings import config_from
    from stickymoe.training.build import build_model
    from stickymoe.training.checkpoint import Progress, save_checkpoint
    from stickymoe.training.optimiser import adamw

    config = config_from({"preset": "cpu-small"})
    model = build_model(config, VOCAB)
    folder = RunFolder(path)
    path.mkdir()
    folder.write_config(config)
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0")).save(str(folder.tokenizer))
    save_checkpoint(folder.checkpoints, Progress(0), model, adamw(list(model.named_parameters()), config.train))


# Candidates


@dataclass(frozen=True)
class Job:
    """What a candidate is given."""

    models: Path
    threads: int
    tokens: int  # tokens to decode in a round


@dataclass(frozen=True)
class Spec:
    """A candidate: `prepare` returns the work of one round."""

    prepare: Callable[[Job], Work]
    threads: int = 2
    tokens: int = 24
    spins: bool = False  # threads that wait spin, as is the default of OpenMP


def prompts() -> Iterator[list[int]]:
    """A prompt for each round, the same for every candidate."""
    import random

    for i in count():
        yield random.Random(i).choices(range(VOCAB), k=PROMPT)


def text_code(tokens: Sequence[int]) -> int:
    """Candidates that generate the same text have the same number, even if one of them generates less."""
    return zlib.crc32(repr(list(tokens[:COMPARED])).encode())


def read_bytes() -> int:
    """Bytes that this process has read from disk."""
    return _status("/proc/self/io", "read_bytes")


def _status(file: str, key: str) -> int:
    return int(next(line for line in Path(file).read_text().splitlines() if line.startswith(key)).split()[1])


def decode(forward: Callable[[list[int], Any], Any], n: int, after: Callable[[], object]) -> Iterator[dict[str, float]]:
    """Greedy texts, one per prompt. `forward(tokens, state)` returns logits and state; `after` each token is not
    timed. At `RATE`, a token takes at least the time of the bytes that were read for it.
    """
    for ids in prompts():
        logits, state = forward(ids, None)
        tokens = [int(logits.argmax())]
        after()
        seconds = charged = 0.0
        first = before = read_bytes()
        for _ in range(n):
            start = time.perf_counter()
            logits, state = forward(tokens[-1:], state)
            tokens.append(int(logits.argmax()))
            token_s = time.perf_counter() - start
            now = read_bytes()
            seconds += token_s
            charged += max(token_s, (now - before) / RATE)
            after()
            before = read_bytes()
        yield {
            "seconds": seconds / n,
            "charged_s": charged / n,
            "bytes": (now - first) / n,
            "text": text_code(tokens),
        }


def nothing() -> None: ...


def transformers_model(job: Job, implementation: str = "grouped_mm") -> Work:
    """Hugging Face's own forward pass; all weights in private memory, since pages of a mapped file can go."""
    import torch
    from transformers import MixtralForCausalLM

    folder = job.models / "mixtral"
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=implementation)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return partial(next, decode(partial(_forward, model), job.tokens, nothing))


def accelerate_model(job: Job) -> Work:
    """accelerate with the experts on disk: it maps the fused tensors of a layer anew in every forward pass. The page
    cache is emptied after each token.
    """
    import torch
    from transformers import MixtralForCausalLM

    file = job.models / "mixtral" / "model.safetensors"
    devices = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    for layer in range(LAYERS):
        parts = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate")
        devices |= {f"model.layers.{layer}.{part}": "cpu" for part in parts}
        devices[f"model.layers.{layer}.mlp.experts"] = "disk"
    model = MixtralForCausalLM.from_pretrained(file.parent, dtype=torch.float32, device_map=devices)
    return partial(next, decode(partial(_forward, model), job.tokens, partial(evict, file)))


def _forward(model: Any, tokens: list[int], state: Any) -> tuple[Any, Any]:
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), past_key_values=state, use_cache=True)
    return out.logits[0, -1], out.past_key_values


def evict(file: Path) -> None:
    """Drop a file from the page cache. Pages that are mapped at this moment stay."""
    opened = os.open(file, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(opened)


def offloaded(job: Job, store: str, **options: Any) -> Work:
    """Our runtime. The slots keep their experts from one text to the next."""
    from stickymoe.runtime.engine import offload

    engine = offload(job.models / store, threads=job.threads, **options)
    texts = prompts()
    engine.generate(list(range(64)), max_new_tokens=2)  # uses every expert, so that with C = N all are resident

    def work() -> dict[str, float]:
        at_first: list[int] = []
        before = read_bytes()
        out = engine.generate(
            next(texts),
            max_new_tokens=job.tokens + 1,
            warm=True,
            on_token=lambda _: None if at_first else at_first.append(read_bytes()),
        )
        end, s = read_bytes(), out.stats
        return {
            "seconds": s.decode_s / job.tokens,
            "bytes": (end - at_first[0]) / job.tokens,
            "bytes_per_miss": (end - before) / s.misses / engine.expert_bytes if s.misses else 1.0,
            "stall_s": (s.stall_s + s.late_s) / job.tokens,
            "text": text_code(out.tokens),
        }

    return work


def bandwidth(job: Job, store: str) -> Work:
    """Reads of the runtime with C = 2, and after each token as many plain direct reads of other experts.

    The time of the runtime's reads is that in which at least one of them runs; its two threads may read at once.
    """
    from stickymoe.runtime.engine import offload
    from stickymoe.runtime.memory import Region
    from stickymoe.runtime.store import EXPERTS

    engine = offload(job.models / store, slots=2, threads=job.threads)
    readers: Any = engine._readers
    entries = [entry for pool in readers.store.entries for entry in pool]
    spans: list[tuple[float, float]] = []
    read, file = readers._read, os.open(readers.store.folder / EXPERTS, os.O_RDONLY | os.O_DIRECT)
    target = Region(1, readers.store.slot_bytes).view(0)
    texts, places = prompts(), count(0, 5)  # 5 steps through all places, since it does not divide their number

    def timed_read(ticket: Any) -> None:
        start = time.perf_counter()
        read(ticket)
        spans.append((start, time.perf_counter()))

    readers._read = timed_read

    def work() -> dict[str, float]:
        ours = plain = 0.0

        def after(_: int) -> None:
            nonlocal ours, plain
            ours += busy(spans)
            for _ in spans:
                entry = entries[next(places) % len(entries)]
                start = time.perf_counter()
                assert os.preadv(file, [target[: entry.nbytes]], entry.offset) == entry.nbytes
                plain += time.perf_counter() - start
            spans.clear()

        engine.generate(next(texts), max_new_tokens=job.tokens + 1, warm=True, on_token=after)
        return {"seconds": ours, "plain_s": plain, "ratio": plain / ours}

    return work


def busy(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def gpt_in_torch(job: Job) -> Work:
    """Our own model as it decodes without the runtime, all experts in memory."""
    import torch

    from stickymoe.models.gpt import DecodeCache
    from stickymoe.runs.folder import RunFolder
    from stickymoe.runs.settings import read_config
    from stickymoe.training.build import build_model
    from stickymoe.training.checkpoint import find_checkpoint, load_model

    torch.set_num_threads(job.threads)
    folder = RunFolder(job.models / "gpt")
    model = build_model(read_config(file=folder.config), VOCAB)
    load_model(find_checkpoint(folder.checkpoints), model)
    model.train(False)

    @torch.no_grad()
    def forward(tokens: list[int], cache: Any) -> tuple[Any, Any]:
        cache = cache or DecodeCache.empty(model.config.n_layers)
        return model(torch.tensor([tokens]), cache=cache).logits[0, -1], cache

    return partial(next, decode(forward, job.tokens, nothing))


def peak_memory(job: Job) -> Work:
    """Peak memory of a generation beyond what was resident before, the slots and the dense part.

    Before: all imports, and a tiny model that was run and closed. The peak is counted from there.
    """
    from stickymoe.runtime.engine import offload

    def run(store: str) -> Any:
        engine = offload(job.models / store, slots=2, threads=job.threads)
        with engine:
            engine.generate(list(range(32)), max_new_tokens=job.tokens)
        return engine

    def work() -> dict[str, float]:
        run("tiny-fp32")
        gc.collect()
        before = _status("/proc/self/status", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        engine = run("large-fp32")
        peak = _status("/proc/self/status", "VmHWM")
        slots = sum(pool.region.nbytes for pool in engine.layers.pools)
        return {
            "before_mb": before / 1e3 * 1.024,
            "peak_mb": peak / 1e3 * 1.024,
            "slots_mb": slots / 1e6,
            "dense_mb": engine.host.dense_bytes / 1e6,
            "store_mb": engine.layers.store.nbytes / 1e6,
            "beyond_mb": ((peak - before) * 1024 - engine.resident_bytes) / 1e6,
        }

    return work


def mixtral_slots(precision: str, threads: int = 2, tokens: int = 24, **options: Any) -> Spec:
    return Spec(partial(offloaded, store=f"mixtral-{precision}", **options), threads, tokens)


CAPACITIES = (6, 4, 2, 1)
PRECISIONS = ("fp32", "int8")
RESIDENT = {
    "HF": Spec(transformers_model),
    "HF, spinning": Spec(transformers_model, spins=True),
    "HF eager": Spec(partial(transformers_model, implementation="eager")),
    "torch kernel": mixtral_slots("fp32", kernel="torch"),
    "fp32": mixtral_slots("fp32"),
    "int8": mixtral_slots("int8"),
    "HF, 1 thread": Spec(transformers_model, threads=1),
    "fp32, 1 thread": mixtral_slots("fp32", threads=1),
    "int8, 1 thread": mixtral_slots("int8", threads=1),
}
DISK = {
    "accelerate": Spec(accelerate_model, tokens=6),
    **{f"{p} C={C}": mixtral_slots(p, tokens=12, slots=C) for p in PRECISIONS for C in CAPACITIES},
    "fp32 C=4 slow": mixtral_slots("fp32", tokens=6, slots=4, throttle=RATE),
}
FAST = 1e9  # bytes per second of slow memory from which experts are prefetched
PREFETCH = {
    "all": mixtral_slots("int8", threads=1),
    "none": mixtral_slots("int8", threads=1, slots=4, throttle=FAST),
    "next_layer": mixtral_slots("int8", threads=1, slots=4, throttle=FAST, prefetch="next_layer"),
}
# The same with a slower token, which leaves more time to read in.
PREFETCH_SLOW = {
    f"{name}, torch": mixtral_slots("int8", threads=1, tokens=12, kernel="torch", **settings)
    for name, settings in {
        "all": {},
        "none": {"slots": 4, "throttle": FAST},
        "next_layer": {"slots": 4, "throttle": FAST, "prefetch": "next_layer"},
    }.items()
}
GPT = {
    "GPT": Spec(partial(offloaded, store="gpt-fp32"), threads=1, tokens=128),
    "GPT torch": Spec(gpt_in_torch, threads=1, tokens=128),
    "GPT torch, 2 threads": Spec(gpt_in_torch, threads=2, tokens=128),
}
READS = {f"reads {p}": Spec(partial(bandwidth, store=f"mixtral-{p}"), tokens=12) for p in PRECISIONS}
MEMORY = {"memory": Spec(peak_memory, threads=1)}
CANDIDATES = {**RESIDENT, **DISK, **PREFETCH, **PREFETCH_SLOW, **GPT, **READS, **MEMORY}


# Rows


@dataclass
class Measured:
    """The timings of all races by candidate, and the rows that follow from them."""

    timings: dict[str, Timing] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, values: Sequence[float], target: tuple[str, float] | None = None, unit: str = "") -> None:
        low, median, high = (round(x, 4) for x in median_interval(values))
        row: dict[str, Any] = {"what": what, "low": low, "median": median, "high": high, "unit": unit}
        if target is not None:
            sign, goal = target
            row |= {"target": f"{sign} {goal:g}", "missed_by": round(_missed_by(median, sign, goal), 4)}
        self._show(row)

    def absent(self, what: str, target: str, why: str) -> None:
        self._show({"what": what, "target": target, "absent": why})

    def _show(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        measured, target, verdict = row_text(row)
        print(f"{row['what']:74} {measured:28} {target and f'target {target}':14} {verdict}", flush=True)

    def speedup(self, ours: str, other: str, *, key: str = "seconds") -> list[float]:
        """How many times as fast a token is, round by round."""
        return [a / b for a, b in zip(self.of(other, key), self.of(ours, "seconds"), strict=True)]

    def fastest(self, *names: str) -> str:
        """The one to compare with, where a rival has several settings."""
        return min(names, key=lambda name: self.timings[name].median)

    def of(self, name: str, key: str) -> list[float]:
        timing = self.timings[name]
        return timing.seconds if key == "seconds" else [numbers[key] for numbers in timing.numbers]


def _missed_by(value: float, sign: str, goal: float) -> float:
    """0 if the target is met; otherwise the relative distance to it."""
    if sign == "=":
        return 0.0 if abs(value - goal) < 0.005 else abs(value - goal) / goal
    distance = (goal - value) / goal
    return max(0.0, distance if sign == "≥" else -distance)


def row_text(row: dict[str, Any]) -> tuple[str, str, str]:
    """Measured value with interval, target and verdict of a row, as text."""
    if "absent" in row:
        return row["absent"], row["target"], ""
    low, median, high = (f"{row[key]:.{_digits(row['median'])}f}" for key in ("low", "median", "high"))
    measured = f"{median}{row['unit']} ({low} to {high})"
    if "target" not in row:
        return measured, "", ""
    missed = row["missed_by"]
    return measured, row["target"] + row["unit"], f"missed by {missed:.0%}" if missed else "met"


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1


def require_same_texts(timings: Sequence[Timing]) -> None:
    """Refuse figures of candidates that generated different texts in a round."""
    first = timings[0]
    for other in timings[1:]:
        for i, (a, b) in enumerate(zip(first.numbers, other.numbers, strict=True)):
            if a["text"] != b["text"]:
                raise SystemExit(f"round {i}: the texts of {first.name} and {other.name} differ; nothing is recorded.")
    names = ", ".join(timing.name for timing in timings)
    print(f"same greedy text in all {len(first.numbers)} rounds: {names}")


# The rows of each race


def resident(m: Measured, run: Callable[..., None]) -> None:
    run(RESIDENT)
    require_same_texts([m.timings[name] for name in RESIDENT if not name.startswith("int8")])
    hf = m.fastest("HF", "HF, spinning")
    m.add("C = N, fp32 : HF default", m.speedup("fp32", hf), ("≥", 1.6))
    m.add("C = N, int8 : HF default", m.speedup("int8", hf), ("≥", 2.2))
    m.add("C = N, fp32, torch kernel : HF default", m.speedup("torch kernel", hf))
    m.add("HF eager : HF default", m.speedup("HF eager", hf))
    for p in PRECISIONS:
        m.add(f"C = N, {p} : HF default, 1 thread", m.speedup(f"{p}, 1 thread", "HF, 1 thread"))


def disk(m: Measured, run: Callable[..., None]) -> None:
    run(DISK)
    for p in PRECISIONS:
        names = [name for name in DISK if name.startswith(p) or (name == "accelerate" and p == "fp32")]
        require_same_texts([m.timings[name] for name in names])
    needed = 2 * LAYERS * 3 * WIDTH * HIDDEN * 4  # bytes of the experts of a token
    if min(m.of("accelerate", "bytes")) < needed:
        raise SystemExit("accelerate read less than it needs: the models are still in memory; set TMPDIR to a disk.")
    m.add("C = 4, fp32 : accelerate, evicted", m.speedup("fp32 C=4", "accelerate"), ("≥", 7))
    slow = m.speedup("fp32 C=4 slow", "accelerate", key="charged_s")
    m.add("C = 4, fp32 : accelerate, both at 200 MB/s", slow, ("≥", 5))
    m.add("C = 4, int8 : accelerate, evicted", m.speedup("int8 C=4", "accelerate"), ("≥", 15))
    m.add("C = 2, int8 : accelerate, evicted", m.speedup("int8 C=2", "accelerate"))
    bytes_ = zip(m.of("fp32 C=2", "bytes"), m.of("accelerate", "bytes"), strict=True)
    m.add("bytes per token, C = 2, fp32 : accelerate", [a / b for a, b in bytes_], ("≤", 0.25))
    per_miss = [x for p in PRECISIONS for C in CAPACITIES for x in m.of(f"{p} C={C}", "bytes_per_miss")]
    m.add("bytes read per miss : bytes of an expert in the store", per_miss, ("=", 1))


def reads(m: Measured, run: Callable[..., None]) -> None:
    run(READS)
    m.add("read bandwidth while missing, fp32 : plain direct reads", m.of("reads fp32", "ratio"), ("≥", 0.9))
    m.add("read bandwidth while missing, int8 : plain direct reads", m.of("reads int8", "ratio"))


def prefetch(m: Measured, run: Callable[..., None]) -> None:
    run(PREFETCH, 2)
    require_same_texts([m.timings[name] for name in PREFETCH])
    m.add("stall hidden by next_layer, 1 GB/s, C = 4, int8, 1 thread", hidden_stall(m, PREFETCH), ("≥", 45), " %")
    # A token takes at least the time of its reads, so no prefetch hides more than what is left of it.
    rounds = zip(*(m.of(name, "seconds") for name in ("all", "none")), m.of("none", "bytes"), strict=True)
    most = [100 * (none - n_bytes / FAST) / (none - full) for full, none, n_bytes in rounds]
    m.add("the most that any prefetch can hide there", most, None, " %")
    run(PREFETCH_SLOW)
    require_same_texts([m.timings[name] for name in PREFETCH_SLOW])
    m.add("stall hidden by next_layer, kernel torch, otherwise the same", hidden_stall(m, PREFETCH_SLOW), None, " %")


def hidden_stall(m: Measured, names: Iterable[str]) -> list[float]:
    """Per cent of the time of loads that a prefetch hides: all resident, without prefetch, with prefetch."""
    rounds = zip(*(m.of(name, "seconds") for name in names), strict=True)
    return [100 * (1 - (some - full) / (none - full)) for full, none, some in rounds]


def gpt(m: Measured, run: Callable[..., None]) -> None:
    run(GPT, 2)
    require_same_texts([m.timings[name] for name in GPT])
    torch = m.fastest("GPT torch", "GPT torch, 2 threads")
    m.add("our GPT: compiled token, C = N : torch token in memory", m.speedup("GPT", torch), ("≥", 12))


def memory(m: Measured, run: Callable[..., None]) -> None:
    beyond = []
    for _ in range(3):  # of fresh processes
        run(MEMORY, 0)
        beyond += m.of("memory", "beyond_mb")
    m.add("peak memory beyond imports, slots and dense part; store 10 × slots", beyond, ("≤", 40), " MB")


SECTIONS = (resident, disk, reads, prefetch, gpt, memory)


def speeds(m: Measured) -> dict[str, dict[str, float]]:
    """Tokens per second and MB read per token of every candidate that decodes."""
    table = {}
    for name in (*RESIDENT, *DISK, *PREFETCH, *PREFETCH_SLOW, *GPT):
        low, median, high = median_interval([1 / s for s in m.of(name, "seconds")])
        mb = median_interval(m.of(name, "bytes"))[1] / 1e6
        table[name] = {"low": round(low, 2), "median": round(median, 2), "high": round(high, 2), "mb": round(mb, 1)}
        print(f"{name:24} {median:8.1f} tokens/s ({low:.1f} to {high:.1f})  {mb:6.1f} MB/token")
    return table


@contextmanager
def models_in(folder: Path | None) -> Iterator[Path]:
    """A folder with the models; a temporary one unless given. A given one is filled once and kept."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="offload-") as temporary:
            make_models(Path(temporary))
            yield Path(temporary)
        return
    if not folder.exists():
        folder.mkdir(parents=True)
        make_models(folder)
    yield folder


def serve_candidate(name: str, models: Path, quick: bool) -> None:
    spec = CANDIDATES[name]
    # Before torch and numba are imported. Where both have threads, these must not spin while the others work.
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    if not spec.spins:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    import stickymoe.runtime.engine
    import stickymoe.runtime.foreign  # noqa: F401  imports are not part of the memory that is compared

    job = Job(models, spec.threads, min(spec.tokens, 4) if quick else spec.tokens)
    serve(lambda: spec.prepare(job), warm_up=0 if name in MEMORY else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="NAME")
    parser.add_argument("--models", type=Path, metavar="DIR", help="keep the models here, for the next time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, without a record")
    parser.add_argument("--only", help=f"comma-separated sections of {', '.join(s.__name__ for s in SECTIONS)}")
    args = parser.parse_args()
    if args.serve:
        serve_candidate(args.serve, args.models, args.quick)
        return
    rounds = 3 if args.quick else args.rounds
    sections = [s for s in SECTIONS if args.only is None or s.__name__ in args.only.split(",")]
    m = Measured()
    with models_in(args.models) as models:
        arguments = ("--models", str(models), *(["--quick"] if args.quick else []))

        def run(specs: dict[str, Spec], times: int = 1) -> None:
            many = times * rounds or 1
            found = race(HERE, list(specs), threads=2, rounds=many, arguments=arguments, together=True)
            m.timings |= {timing.name: timing for timing in found}

        for section in sections:
            section(m, run)
    installed = importlib.util.find_spec("llama_cpp") is not None
    why = "not measured" if installed else "llama_cpp is not installed"
    m.absent("C = 2, fp32 : llama.cpp with mmap, evicted", "≥ 5", why)
    if len(sections) < len(SECTIONS):
        return
    record = {
        "rows": m.rows,
        "tokens_per_s": speeds(m),
        "memory": m.timings.pop("memory").numbers[0],
        "timings": {name: timing.as_dict() | {"numbers": timing.numbers} for name, timing in m.timings.items()},
    }
    if not args.quick:
        write_record(HERE.with_suffix(".json"), record)


if __name__ == "__main__":
    main()
