"""The package as a whole: public names that load on first use, and what stays unloaded until then."""

import subprocess
import sys

import pytest

import stickymoe

HEAVY = {"torch", "numba", "transformers", "accelerate", "altair"}


def loaded_by(statement: str) -> set[str]:
    """The heavy packages in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint('loaded:', *({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_witness_sees_what_is_loaded():
    assert "numba" in loaded_by("import numba")


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import stickymoe") == set()


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["--help"], ["--version"], ["variants"], ["train", "--help"], ["train", "--print_config"], ["nonsense"]),
        *(["simulate", "--help"], ["plan", "--help"], ["device", "--list"], ["trace", "make", "--help"]),
    ],
    ids=" ".join,
)
def test_asking_for_help_loads_nothing_heavy(argv):
    run = f"import contextlib\nfrom stickymoe.cli import main\nwith contextlib.suppress(SystemExit): main({argv})"
    assert loaded_by(run) == set()


@pytest.mark.parametrize("name", ["RouteTable", "switch_rate", "replay", "simulate", "RunConfig", "StickyError"])
def test_measuring_and_configuring_need_no_torch(name):
    assert "torch" not in loaded_by(f"from stickymoe import {name}")


@pytest.mark.parametrize("name", stickymoe.__all__)
def test_every_public_name_resolves(name):
    found = getattr(stickymoe, name)
    assert found.__name__ == name
    assert found.__module__.startswith("stickymoe.")
    assert found.__doc__


def test_dir_tells_the_public_names():
    assert dir(stickymoe) == sorted(stickymoe.__all__)
    assert len(set(stickymoe.__all__)) == len(stickymoe.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'stickymoe' has no attribute 'RouteTabel'$"):
        stickymoe.RouteTabel  # noqa: B018
    with pytest.raises(ImportError, match="RouteTabel"):
        from stickymoe import RouteTabel  # noqa: F401


def test_the_version_is_that_of_the_command_line():
    done = subprocess.run([sys.executable, "-m", "stickymoe.cli", "--version"], capture_output=True, text=True)
    assert done.stdout == f"stickymoe {stickymoe.__version__}\n"
