"""MkDocs hooks: pages made from the code, sources that pages link to, and diagrams that follow the
reader's colours."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from api_pages import api_pages
from command_line import command_line
from mkdocs.structure.files import File
from sources import source_page, source_path

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
COMMAND_LINE: Final = "command-line.md"
CHANGELOG: Final = "changelog.md"
_LINK: Final = re.compile(r"(?<=\]\()(?P<path>\.\./[\w./-]+)(?=\))")
# A link whose text is the file's name, as it is read outside of the site; on it the page's title
# stands there.
_NAMED: Final = re.compile(r"\[[\w-]+\.md\]\((?P<path>[\w./-]+\.md)")
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_DRAWING: Final = re.compile(
    r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[\w./-]*images/[\w-]+\.svg)\)$", re.MULTILINE
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and one for each source that a page links to."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name, text in {COMMAND_LINE: command_line(), CHANGELOG: changelog, **api_pages()}.items():
        files.append(File.generated(config, name, content=text))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    linked = {
        _source(page, match["path"]) for page, text in pages for match in _LINK.finditer(text)
    }
    for path in sorted(filter(None, linked)):
        if (ROOT / path).exists():
            files.append(File.generated(config, source_path(path), content=source_page(ROOT, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the sources' pages, and put drawings into the page itself."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        source = _source(page.file.src_uri, match["path"])
        return up + source_path(source) if source else match["path"]

    def drawing(match: re.Match[str]) -> str:
        svg = (Path(page.file.abs_src_path or "").parent / match["path"]).read_text("utf-8")
        return f'<figure class="drawing" markdown="0">{svg.strip()}<figcaption>{match["alt"]}</figcaption></figure>'

    def titled(match: re.Match[str]) -> str:
        target = files.get_file_from_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match["path"]))
        )
        title = _TITLE.search(target.content_string) if target else None
        return f"[{title[1]}]({match['path']}" if title else match[0]

    return _DRAWING.sub(drawing, _LINK.sub(link, _NAMED.sub(titled, markdown)))


def _source(page: str, link: str) -> str:
    """The path in the repository that a page links to; empty if it is a page, too."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return "" if path.startswith("docs/") else path
