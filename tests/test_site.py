"""The documentation site: it builds strictly, loads nothing from another host, and its search works from disk."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

import stickymoe
from browser import NEEDS_BROWSER, chromium, requested

ROOT = Path(__file__).parent.parent
BESIDE = (
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples",
    "results",
    "benchmarks",
    "src",
    "tools",
)
ELSEWHERE = re.compile(r"^\s*(?:https?:)?//")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


class Requests(HTMLParser):
    """The addresses that a browser asks for when it opens a page, and the names of the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.names.add(found.get("id") or "")
        self.addresses += re.findall(r"url\(['\"]?([^'\")]+)", found.get("style") or "")
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(found["href"] or "")
        elif tag != "a":
            names = ("src", "srcset", "data", "poster", "action")
            self.addresses += [found[name] or "" for name in names if name in found]


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_of_the_repository_is_on_the_site(site):
    named = {page.relative_to(site).with_suffix("").as_posix() for page in pages(site)}
    written = {page.stem for page in (ROOT / "docs").glob("*.md")}
    outside = {
        "index",
        "contributing",
        "changelog",
        "records",
        "examples/olmoe",
        "examples/smollm2",
        "examples/llama_cpp",
    }
    assert named == written | outside | {"404", "results/tables/provenance"}


def test_no_page_asks_another_host(site):
    for page in pages(site):
        addresses = Requests(page).addresses
        assert addresses
        assert [address for address in addresses if ELSEWHERE.match(address)] == [], page.name
        assert 'class="mermaid"' not in page.read_text(), "Material loads mermaid from another host"
    for style in site.rglob("*.css"):
        addresses = re.findall(r"(?:@import|url\()\s*['\"]?([^'\")]+)", style.read_text())
        assert [address for address in addresses if ELSEWHERE.match(address)] == [], style.name


def test_the_witness_sees_a_request(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<a href="https://a.org"><img src="//b.org/c"></a><p style="background: url(http://d.org)">')
    assert [address for address in Requests(page).addresses if ELSEWHERE.match(address)] == [
        "//b.org/c",
        "http://d.org",
    ]


def test_every_public_name_is_described_on_one_page(site):
    source = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: stickymoe\.(\w+)$", source, re.MULTILINE)
    assert sorted(listed) == sorted(set(stickymoe.__all__) - {"__version__"})
    text = (site / "api.html").read_text()
    for name in listed:
        (entry,) = re.findall(rf'<h3 id="stickymoe\.{name}".*?(?=<h[1-6] |\Z)', text, re.DOTALL)
        assert '<div class="doc-signature' in entry or "Error" in name, name
        assert re.search(r"doc-contents.*<p>\S", entry, re.DOTALL), name


def test_links_to_files_lead_to_pages_or_copies(site):
    assert 'href="guide.html"' in (site / "index.html").read_text()
    assert 'href="../frontier.html"' in (site / "examples" / "olmoe.html").read_text()
    assert 'href="files/results/traces.json"' in (site / "locality.html").read_text()
    assert (site / "files" / "results" / "traces.json").read_bytes() == (ROOT / "results/traces.json").read_bytes()


def test_no_page_names_this_machine(site):
    for page in pages(site):
        assert str(ROOT) not in page.read_text(), page.name


DEAD = ("nowhere.md", "#nowhere-here", "glossary.md#nowhere", "../src/nowhere.py", "nowhere.svg")


def test_dead_links_fail_the_build(tmp_path):
    """In a copy of the repository, with dead links on one page."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in BESIDE:
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "runtime.md").open("a") as page:
        page.writelines(f"\n[dead]({target})\n" for target in DEAD)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(DEAD), done.stderr
    for target, line in zip(DEAD, sorted(warnings, key=place_in_dead), strict=True):
        assert target.removeprefix("../") in line
        assert "runtime.md" in line


def place_in_dead(warning: str) -> int:
    return next((i for i, target in enumerate(DEAD) if target.removeprefix("../") in warning), -1)


BROKEN_CODE = """
return [...document.querySelectorAll("article :not(pre) > code")]
    .filter(code => code.getClientRects().length > 1 && !code.closest(".doc, a"))
    .map(code => code.textContent)
"""
BEYOND_THE_TEXT = """
const end = document.querySelector("article").getBoundingClientRect().right + 1
return [...document.querySelectorAll("article :is(p, li) > code")]
    .filter(code => code.getBoundingClientRect().right > end && !code.closest("table"))
    .map(code => code.textContent)
"""
FIGURES = """
const widths = [...document.querySelectorAll("article img")].map(figure => figure.getBoundingClientRect().width)
return [widths, document.documentElement.scrollWidth > window.innerWidth]
"""


@pytest.fixture(scope="module")
def browser():
    with chromium(1280, 1000) as driver:
        yield driver


class TestInABrowser:
    """Opened from disk, without a server."""

    pytestmark = NEEDS_BROWSER

    def test_the_search_finds_a_page(self, browser, site):
        browser.get((site / "index.html").as_uri())
        browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys("stickymoe plan")
        wait = WebDriverWait(browser, 30)
        results = wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
        addresses = [result.get_attribute("href") for result in results]
        assert any("locality.html" in address for address in addresses), addresses

    def test_no_command_or_option_is_broken_on_a_wide_screen(self, browser, site):
        """Neither may it leave the text."""
        for page in pages(site):
            browser.get(page.as_uri())
            assert browser.execute_script(BROKEN_CODE) == [], page.name
            assert browser.execute_script(BEYOND_THE_TEXT) == [], page.name

    def test_figures_can_be_read_and_scroll_on_a_narrow_screen(self, site):
        with chromium(500, 1000) as browser:
            browser.get((site / "frontier.html").as_uri())
            widths, wider = browser.execute_script(FIGURES)
        assert min(widths) > 600
        assert not wider, "the page itself does not scroll sideways"

    def test_the_arrow_of_a_column_stays_with_its_name(self, site):
        headings = re.findall(r"<th[^>]*>([^<]*[↑↓])</th>", (site / "frontier.html").read_text())
        assert headings
        assert [heading for heading in headings if not heading[:-1].endswith("\N{NO-BREAK SPACE}")] == []

    @pytest.mark.parametrize("page", ["index", "api", "results", "serving"])
    def test_a_page_asks_no_host_and_logs_no_error(self, browser, site, page):
        requested(browser)
        browser.get_log("browser")
        browser.get((site / f"{page}.html").as_uri())
        WebDriverWait(browser, 30).until(lambda b: b.find_elements(By.CSS_SELECTOR, ".md-nav__link--active"))
        assert {address.partition(":")[0] for address in requested(browser)} <= {"file", "data", "blob"}
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

    def test_pages_fit_a_phone(self, site):
        with chromium(500, 900) as driver:
            for page in ("index", "guide", "api", "results", "contributing"):
                driver.get((site / f"{page}.html").as_uri())
                width, room = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
                assert width <= room, page
