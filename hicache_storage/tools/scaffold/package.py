"""From templates to files."""

from __future__ import annotations

import shutil
import string
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage.tools.scaffold.names import PackageNames

# The suffix keeps tools that look for Python sources, and git's own look at .gitignore, away from
# the templates.
FILES: Final = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/conformance.yml": "conformance.yml.in",
    "{package}/__init__.py": "init.py.in",
    "{package}/plugin.py": "plugin.py.in",
    "{package}/config.py": "config.py.in",
    "{package}/driver.py": "driver.py.in",
    "{package}/py.typed": "py.typed.in",
    "tests/test_conformance.py": "test_conformance.py.in",
}
"""Every file of a package, and the template it is made of."""


class _Template(string.Template):
    """Template whose placeholders are `%%{name}`.

    Neither Python, TOML, Markdown nor GitHub's workflows mean anything by that.
    """

    delimiter = "%%"


def package_files(names: PackageNames) -> dict[str, str]:
    """The text of each file, by its path in the package."""
    templates, words = files("hicache_storage.tools.scaffold") / "template", asdict(names)
    return {
        path.format(**words): _Template((templates / template).read_text("utf-8")).substitute(words)
        for path, template in FILES.items()
    }


def make_package(names: PackageNames, directory: Path) -> list[Path]:
    """Write the package into a new directory; all of it, or nothing. Returns the files.

    Raises:
        FileExistsError: the directory exists, even if it is empty; nothing has been written.
        OSError: it cannot be written.
    """
    texts = package_files(names)
    # Refuses a directory that exists, so that the clean-up below removes nothing but its own files.
    directory.mkdir()
    try:
        for path, text in texts.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, "utf-8")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return [directory / path for path in texts]
