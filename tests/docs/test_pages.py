"""Every block of the documentation does what its page says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.docs.blocks import PARSED, ROOT, RUN, blocks, pages
from tests.docs.reader import WHEELS, Reader

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
    reader = Reader(tmp_path, page)
    try:
        for block in blocks(page):
            if not block.reason:
                reader.read(block)
    finally:
        reader.close()
