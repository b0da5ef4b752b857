"""The names in a driver's package, all made of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_NAME_CHARACTERS: Final = 23
"""With longer names the lines of the templates would be wrapped, at 100 columns."""
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+")


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
    repository: str
    """`OWNER/NAME` on GitHub; where the badge is found."""
    pages: str
    """Address of the repository's GitHub Pages."""


def check_name(name: str, repository: str | None = None) -> PackageNames:
    """The names of the package of a driver called `name`.

    Raises:
        ValueError: it cannot be a driver's name, or `repository` is not `OWNER/NAME`; the message
            says what would do.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"{name!r} cannot be a driver's name: at most {MAX_NAME_CHARACTERS} lower-case "
            "letters and digits, in words joined by - or _, beginning with a letter, such as "
            "'acme' or 'acme-kv'"
        )
    words = re.split("[-_]", name)
    distribution = "-".join(("hicache", *words, "driver"))
    if repository is not None and not _REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository!r} is not of the form OWNER/NAME")
    owner, _, project = (repository or f"OWNER/{distribution}").partition("/")
    return PackageNames(
        driver=name,
        distribution=distribution,
        package=distribution.replace("-", "_"),
        prefix="".join(word.capitalize() for word in words),
        repository=f"{owner}/{project}",
        # GitHub Pages serves an owner's sites under the name in lower case.
        pages=f"https://{owner.lower() if repository else owner}.github.io/{project}",
    )
