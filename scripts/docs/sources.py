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
SKIPPED: Final = ("__pycache__", ".egg-info", "build", ".pytest_cache")


def source_path(path: str) -> str:
    """Where the page of a file or folder stands on the site."""
    return f"source/{path.strip('/')}.md"


def source_page(root: Path, path: str) -> str:
    """The page of a file, or of all files of a folder one after the other."""
    place = root / path
    files = [place] if place.is_file() else sorted(filter(_is_shown, place.rglob("*")))
    title = f"---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n\n# `{path.strip('/')}`\n"
    return title + "\n".join(_shown(file, root, alone=file == place) for file in files)


def _is_shown(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0 and not any(part.endswith(SKIPPED) for part in file.parts)


def _shown(file: Path, root: Path, *, alone: bool) -> str:
    heading = "" if alone else f"\n## `{file.relative_to(root)}`\n"
    text = file.read_text("utf-8")
    fence = "````" if "```" in text else "```"
    return f"{heading}\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
