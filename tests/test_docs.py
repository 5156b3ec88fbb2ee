"""README and docs are true: their code, commands, grid and file tree work, and generated pages follow from records."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from stickymoe.cli import COMMANDS, main
from stickymoe.locality.devices import load_device, parse_device
from stickymoe.locality.plan import bytes_text
from stickymoe.paper.grids import GRIDS
from stickymoe.paper.sections import paper_report
from stickymoe.reports.collection import Row, Run, collect
from stickymoe.runs.folder import run_id
from stickymoe.runs.presets import PRESETS, RECOMMENDED
from stickymoe.runs.record import RunRecord
from stickymoe.runs.settings import config_from
from stickymoe.sweeps.grid import configs, load_grid
from tests.serving.conftest import running

ROOT = Path(__file__).parent.parent
DOCS = ("guide", "locality", "huggingface", "runtime", "serving")
SERVERS = ("serve", "monitor")
ADDRESS = "http://127.0.0.1:8000"  # of a server, in the pages
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS)]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = re.findall(r"^    (stickymoe .*)$", page.read_text(), re.MULTILINE)
    return [shlex.split(line.partition("#")[0])[1:] for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory, corpus):
    """A folder with the files that the pages name: texts, a transformers checkpoint, and a trace of another tool."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("DIR", "WIKITEXT"):
        (folder / name).symlink_to(corpus)
    write_checkpoint(folder / "MODEL")
    (folder / "TEXT").write_text("The quick brown fox jumps over the lazy dog, again and again.\n" * 200)
    rows = "".join(f"0,1,{step},0,0,{step % 2},1.0\n" for step in range(9))
    facts = "# route_trace v1\n# model=m n_expert=2 n_expert_used=1\nturn,phase,step,layer,slot,expert,weight\n"
    (folder / "route.csv").write_text(facts + rows)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_work_as_written(page, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    done = 0
    for command in commands(page):
        if command[0] == "sweep" and "--dry_run" not in command:
            command += ["--dry_run"]  # a real sweep takes hours; tests/sweeps runs small ones
        if command[0] in SERVERS:
            start_and_stop(command)
        else:
            assert main(command) == 0, (command, capsys.readouterr().err)
        done += 1
    assert done >= 3


def test_the_sweeps_that_repeat_the_records_are_valid(place, monkeypatch):
    for name in ("results", "WEBDOCS"):
        (place / name).symlink_to(ROOT / "results" if name == "results" else place / "DIR")
    monkeypatch.chdir(place)
    sweeps = [command for command in commands(ROOT / "results" / "README.md") if command[0] == "sweep"]
    assert len(sweeps) > 9
    for command in sweeps:
        assert main([*command, "--dry_run"]) == 0, command


def start_and_stop(command: list[str]) -> None:
    """Run a command that serves, on a free port, until it is ready."""
    options = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "stickymoe.cli", *command, "--port", "0"], **options) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://127.0.0.1:" in line:
                process.send_signal(signal.SIGTERM)
                break
        process.stderr.read()
    assert process.returncode == 0, (command, lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_works_as_written(page, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["train", "--preset", "tiny", "--variant", "soft", "--variant.lam", "0.2", "--out", "runs/soft"]) == 0
    torch.manual_seed(0)
    blocks = fenced(page, "python")
    curl = re.findall(r"^    (curl .*)$", page.read_text(), re.MULTILINE)
    assert blocks
    with ExitStack() as stack:
        if any(ADDRESS in block for block in [*blocks, *curl]):
            url = stack.enter_context(running({"soft": Path("runs/soft")}, slots=2)).url
        for block in blocks:
            exec(compile(block.replace(ADDRESS, url) if ADDRESS in block else block, page.name, "exec"), {})
        for command in curl:
            answer = subprocess.run([*shlex.split(command.replace(ADDRESS, url)), "-sf"], capture_output=True)
            assert answer.returncode == 0, answer


def test_the_grid_in_the_guide_is_valid(tmp_path):
    grid = fenced(ROOT / "docs" / "guide.md", "yaml")[0]
    file = tmp_path / "grid.yaml"
    file.write_text(grid)
    runs = configs(load_grid(str(file), GRIDS), seeds=[1], flags=[], source="guide")
    assert [run.variant.name for run in runs] == ["vanilla", "soft", "soft_hard"]


def test_the_frontier_page_follows_from_the_committed_records(tmp_path):
    runpy.run_path(str(ROOT / "results" / "frontier_page.py"))["main"](tmp_path)
    assert (tmp_path / "frontier.md").read_text() == (ROOT / "docs" / "frontier.md").read_text()
    drawn = {p.name for p in (tmp_path / "frontier").iterdir()}
    assert drawn == {p.name for p in (ROOT / "docs" / "frontier").iterdir()}


def test_the_performance_page_follows_from_the_committed_records(tmp_path):
    runpy.run_path(str(ROOT / "benchmarks" / "performance_page.py"))["main"](tmp_path)
    for page in tmp_path.iterdir():
        assert page.read_text() == (ROOT / "docs" / page.name).read_text()


def test_the_section_on_traces_follows_from_the_committed_record(tmp_path):
    (tmp_path / "locality.md").write_text((ROOT / "docs" / "locality.md").read_text())
    runpy.run_path(str(ROOT / "results" / "traces.py"))["main"](docs=tmp_path)
    assert (tmp_path / "locality.md").read_text() == (ROOT / "docs" / "locality.md").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"locality.md", "traces.svg"}
    assert (ROOT / "docs" / "traces.svg").exists()


