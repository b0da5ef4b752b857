"""The guide names every option, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hicache_backends.hf3fs.config import Hf3fsConfig

GUIDE = Path(__file__).parents[3] / "docs" / "hf3fs.md"
# What the guide puts in words.
DESCRIBED = {"path", "metadata_url", "token", "threads", "metadata_ca", "metadata_certificate", "metadata_key"}


def test_the_guide_has_every_option_and_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", GUIDE.read_text(), re.MULTILINE))
    fields = {field.name: field.default for field in msgspec.structs.fields(Hf3fsConfig)}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        if name not in DESCRIBED:
            said = (
                str(default).lower()
                if isinstance(default, bool)
                else f"{default:g}"
                if isinstance(default, float)
                else str(default)
            )
            assert rows[name].strip("` ") == said, name
