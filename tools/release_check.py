"""Check a release: build it, install every extra in an empty environment, and run there what its users run.

`make release-check` runs this. It needs the package registry, and takes some minutes: most of them install torch.
Environments are made one after another in a temporary folder, so one of them is on the disk at a time.
"""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = "core"  # the package without an extra
TRAIN = "stickymoe train --preset tiny --variant soft --variant.lam 0.2 --train.steps 4 --out runs/soft"
ATTACH = """
import torch, transformers, stickymoe
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**sizes, **heads))
tokens = torch.randint(64, (1, 12))
with stickymoe.attach(model, "soft", lam=0.1) as attached:
    model(tokens, labels=tokens).loss.backward()
    print(attached.terms, stickymoe.simulate(attached.trace.table(), capacity=3).miss_rate)
"""
READ_TEXT = (
    "from datasets import load_dataset; assert load_dataset('text', data_files='text.txt')['train'].num_rows == 2"
)
# A cluster of one node, which ends with its process; `ray stop` would end every cluster of the machine.
SWEEP_ON_RAY = """
import subprocess, sys, ray
address = ray.init(num_cpus=1, include_dashboard=False).address_info["gcs_address"]
sweep = ["-m", "stickymoe.cli", "sweep", "grid.yaml", "--engine", "ray", "--address", address, "--out", "runs"]
sys.exit(subprocess.run([sys.executable, *sweep]).returncode)
"""
GRID = """
preset: tiny
rows:
  - variant: vanilla
    train: {steps: 4}
"""


class CheckError(Exception):
    """A check that failed, in one line."""


def run(*command: str | Path, folder: Path, env: dict[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        shown = shlex.join(map(str, command)).replace("\n", " ")[:160]
        raise CheckError(f"{shown} ended with exit code {done.returncode}: {said[-1]}")
    return done.stdout


# The environments and what is run in them


class Environment:
    """An empty environment with the wheel and one extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.programs = folder / "env" / "bin"
        self.place = folder / "place"
        self.place.mkdir(parents=True)
        # Nothing of the repository is on the path of its programs, and nothing of them is left in the user's folders.
        own = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self.variables = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")} | own
        venv.create(folder / "env", symlinks=True)
        wanted = str(wheel) if extra == CORE else f"{wheel}[{extra}]"
        pip = (sys.executable, "-m", "pip", "--python", self.programs / "python", "--quiet")
        constraints = ("--constraint", ROOT / "constraints.txt")
        run(*pip, "install", "--no-compile", *constraints, wanted, folder=folder)
        run(*pip, "check", folder=folder)

    def __call__(self, line: str) -> str:
        """Run a command line of a user."""
        program, *arguments = shlex.split(line)
        return run(self.programs / program, *arguments, folder=self.place, env=self.variables)

    def python(self, code: str) -> str:
        return run(self.programs / "python", "-c", code, folder=self.place, env=self.variables)

    @contextmanager
    def server(self, line: str) -> Iterator[str]:
        """The address of a command that serves, while it runs."""
        program, *arguments = shlex.split(line)
        command = [str(self.programs / program), *arguments]
        with subprocess.Popen(
            command, cwd=self.place, env=self.variables, stderr=subprocess.PIPE, text=True
        ) as process:
            lines: list[str] = []
            output = process.stderr or iter(())
            try:
                yield address_in(output, lines)
            finally:
                process.terminate()
                lines += output
        if process.returncode != 0:
            raise CheckError(f"{line} ended with exit code {process.returncode}: {''.join(lines[-1:]).strip()}")


def address_in(output: Iterable[str], lines: list[str]) -> str:
    """The first address in the output of a server; `lines` gets what was read."""
    for line in output:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise CheckError(f"a server ended without an address: {''.join(lines[-1:]).strip()}")


def use_core(env: Environment) -> None:
    env("stickymoe trace make trace --n_layers 4 --n_experts 4 --top_k 2")
    env("stickymoe simulate trace --policy lru,belady --capacity 2,3")
    env("stickymoe plan trace --device raspberry-pi-5 --expert_bytes 1MB")


def use_train(env: Environment) -> None:
    env(TRAIN)
    env('stickymoe generate runs/soft --prompt "The area" --max_new_tokens 4 --slots 2')


def use_report(env: Environment) -> None:
    """On a published record, because training is another extra."""
    record = next((ROOT / "results" / "paper").rglob("soft-*/record.json"))
    shutil.copytree(record.parent, env.place / "runs" / "soft")
    env("stickymoe report runs -o report.html")
    if not (env.place / "report.html").stat().st_size:
        raise CheckError("stickymoe report wrote an empty page")


def use_hub(env: Environment) -> None:
    """On a local file: a release is checked without a download of a corpus."""
    (env.place / "text.txt").write_text("Experts come.\nExperts go.\n")
    env.python(READ_TEXT)


def use_hf(env: Environment) -> None:
    env.python(ATTACH)


def use_serve(env: Environment) -> None:
    env(TRAIN)
    with env.server("stickymoe serve runs/soft --slots 2 --port 0") as address:
        urllib.request.urlopen(f"{address}/health", timeout=60).close()  # any status but success is an OSError


def use_ray(env: Environment) -> None:
    (env.place / "grid.yaml").write_text(GRID)
    env.python(SWEEP_ON_RAY)
    if not list(env.place.glob("runs/*/record.json")):
        raise CheckError("stickymoe sweep --engine ray left no record")


def use_all(env: Environment) -> None:
    env(TRAIN)
    env("stickymoe report runs -o report.html")
    env("stickymoe export runs/soft model")


SMOKE: dict[str, Callable[[Environment], None]] = {
    CORE: use_core,
    "train": use_train,
    "report": use_report,
    "hub": use_hub,
    "hf": use_hf,
    "serve": use_serve,
    "ray": use_ray,
    "all": use_all,
}


# What is built


def tracked(folder: str = ".") -> list[str]:
    """Files of the repository, as git knows them."""
    return run("git", "ls-files", folder, folder=ROOT).splitlines()


def build(folder: Path) -> None:
    """Build both distributions. The wheel is built from the source distribution, and equals that of the repository."""
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for options in (("--outdir", folder / "dist"), ("--wheel", "--outdir", folder / "direct")):
        run(sys.executable, "-m", "build", *options, source, folder=folder)
    (wheel,), (direct,) = (folder / "dist").glob("*.whl"), (folder / "direct").glob("*.whl")
    if contents(wheel) != contents(direct):
        changed = sorted(name for name, _ in contents(wheel).items() ^ contents(direct).items())
        raise CheckError(f"the wheel of the source distribution differs from that of the repository: {changed[:5]}")


def contents(wheel: Path) -> dict[str, int]:
    """Each file of a wheel with its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def check_files(wheel: Path) -> None:
    """The wheel has every file of the package and nothing else."""
    expected = {name.removeprefix("src/") for name in tracked("src/stickymoe")}
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    if found != expected:
        raise CheckError(f"wheel: {sorted(expected - found)} are missing, {sorted(found - expected)} are too many")


def check_metadata(wheel: Path) -> None:
    """Version, description and licence; a tagged commit has its version and no unreleased changes."""
    facts, changelog = metadata(wheel), (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^]]*)\]", changelog, re.MULTILINE)
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    version = facts["Version"]
    for file, found in (("CHANGELOG.md", released[:1]), ("CITATION.cff", cited)):
        if found != [version]:
            raise CheckError(f"{file} names version {found}, the package has {version}")
    if facts["Description-Content-Type"] != "text/markdown" or "# StickyMoE" not in str(facts.get_payload()):
        raise CheckError("wheel: the description is not README.md")
    tags = run("git", "tag", "--points-at", "HEAD", "v*", folder=ROOT).split()
    if tags and tags != [f"v{version}"]:
        raise CheckError(f"tags of this commit: got {tags}, expected v{version}")
    if tags and re.search(r"^## \[Unreleased\]\s+(?!## )\S", changelog, re.MULTILINE):
        raise CheckError(f"CHANGELOG.md has unreleased changes: move them to the section of {version}")


