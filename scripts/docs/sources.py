"""Pages that show files of the repository which the documentation links to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LANGUAGES: Final = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".json": "json",
    ".service": "ini",
}
TEXTS: Final = frozenset({*LANGUAGES, ".md"})
SKIPPED: Final = ("__pycache__", ".egg-info", "build", "dist")


def source_path(path: str) -> str:
    """Where the page of a file or folder stands on the site."""
    return f"source/{path.strip('/')}.md"


def source_page(root: Path, path: str) -> str:
    """The page of a file, or of all files of a folder one after the other."""
    place = root / path
    files = (
        [place]
        if place.is_file()
        else sorted(each for each in place.rglob("*") if _is_shown(root, each))
    )
    title = f"---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n\n# `{path.strip('/')}`\n"
    return title + "\n".join(_shown(file, root, alone=file == place) for file in files)


def _is_shown(root: Path, file: Path) -> bool:
    """Neither made nor hidden, and text."""
    made = any(
        part.startswith(".") or part.endswith(SKIPPED) for part in file.relative_to(root).parts
    )
    return (
        file.is_file()
        and not made
        and file.stat().st_size > 0
        and (not file.suffix or file.suffix in TEXTS)
    )


def _shown(file: Path, root: Path, *, alone: bool) -> str:
    heading = "" if alone else f"\n## `{file.relative_to(root)}`\n"
    text = file.read_text("utf-8")
    fence = "````" if "```" in text else "```"
    return f"{heading}\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
