"""MkDocs hooks: pages made from the code, and diagrams that follow the reader's colours."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
INTRODUCTION: Final = """# Command line

`hicache` has the SDK's own commands and those of every installed package that brings some (entry points
`hicache_storage.commands`). This page is made from the commands; `--help` says the same for the version that is installed, which `hicache --version`
tells.
"""
MODULES: Final = {
    "hicache_storage": "hicache_storage",
    "spec": "hicache_storage.spec",
    "objects": "hicache_storage.objects",
    "layers": "hicache_storage.layers",
    "pools": "hicache_storage.pools",
    "hookspecs": "hicache_storage.hookspecs",
    "transfer": "hicache_storage.transfer",
    "testing": "hicache_storage.testing",
    "hybrid": "hicache_storage.hybrid",
    "conformance": "hicache_conformance",
}
"""Public modules, by the names of their pages, which mkdocstrings fills from the sources."""
_LINK: Final = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[\w./-]+)\)")
# A link whose text is the file's name, as it is read outside of the site; on it the page's title
# stands there.
_NAMED: Final = re.compile(r"\[[\w-]+\.md\]\((?P<path>[\w./-]+\.md)")
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_DRAWING: Final = re.compile(
    r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[\w./-]*images/[\w-]+\.svg)\)$", re.MULTILINE
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    texts = {"command-line.md": command_line(), "changelog.md": changelog}
    for name, module in MODULES.items():
        texts[f"api/{name}.md"] = f"# `{module}`\n\n::: {module}\n"
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page itself. A file outside of docs/ is named, and no link."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["path"]))
        return match[0] if path.startswith("docs/") else match["text"]

    def drawing(match: re.Match[str]) -> str:
        svg = (Path(page.file.abs_src_path or "").parent / match["path"]).read_text("utf-8")
        return f'<figure class="drawing" markdown="0">{svg.strip()}<figcaption>{match["alt"]}</figcaption></figure>'

    def titled(match: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, match["path"])))
        title = _TITLE.search(target.content_string) if target else None
        return f"[{title[1]}]({match['path']}" if title else match[0]

    return _DRAWING.sub(drawing, _LINK.sub(link, _NAMED.sub(titled, markdown)))


def command_line() -> str:
    """Markdown of all commands, each with its arguments and options."""
    from hicache_storage.cli.main import app

    commands = typer.main.get_command(app())
    text = get_docs_for_click(
        obj=commands, ctx=typer.Context(commands), indent=1, name="hicache", title="All commands"
    )
    return f"{INTRODUCTION}\n{text}"
