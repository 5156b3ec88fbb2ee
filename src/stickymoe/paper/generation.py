"""The end of the demo: two models generate after the same prompt, with experts on disk and the same bytes of slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stickymoe.locality.plan import bytes_text, speed_text
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.reports.tables import Table
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.record import RunRecord

if TYPE_CHECKING:
    from stickymoe.runtime.engine import Engine, Generation

PROMPT = "The population of the country is"
TOKENS, TEXTS = 96, 5  # of each model
MEMORY = "1.7MB"  # three of the four experts of every layer of the preset `demo`
THROTTLE = "5MB"  # so slow that loads limit the speed of small experts, as they do with large ones on a device
_SHOWN = 160  # characters of a text


@dataclass(frozen=True)
class Texts:
    """Texts of one model, and what their tokens after the prompt cost. `ppl` is of the validation split."""

    ppl: float
    first: str
    slots: int
    n_experts: int
    tokens: int
    requests: int
    misses: int
    bytes_read: int
    seconds: float
    resident_bytes: int
    counted: int  # misses, prompts included
    simulated: int  # the same, by a replay of the routes

    @classmethod
    def of(cls, engine: Engine, outs: Sequence[Generation], ppl: float) -> Texts:
        tables = [out.table for out in outs if out.table is not None]
        access = Access(order="decode")
        replayed = [simulate(t, capacity=engine.slots, policy=engine.policy, access=access) for t in tables]
        tokens = sum(out.stats.tokens - 1 for out in outs)  # the first one comes from the prompt
        counted = sum(out.stats.misses for out in outs)
        prompt_misses = sum(out.stats.prompt_misses for out in outs)
        return cls(
            ppl=ppl,
            first=engine.host.decode(outs[0].tokens),
            slots=engine.slots,
            n_experts=tables[0].n_experts,
            tokens=tokens,
            requests=tokens * tables[0].n_layers * tables[0].top_k,
            misses=counted - prompt_misses,
            bytes_read=sum(out.stats.bytes_read for out in outs) - prompt_misses * engine.expert_bytes,
            seconds=sum(out.stats.decode_s for out in outs),
            resident_bytes=engine.resident_bytes,
            counted=counted,
            simulated=sum(found.misses for found in replayed),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def generate_in_turns(runs: Mapping[str, Path], stores: Path) -> dict[str, Texts]:
    """Pack each run into a folder of `stores`, unless it is there, and let the models generate in turns."""
    from stickymoe.runtime.engine import offload
    from stickymoe.runtime.opening import open_store

    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, run in runs.items():
            open_store(run, store=stores / name, replace=True)
            engines[name] = stack.enter_context(offload(stores / name, memory=MEMORY, throttle=THROTTLE))
        for engine in engines.values():
            _generate(engine, max_new_tokens=2)  # compiles the loops before they are timed
        outs: dict[str, list[Generation]] = {name: [] for name in engines}
        for seed in range(TEXTS):
            for name, engine in engines.items():
                outs[name].append(_generate(engine, max_new_tokens=TOKENS, temperature=0.8, seed=seed))
        return {name: Texts.of(engine, outs[name], _perplexity(runs[name])) for name, engine in engines.items()}


def _generate(engine: Engine, **settings: Any) -> Generation:
    out = engine.generate(engine.host.encode(PROMPT, chat=False), do_sample=True, stop_ids=(), **settings)
    if out.interrupted:
        raise KeyboardInterrupt
    return out


def _perplexity(run: Path) -> float:
    found = RunRecord.read(RunFolder(run).record).metrics["ppl"]
    return math.nan if found is None else found


def generation_table(models: Mapping[str, Texts]) -> Table:
    headings = ("model", "PPL ↓", "misses/token ↓", "read/token ↓", "hit rate ↑", "tokens/s ↑", "resident ↓")
    rows = tuple(
        (
            name,
            f"{t.ppl:.2f}",
            f"{t.misses / t.tokens:.2f}",
            bytes_text(t.bytes_read / t.tokens),
            f"{1 - t.misses / t.requests:.1%}",
            speed_text(t.tokens_per_s),
            bytes_text(t.resident_bytes),
        )
        for name, t in models.items()
    )
    return Table("generation", "", headings, rows)


def beginnings(models: Mapping[str, Texts]) -> str:
    """How the first text of each model begins."""
    width = max(map(len, models))
    return "\n".join(f"{name:{width}}  {_shortened(PROMPT + t.first)}" for name, t in models.items())


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[:_SHOWN].rstrip() + " …"


def setting(models: Mapping[str, Texts]) -> str:
    t = next(iter(models.values()))
    return (
        f"Experts on disk, {MEMORY} of slots in memory ({t.slots} of {t.n_experts} experts per layer), {THROTTLE} per "
        f"second, {TEXTS} sampled texts of {TOKENS} tokens, in turns:"
    )


def conclusion(models: Mapping[str, Texts]) -> str:
    """What the second model gains and costs relative to the first, and the control that both must be compared with."""
    (a, base), (b, other) = models.items()
    change = other.ppl / base.ppl - 1
    fewer = base.misses / other.misses if other.misses else math.inf
    counts = "; ".join(f"{name} {t.simulated:,} and {t.counted:,}" for name, t in models.items())
    return (
        "PPL: on the validation split · misses, read, hit rate, tokens/s: of the tokens after the prompt · resident: "
        "slots and dense part\n\n"
        f"{b} has {fewer:.1f} × fewer misses than {a} in these texts ({other.misses:,} instead of {base.misses:,}), "
        "because its router has a budget of loads. "
        f"It generates {other.tokens_per_s / base.tokens_per_s:.1f} × as fast. "
        f"Its perplexity is {abs(change):.1%} {'higher' if change > 0 else 'lower'} "
        "(one seed; a short training favours routers that hash the token, as this one does).\n"
        f"Control: a model with just the {base.slots} experts that fit loads nothing. docs/frontier.md compares it.\n"
        f"Misses including the prompts, simulated and counted: {counts}."
    )
