"""Every block of the documentation does what its page says; the built site needs no other server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.docs.blocks import PARSED, ROOT, RUN, blocks, pages
from tests.docs.reader import WHEELS, Reader
from tests.metadata_server.browser import browser

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.docs

QUICK_STARTS: Final = [
    ROOT / "docs" / f"quickstart-{path}.md"
    for path in ("operator", "python", "engine", "vllm", "lmcache")
]
LONG: Final = ("write-a-driver",)
"""Pages whose commands run the whole suite."""
TOLD: Final = [
    pytest.param(page, marks=[pytest.mark.long] if page.stem in LONG else [])
    for page in (QUICK_STARTS if WHEELS else pages())
    if any(b.language in RUN | PARSED for b in blocks(page))
]


@pytest.mark.parametrize("page", TOLD, ids=lambda page: page.stem)
def test_every_block_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    Reader(tmp_path, page).read()


# The built site.


WIDTH: Final = 1280
"""Of a small notebook's screen. What is wider is cut off, and with it the last column, which says
what to do."""
TOO_WIDE: Final = """
return [...document.querySelectorAll('.md-typeset table')]
  .filter((table) => table.scrollWidth > table.closest('.md-typeset__scrollwrap').clientWidth + 1)
  .map((table) => table.textContent.slice(0, 80))
"""


LOADED: Final = re.compile(
    r"<(?:img|script|iframe|source|use)\b[^>]*\b(?:src|href)=[\"']?(?:\w+:)?//"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev|alternate))[^>]*href=[\"']?(?:\w+:)?//"
)
"""What a browser fetches by itself."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", directory],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return directory


def test_nothing_comes_from_another_server(site: Path) -> None:
    found = {
        str(page.relative_to(site)): match[0]
        for page in site.rglob("*.html")
        if (match := LOADED.search(page.read_text("utf-8")))
    }
    assert found == {}


def test_tables_fit_their_pages(site: Path) -> None:
    with browser() as page:
        for name in (
            "troubleshooting",
            "observability",
            "metadata-server",
            "hf3fs",
            "engines",
            "migration",
        ):
            page.open(f"file://{site}/{name}/index.html", width=WIDTH)
            assert page.all("table")
            assert page.run(TOO_WIDE) == [], name
