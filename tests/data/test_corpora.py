"""What text becomes which rows and documents, and which text is refused."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from stickymoe.data.corpora import Corpus, Document, load_corpus
from stickymoe.errors import DataError
from stickymoe.runs.config import DataConfig


def load(path: object) -> Corpus:
    return load_corpus(DataConfig(path=str(path)))


def rows(documents: tuple[Document, ...]) -> list[str]:
    return [row for document in documents for row in document.rows]


@pytest.fixture(scope="module")
def factbook() -> Corpus:
    return load_corpus(DataConfig(corpus="factbook"))


class TestFactbook:
    def test_every_topic_is_in_every_split(self, factbook: Corpus) -> None:
        for split in (factbook.train, factbook.valid, factbook.test):
            assert len({document.topic for document in split}) == 13

    def test_no_country_is_in_two_splits(self, factbook: Corpus) -> None:
        countries = [
            {document.name.split("/")[0] for document in split}
            for split in (factbook.train, factbook.valid, factbook.test)
        ]
        assert sum(map(len, countries)) == len(set.union(*countries)) == 256

    def test_rows_are_plain_text(self, factbook: Corpus) -> None:
        every = rows(factbook.train + factbook.valid + factbook.test)
        assert all(row and row == row.strip() and "\n" not in row for row in every)
        assert not [row for row in every if re.search(r"</?[a-z]+>|&(nbsp|amp|lt|[a-z]+acute);", row)]

    def test_rows_contain_field_and_text(self, factbook: Corpus) -> None:
        france = next(document for document in factbook.train if document.name == "fr/Geography")
        assert france.topic == "Geography"
        area = next(row for row in france.rows if row.startswith("Area: "))
        assert area.startswith("Area: total: 643,801 sq km ; 551,500 sq km (metropolitan France); land: 640,427 sq km")

    def test_is_the_same_every_time(self, factbook: Corpus) -> None:
        assert load_corpus(DataConfig(corpus="factbook")) == factbook


class TestSplitFiles:
    @pytest.mark.parametrize(
        ("train", "valid", "test"),
        [
            ("train.txt", "valid.txt", "test.txt"),
            ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
            ("wiki.train.tokens", "wiki.validation.tokens", "wiki.test.tokens"),
            ("my-train.md", "my_val.md", "TEST.TXT"),
            ("train.txt", "dev.txt", "test.txt"),
        ],
    )
    def test_are_found_by_name(self, folder: Any, train: str, valid: str, test: str) -> None:
        corpus = load(folder({train: "a\nb", valid: "c", test: "d", "README.rst": "x"}))
        assert (rows(corpus.train), rows(corpus.valid), rows(corpus.test)) == (["a", "b"], ["c"], ["d"])

    def test_rows_are_stripped_and_blank_ones_dropped(self, folder: Any) -> None:
        corpus = load(folder({"train.txt": "\ufeff a \r\n \r\n\tb\r\n", "valid.txt": "c\u2028d"}))
        assert corpus.train == (Document("train.txt", ("a", "b")),)
        assert rows(corpus.valid) == ["c\u2028d"]

    def test_need_no_test(self, folder: Any) -> None:
        assert load(folder({"train.txt": "a", "valid.txt": "b"})).test == ()

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {"wiki.valid.raw": "a", "wiki.test.raw": "b"},
                r"has wiki.test.raw, wiki.valid.raw but no file for train",
            ),
            ({"train.txt": "a"}, r"has train.txt but no file for valid\. Add valid.txt"),
            ({"test.txt": "a"}, r"no file for train or valid\. Add train.txt and valid.txt"),
            ({"train.txt": "a", "val.txt": "b", "dev.txt": "c"}, r"two files for valid, dev.txt and val.txt"),
            ({"train.txt": " \n", "valid.txt": "b"}, r"has no text for train"),
            ({"train.txt": "a", "valid.txt": ""}, r"has no text for valid"),
        ],
    )
    def test_are_refused(self, folder: Any, files: dict[str, str], message: str) -> None:
        with pytest.raises(DataError, match=message):
            load(folder(files))


class TestUnknownWords:
    RAW = "the lobster walks\n" * 50
    UNK = "the <unk> walks\n" * 50

    @pytest.mark.parametrize(
        ("train", "valid", "test", "named"),
        [(UNK, RAW, UNK, "valid"), (RAW, UNK, RAW, "valid"), (RAW, RAW, UNK, "test")],
    )
    def test_in_only_one_split_are_refused(self, folder: Any, train: str, valid: str, test: str, named: str) -> None:
        with pytest.raises(DataError, match=f"only one of train and {named} has '<unk>'.*one release"):
            load(folder({"train.txt": train, "valid.txt": valid, "test.txt": test}))

    def test_in_both_are_fine(self, folder: Any) -> None:
        load(folder({"train.txt": self.UNK, "valid.txt": self.UNK}))

    def test_mentioned_once_are_fine(self, folder: Any) -> None:
        load(folder({"train.txt": self.RAW * 10 + "what <unk> means", "valid.txt": self.RAW}))


class TestArticles:
    def test_begin_at_titles_of_the_first_level(self, folder: Any) -> None:
        text = "\n = Crab = \n\n A crab . \n\n = = Legs = = \n\n Ten . \n\n = Lobster = \n\n Walks . \n"
        assert load(folder({"train.txt": text, "valid.txt": "x"})).train == (
            Document("Crab", ("= Crab =", "A crab .", "= = Legs = =", "Ten .")),
            Document("Lobster", ("= Lobster =", "Walks .")),
        )

    def test_do_not_begin_at_a_formula_inside_a_paragraph(self, folder: Any) -> None:
        text = "\n= Statistics =\n\nGP\n= Games Played ; W =\nWins\n"
        assert len(load(folder({"train.txt": text, "valid.txt": "x"})).train) == 1

    def test_are_found_without_blank_rows_too(self, folder: Any) -> None:
        names = [d.name for d in load(folder({"train.txt": "before\n= A =\na\n= B =\nb\n", "valid.txt": "x"})).train]
        assert names == ["train.txt", "A", "B"]


class TestAnyText:
    def test_a_folder_is_split_by_bytes_in_the_order_of_names(self, folder: Any) -> None:
        files = {f"{name}.txt": "\n".join(f"{name}{i:03}" for i in range(100)) for name in ("b", "a", "sub/c", "z")}
        corpus = load(folder({**files, ".git/x.txt": "hidden", "image.png": b"\xff"}))
        everything = rows(corpus.train) + rows(corpus.valid) + rows(corpus.test)
        assert everything == sorted(everything, key=lambda row: (row[:-3], row))
        assert len(everything) == 400
        size = [sum(map(len, rows(split))) for split in (corpus.train, corpus.valid, corpus.test)]
        assert [round(100 * part / sum(size)) for part in size] == [90, 5, 5]
        assert [document.name for document in corpus.train] == ["a.txt", "b.txt", "sub/c.txt", "z.txt"]
        assert [document.name for document in corpus.valid] == ["z.txt"]

    def test_one_file_is_enough(self, folder: Any) -> None:
        file = folder({"book.text": "\n".join(map(str, range(100, 200)))}) / "book.text"
        corpus = load(file)
        assert [len(rows(split)) for split in (corpus.train, corpus.valid, corpus.test)] == [90, 5, 5]

    def test_too_few_rows_to_split_are_refused(self, folder: Any) -> None:
        with pytest.raises(DataError, match=r"no text for valid.*Give more rows"):
            load(folder({"one.txt": "a single row"}))

    def test_not_utf8_is_refused_with_the_place(self, folder: Any) -> None:
        with pytest.raises(DataError, match=r"b\.txt' is not UTF-8: byte 0xe9 at offset 3\. Convert"):
            load(folder({"a.txt": "fine", "b.txt": b"caf\xe9"}))

    def test_a_folder_without_text_is_refused(self, folder: Any) -> None:
        with pytest.raises(DataError, match=r"has no text files\. Expected names ending in \.txt"):
            load(folder({"data.json": "{}"}))

    def test_a_missing_path_is_refused(self, tmp_path: Any) -> None:
        with pytest.raises(DataError, match=r"nowhere' does not exist"):
            load(tmp_path / "nowhere")


class TestNamed:
    def test_unknown_name(self) -> None:
        with pytest.raises(DataError, match=r"Unknown corpus 'wikitext2'\. Did you mean 'wikitext-2'\?"):
            load_corpus(DataConfig(corpus="wikitext2"))

    def test_the_hub_gives_articles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = ["", " = A = \n", "", " text \n", ""]
        hub = {split: {"text": lines} for split in ("train", "validation", "test")}
        self.install_hub(monkeypatch, lambda *_: hub)
        corpus = load_corpus(DataConfig(corpus="wikitext-2"))
        assert corpus.train == corpus.valid == corpus.test == (Document("A", ("= A =", "text")),)

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ConnectionError("no route\nto the hub")

        self.install_hub(monkeypatch, fail)
        with pytest.raises(DataError, match=r"ConnectionError: no route\).*--data\.path DIR") as caught:
            load_corpus(DataConfig(corpus="wikitext-2"))
        assert "\n" not in str(caught.value)

    def test_no_datasets_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r"needs the package 'datasets'.*--data\.path DIR.*train, valid and test"):
            load_corpus(DataConfig(corpus="wikitext-2"))

    @staticmethod
    def install_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
        module = ModuleType("datasets")
        monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
        monkeypatch.setitem(sys.modules, "datasets", module)
