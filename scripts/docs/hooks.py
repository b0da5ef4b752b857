"""MkDocs hooks: pages made from the code, sources that pages link to, and diagrams that follow the
reader's colours."""

from __future__ import annotations

import posixpath
import re
import subprocess
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
LANGUAGES: Final = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".json": "json",
    ".service": "ini",
}
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
    texts = {"command-line.md": command_line(), "changelog.md": changelog}
    for name, module in MODULES.items():
        texts[f"api/{name}.md"] = f"# `{module}`\n\n::: {module}\n"
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    linked = {
        _source(page, match["path"]) for page, text in pages for match in _LINK.finditer(text)
    }
    for path in sorted(filter(None, linked)):
        if (ROOT / path).exists():
            files.append(File.generated(config, _source_path(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the sources' pages, and put drawings into the page itself."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        source = _source(page.file.src_uri, match["path"])
        return up + _source_path(source) if source else match["path"]

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


def command_line() -> str:
    """Markdown of all commands, each with its arguments and options."""
    from hicache_storage.cli.main import app

    commands = typer.main.get_command(app())
    text = get_docs_for_click(
        obj=commands, ctx=typer.Context(commands), indent=1, name="hicache", title="All commands"
    )
    return f"{INTRODUCTION}\n{text}"


def _source(page: str, link: str) -> str:
    """The path in the repository that a page links to; empty if it is a page, too."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return "" if path.startswith("docs/") else path


def _source_path(path: str) -> str:
    """Where the page of a file or folder stands on the site."""
    return f"source/{path.strip('/')}.md"


def _source_page(path: str) -> str:
    """The page of a file, or of all files of a folder one after the other."""
    listed = subprocess.run(
        ["git", "ls-files", "--", path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.splitlines()]
    title = f"---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n\n# `{path.strip('/')}`\n"
    return title + "\n".join(
        _shown(file, alone=file == ROOT / path) for file in files if file.stat().st_size
    )


def _shown(file: Path, *, alone: bool) -> str:
    heading = "" if alone else f"\n## `{file.relative_to(ROOT)}`\n"
    text = file.read_text("utf-8")
    fence = "````" if "```" in text else "```"
    language = LANGUAGES.get(Path(file.name.removesuffix(".in")).suffix, "text")
    return f"{heading}\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
