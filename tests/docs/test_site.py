"""The site in a browser: no table is wider than its page."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from pages import ROOT

from tests.metadata_server.browser import browser

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.docs

WIDTH: Final = 1280
"""Of a small notebook's screen. What is wider is cut off, and with it the last column, which says
what to do."""
TOO_WIDE: Final = """
return [...document.querySelectorAll('.md-typeset table')]
  .filter((table) => table.scrollWidth > table.closest('.md-typeset__scrollwrap').clientWidth + 1)
  .map((table) => table.textContent.slice(0, 80))
"""


def test_tables_fit_their_pages(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", tmp_path],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    with browser() as page:
        for name in (
            "troubleshooting",
            "observability",
            "metadata-server",
            "hf3fs",
            "engines",
            "migration",
        ):
            page.open(f"file://{tmp_path}/{name}/index.html", width=WIDTH)
            assert page.all("table")
            assert page.run(TOO_WIDE) == [], name
