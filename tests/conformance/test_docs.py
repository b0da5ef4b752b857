"""The guide for authors shows what `hicache new` makes.

`make docs` runs its commands and compares what they say.
"""

from __future__ import annotations

import re
from pathlib import Path

from hicache_storage.tools.scaffold import check_name, package_files

GUIDE = Path(__file__).parents[2] / "docs" / "write-a-driver.md"


def test_the_guide_shows_the_generated_package_as_it_is():
    text, files = GUIDE.read_text("utf-8"), package_files(check_name("demo"))
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name in ("plugin.py", "config.py", "driver.py"):
        assert files[f"hicache_demo_driver/{name}"] in blocks, name
    assert files["tests/test_conformance.py"] in blocks
    assert any(block in files["pyproject.toml"] for block in blocks if "entry-points" in block)


def test_the_guide_names_every_capability_that_binds_a_rule():
    from hicache_conformance.model.rules import all_needs

    text = GUIDE.read_text("utf-8")
    for need in all_needs():
        assert f"`{need.partition('>=')[0]}=" in text, need
