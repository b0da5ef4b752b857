"""What the guide for authors shows is what the example holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "write-a-driver.md"
EXAMPLE = ROOT / "examples" / "hicache-memory-driver"
SHOWN = (
    "pyproject.toml",
    "hicache_memory_driver/plugin.py",
    "hicache_memory_driver/config.py",
    "hicache_memory_driver/driver.py",
    "tests/test_conformance.py",
)


@pytest.mark.parametrize("name", SHOWN)
def test_the_guide_shows_the_example_as_it_is(name):
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert (EXAMPLE / name).read_text("utf-8") in blocks


def test_the_guide_s_commands_exist(site):
    commands = re.findall(r"^\$ hicache (.*?)(?: +#.*)?$", GUIDE.read_text("utf-8"), re.MULTILINE)
    assert {"drivers", "drivers memory", "conformance explain ID-1"} <= set(commands)
    for command in ("drivers", "drivers memory", "conformance explain ID-1"):
        assert site.hicache(*command.split()).status == 0


def test_the_guide_names_every_capability_that_binds_a_rule():
    from hicache_conformance.manifest import all_needs

    text = GUIDE.read_text("utf-8")
    for need in all_needs():
        assert f"`{need.partition('>=')[0]}=" in text, need
