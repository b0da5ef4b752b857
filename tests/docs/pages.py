"""The pages whose blocks are run: README and everything in docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.docs.blocks import blocks

ROOT: Final = Path(__file__).parents[2]


def pages() -> list[Path]:
    """All pages; those that take longest first, so that workers end together."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return sorted(
        found,
        key=lambda page: (
            -sum(
                block.language in ("console", "bash") and not block.reason for block in blocks(page)
            )
        ),
    )
