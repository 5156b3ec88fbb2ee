"""What MkDocs does for this site beside its configuration in mkdocs.yml.

README and some other files outside docs/ are pages, too. The links of all files work where the repository is browsed.
On the site, a link to a file that is a page leads to this page, and any other file that is linked is copied beside the
pages. A link to a file that does not exist fails the strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

# Files outside docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/olmoe/README.md": "examples/olmoe.md",
    "examples/smollm2/README.md": "examples/smollm2.md",
    "examples/llama_cpp/README.md": "examples/llama_cpp.md",
    "results/README.md": "records.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
# A link to a folder leads to the page about it.
FOLDERS = {"examples": "examples/smollm2.md", "results": "records.md"}
ICON = "src/stickymoe/serving/static/icon.svg"

FENCED_OR_TARGET = re.compile(r"^```.*?^```|(?<=\]\()(?![a-z]+:|#)[^)#\s]+", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the icon, and the files that pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ROOT / ICON)))
    for document in list(files.documentation_pages()):
        for target in linked(document.content_string, document.src_uri):
            place = place_of(target)
            if place not in files.src_uris and (ROOT / target).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to places of the site."""
    place = page.file.src_uri

    def on_site(found: re.Match[str]) -> str:
        if found[0].startswith("```"):
            return found[0]
        return posixpath.relpath(place_of(repository_path(found[0], place)), posixpath.dirname(place))

    return FENCED_OR_TARGET.sub(on_site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the arrow of a column, which says what is better, in one line with the last word of its name."""
    return re.sub(r" ([↑↓])(?=</th>)", "\N{NO-BREAK SPACE}\\1", html)


def linked(markdown: str, place: str) -> set[str]:
    """Paths in the repository that a page links to."""
    found = FENCED_OR_TARGET.findall(markdown)
    return {repository_path(target, place) for target in found if not target.startswith("```")}


def repository_path(target: str, place: str) -> str:
    """The path in the repository of a link target on the page at `place`."""
    source = SOURCES.get(place, f"docs/{place}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def place_of(path: str) -> str:
    """The place on the site of a path in the repository."""
    if path in FOLDERS or path in PAGES:
        return FOLDERS.get(path) or PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"
