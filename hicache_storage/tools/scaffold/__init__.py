"""A new driver's package, made of templates: from the name of a driver to its files."""

from __future__ import annotations

import re
import string
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

MAX_NAME_CHARACTERS: Final = 23
"""With longer names the lines of the templates would be wrapped, at 100 columns."""
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
# The suffix keeps tools that look for Python sources, and git's own look at .gitignore, away from
# the templates.
FILES: Final = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/conformance.yml": "conformance.yml.in",
    "{package}/__init__.py": "init.py.in",
    "{package}/py.typed": "py.typed.in",
    "tests/test_conformance.py": "test_conformance.py.in",
}
"""The files of every package, and the templates they are made of; the others are in the folder of
the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTexts:
    """Fills the placeholders that depend on the store."""

    where: str
    """Where it keeps pages, as in "a driver that keeps pages ..."."""
    options: str = ""
    """Options without a default, as in the README."""
    needs: str = ""
    """Further requirements of the package."""
    test_needs: str = ""
    """Further requirements of its tests."""
    setup: str = (
        "      # A driver whose trial_services start a server needs it here:\n"
        "      # - run: sudo apt-get update && sudo apt-get install -y redis-server\n"
    )
    """Steps of its workflow before the installation."""


STORES: Final = {
    "memory": StoreTexts(where="in the memory of its process"),
    "directory": StoreTexts(where="in a directory", options='"path": "/data/pages"'),
    "sqlite": StoreTexts(where="in a database of SQLite", options='"path": "/data/pages.db"'),
    "redis": StoreTexts(
        where="in a Redis",
        options='"url": "redis://cache:6379/0"',
        needs=', "redis>=6.4,<9"',
        setup="      - run: sudo apt-get update && sudo apt-get install -y redis-server\n",
    ),
    "s3": StoreTexts(
        where="in a bucket of S3, GCS or Azure",
        options='"url": "s3://BUCKET/PREFIX"',
        needs=', "obstore>=0.9,<1"',
        test_needs=', "moto[s3,server]>=5.1,<6", "waitress>=3,<4"',
    ),
}
"""The stores that a package can begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageNames:
    """Fills the placeholders of the templates."""

    driver: str
    """Name of the driver, as in `create_storage("acme")`."""
    distribution: str
    """Name of the distribution (PEP 508)."""
    package: str
    """Name of the package."""
    prefix: str
    """Beginning of the class names."""


def check_name(name: str) -> PackageNames:
    """The names of the package of a driver called `name`.

    Raises:
        ValueError: it cannot be a driver's name; the message says what would do.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"{name!r} cannot be a driver's name: at most {MAX_NAME_CHARACTERS} lower-case "
            "letters and digits, in words joined by - or _, beginning with a letter, such as "
            "'acme' or 'acme-kv'"
        )
    words = re.split("[-_]", name)
    distribution = "-".join(("hicache", *words, "driver"))
    return PackageNames(
        driver=name,
        distribution=distribution,
        package=distribution.replace("-", "_"),
        prefix="".join(word.capitalize() for word in words),
    )


class _Template(string.Template):
    """Template whose placeholders are `%%{name}`.

    Neither Python, TOML, Markdown nor GitHub's workflows mean anything by that.
    """

    delimiter = "%%"


def package_files(names: PackageNames, store: str) -> dict[str, str]:
    """The text of each file, by its path in the package.

    Raises:
        ValueError: there is no such store.
    """
    if store not in STORES:
        raise ValueError(f"there is no store {store!r}; there are {', '.join(STORES)}")
    templates = files("hicache_storage.tools.scaffold") / "template"
    words = asdict(names) | asdict(STORES[store])
    chosen = {path.format(**words): templates / template for path, template in FILES.items()}
    for template in sorted((templates / store).iterdir(), key=lambda template: template.name):
        chosen[f"{names.package}/{template.name.removesuffix('.in')}"] = template
    return {
        path: _Template(template.read_text("utf-8")).substitute(words)
        for path, template in chosen.items()
    }


def make_package(names: PackageNames, directory: Path, store: str = "memory") -> list[Path]:
    """Write the package into a new directory; returns the files.

    Raises:
        FileExistsError: the directory exists, even if it is empty; nothing has been written.
        OSError: it cannot be written.
        ValueError: there is no such store.
    """
    texts = package_files(names, store)
    directory.mkdir()
    for path, text in texts.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, "utf-8")
    return [directory / path for path in texts]
