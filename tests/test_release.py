"""What a release needs: one version everywhere, a check of every extra, and workflows that run existing commands."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import stickymoe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINS = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
WRITTEN = [  # pages that no script generates
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs" / f"{name}.md" for name in ("guide", "huggingface", "runtime", "serving", "glossary", "api")),
]


@pytest.fixture(scope="module")
def release_check():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "tools" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# Versions


def python_versions() -> list[str]:
    return re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_one_version_of_the_package_is_named_everywhere():
    released = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == stickymoe.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == stickymoe.__version__


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_versions_on_a_page_are_those_of_the_package(page):
    text = page.read_text()
    assert set(re.findall(r"Python (\d\.\d+)", text)) <= {PROJECT["requires-python"].removeprefix(">=")}
    for name, found in re.findall(r"\b([A-Za-z][\w-]+)(?: |==|>=)(\d+(?:\.\d+)+)", text):
        if name.lower() in PINS:
            assert f"{PINS[name.lower()]}.".startswith(f"{found}."), (name, found)


def test_the_supported_python_versions_are_those_that_ci_tests():
    assert python_versions()[0] == PROJECT["requires-python"].removeprefix(">=")
    for job in ("test", "release-check"):
        (workflow,) = WORKFLOWS
        assert yaml.safe_load(workflow.read_text())["jobs"][job]["strategy"]["matrix"]["python"] == python_versions()


# Workflows


def commands_of(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_complete(workflow):
    content = yaml.safe_load(workflow.read_text())
    assert content["name"]
    assert content[True], "YAML reads the key `on` as true"
    for job in content["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", [])) <= set(content["jobs"])
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert all(re.search(r"@v\d+$", step["uses"]) for step in job["steps"] if "uses" in step)


def test_ci_runs_existing_targets_of_make():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    here = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    (workflow,) = WORKFLOWS
    for command in [*here, *commands_of(workflow)]:
        assert re.fullmatch(r"make ([\w-]+)", command), command
        assert command.split()[1] in targets, command
    assert set(here) <= set(commands_of(workflow))


# The check of a release


def write_wheel(folder: Path, *, version: str = stickymoe.__version__, extras: tuple[str, ...] = ()) -> Path:
    """A wheel with nothing but its metadata."""
    wheel = folder / f"stickymoe-{version}-py3-none-any.whl"
    facts = [f"Version: {version}", "Description-Content-Type: text/markdown"]
    facts += [f"Provides-Extra: {extra}" for extra in extras]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"stickymoe-{version}.dist-info/METADATA", "\n".join([*facts, "", "# StickyMoE"]))
    return wheel


def test_every_extra_of_a_user_is_tried(release_check):
    extras = set(PROJECT["optional-dependencies"]) - {"dev"}
    assert set(release_check.SMOKE) == extras | {release_check.CORE}


def test_extras_come_from_the_wheel(release_check, tmp_path):
    wheel = write_wheel(tmp_path, extras=("train", "dev", "moon"))
    assert release_check.extras(wheel) == ["core", "train", "moon"]
    with pytest.raises(
        release_check.CheckError, match=r"^extra moon has no smoke command: add one to SMOKE in .*\.py$"
    ):
        release_check.try_extra(tmp_path, wheel, "moon")


def test_another_version_fails(release_check, tmp_path):
    release_check.check_metadata(write_wheel(tmp_path))
    with pytest.raises(release_check.CheckError, match=r"^CHANGELOG\.md names version \['.*'\], the package has 9\.9$"):
        release_check.check_metadata(write_wheel(tmp_path, version="9.9"))


def test_missing_files_fail(release_check, tmp_path):
    with pytest.raises(release_check.CheckError, match=r"'stickymoe/py\.typed'.* are missing, \[\] are too many$"):
        release_check.check_files(write_wheel(tmp_path))


def test_a_command_that_fails_is_named_with_its_last_line(release_check, tmp_path):
    line = r"^false ended with exit code 1: nothing$"
    with pytest.raises(release_check.CheckError, match=line):
        release_check.run("false", folder=tmp_path)


def test_the_report_names_every_failure(release_check, capsys):
    def fail():
        raise release_check.CheckError("it is broken")

    report = release_check.Report()
    report.attempt("first", lambda: None)
    report.attempt("second", fail)
    assert report.failures == {"second": "it is broken"}
    assert re.fullmatch(r"first +0 s  ok\nsecond +0 s  FAILED: it is broken", str(report))
    assert "second: FAILED: it is broken" in capsys.readouterr().out
