"""The command line as a user meets it: every mistake one clear line, exit code 2, and nothing lost."""

from __future__ import annotations

import builtins
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import yaml

from stickymoe.cli import COMMANDS, main
from stickymoe.errors import StickyError
from stickymoe.runs.presets import PRESETS, RECOMMENDED
from stickymoe.runs.record import RunRecord
from stickymoe.variants import variant_class, variant_names

SMALL = (
    *("--preset", "tiny", "--quiet"),
    *("--data.vocab_size", "300", "--model.d_model", "16", "--model.d_ff", "16", "--model.seq_len", "16"),
    *("--train.steps", "12", "--train.batch_size", "4", "--train.eval_every", "6", "--train.checkpoint_every", "3"),
)


@pytest.fixture(scope="session")
def small(corpus: Path) -> list[str]:
    """A training command of twelve small steps, without its folder."""
    return ["train", *SMALL, "--data.path", str(corpus)]


@pytest.fixture(scope="session")
def finished_run(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "finished"
    assert main([*small, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def stopped_run(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped by Ctrl-C at step 6: the checkpoints of steps 3 and 6."""
    from stickymoe.data.batches import TrainBatches

    out = tmp_path_factory.mktemp("cli") / "stopped"
    original = TrainBatches.batch

    def batch(self: TrainBatches, step: int, **kwargs: Any) -> Any:
        if step == 5:
            signal.raise_signal(signal.SIGINT)
        return original(self, step, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainBatches, "batch", batch)
        assert main([*small, "--out", str(out)]) == 130
    return out


@pytest.fixture
def finished(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(finished_run, tmp_path / "finished"))


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of an unfinished run."""
    return Path(shutil.copytree(stopped_run, tmp_path / "stopped"))


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(*args, match=…)`: the command fails in one line that matches."""

    def check(*args: str | Path, match: str) -> str:
        capsys.readouterr()
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert code == 2, f"{code}: {out}{err}"
        assert err.startswith("stickymoe: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert len(err) < 700, "a line nobody reads"
        assert re.search(match, err), err
        assert out == ""
        return err

    return check


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def write_corpus(folder: Path, **splits: str | bytes) -> Path:
    folder.mkdir(parents=True)
    for name, text in splits.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def printed_config(capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["train", "--print_config", *map(str, args)]) == 0
    config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return config


class TestRecommended:
    def test_is_a_variant_with_its_settings_and_flags_over_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = printed_config(capsys, "--recommended", "--preset", "cpu-small", "--variant.budget", "0.5")
        assert config["variant"] == {**printed_config(capsys, "--recommended")["variant"], "budget": 0.5}
        assert config["variant"].items() >= {**RECOMMENDED, "budget": 0.5}.items()

    def test_has_the_slots_and_loads_that_were_tried_with_a_preset(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("preset: cpu-16\n")
        for chosen in (["--preset", "cpu-16"], ["--config", file]):
            config = printed_config(capsys, "--recommended", *chosen, "--variant.budget", "0.2")
            assert config["variant"].items() >= {**RECOMMENDED, "capacity": 4, "budget": 0.2}.items()
            assert config["model"]["n_experts"] == 16

    def test_is_not_what_nothing_asks_for(self, refused: Refused) -> None:
        refused("train", match=r"train: got no settings. Try --preset tiny \(seconds\), or see")

    def test_leaves_no_doubt_which_variant_is_meant(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("variant: {name: soft, lam: 0.3}\n")
        for more in (["--variant", "soft"], ["--config", str(file)]):
            assert main(["train", "--recommended", *more]) == 2
            error = capsys.readouterr().err
            assert error == "stickymoe: --recommended chooses the variant, but 'soft' was given: omit one of them.\n"


class TestNames:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["trian"], r"Unknown command 'trian'\. Did you mean 'train'\?"),
            (["evall"], r"Unknown command 'evall'\. Did you mean 'eval'\?"),
            (["xyz"], r"Unknown command 'xyz'\. Known: .*\btrain\b"),
            (["--verbose"], r"Unknown command '--verbose'"),
            (["train", "--variant", "sfot"], r"Unknown variant 'sfot'\. Did you mean 'soft'"),
            (["train", "--variant", "soft-hard"], r"Unknown variant 'soft-hard'\. Did you mean 'soft_hard'"),
            (["train", "--variant", "xyz"], r"Unknown variant 'xyz'\. Known: bles, .*vanilla"),
            (["train", "--preset", "tinny"], r"Unknown preset 'tinny'\. Did you mean 'tiny'\?"),
            (["train", "--preset", "cpu_small"], r"Unknown preset 'cpu_small'\. Did you mean 'cpu-small'"),
            (["train", "--preset", "xyz"], r"Unknown preset 'xyz'\. Known: .*paper-small"),
            (["train", "--data.corpus", "wikitext2"], r"Unknown corpus 'wikitext2'\. Did you mean 'wikitext-2'\?"),
        ],
    )
    def test_unknown_gets_near_ones(self, refused: Refused, tmp_path: Path, args: list[str], message: str) -> None:
        out = ["--out", str(tmp_path / "run")] if args[0] == "train" else []
        refused(*args, *out, match=message)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("variant: sfot", r"Unknown variant 'sfot'\. Did you mean 'soft'"),
            ("variant: {name: sfot}", r"Unknown variant 'sfot'\. Did you mean 'soft'"),
            ("preset: tinny", r"Unknown preset 'tinny'\. Did you mean 'tiny'"),
        ],
    )
    def test_unknown_in_a_file(self, refused: Refused, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "c.yaml").write_text(text)
        refused("train", "--config", tmp_path / "c.yaml", match=message)


# What is given on the command line, and what the message must contain.
# `\b…\b` keeps a path from matching in a longer one.
BAD_FLAGS = [
    ("--train.stepz 3", r"'--train\.stepz'.*Did you mean '--train\.steps'"),
    ("--model.topk 1", r"'--model\.topk'.*Did you mean '--model\.top_k'"),
    ("--variant.lam 0.1", r"'--variant\.lam'"),  # vanilla has none
    ("--trian.steps 3", r"'--trian\.steps'.*Did you mean '--train\.steps'"),
    ("--whatever", r"Unknown setting '--whatever'"),
    ("--varaint soft", r"'--varaint'.*Did you mean '--variant'"),
    ("surplus", r"'surplus'"),
    ("--train.steps abc", r"train\.steps: got '?abc'?, expected (an )?(int|whole)"),
    ("--train.steps 1.5", r"train\.steps: got '?1\.5'?, expected (an )?(int|whole)"),
    ("--train.steps true", r"train\.steps: got '?[Tt]rue'?, expected (an )?(int|whole)"),
    ("--train.steps=", r"train\.steps: got ''?, expected|train\.steps.*expected"),
    ("--train.steps", r"train\.steps.*expected one argument"),
    ("--train.lr fast", r"train\.lr: got '?fast'?, expected (a )?(float|number)"),
    ("--data.documents 3", r"data\.documents: got '?3'?, expected (a )?bool"),
    ("--data.tokenizer gpt3", r"data\.tokenizer: got '?gpt3'?, expected .*gpt2.*bpe"),
    ("--train.precision fp8", r"train\.precision: got '?fp8'?, expected .*fp32.*bf16"),
    ("--eval.capacities [2,x]", r"eval\.capacities.*\bx\b"),
    ("--eval.capacities 2", r"eval\.capacities: got '?2'?, expected"),
    ("--eval.capacities [0]", r"eval\.capacities: got .*0.*, expected .* ≥ 1"),
    ("--seed x", r"seed: got '?x'?, expected (an )?(int|whole)"),
    ("--seed -1", r"seed: got -1, expected"),
    ("--variant.mu -0.1", r"variant\.mu: got -0\.1, expected a finite number ≥ 0"),
    ("--variant.mu nan", r"variant\.mu: got '?nan'?, expected"),
    ("--variant.mu .nan", r"variant\.mu: got nan, expected a finite number ≥ 0"),
    ("--variant.mu .inf", r"variant\.mu: got inf, expected a finite number ≥ 0"),
    ("--variant.mu=-.inf", r"variant\.mu: got -inf, expected a finite number ≥ 0"),
    ("--variant soft --variant.lam -1", r"variant\.lam: got -1\.0, expected a finite number ≥ 0"),
    ("--variant soft --variant.lam .nan", r"variant\.lam: got nan, expected a finite number ≥ 0"),
    ("--variant soft_hard --variant.alpha .nan", r"variant\.alpha: got nan, expected a finite number ≥ 0"),
    ("--variant soft_hard --variant.window 0", r"variant\.window: got 0, expected a whole number ≥ 1"),
    ("--variant hard_window --variant.window 0", r"variant\.window: got 0, expected a whole number ≥ 1"),
    ("--variant hard_window --variant.window 2.5", r"variant\.window: got '?2\.5'?, expected"),
    ("--variant hard_window --variant.beta .nan", r"variant\.beta: got nan, expected a finite number ≥ 0"),
    ("--variant remoe --variant.tune_share 0", r"variant\.tune_share: got 0\.0, expected"),
    ("--model.top_k 5", r"model\.top_k: got 5, expected at most n_experts=4"),
    ("--model.top_k 0", r"model\.top_k: got 0, expected a whole number ≥ 1"),
    ("--model.n_heads 3", r"model\.n_heads: got 3, expected a divisor of d_model=16"),
    ("--train.steps 0", r"train\.steps: got 0, expected a whole number ≥ 1"),
    ("--train.steps -5", r"train\.steps: got -5, expected a whole number ≥ 1"),
    ("--train.accumulate 3", r"train\.accumulate: got 3, expected a divisor of batch_size=4"),
    ("--data.vocab_size 10", r"data\.vocab_size: got 10, expected at least 257"),
    ("--train 5", r"'?--train\b.*"),
    ("--preset", r"--preset.*expected one argument"),
    ("--out", r"--out.*expected one argument"),
    ("--config nowhere.yaml", r"nowhere\.yaml.*No such file"),
]


class TestSettings:
    @pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
    def test_bad_in_flags(self, small: list[str], refused: Refused, tmp_path: Path, flags: str, message: str) -> None:
        shown = refused(*small, "--out", tmp_path / "run", *flags.split(), match=message)
        assert "Parser key" not in shown, "the parser's own message"
        assert "typing." not in shown
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("train: {stepz: 3}", r"'train\.stepz'.*Did you mean 'train\.steps'"),
            ("variant: {name: soft, lamm: 1}", r"'variant\.lamm'.*Did you mean 'variant\.lam'"),
            ("variant: {name: vanilla, lam: 1}", r"'variant\.lam'"),
            ("trian: {steps: 3}", r"'trian(\.steps)?'.*Did you mean 'train(\.steps)?'"),
            ("train: {nested: {a: 1}}", r"'train\.nested(\.a)?'"),
            ("surplus: 3", r"'surplus'"),
            ("5: 6", r"\b5\b"),
            ("train: {steps: abc}", r"train\.steps: got '?abc'?, expected (an )?(int|whole)"),
            ("train: {steps: 1.5}", r"train\.steps: got '?1\.5'?, expected (an )?(int|whole)"),
            ("train: {steps: true}", r"train\.steps: got '?True'?, expected (an )?(int|whole)"),
            ("train: {steps: null}", r"train\.steps: got '?(None|null)'?, expected"),
            ("train: {steps: [1]}", r"train\.steps: got .*1.*, expected"),
            ("train: {steps: {a: 1}}", r"train\.steps(: got|\.a)"),
            ("train: 5", r"train: got '?5'?, expected"),
            ("train: [1]", r"train: got .*1.*, expected"),
            ("model: null", r"model: got '?(None|null)'?, expected"),
            ("variant: 5", r"variant: got '?5'?, expected|Unknown variant '5'"),
            ("variant: [soft]", r"variant: got .*soft.*, expected"),
            ("variant: null", r"variant: got '?(None|null)'?, expected"),
            ("variant: {name: 5}", r"Unknown variant '5'"),
            ("preset: 5", r"Unknown preset '5'|preset: got '?5'?, expected"),
            ("seed: abc", r"seed: got '?abc'?, expected (an )?(int|whole)"),
            ("seed: null", r"seed: got '?(None|null)'?, expected"),
            ("data: {path: 5}", r"data\.path: got '?5'?, expected"),
            ("data: {tokenizer: gpt3}", r"data\.tokenizer: got '?gpt3'?, expected .*gpt2.*bpe"),
            ("eval: {capacities: [2, x]}", r"eval\.capacities.*\bx\b"),
            ("variant: {name: soft, lam: .nan}", r"variant\.lam: got nan, expected a finite number ≥ 0"),
            ("variant: {name: soft, lam: -.inf}", r"variant\.lam: got -inf, expected a finite number ≥ 0"),
            ("variant: {name: soft, lam: -1}", r"variant\.lam: got -1\.0, expected a finite number ≥ 0"),
            ("model: {top_k: 9}", r"model\.top_k: got 9, expected at most n_experts=4"),
            ("model: {n_heads: 3}", r"model\.n_heads: got 3, expected a divisor of d_model="),
            ("- a", r"c\.yaml.*expected"),
            ("just text", r"c\.yaml.*expected"),
            ("a: b: c", r"c\.yaml is not YAML"),
            ("\ttrain: 5", r"c\.yaml is not YAML"),
            ("train: {steps: 5", r"c\.yaml is not YAML"),
        ],
        ids=lambda value: value if ":" in value or value.startswith(("-", "j", "\t")) else "",
    )
    def test_bad_in_a_file(self, refused: Refused, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "c.yaml").write_text(text)
        shown = refused("train", "--config", tmp_path / "c.yaml", "--out", tmp_path / "run", match=message)
        assert "Parser key" not in shown, "the parser's own message"
        assert "typing." not in shown
        assert not (tmp_path / "run").exists()

    def test_a_file_that_is_not_text(self, refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_bytes(b"seed: \xff\xfe")
        refused("train", "--config", tmp_path / "c.yaml", match=r"c\.yaml is damaged: it is not UTF-8 text")

    def test_a_folder_instead_of_a_file(self, refused: Refused, tmp_path: Path) -> None:
        refused("train", "--config", tmp_path, match=r"cannot be read \(Is a directory\)")


class TestPrecedence:
    def test_flags_over_file_over_preset(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("train: {steps: 7, batch_size: 2}\nseed: 5\n")
        config = printed_config(capsys, "--preset", "tiny", "--config", file, "--seed", "6")
        assert config["model"]["d_model"] == 32  # the preset's
        assert config["train"]["steps"] == 7  # the file's, not the preset's 40
        assert config["train"]["batch_size"] == 2
        assert config["seed"] == 6  # the flag's, not the file's
        assert config["train"]["clip"] == 1.0  # nobody's

    def test_the_order_on_the_line_does_not_matter(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("train: {steps: 7}")
        first = printed_config(capsys, "--train.steps", "9", "--config", file, "--preset", "tiny")
        assert first == printed_config(capsys, "--preset", "tiny", "--config", file, "--train.steps", "9")
        assert first["train"]["steps"] == 9

    def test_a_file_may_name_its_preset(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("preset: tiny\nseed: 5\n")
        assert printed_config(capsys, "--config", file)["model"]["d_model"] == 32
        assert printed_config(capsys, "--config", file, "--preset", "demo")["model"]["d_model"] == 64

    def test_another_variant_than_the_files(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("variant: {name: soft_hard, lam: 0.7, window: 8}\nseed: 5\n")
        config = printed_config(capsys, "--config", file, "--variant", "hard_window", "--variant.beta", "3")
        assert config["variant"]["name"] == "hard_window"
        assert (config["variant"]["window"], config["variant"]["beta"]) == (4, 3.0)
        assert config["seed"] == 5

    def test_the_files_own_variant_named_again_keeps_its_settings(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("variant: {name: soft, lam: 0.7}")
        assert printed_config(capsys, "--config", file, "--variant", "soft")["variant"]["lam"] == 0.7
        assert printed_config(capsys, "--config", file, "--variant.lam", "0.2")["variant"]["lam"] == 0.2

    def test_numbers_as_people_write_them(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("train: {lr: 3e-4, clip: 1}\nvariant: {name: soft, lam: 1e-3}")
        config = printed_config(capsys, "--config", file, "--train.weight_decay", "5e-2")
        assert (config["train"]["lr"], config["train"]["clip"], config["variant"]["lam"]) == (3e-4, 1.0, 1e-3)
        assert config["train"]["weight_decay"] == 5e-2


class TestPrintConfig:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_of_a_preset_fed_back_is_the_same(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str
    ) -> None:
        self.check_fed_back(capsys, tmp_path, "--preset", preset)

    @pytest.mark.parametrize("variant", variant_names())
    def test_of_a_variant_fed_back_is_the_same(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, variant: str
    ) -> None:
        self.check_fed_back(
            capsys,
            tmp_path,
            *("--preset", "tiny", "--variant", variant, "--train.lr", "1e-5", "--eval.capacities", "[1,2,4]"),
            *("--data.path", "/λ/a b: c", "--data.cache_dir", "null", "--seed", "7"),
        )

    def check_fed_back(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, *args: str) -> None:
        config = printed_config(capsys, *args)
        file = tmp_path / "c.yaml"
        file.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        capsys.readouterr()
        assert main(["train", "--print_config", "--config", str(file)]) == 0
        again = capsys.readouterr().out
        assert yaml.safe_load(again) == config
        file.write_text(again, encoding="utf-8")
        assert printed_config(capsys, "--config", file) == config

    def test_makes_no_folder(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        printed_config(capsys, "--preset", "tiny", "--out", "run")
        assert list(tmp_path.iterdir()) == []


class TestText:
    ROWS = "ban dort ken lart min bon.\n" * 50

    def run(self, small: list[str], path: Path, out: Path) -> list[str]:
        return [*small, "--data.path", str(path), "--out", str(out)]

    @pytest.mark.parametrize(
        ("splits", "message"),
        [
            ({}, r"'.*text' has no text files.*\.txt"),
            ({"train": "", "valid": ROWS}, r"no text for train.*Give more"),
            ({"train": " \n\n", "valid": ROWS}, r"no text for train.*Give more"),
            ({"train": ROWS, "valid": ""}, r"no text for valid.*Give more"),
            ({"train": ROWS}, r"train\.txt but no file for valid.*[Aa]dd valid\.txt"),
            ({"train": "ban dort.", "valid": ROWS}, r"has \d+ tokens.*needs 17.*--model\.seq_len"),
            ({"train": ROWS, "valid": "b"}, r"1 tokens?, expected at least 2"),
            ({"train": b"ban\nd\xf6rt\n", "valid": ROWS}, r"train\.txt' is not UTF-8: byte 0xf6 at offset 5.*iconv"),
        ],
    )
    def test_that_cannot_be_used(
        self, small: list[str], refused: Refused, tmp_path: Path, splits: dict[str, str | bytes], message: str
    ) -> None:
        path = write_corpus(tmp_path / "text", **splits)
        refused(*self.run(small, path, tmp_path / "run"), match=message)
        assert contents(tmp_path / "run") == {}

    def test_that_is_not_there(self, small: list[str], refused: Refused, tmp_path: Path) -> None:
        refused(
            *self.run(small, tmp_path / "nowhere", tmp_path / "run"),
            match=r"data\.path: '.*nowhere' does not exist.*Expected a folder of text",
        )
        assert not (tmp_path / "run").exists()

    def hub(self, tmp_path: Path) -> list[str]:
        return ["train", "--preset", "cpu-small", "--out", str(tmp_path / "run")]

    def test_on_the_hub_without_its_library(
        self, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        refused(*self.hub(tmp_path), match=r"'datasets'.*pip install.*--data\.path DIR")
        assert not (tmp_path / "run").exists()

    def test_on_the_hub_without_a_network(
        self, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load_dataset(*_: object) -> NoReturn:
            raise ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub\n(details)")

        hub = ModuleType("datasets")
        hub.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", hub)
        refused(*self.hub(tmp_path), match=r"wikitext-2.*Couldn't reach.*--data\.path DIR")
        assert not (tmp_path / "run").exists()

    def test_whose_cache_cannot_be_written(self, small: list[str], refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        refused(
            *self.run(small, write_corpus(tmp_path / "text", train=self.ROWS, valid=self.ROWS), tmp_path / "run"),
            *("--data.cache_dir", tmp_path / "file" / "cache"),
            match=r"cache.*--data\.cache_dir DIR",
        )


class TestOut:
    @pytest.mark.parametrize("inside", ["file", "file/run"])
    def test_a_file_in_the_way(self, small: list[str], refused: Refused, tmp_path: Path, inside: str) -> None:
        (tmp_path / "file").write_text("mine")
        refused(*small, "--out", tmp_path / inside, match=r"file.* cannot be written .*another folder with --out")
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_place_where_nothing_can_be(self, small: list[str], refused: Refused) -> None:
        refused(*small, "--out", "/proc/stickymoe/run", match=r"/proc/stickymoe/run cannot be written .*--out")

    def test_something_else_of_the_users(self, small: list[str], refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("mine")
        refused(*small, "--out", tmp_path, match=r"is not empty and has no run \(found thesis\.tex\).*--out")
        assert contents(tmp_path) == {"thesis.tex": b"mine"}

    @pytest.mark.parametrize("resume", [[], ["--resume"]])
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--seed", "43"], r"different run \(seed: 42 there, 43 here\)"),
            (["--variant.mu", "0.5"], r"different run \(variant\.mu: 0\.01 there, 0\.5 here\)"),
            (["--variant", "soft"], r"different run \(variant\.name: vanilla there, soft here\)"),
            (["--train.steps", "24"], r"different run \(train\.steps: 12 there, 24 here\)"),
        ],
    )
    def test_a_different_run(
        self, small: list[str], refused: Refused, finished: Path, flags: list[str], message: str, resume: list[str]
    ) -> None:
        before = contents(finished)
        refused(*small, "--out", finished, *flags, *resume, match=message + r".*another folder with --out")
        assert contents(finished) == before

    def test_the_same_run_on_other_text(
        self, small: list[str], refused: Refused, finished: Path, corpus: Path, tmp_path: Path
    ) -> None:
        text = Path(shutil.copytree(corpus, tmp_path / "text"))
        with (text / "train.txt").open("a") as f:
            f.write("one more row\n")
        before = contents(finished)
        refused(*small, "--data.path", text, "--out", finished, match=r"different run \(.*data.*\).*another folder")
        assert contents(finished) == before

    def test_this_run_unfinished(self, small: list[str], refused: Refused, stopped: Path) -> None:
        before = contents(stopped)
        refused(*small, "--out", stopped, match=r"unfinished \(interrupted\).*Add --resume")
        assert contents(stopped) == before

    def test_this_run_finished_is_shown(
        self, small: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = contents(finished)
        assert main([*small, "--out", str(finished)]) == 0
        assert "vanilla" in capsys.readouterr().out
        assert contents(finished) == before

    def test_held_by_another_process(self, small: list[str], refused: Refused, stopped: Path) -> None:
        before = contents(stopped)
        hold = (
            "import sys; from pathlib import Path; from stickymoe.runs.folder import RunFolder\n"
            "with RunFolder(Path(sys.argv[1])).lock(): print('held', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", hold, str(stopped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            refused(*small, "--out", stopped, "--resume", match=r"stopped is being written by another process")
            assert contents(stopped) == before
            holder.communicate("")
        assert main([*small, "--out", str(stopped), "--resume"]) == 0

    def test_the_default_is_a_folder_of_its_own_for_each_run(
        self, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for flags in ([], ["--variant", "soft"], ["--seed", "43"]):
            assert main([*small, "--train.steps", "1", *flags]) == 0
        runs = sorted((tmp_path / "runs").iterdir())
        assert len(runs) == 3
        assert {RunRecord.read(run / "record.json").status for run in runs} == {"complete"}


class TestResume:
    def test_where_nothing_is(self, refused: Refused, tmp_path: Path) -> None:
        refused("train", "--resume", "--out", tmp_path / "run", match=r"no run to resume in .*run")
        assert not (tmp_path / "run").exists()

    def test_in_a_folder_of_something_else(self, refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("mine")
        refused("train", "--resume", "--out", tmp_path, match=r"no run to resume in ")
        assert contents(tmp_path) == {"thesis.tex": b"mine"}

    def test_without_a_folder(self, refused: Refused) -> None:
        refused("train", "--resume", match=r"--resume needs the run folder: add --out DIR")

    def test_from_a_checkpoint_without_saying_resume(self, refused: Refused, stopped: Path) -> None:
        refused("train", "--checkpoint", "step-000003", "--out", stopped, match=r"step-000003.*add --resume")

    def test_from_a_checkpoint_that_is_not_there(self, refused: Refused, stopped: Path) -> None:
        before = contents(stopped)
        refused(
            *("train", "--resume", "--out", stopped, "--checkpoint", "step-000005"),
            match=r"No checkpoint 'step-000005'.*Available: step-000003, step-000006",
        )
        assert contents(stopped) == before

    def test_with_nothing_but_the_folder(self, stopped: Path, finished_run: Path) -> None:
        assert main(["train", "--resume", "--quiet", "--out", str(stopped)]) == 0
        for name in ("metrics.jsonl", "record.json"):
            assert (stopped / name).read_bytes() == (finished_run / name).read_bytes()

    @pytest.mark.parametrize("file", ["model.safetensors", "optimiser.safetensors", "state.json"])
    @pytest.mark.parametrize("harm", ["truncated", "altered", "gone"])
    def test_from_a_damaged_checkpoint(self, refused: Refused, stopped: Path, file: str, harm: str) -> None:
        damaged = stopped / "checkpoints" / "step-000006" / file
        content = damaged.read_bytes()
        if harm == "truncated":
            damaged.write_bytes(content[:-10])
        elif harm == "altered":
            middle = len(content) // 2
            damaged.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        else:
            damaged.unlink()
        before = contents(stopped)
        message = refused(
            *("train", "--resume", "--quiet", "--out", stopped),
            match=r"step-000006 is damaged .*step-000003: add --checkpoint step-000003",
        )
        assert file in message
        assert contents(stopped) == before

    def test_from_the_checkpoint_before_a_damaged_one(self, stopped: Path, finished_run: Path) -> None:
        (stopped / "checkpoints" / "step-000006" / "state.json").unlink()
        assert main(["train", "--resume", "--quiet", "--out", str(stopped), "--checkpoint", "step-000003"]) == 0
        for name in ("metrics.jsonl", "record.json"):
            assert (stopped / name).read_bytes() == (finished_run / name).read_bytes()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"config\.yaml is not YAML"),
            ("- a", r"config\.yaml"),
            ("seed: x", r"seed.*config\.yaml"),
            ("preset: tiny\ndata: {vocab_size: 300, path: CORPUS}", r"different run"),
        ],
    )
    def test_with_a_damaged_config(
        self, refused: Refused, stopped: Path, corpus: Path, text: str, message: str
    ) -> None:
        (stopped / "config.yaml").write_text(text.replace("CORPUS", str(corpus)))
        before = contents(stopped)
        refused("train", "--resume", "--out", stopped, match=message)
        assert contents(stopped) == before

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}'])
    def test_with_a_damaged_record(self, refused: Refused, stopped: Path, text: str) -> None:
        (stopped / "record.json").write_text(text)
        before = contents(stopped)
        refused("train", "--resume", "--out", stopped, match=r"record\.json is damaged")
        assert contents(stopped) == before


class TestEval:
    @pytest.mark.parametrize("name", ["nowhere", "empty", "text"])
    def test_of_no_run(self, refused: Refused, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        write_corpus(tmp_path / "text", train="ban dort.")
        refused("eval", tmp_path / name, match=rf"{name} is not a run folder: it has no readable record\.json")
        assert not (tmp_path / "nowhere").exists()
        assert list((tmp_path / "empty").iterdir()) == []

    def test_of_a_file(self, refused: Refused, finished: Path) -> None:
        refused("eval", finished / "record.json", match=r"record\.json is not a run folder")

    def test_of_nothing(self, refused: Refused) -> None:
        refused("eval", match=r"DIR.*stickymoe eval --help")

    def test_shows_the_runs_numbers_and_changes_nothing(
        self, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = contents(finished)
        assert main(["eval", str(finished)]) == 0
        shown = capsys.readouterr().out
        metrics = RunRecord.read(finished / "record.json").metrics
        for value in (f"{metrics['ppl']:.2f}", f"{metrics['switch_rate']:.3f}", f"{metrics['bits_per_byte']:.3f}"):
            assert value in shown
        assert main(["eval", str(finished), "--split", "test"]) == 0
        assert capsys.readouterr().out != shown
        assert contents(finished) == before

    def test_of_an_unfinished_run_says_what_is_measured(
        self, stopped: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert main(["eval", str(stopped), "--checkpoint", "step-000003"]) == 0
        assert caplog.messages == [f"{stopped} is interrupted, evaluated at step-000003"]
        earlier = capsys.readouterr().out
        assert main(["eval", str(stopped)]) == 0
        assert capsys.readouterr().out != earlier

    def test_before_the_first_checkpoint(self, refused: Refused, stopped: Path) -> None:
        shutil.rmtree(stopped / "checkpoints")
        refused("eval", stopped, match=r"stopped has no checkpoint to evaluate")

    def test_on_a_split_that_is_not_there(self, refused: Refused, finished: Path) -> None:
        refused("eval", finished, "--split", "train2", match=r"--split.*'train2'.*valid.*test")

    def test_of_a_damaged_checkpoint(
        self, refused: Refused, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        weights = finished / "checkpoints" / "step-000012" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-3])
        refused("eval", finished, match=r"step-000012 is damaged .*--checkpoint step-000009")
        assert main(["eval", str(finished), "--checkpoint", "step-000009"]) == 0

    def test_without_its_text(
        self, small: list[str], refused: Refused, corpus: Path, tmp_path: Path, finished: Path
    ) -> None:
        config = yaml.safe_load((finished / "config.yaml").read_text())
        config["data"]["path"] = str(tmp_path / "gone")
        (finished / "config.yaml").write_text(yaml.safe_dump(config))
        refused("eval", finished, match=r"gone' does not exist")
        assert main(["eval", str(finished), "--data.path", str(corpus)]) == 0
        other = write_corpus(tmp_path / "other", train=TestText.ROWS, valid=TestText.ROWS)
        refused("eval", finished, "--data.path", other, match=r"trained on data with fingerprint.*--data\.path")

    @pytest.mark.parametrize(
        ("path", "value"),
        [("model.d_model", 32), ("variant.name", "dense"), ("model.n_layers", 1), ("model.top_k", 1)],
    )
    def test_of_an_altered_config(self, refused: Refused, finished: Path, path: str, value: object) -> None:
        config = yaml.safe_load((finished / "config.yaml").read_text())
        section, key = path.split(".")
        config[section][key] = value
        if value == "dense":
            config[section] = {"name": "dense"}
        (finished / "config.yaml").write_text(yaml.safe_dump(config))
        refused("eval", finished, match=r"config\.yaml|different run")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 7}'])
    def test_of_a_damaged_record(self, refused: Refused, finished: Path, text: str) -> None:
        (finished / "record.json").write_text(text)
        refused("eval", finished, match=r"record\.json is damaged")

    @pytest.mark.parametrize("text", ["{", "- a", "seed: x", "train: {stepz: 1}"])
    def test_of_a_damaged_config(self, refused: Refused, finished: Path, text: str) -> None:
        (finished / "config.yaml").write_text(text)
        refused("eval", finished, match=r"config\.yaml")


class TestDebug:
    @pytest.mark.parametrize("place", [0, 1, 3])
    def test_shows_the_traceback(self, place: int) -> None:
        args = ["train", "--variant", "sfot"]
        args.insert(place, "--debug")
        done = subprocess.run(
            [sys.executable, "-m", "stickymoe.cli", *args], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert done.stderr.startswith("Traceback")
        assert "Unknown variant 'sfot'" in done.stderr
        assert "base.py" in done.stderr

    def test_is_needed_for_it(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "stickymoe.cli", "train", "--variant", "sfot"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == "stickymoe: Unknown variant 'sfot'. Did you mean 'soft'?\n"


class TestHelp:
    @pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
    def test_of_all_names_every_command(self, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
        assert main(args) == 0
        out, err = capsys.readouterr()
        assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in COMMANDS)
        assert err == ""

    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.parametrize("flag", ["--help", "-h"])
    def test_of_every_command(self, capsys: pytest.CaptureFixture[str], command: str, flag: str) -> None:
        with contextlib.suppress(SystemExit):
            assert main([command, flag]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"usage: stickymoe {command}")
        assert "--help" in out
        assert err == ""

    def test_exits_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command in COMMANDS:
            try:
                code = main([command, "--help"])
            except SystemExit as e:
                code = int(e.code or 0)
            assert code == 0

    def test_of_train_tells_every_setting_and_its_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", "--help", "--preset", "tiny", "--variant", "soft_hard"]) == 0
        out = capsys.readouterr().out
        for option in ("--preset", "--config", "--out", "--resume", "--print_config", "--data.path", "--model.top_k"):
            assert option in out
        for option in ("--train.steps", "--variant.lam", "--variant.window", "--seed", "--eval.capacities"):
            assert option in out
        assert re.search(r"--train\.steps\b.*?default: 40\b", out, re.DOTALL)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert re.fullmatch(r"stickymoe \d+\.\d+\.\d+\n", capsys.readouterr().out)

    def test_of_variants_tells_equations_and_hyper_parameters(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["variants"]) == 0
        out = capsys.readouterr().out
        for name in variant_names():
            assert re.search(rf"^{name}\b", out, re.MULTILINE)
            assert variant_class(name).equation in out
        assert "--variant.lam 0.1" in out


class TestLightness:
    @pytest.mark.parametrize(
        "args",
        [
            ["--help"],
            ["--version"],
            ["variants"],
            ["train", "--help"],
            ["train", "--help", "--variant", "soft_hard", "--preset", "demo"],
            ["train", "--preset", "tiny", "--variant", "remoe", "--print_config"],
            ["train", "--variant", "sfot"],
            ["eval", "--help"],
            ["demo", "--help"],
            ["nonsense"],
        ],
        ids=" ".join,
    )
    def test_answers_without_torch(self, args: list[str]) -> None:
        code = (
            "import sys\nfrom stickymoe.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "heavy = {'torch', 'numba', 'accelerate', 'tokenizers', 'transformers'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


class TestMain:
    def test_runs_as_a_module_and_reads_the_line(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "stickymoe.cli", "variants"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        assert "soft_hard" in done.stdout
        assert done.stderr == ""

    def test_ctrl_c_before_a_run_starts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(_: list[str]) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("stickymoe.cli.train.train_command", interrupted)
        assert main(["train"]) == 130
        assert "Traceback" not in capsys.readouterr().err

    def test_a_reader_that_went_away_is_no_error(self) -> None:
        done = subprocess.run(
            f"{sys.executable} -m stickymoe.cli train --help | head -1",
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.startswith("usage: stickymoe train")
        assert done.stderr == ""

    def test_a_bug_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exit code 2 is only for what a user can mend."""

        def broken(_: list[str]) -> None:
            raise builtins.ZeroDivisionError("a bug")

        monkeypatch.setattr("stickymoe.cli.train.train_command", broken)
        with pytest.raises(ZeroDivisionError):
            main(["train"])

    def test_prints_what_came_out(self, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "run"
        assert main([*small, "--train.steps", "2", "--variant", "soft", "--out", str(out)]) == 0
        shown, err = capsys.readouterr()
        metrics = json.loads((out / "record.json").read_text())["metrics"]
        assert "soft λ=0.1" in shown
        assert f"{metrics['ppl']:.2f}" in shown
        assert str(out) in shown
        assert err == ""

    def test_errors_are_sticky(self) -> None:
        """Whatever a user can mend is one type, so that a Python caller can catch it too."""
        from stickymoe import errors

        kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
        assert len(kinds) > 4
        assert all(issubclass(kind, StickyError) for kind in kinds)