def test_the_profile_of_the_phone_and_its_predictions_follow_from_the_measured_runs():
    script = runpy.run_path(str(ROOT / "results" / "traces.py"))
    fit, device = script["fitted"](script["RUNS"]), load_device(script["DEVICE"])
    for figure in ("load_bandwidth", "compute_bandwidth"):
        assert getattr(device, figure) == pytest.approx(fit[figure], rel=0.005)
    assert f"set `overlap: {fit['overlap']:.1f}`" in (ROOT / "docs" / "locality.md").read_text()
    runs = json.loads((ROOT / "results" / "traces.json").read_text())["runs"]
    assert [{name: run[name] for name in asdict(given)} for run, given in zip(runs, script["RUNS"], strict=True)] == [
        asdict(given) for given in script["RUNS"]
    ]
    for run in runs:
        if found := run.get("predicted"):
            phone = replace(device, overlap=round(fit["overlap"], 2) if run["overlap"] else 0.0)
            loads = found["loads_per_token"] * phone.load_ms(float(found["expert_bytes"]))
            expected = 1000 / phone.token_ms(phone.compute_ms(float(found["active_bytes"])), loads)
            assert found["tokens_per_s"] == pytest.approx(expected)
            assert found["tokens_per_s"] == pytest.approx(run["tokens_per_s"], rel=0.2), run["model"]


def published():
    """Steps, variant and model of every published run beyond the paper."""
    records = sorted((ROOT / "results" / "frontier").rglob("record.json"))
    return {identity(config_from(RunRecord.read(file).config)) for file in records}


def identity(config):
    return config.train.steps, config.variant.key, config.model


def rows_of(grid):
    planned = configs(load_grid(str(grid), GRIDS), seeds=[42], flags=["--data.path", "x"], source="")
    return {identity(run) for run in planned}


PLANNED = {"rivals.yaml"}  # grids of which rows have not been run yet


def test_every_published_row_beyond_the_paper_is_in_a_grid():
    grids = [*sorted((ROOT / "results" / "frontier").glob("*.yaml")), "sharing"]
    rows = {grid: rows_of(grid) for grid in grids}
    for grid, planned in rows.items():
        assert (planned <= published()) == (Path(grid).name not in PLANNED), grid
    assert published() <= set().union(*rows.values(), rows_of("frontier"))


def found_rows(*folders, experts=4):
    """Rows of published runs by their labels, over all seeds."""
    by_label: dict[str, list[Run]] = {}
    for run in collect([ROOT / "results" / folder for folder in folders]).runs:
        if run.config.model.n_experts == experts:
            by_label.setdefault(run.config.variant.label, []).append(run)
    return {label: Row.of(runs) for label, runs in by_label.items()}


