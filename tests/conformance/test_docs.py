"""The guide for authors shows what `hicache new` makes.

`make docs` runs its commands and compares what they say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from author import ROOT, Author

from hicache_storage.tools.scaffold import check_name, package_files

GUIDE = ROOT / "docs" / "write-a-driver.md"


def test_the_package_comes_from_the_author_s_own_environment(tmp_path):
    author = Author(tmp_path)
    author.install(ROOT)
    where = "import hicache_storage as s, hicache_demo_driver as d; print(s.__file__, d.__file__)"
    done = author.shell(f"hicache new demo && pip install -q ./demo && python -P -c '{where}'")
    assert all(
        path.startswith(str(author.scripts.parent)) for path in done.stdout.splitlines()[-1].split()
    ), done.stdout


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