def extras(wheel: Path) -> list[str]:
    """The core, and every extra that users install."""
    return [CORE, *(extra for extra in metadata(wheel).get_all("Provides-Extra", []) if extra != "dev")]


def try_extra(folder: Path, wheel: Path, extra: str) -> None:
    """Install an extra, use it, and remove it."""
    if extra not in SMOKE:
        raise CheckError(f"extra {extra} has no smoke command: add one to SMOKE in tools/release_check.py")
    try:
        SMOKE[extra](Environment(folder / extra, wheel, extra))
    finally:
        shutil.rmtree(folder / extra)


# The check


@dataclass
class Report:
    """How each check went: its seconds, and why it failed if it did."""

    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, check: Callable[[], object]) -> None:
        print(f"{name} …", flush=True)
        start = time.monotonic()
        try:
            check()
        except (CheckError, OSError) as e:
            self.failures[name] = str(e)
        self.seconds[name] = time.monotonic() - start
        print(f"{name}: {self.result(name)}", flush=True)

    def result(self, name: str) -> str:
        return f"FAILED: {self.failures[name]}" if name in self.failures else "ok"

    def __str__(self) -> str:
        width = max(map(len, self.seconds))
        rows = (f"{name:{width}}  {time:5.0f} s  {self.result(name)}" for name, time in self.seconds.items())
        return "\n".join(rows)


def check(folder: Path, report: Report) -> None:
    report.attempt("build", lambda: build(folder))
    if report.failures:
        return
    (wheel,) = (folder / "dist").glob("*.whl")
    report.attempt("files of the wheel", lambda: check_files(wheel))
    report.attempt("metadata", lambda: check_metadata(wheel))
    for extra in extras(wheel):
        report.attempt("the core" if extra == CORE else f"extra {extra}", partial(try_extra, folder, wheel, extra))


def main() -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="stickymoe-release-") as folder:
        check(Path(folder), report)
    print(f"\n{report}\n")
    print(f"{len(report.failures)} of {len(report.seconds)} checks failed." if report.failures else "Ready to release.")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
