"""The report as its reader meets it: opened from disk in headless Chromium (Debian's chromium and chromium-driver)."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from browser import NEEDS_BROWSER, chromium, requested
from reports.records import a_run, write
from stickymoe.reports.report import report

pytestmark = NEEDS_BROWSER
WORDS = ("<script>document.title='owned'</script>", "quick", "brown", "fox")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    for variant, ppl, hit in (("vanilla", 100.0, 0.5), ({"name": "soft", "lam": 0.5}, 104.0, 0.9)):
        write(a_run(variant, ppl=ppl, cache_hit_rate=hit), folder / "runs", words=WORDS)
    report([folder / "runs"], folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(page):
    with chromium() as driver:
        driver.get(page.as_uri())
        yield driver


def drawn(browser, name):
    chart = browser.find_element(By.ID, name)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    WebDriverWait(browser, 30).until(lambda _: chart.get_attribute("data-drawn") == "yes")
    return chart


def colours(browser, where):
    spans = browser.find_elements(By.CSS_SELECTOR, f".{where}-text span")
    return [span.value_of_css_property("background-color") for span in spans]


def test_loads_without_an_error_or_a_request_to_any_host(browser, page):
    for chart in browser.find_elements(By.CLASS_NAME, "chart"):
        drawn(browser, chart.get_attribute("id"))
    assert browser.get_log("browser") == []
    asked = requested(browser)
    assert page.as_uri() in asked
    assert {url.split(":")[0] for url in asked} <= {"file", "data", "blob"}


def test_text_shows_as_text(browser):
    assert browser.title == "StickyMoE report"
    assert WORDS[0] in browser.find_element(By.CSS_SELECTOR, ".upper-text").text


def test_the_layer_chooser_changes_the_ribbon_by_mouse_and_by_keyboard(browser):
    layers = browser.find_elements(By.CSS_SELECTOR, ".layer input")
    assert len(layers) == 4
    layers[0].click()
    first = colours(browser, "upper"), colours(browser, "lower")
    assert "layer 0" in browser.find_element(By.CLASS_NAME, "upper-counts").text
    layers[0].send_keys(Keys.ARROW_RIGHT)
    assert layers[1].is_selected()
    assert "layer 1" in browser.find_element(By.CLASS_NAME, "upper-counts").text
    assert (colours(browser, "upper"), colours(browser, "lower")) != first


def test_another_run_can_be_chosen(browser):
    below = Select(browser.find_element(By.CSS_SELECTOR, "select.lower"))
    assert [option.text for option in below.options] == ["vanilla", "soft λ=0.5"]
    below.select_by_visible_text("vanilla")
    assert browser.find_element(By.CLASS_NAME, "lower-counts").text.startswith("vanilla: ")
    assert colours(browser, "lower") == colours(browser, "upper")
    below.select_by_visible_text("soft λ=0.5")
    assert colours(browser, "lower") != colours(browser, "upper")


def test_switches_and_misses_are_marked_as_counted(browser):
    said = browser.find_element(By.CLASS_NAME, "upper-counts").text
    marked = len(browser.find_elements(By.CSS_SELECTOR, ".upper-text span.switch"))
    assert f"changes {marked} times in 63 steps" in said
    assert browser.find_elements(By.CSS_SELECTOR, ".upper-text span.miss")


def test_a_hover_names_a_point(browser):
    chart = drawn(browser, "pareto-chr-small-1000")
    points = chart.find_elements(By.CSS_SELECTOR, "path[aria-roledescription='point']")
    assert len(points) == 2
    names = set()
    for point in points:
        ActionChains(browser).move_to_element(point).perform()
        tooltip = browser.find_element(By.ID, "vg-tooltip-element")
        WebDriverWait(browser, 10).until(lambda _, t=tooltip: "visible" in t.get_attribute("class"))
        names.add(tooltip.text.split("\n")[0])
    assert names == {"run vanilla", "run soft λ=0.5"}
