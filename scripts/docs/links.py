"""Checks a built site: every link leads somewhere, every anchor exists, and nothing is loaded from
another server.

usage: python scripts/docs/links.py DIRECTORY. Exits with 1 if it finds something. Addresses of
other servers are only read, never asked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADED: Final = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "use": "href",
}
"""What a browser fetches by itself, and where it says so."""
NAMED: Final = frozenset({"canonical", "next", "prev", "alternate"})
"""Relations of a `link` that are no resources."""


@dataclass
class Document(HTMLParser):
    """The links and anchors of one page."""

    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag leads to, loads, or is called."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif given.get(LOADED.get(tag, "")) and not NAMED & set(given.get("rel", "").split()):
            self.resources.append(given[LOADED[tag]])


def problems(site: Path) -> Iterator[str]:
    """One sentence for each thing that is wrong."""
    for page in sorted(site.rglob("*.html")):
        document = read(page)
        for address in document.resources:
            if urlsplit(address).netloc:
                yield f"{page.relative_to(site)} loads {address} from another server"
        for address in {*document.links, *document.resources}:
            if reason := _wrong(site, page, address):
                yield f"{page.relative_to(site)}: {address}: {reason}"


@cache
def read(page: Path) -> Document:
    """Parse a page, once."""
    document = Document()
    document.feed(page.read_text("utf-8"))
    return document


def _wrong(site: Path, page: Path, address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        known = (parts.scheme in ("http", "https") and "." in parts.netloc) or parts.scheme in (
            "mailto",
            "data",
            "javascript",
        )
        return "" if known else "no address"
    place = page if not parts.path else _place(site, page, unquote(parts.path))
    if not place.is_file():
        return "leads nowhere"
    if (
        parts.fragment
        and place.suffix == ".html"
        and unquote(parts.fragment) not in read(place).anchors
    ):
        return "" if parts.fragment.startswith("__") else "has no such anchor"
    return ""


def _place(site: Path, page: Path, path: str) -> Path:
    place = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return place / "index.html" if place.is_dir() else place


def main() -> int:
    """Print what is wrong; the status of the command."""
    site = Path(sys.argv[1]).resolve()
    found = list(problems(site))
    for problem in found:
        print(problem)
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found) or 'no'} links that are wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
