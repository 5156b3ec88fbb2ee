"""Sweeps: runs side by side, skipped when done, resumed when broken, failed when they fail."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from stickymoe.cli import main
from stickymoe.errors import RunError
from stickymoe.runs.record import RunRecord
from stickymoe.sweeps.cells import Ended
from stickymoe.sweeps.engine import MAX_LOSSES, sweep
from stickymoe.sweeps.local import LocalEngine
from stickymoe.training.loop import train
from tests.sweeps.conftest import SHORT, cells_of, wait_for


@pytest.fixture(scope="session")
def swept(grid, tmp_path_factory):
    """The folder of a finished sweep over vanilla, soft and remoe. Not to be written to."""
    out = tmp_path_factory.mktemp("sweep")
    sweep(cells_of(grid, out, "vanilla", "soft", "remoe"), jobs=2)
    return out


@pytest.fixture
def vanilla_only(grid, swept, tmp_path):
    """A folder in which only vanilla is finished, and its cell."""
    (finished,) = cells_of(grid, swept, "vanilla")
    (vanilla,) = cells_of(grid, tmp_path, "vanilla")
    shutil.copytree(finished.folder.path, vanilla.folder.path)
    return vanilla


def test_every_run_is_run_once(grid, swept):
    cells = cells_of(grid, swept, "vanilla", "soft", "remoe")
    assert [cell.record.status for cell in cells] == ["complete"] * 3
    written = {cell.run_id: cell.folder.record.stat().st_mtime_ns for cell in cells}
    again = sweep(cells, jobs=2)
    assert [cell.status for cell in again] == ["complete"] * 3
    assert {cell.run_id: cell.folder.record.stat().st_mtime_ns for cell in again} == written


def test_a_run_of_a_sweep_is_the_run_by_itself(grid, swept, tmp_path):
    (cell,) = cells_of(grid, swept, "soft")
    train(cell.config, tmp_path / "alone", quiet=True)
    assert (tmp_path / "alone" / "metrics.jsonl").read_bytes() == cell.folder.metrics.read_bytes()
    assert (tmp_path / "alone" / "record.json").read_bytes() == cell.folder.record.read_bytes()


def test_remoe_starts_from_the_end_of_vanilla_and_equals_a_run_that_does_not(grid, swept, tmp_path):
    vanilla, remoe = cells_of(grid, swept, "vanilla", "remoe")
    assert remoe.after is vanilla
    assert len(remoe.folder.timings.read_text().splitlines()) == 1  # its own steps alone
    train(remoe.config, tmp_path / "whole", quiet=True)
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == remoe.folder.metrics.read_bytes()
    assert (tmp_path / "whole" / "record.json").read_bytes() == remoe.folder.record.read_bytes()


def test_a_failing_run_is_recorded_and_the_others_continue(grid, tmp_path):
    bad = cells_of(grid, tmp_path, "soft", train={**SHORT, "lr": 1e30, "clip": 1e30})
    cells = sweep([*bad, *cells_of(grid, tmp_path, "vanilla")], jobs=1)
    assert [cell.status for cell in cells] == ["failed", "complete"]
    record = RunRecord.read(bad[0].folder.record)
    assert record.status == "failed"
    assert "at step" in record.failure
    assert record.metrics == {}


def test_two_sweeps_on_one_folder_leave_each_run_whole(grid, tmp_path, corpus):
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({**grid, "rows": [{"variant": "vanilla"}, {"variant": "soft"}]}))
    command = [sys.executable, "-m", "stickymoe.cli", "sweep", str(file), "--out", str(tmp_path / "out"), "--jobs", "1"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        process.communicate(timeout=300)
    assert [process.returncode for process in both] == [0, 0]
    cells = cells_of(grid, tmp_path / "out", "vanilla", "soft")
    assert all(RunRecord.read(cell.folder.record).status == "complete" for cell in sweep(cells, jobs=2))
    train(cells[0].config, tmp_path / "alone", quiet=True)
    assert (tmp_path / "alone" / "metrics.jsonl").read_bytes() == cells[0].folder.metrics.read_bytes()


def test_a_damaged_record_fails_its_cell_and_is_left_as_it_is(grid, tmp_path, capsys):
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({**grid, "rows": [{"variant": "vanilla"}, {"variant": "dense"}]}))
    vanilla, dense = cells_of(grid, tmp_path / "out", "vanilla", "dense")
    vanilla.folder.path.mkdir(parents=True)
    vanilla.folder.record.write_text("{")
    assert main(["sweep", str(file), "--out", str(tmp_path / "out")]) == 2
    assert vanilla.folder.record.read_text() == "{"
    assert dense.record.status == "complete"
    printed = capsys.readouterr()
    assert "dense" in printed.out
    assert "1 of 2 runs failed" in printed.err.splitlines()[-1]


def test_dry_run_lists_and_does_nothing(tmp_path, corpus, capsys):
    flags = ["--data.path", str(corpus), "--data.vocab_size", "300", "--out", str(tmp_path / "out"), "--dry_run"]
    assert main(["sweep", "cpu-small", "--seeds", "42,43", *flags]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 32
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu-smal"], "Did you mean 'cpu-small'"),
        (["demo", "--seeds", "a"], "'a'"),
        (["demo", "--jobs", "0"], "--jobs: got 0"),
        (["demo", "--engine", "slurm"], "'slurm' (choose from"),
        (["demo", "--address", "head:6379"], "add --engine ray"),
        (["demo", "--dry-run"], "Did you mean '--dry_run'"),
        (["demo", "--seed", "43"], "use --seeds in a sweep"),
        (["demo", "--variant", "soft"], "choose rows with --rows"),
        (["demo", "--variant.name=soft"], "choose rows with --rows"),
        ([], "GRID"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["sweep", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_remoe_trains_its_first_phase_where_vanilla_has_no_weights_left(grid, vanilla_only, tmp_path):
    shutil.rmtree(vanilla_only.folder.checkpoints)
    _, remoe = sweep(cells_of(grid, tmp_path, "vanilla", "remoe"), jobs=1)
    assert remoe.status == "complete"
    assert len(remoe.folder.timings.read_text().splitlines()) > 1, "all steps are its own"


def test_remoe_does_not_start_from_an_earlier_checkpoint_of_vanilla(grid, vanilla_only, tmp_path):
    shutil.rmtree(vanilla_only.folder.checkpoints / "step-000006")
    assert list(vanilla_only.folder.checkpoints.iterdir()), "there are earlier ones"
    (remoe,) = cells_of(grid, tmp_path, "remoe")
    with pytest.raises(RunError, match=r"no intact checkpoint of its last step.*omit --first_phase"):
        train(remoe.config, remoe.folder.path, first_phase=vanilla_only.folder.path, quiet=True)
    assert RunRecord.read(remoe.folder.record).status == "failed"


def test_a_sweep_that_cannot_continue_leaves_no_process(grid, tmp_path, monkeypatch):
    """As when the disk is full and the next run cannot be prepared."""
    long = {"train": {**SHORT, "steps": 100_000}}
    cells = [*cells_of(grid, tmp_path, "vanilla", **long), *cells_of(grid, tmp_path, "soft", **long)]
    started = []

    class FullDisk(LocalEngine):
        def start(self, cell):
            if started:
                raise OSError(errno.ENOSPC, "No space left on device")
            started.append(super().start(cell))
            return started[0]

    with pytest.raises(RunError, match=r"Sweep stopped.*No space left on device"):
        sweep(cells, jobs=2, engine=FullDisk())
    assert started[0].poll() is not None


class Unlucky:
    """An engine on which every process is lost, after `progress` has advanced the run."""

    def __init__(self, progress):
        self.progress, self.starts = progress, 0

    def cpus(self):
        return 1

    def start(self, cell):
        cell.prepare()
        self.starts += 1
        self.cell = cell
        return self

    def poll(self):
        self.progress(self)
        return Ended(1, "its node died", lost=True)


def test_a_cell_that_is_lost_without_progress_fails_in_the_end(grid, tmp_path):
    engine = Unlucky(lambda engine: None)
    (cell,) = sweep(cells_of(grid, tmp_path, "vanilla"), engine=engine)
    assert engine.starts == MAX_LOSSES
    assert cell.status == "failed"
    assert RunRecord.read(cell.folder.record).failure == "its node died, 3 times without progress"


def test_a_cell_that_is_lost_after_progress_starts_again(grid, vanilla_only, tmp_path):
    record = vanilla_only.folder.record.read_text()
    vanilla_only.folder.record.unlink()
    vanilla_only.folder.metrics.unlink()

    def advance(engine):
        engine.cell.folder.append(engine.cell.folder.metrics, {"step": engine.starts})
        if engine.starts > MAX_LOSSES:
            engine.cell.folder.record.write_text(record)

    engine = Unlucky(advance)
    (cell,) = sweep(cells_of(grid, tmp_path, "vanilla"), engine=engine)
    assert (cell.status, engine.starts) == ("complete", MAX_LOSSES + 1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_sweep_leaves_no_process_and_can_be_resumed(grid, tmp_path, how):
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({**grid, "train": {**SHORT, "steps": 100_000}, "rows": [{"variant": "vanilla"}]}))
    command = [sys.executable, "-m", "stickymoe.cli", "sweep", str(file), "--out", str(tmp_path / "out")]
    heeding = {"preexec_fn": lambda: signal.signal(how, signal.SIG_DFL)}  # also where these tests run under nohup
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heeding)
    (child,) = wait_for(lambda: [p for p in psutil.Process(process.pid).children() if "train" in p.cmdline()])
    (metrics,) = wait_for(lambda: list((tmp_path / "out").glob("*/metrics.jsonl")))
    process.send_signal(how)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "The same command resumes it" in message
    assert not child.is_running()
    assert RunRecord.read(metrics.with_name("record.json")).status == "interrupted"