def test_the_numbers_of_the_readme_follow_from_the_records():
    readme = " ".join((ROOT / "README.md").read_text().split())
    small = found_rows("paper/cpu-small", "frontier/cpu-small")
    alone = found_rows("frontier/cpu-small", experts=3)
    sixteen = found_rows("frontier/cpu-16", experts=16)
    three, four = "siblings C=3 B=0.03 token hashed", "siblings C=4 B=0.1 token hashed"
    fewer = sixteen[four].fewer_misses(sixteen["vanilla"], "cache_hit_rate_all_c4").mean
    assert round(fewer) == 12
    assert readme.count("twelve times") == 2
    assert abs(sixteen[four].change(sixteen["vanilla"]).mean) < 0.5  # the same perplexity
    assert sixteen[four].mean("ppl") > small["siblings C=4 B=0.03 token hashed"].mean("ppl")  # of four experts
    assert round(small[three].fewer_misses(small["vanilla"], "cache_hit_rate_all_c3").mean) == 13
    assert f"thirteen times fewer misses and {-small[three].change(small['vanilla']).mean:.0f} % lower" in readme
    assert f"within {-small[three].change(alone[three]).mean:.1f} % of it (one seed)" in readme
    all_resident = sixteen["siblings C=16 B=0.03 token hashed"]
    assert f"has {-all_resident.change(sixteen[four]).mean:.0f} % lower perplexity (one seed)" in readme
    long = found_rows("paper/length", "frontier/lookup-length")
    once, plain = long["hash+lookup n=2,3 row lr=3 drop=0.926"], long["vanilla"]
    (run,) = once.runs
    assert run.complete
    assert round(1 / (1 - run.config.variant.settings()["table_drop"]), 1) == round(run.epochs, 1) == 13.5
    assert f"reads rows of {bytes_text(run.record.sizes['row_bytes'])} per token" in readme
    assert f"it has perplexity {once.mean('ppl'):.2f} with four experts in memory" in readme
    assert f"plain routing with these four has {plain.mean('ppl'):.2f}" in readme
    best = min(line["valid"]["ppl"] for line in long["hash+lookup n=2,3"].runs[0].log if "valid" in line)
    assert f"read in every pass, they overfit, and {best:.2f} is the best" in readme
    counted = json.loads((ROOT / "results" / "ngrams.json").read_text())
    (trigram,) = (m for c in counted if c["corpus"] == "wikitext-2" for m in c["models"] if m["order"] == 3)
    assert f"trigram, which only counts, has {trigram['ppl']:.2f}" in readme


def test_the_recommended_variant_is_published():
    recommended = config_from({"preset": "cpu-small", "variant": RECOMMENDED, "data": {"path": "x"}})
    assert identity(recommended) in published()
    assert f"trains `{recommended.variant.label}`" in (ROOT / "docs" / "frontier.md").read_text()


def test_published_records_of_the_recommended_router_have_current_run_ids():
    """A record from before a change of the numerics has another id."""
    name = config_from({"variant": RECOMMENDED}).variant.label.partition(" ")[0]
    found = [RunRecord.read(file) for file in (ROOT / "results" / "frontier").rglob(f"{name}-*/record.json")]
    assert len(found) > 3
    for record in found:
        assert record.run_id == run_id(config_from(record.config), record.data["fingerprint"]), record.config["variant"]


def test_the_published_results_follow_from_the_committed_records(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    paper_report([Path("results/paper")], tmp_path / "results.html")
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    fresh = {p.relative_to(tmp_path): p for p in (tmp_path / "results" / "tables").iterdir()}
    assert {p.relative_to(ROOT / "docs") for p in (ROOT / "docs" / "results" / "tables").iterdir()} == set(fresh)
    for name, file in fresh.items():
        assert file.read_text() == (ROOT / "docs" / name).read_text(), name


def test_the_device_profile_in_the_docs_is_valid():
    (profile,) = fenced(ROOT / "docs" / "locality.md", "yaml")
    assert parse_device(profile, "docs").fast_memory == 6e9


def test_the_file_tree_is_true():
    tree = re.search(r"^    src/stickymoe/\n((?:      \S.*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines()}
    there = {p.name for p in (ROOT / "src" / "stickymoe").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert there <= named
    assert all((ROOT / "src" / "stickymoe" / name).exists() for name in named)


def test_every_command_and_preset_is_documented():
    readme, guide, *others = (page.read_text() for page in PAGES)
    for command in COMMANDS:
        assert f"stickymoe {command}" in "".join([readme, guide, *others]) or f"make {command}" in readme, command
    for preset in PRESETS:
        assert f"`{preset}`" in guide, preset


def test_the_readme_names_what_ci_runs():
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_no_page_names_this_machine():
    for page in [*PAGES, ROOT / "docs" / "performance.md", ROOT / "constraints.txt"]:
        assert not re.search(r"/(?:work|root|home|tmp)/", page.read_text()), page


def test_links_lead_somewhere():
    outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")]
    for page in [*outside, *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)
