"""The wheel in an empty environment: traces are made, replayed and planned for without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import stickymoe

ROOT = Path(__file__).parent.parent
RECORD = next((ROOT / "results" / "paper").rglob("soft-*/record.json"))
OPTIONAL = (
    *("torch", "accelerate", "safetensors", "tokenizers"),
    *("altair", "vl_convert", "jinja2", "datasets", "transformers"),
)
TRAIN_LINE = 'train needs torch, which is not installed: pip install "stickymoe[train]".'


def pip(*args: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the source, so that nothing of a build is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-deps", "--wheel-dir", source / "dist", source)
    (built,) = (source / "dist").iterdir()
    return built


class Installed:
    """The wheel with its core dependencies alone."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.env, self.place = folder / "env", folder / "place"
        self.place.mkdir()
        venv.create(self.env, symlinks=True)
        self.python, self.command = self.env / "bin" / "python", self.env / "bin" / "stickymoe"
        pip("--python", self.python, "install", "--no-compile", "-c", ROOT / "constraints.txt", wheel)

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program where nothing of the repository is on its path."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(args, cwd=self.place, env=outside, capture_output=True, text=True, check=False)

    def __call__(self, *args: str) -> str:
        """The output of a `stickymoe` command that succeeds."""
        done = self.run(self.command, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_it_has_the_version_of_the_package_and_its_licence(wheel, installed):
    assert wheel.name == f"stickymoe-{stickymoe.__version__}-py3-none-any.whl"
    assert installed("--version") == f"stickymoe {stickymoe.__version__}\n"
    metadata = installed.run(
        installed.python,
        "-c",
        "from importlib.metadata import distribution as d\nprint(d('stickymoe').metadata, *d('stickymoe').files)",
    ).stdout
    assert "License-Expression: Apache-2.0" in metadata
    for file in ("licenses/LICENSE", "stickymoe/py.typed", "reports/templates/", "locality/profiles/", "paper/data/"):
        assert file in metadata


@pytest.mark.parametrize("package", OPTIONAL)
def test_it_installs_no_optional_package(installed, package):
    done = installed.run(installed.python, "-c", f"import {package}")
    assert done.stderr.endswith(f"ModuleNotFoundError: No module named '{package}'\n")


def test_the_package_comes_from_the_wheel(installed):
    done = installed.run(installed.python, "-c", "import stickymoe; print(stickymoe.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed.env), done.stderr


def test_a_trace_is_made_replayed_and_planned_for(installed):
    installed("trace", "make", "trace", "--n_layers", "4", "--n_experts", "4", "--top_k", "2")
    simulated = installed("simulate", "trace", "--policy", "lru,belady", "--capacity", "2,3")
    assert "trace: 4 layers, 4 experts, top-2" in simulated
    assert "belady" in simulated
    planned = installed("plan", "trace", "--device", "raspberry-pi-5", "--expert_bytes", "1MB")
    assert "tokens/s" in planned


def test_a_finished_run_is_replayed_and_planned_for(installed):
    """A published record with a trace of its shape: what a run folder of another machine holds."""
    installed("trace", "make", "run/routes", "--n_layers", "4", "--n_experts", "4", "--top_k", "2")
    shutil.copy(RECORD, installed.place / "run")
    assert "soft λ=" in installed("simulate", "run", "--policy", "lru", "--capacity", "2")
    assert "tokens/s" in installed("plan", "run", "--device", "raspberry-pi-5")


@pytest.mark.parametrize(
    "command", ["--help", "variants", "device --list", "train --help", "train --preset tiny --print_config"]
)
def test_commands_that_need_no_extra(installed, command):
    assert installed(*command.split())


def test_train_says_which_extra_it_needs_in_one_line(installed):
    done = installed.run(installed.command, "train", "--preset", "tiny", "--out", "runs/a")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"stickymoe: {TRAIN_LINE}\n")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("eval run", "train"),
        ("demo", "train"),
        ("sweep cpu-small", "train"),
        ("report run", "report"),
        ("export run out", "hf"),
    ],
)
def test_every_command_that_needs_an_extra_says_which_in_one_line(installed, command, extra):
    done = installed.run(installed.command, *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    needs = rf"stickymoe: {command.split()[0]} needs \w+, which is not installed: "
    assert re.fullmatch(needs + rf'pip install "stickymoe\[{extra}\]"\.\n', done.stderr), done.stderr


def test_python_says_the_same_line(installed):
    done = installed.run(installed.python, "-c", "import stickymoe; stickymoe.train")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"stickymoe.errors.MissingExtraError: {TRAIN_LINE}"
