"""The table of families in the docs is what the models show."""

from family_table import PAGE, page_with, table


def test_the_table_of_families_follows_from_the_models():
    text = PAGE.read_text()
    assert page_with(text, table()) == text, "run python tests/huggingface/family_table.py"
