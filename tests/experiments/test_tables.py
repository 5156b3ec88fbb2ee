"""Results as tables: what failed is shown as failed, what is unknown as a dash, every capacity that was measured."""

from __future__ import annotations

from stickymoe.experiments.tables import Row, results_console, results_markdown, results_table

VANILLA = Row("vanilla", "complete", {"ppl": 100.0, "bits_per_byte": 1.5, "switch_rate": 0.5, "neglected_experts": 0})
SOFT = Row("soft λ=0.1", "complete", {"ppl": 102.5, "cache_hit_rate_all_c4": 0.75, "cache_hit_rate_all_c12": 0.875})
FAILED = Row("oracle", "failed", {})


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in markdown.splitlines()]


def test_perplexity_is_also_relative_to_the_baseline():
    head, _, vanilla, soft = cells(results_markdown([VANILLA, SOFT], baseline=VANILLA))
    at = head.index("ΔPPL %")
    assert (vanilla[at], soft[at]) == ("–", "+2.5")


def test_a_failed_run_says_so_in_every_cell():
    *_, failed = cells(results_markdown([VANILLA, FAILED], baseline=VANILLA))
    assert failed[0] == "oracle"
    assert set(failed[1:]) == {"failed"}


def test_what_was_not_measured_is_a_dash_not_a_zero():
    head, _, vanilla = cells(results_markdown([VANILLA]))
    assert vanilla[head.index("UE ↑")] == "–"
    assert vanilla[head.index("neglected")] == "0"


def test_every_capacity_has_its_column_in_order():
    head, _, _, soft = cells(results_markdown([VANILLA, SOFT]))
    assert [h for h in head if h.startswith("all")] == ["all C=4 ↑", "all C=12 ↑"]
    assert soft[head.index("all C=12 ↑")] == "0.875"


def test_the_terminal_table_is_never_squeezed():
    console = results_console()
    with console.capture() as printed:
        console.print(results_table([VANILLA, SOFT, FAILED], baseline=VANILLA))
    assert "…" not in printed.get()
    assert "102.50" in printed.get()
