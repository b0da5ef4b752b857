"""What docs/matrix.md says about drivers of others, shown with the drivers alone.

Each script stands for one driver, and its arguments are rules.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_conformance.interfaces.sglang.setup import known

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPTS = {name: setup.reproductions for name, setup in known().items() if setup.reproductions}


@pytest.fixture(scope="module", params=SCRIPTS)
def shown(request):
    """The script of a driver, and what it has printed about each of its rules."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / SCRIPTS[request.param]],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    found = dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    return request.param, ran, found


def test_every_failure_is_there(shown):
    _, ran, found = shown
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found


def test_every_failing_rule_of_the_matrix_has_one(shown):
    driver, _, found = shown
    text = (ROOT / "docs" / "matrix.md").read_text()
    _, _, section = text.partition(f"\n## {driver}\n")
    failing = set(re.findall(r"^- \*\*(\S+)\*\*", section.partition("\n## ")[0], re.MULTILINE))
    if known()[driver].not_judged:
        assert f"`{driver}`" in text
        assert not failing
    else:
        assert failing
        assert failing <= set(found)
