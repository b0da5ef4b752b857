"""The guide to stacks names every field of their config; `make docs` runs its code."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from hicache_storage.hybrid.stack import StackConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "hybrid-stack.md").read_text()


def test_the_guide_names_every_field():
    assert [field.name for field in fields(StackConfig) if field.name not in GUIDE] == []
