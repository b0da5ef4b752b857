"""Generated parts of pages are up to date."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import HiCacheStorage
from tests.docs.pages import ROOT, pages

if TYPE_CHECKING:
    from pathlib import Path

sys.path.insert(0, str(ROOT / "scripts" / "docs"))

import options


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if "<!-- options of" in page.read_text("utf-8")],
    ids=lambda page: page.stem,
)
def test_tables_of_options_are_those_of_the_models(page: Path) -> None:
    text = page.read_text("utf-8")
    assert options.filled(text) == text, "run: .venv/bin/python scripts/docs/options.py"


def test_every_model_has_a_table() -> None:
    text = "".join(page.read_text("utf-8") for page in pages())
    assert [name for name in options.MODELS if f"<!-- options of {name} -->" not in text] == []


@pytest.mark.parametrize("model", options.MODELS)
def test_every_option_says_what_it_does(model: str) -> None:
    assert [option.name for option in options.MODELS[model]() if not option.meaning] == []


def test_the_driver_reference_names_all_that_a_driver_inherits() -> None:
    page = (ROOT / "docs" / "reference" / "driver-api.md").read_text("utf-8")
    inherited = [
        name
        for owner in ObjectStorage.__mro__[: ObjectStorage.__mro__.index(HiCacheStorage)]
        for name in vars(owner)
        if not name.startswith("_") and not hasattr(HiCacheStorage, name)
    ]
    assert [name for name in inherited if not re.search(rf"\b{name}\b", page)] == []
